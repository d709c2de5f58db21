"""See where XLA fuses and why it stops; compare it with explicit Pallas GPU kernels; beat it."""
