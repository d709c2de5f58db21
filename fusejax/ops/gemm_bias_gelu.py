"""A dense layer: GELU of a biased matrix product.

    h = x @ weight
    z = h + bias
    y = gelu(z)

x is [B, D], weight [D, H], y [B, H]. Must move: x, weight and bias read once, y written once:
2BD + 2DH + 2H + 2BH bytes at 16 bits, for 2BDH operations. Fused, the epilogue works on what the
product has in registers; split, h is written and read again: 4BH bytes more.
"""

import functools
from typing import Any

import numpy as np

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.gelu import gelu64, gelu64_slope
from fusejax.ops.op import Chain, Op, Stage
from fusejax.ops.products import AXES, DIMENSIONS, MATMUL, product_gradient
from pallas_kernels import gelu as gelu_kernels
from pallas_kernels import gemm


def _bias(h: Any, bias: Any) -> Any:
    return h + bias


def gemm_bias_gelu(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """

    def reference(
        x: np.ndarray, weight: np.ndarray, bias: np.ndarray, dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        return (gelu64(x @ weight + bias, approximate=approximate),)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        x, weight, bias = arguments
        dz = cotangents[0] * gelu64_slope(x @ weight + bias, approximate=approximate)
        return *product_gradient(x, weight, dz), dz.sum(0)

    def split_kernel(x: Any, weight: Any, bias: Any, *, interpret: Any = None) -> Any:
        h = MATMUL.function(x, weight)
        return gelu_kernels.bias_gelu(h, bias, approximate=approximate, interpret=interpret)

    _, gelu = bias_gelu(approximate=approximate).chain.stages
    return Op(
        name="gemm_bias_gelu",
        formula="gelu(x @ weight + bias)",
        axes=AXES,
        dimensions=DIMENSIONS | {"bias": ("width",)},
        chain=Chain(
            arguments=("x", "weight", "bias"),
            stages=(MATMUL, Stage("bias", _bias, ("h", "bias"), ("z",)), gelu),
            results=("y",),
        ),
        split_after=("matmul",),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(gemm.gemm_bias_gelu, approximate=approximate),
        kernel_refusal=gemm.unsupported,
        kernel_modes=("forward",),
        kernel_is_for_hopper=True,
        split_kernel=split_kernel,
    )
