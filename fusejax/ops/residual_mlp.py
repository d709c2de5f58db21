"""A layer of a model: LayerNorm of a residual sum, then two dense layers with GELU between them.

    n = LayerNorm(x + residual) * scale + bias
    a = gelu(n @ weight + weight_bias)
    y = a @ weight_out

x and residual are [B, H], weight [H, D], weight_out [D, H], y [B, H]. How much of a layer's time
its kernels between the products are, and so what fusing them can gain, is what it is here for.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.gelu import gelu64, gelu64_slope, gelu_stage
from fusejax.ops.op import Chain, Op, Stage
from fusejax.ops.residual_ln import residual_ln
from pallas_kernels import gelu as gelu_kernels
from pallas_kernels import norms

_NORM = residual_ln()


def _matmul(n: Any, weight: Any) -> Any:
    return jnp.matmul(n, weight)


def _bias(p: Any, weight_bias: Any) -> Any:
    return p + weight_bias


def _reference(*arguments_and_dtype: Any) -> tuple[np.ndarray, ...]:
    *norm, weight, weight_bias, weight_out, dtype = arguments_and_dtype
    (n,) = _NORM.reference(*norm, dtype)
    return (gelu64(n @ weight + weight_bias, approximate=True) @ weight_out,)


def _reference_gradient(
    arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
) -> tuple[np.ndarray, ...]:
    *norm, weight, weight_bias, weight_out = arguments
    (dy,) = cotangents
    (n,) = _NORM.reference(*norm, dtype)
    z = n @ weight + weight_bias
    dz = dy @ weight_out.T * gelu64_slope(z, approximate=True)
    of_norm = _NORM.reference_gradient(tuple(norm), (dz @ weight.T,), dtype)
    return *of_norm, n.T @ dz, dz.sum(0), gelu64(z, approximate=True).T @ dy


def _kernel(
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    weight: Any,
    weight_bias: Any,
    weight_out: Any,
    *,
    interpret: Any = None,
) -> Any:
    """The products are the library's; what stands between them is two kernels."""
    n = norms.residual_layer_norm(x, residual, scale, bias, interpret=interpret)
    h = _matmul(n, weight)
    return _matmul(gelu_kernels.bias_gelu(h, weight_bias, interpret=interpret), weight_out)


def _refusal(
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    weight: Any,
    weight_bias: Any,
    weight_out: Any,
) -> str | None:
    del weight, weight_bias, weight_out
    return norms.unsupported(x, residual, scale, bias)


def residual_mlp() -> Op:
    """The op; see the module's docstring."""
    return Op(
        name="residual_mlp",
        formula="gelu(LayerNorm(x + residual) @ weight + weight_bias) @ weight_out",
        axes=("rows", "width", "hidden"),
        dimensions={
            **_NORM.dimensions,
            "weight": ("width", "hidden"),
            "weight_bias": ("hidden",),
            "weight_out": ("hidden", "width"),
        },
        chain=Chain(
            arguments=(*_NORM.chain.arguments, "weight", "weight_bias", "weight_out"),
            stages=(
                *_NORM.chain.stages,
                Stage("matmul", _matmul, ("y", "weight"), ("p",)),
                Stage("weight_bias", _bias, ("p", "weight_bias"), ("z",)),
                gelu_stage("z", "a", approximate=True),
                Stage("matmul_out", _matmul, ("a", "weight_out"), ("out",)),
            ),
            results=("out",),
        ),
        split_after=("add", "normalize", "affine", "matmul", "weight_bias", "gelu"),
        reference=_reference,
        reference_gradient=_reference_gradient,
        kernel=_kernel,
        kernel_refusal=_refusal,
    )
