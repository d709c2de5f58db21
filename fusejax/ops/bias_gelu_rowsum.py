"""GELU of a biased tensor, and the float32 sum of each of its rows.

    z = x + bias
    y = gelu(z)
    sums = sum(y, -1)      # in float32

Must move: x and bias read once, y and the sums written once: 4BH bytes, 2H and 4B for a 16-bit
[B, H].
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.gelu import gelu64, gelu64_slope
from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import gelu as gelu_kernels


def _row_sum(y: Any) -> Any:
    return y.astype(jnp.float32).sum(-1)


ROW_SUM = Stage("rowsum", _row_sum, ("y",), ("sums",))


def bias_gelu_rowsum(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """

    def reference(x: np.ndarray, bias: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        del dtype
        y = gelu64(x + bias, approximate=approximate)
        return y, y.sum(-1)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        x, bias = arguments
        dy, dsums = cotangents
        dz = (dy + dsums[..., None]) * gelu64_slope(x + bias, approximate=approximate)
        return dz, dz.sum(0)

    return Op(
        name="bias_gelu_rowsum",
        formula="y = gelu(x + bias), sum(y, -1)",
        dimensions={"x": ("rows", "width"), "bias": ("width",)},
        chain=Chain(
            arguments=("x", "bias"),
            stages=(
                *bias_gelu(approximate=approximate).chain.stages,
                ROW_SUM,
            ),
            results=("y", "sums"),
        ),
        split_after=("gelu",),
        recomputed=("bias", "gelu"),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(gelu_kernels.bias_gelu_rowsum, approximate=approximate),
        kernel_refusal=functools.partial(gelu_kernels.unsupported, row_sums=True),
    )
