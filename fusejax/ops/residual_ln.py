"""LayerNorm of a residual sum.

    h = x + residual                                     # rounded to x's dtype
    n = (h - mean(h)) / sqrt(mean((h - mean(h))**2) + epsilon)
    y = n * scale + bias

Statistics are two-pass and centred, in float32, of the rounded sum. Must move: x, residual, scale
and bias read once, y written once: 6BH bytes and 4H for a 16-bit [B, H].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import norms

EPSILON = 1e-6


def _add(x: Any, residual: Any) -> Any:
    return x + residual


def _normalize(h: Any) -> Any:
    h32 = h.astype(jnp.float32)
    centred = h32 - h32.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + EPSILON)).astype(h.dtype)


def _affine(n: Any, scale: Any, bias: Any) -> Any:
    scaled = n.astype(jnp.float32) * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    return scaled.astype(n.dtype)


def _standardise(x: np.ndarray, residual: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    h = (x + residual).astype(dtype).astype(np.float64)
    centred = h - h.mean(-1, keepdims=True)
    reciprocal = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return centred * reciprocal, reciprocal


def _reference(
    x: np.ndarray, residual: np.ndarray, scale: np.ndarray, bias: np.ndarray, dtype: Any
) -> tuple[np.ndarray, ...]:
    return (_standardise(x, residual, dtype)[0] * scale + bias,)


def _reference_gradient(
    arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
) -> tuple[np.ndarray, ...]:
    x, residual, scale, _ = arguments
    (dy,) = cotangents
    n, reciprocal = _standardise(x, residual, dtype)
    dn = dy * scale
    dh = reciprocal * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
    return dh, dh, (dy * n).sum(0), dy.sum(0)


def residual_ln() -> Op:
    """The op; see the module's docstring."""
    return Op(
        name="residual_ln",
        formula="LayerNorm(x + residual) * scale + bias",
        dimensions={
            "x": ("rows", "width"),
            "residual": ("rows", "width"),
            "scale": ("width",),
            "bias": ("width",),
        },
        chain=Chain(
            arguments=("x", "residual", "scale", "bias"),
            stages=(
                Stage("add", _add, ("x", "residual"), ("h",)),
                Stage("normalize", _normalize, ("h",), ("n",)),
                Stage("affine", _affine, ("n", "scale", "bias"), ("y",)),
            ),
            results=("y",),
        ),
        split_after=("add", "normalize"),
        reference=_reference,
        reference_gradient=_reference_gradient,
        kernel=norms.residual_layer_norm,
        kernel_refusal=norms.unsupported,
    )
