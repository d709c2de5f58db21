"""An op, or several, over many shapes and dtypes: where the best path changes."""
