"""A language model, as far as its gates need it."""
