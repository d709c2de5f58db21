"""Row kernels for Hopper and later GPUs, in Pallas on Mosaic GPU; they need only JAX.

Every function has a backward kernel and takes rows of any length from 1 on. Each module has the
public functions, the launches behind them, their pure plans, the bytes that they must move
(`expected_bytes`) and the reason for which they refuse arguments (`unsupported`).
"""

from pallas_kernels.cross_entropy import softmax_cross_entropy
from pallas_kernels.gated import geglu, swiglu
from pallas_kernels.gelu import bias_gelu, bias_gelu_rowsum
from pallas_kernels.norms import (
    layer_norm,
    prenorm_layer_norm,
    prenorm_rms_norm,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from pallas_kernels.plan import Plan
from pallas_kernels.row_softmax import softmax

__all__ = [
    "Plan",
    "bias_gelu",
    "bias_gelu_rowsum",
    "geglu",
    "layer_norm",
    "prenorm_layer_norm",
    "prenorm_rms_norm",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "softmax",
    "softmax_cross_entropy",
    "swiglu",
]
