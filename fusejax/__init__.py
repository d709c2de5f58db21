"""See where XLA fuses and why it stops; compare it with explicit Pallas GPU kernels; beat it."""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "UsageError",
    "bias_gelu",
    "bias_gelu_rowsum",
    "compare",
    "explain_choice",
    "flax",
    "geglu",
    "inspect",
    "layer_norm",
    "prenorm_layer_norm",
    "prenorm_rms_norm",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "softmax",
    "softmax_cross_entropy",
    "split_at_scopes",
    "stage",
    "swiglu",
    "testing",
]

_HOME = {
    "UsageError": "fusejax.errors",
    "bias_gelu": "fusejax.functions.activations",
    "bias_gelu_rowsum": "fusejax.functions.activations",
    "compare": "fusejax.compare_functions",
    "explain_choice": "fusejax.functions.explain",
    "geglu": "fusejax.functions.activations",
    "inspect": "fusejax.inspection",
    "layer_norm": "fusejax.functions.norms",
    "prenorm_layer_norm": "fusejax.functions.norms",
    "prenorm_rms_norm": "fusejax.functions.norms",
    "residual_layer_norm": "fusejax.functions.norms",
    "residual_rms_norm": "fusejax.functions.norms",
    "rms_norm": "fusejax.functions.norms",
    "softmax": "fusejax.functions.softmaxes",
    "softmax_cross_entropy": "fusejax.functions.softmaxes",
    "split_at_scopes": "fusejax.split_scopes",
    "stage": "fusejax.stages",
    "swiglu": "fusejax.functions.activations",
}

_MODULES = ("flax", "testing")


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import fusejax` stays light."""
    if name in _MODULES:
        return importlib.import_module(f"fusejax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fusejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
