"""What compiling costs, how often it happens, and what ends a compiled region."""
