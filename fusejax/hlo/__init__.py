"""Kernels, boundaries, traffic and reasons, read from HLO text."""
