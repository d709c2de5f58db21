"""From a function and shapes to a compiled program, for a GPU that is here or one that is not."""
