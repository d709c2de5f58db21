"""Flax layers on the functional ops: `fusejax.flax.linen`, `fusejax.flax.nnx`."""

import importlib
from typing import Any

__all__ = ["linen", "nnx"]


def __getattr__(name: str) -> Any:
    """Imports on first use: who writes linen need not load nnx's layers."""
    if name not in __all__:
        raise AttributeError(f"module 'fusejax.flax' has no attribute {name!r}")
    return importlib.import_module(f"fusejax.flax.{name}")
