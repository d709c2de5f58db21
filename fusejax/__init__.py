"""See where XLA fuses and why it stops; compare it with explicit Pallas GPU kernels; beat it."""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["UsageError", "inspect", "stage"]

_HOME = {
    "UsageError": "fusejax.errors",
    "inspect": "fusejax.inspection",
    "stage": "fusejax.stages",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import fusejax` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'fusejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
