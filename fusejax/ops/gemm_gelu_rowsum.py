"""GELU of a matrix product, and the float32 sum of each of its rows.

    h = x @ weight
    y = gelu(h)
    sums = sum(y, -1)      # in float32

x is [B, D], weight [D, H], y [B, H]. Must move: x and weight read once, y and the sums written
once: 2BD + 2DH + 2BH + 4B bytes at 16 bits, for 2BDH operations. Fused with the product, the row
sums are state that the tensor cores' accumulators have to share registers with, and a tile of the
product has only a part of each row; split, h is written and read again: 4BH bytes more, by a
kernel that only waits for memory.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.bias_gelu_rowsum import ROW_SUM
from fusejax.ops.gelu import gelu64, gelu64_slope, gelu_stage
from fusejax.ops.op import Chain, Op
from fusejax.ops.products import AXES, DIMENSIONS, MATMUL, product_gradient
from pallas_kernels import gelu as gelu_kernels
from pallas_kernels import gemm


def gemm_gelu_rowsum(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """

    def reference(x: np.ndarray, weight: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        del dtype
        y = gelu64(x @ weight, approximate=approximate)
        return y, y.sum(-1)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        x, weight = arguments
        dy, dsums = cotangents
        dh = (dy + dsums[:, None]) * gelu64_slope(x @ weight, approximate=approximate)
        return product_gradient(x, weight, dh)

    def split_kernel(x: Any, weight: Any, *, interpret: Any = None) -> Any:
        h = MATMUL.function(x, weight)
        return gelu_kernels.bias_gelu_rowsum(
            h, jnp.zeros_like(h, shape=h.shape[-1:]), approximate=approximate, interpret=interpret
        )

    return Op(
        name="gemm_gelu_rowsum",
        formula="y = gelu(x @ weight), sum(y, -1)",
        axes=AXES,
        dimensions=DIMENSIONS,
        chain=Chain(
            arguments=("x", "weight"),
            stages=(MATMUL, gelu_stage("h", "y", approximate=approximate), ROW_SUM),
            results=("y", "sums"),
        ),
        split_after=("matmul", "gelu"),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(gemm.gemm_gelu_rowsum, approximate=approximate),
        kernel_refusal=gemm.unsupported,
        kernel_modes=("forward",),
        kernel_is_for_hopper=True,
        split_kernel=split_kernel,
        recomputed=("gelu",),
    )
