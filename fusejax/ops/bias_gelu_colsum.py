"""GELU of a biased tensor, and the float32 sum of each of its columns.

    z = x + bias
    y = gelu(z)
    sums = sum(y, 0)       # in float32

No block has a whole column: one kernel keeps partial sums and adds them up at its end, two read y
again. Must move: x and bias read once, y and the sums written once: 4BH bytes, 2H and 4H for a
16-bit [B, H].
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import column_sums


def _column_sum(y: Any) -> Any:
    return y.astype(jnp.float32).sum(0)


def bias_gelu_colsum(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """
    straight = bias_gelu(approximate=approximate)

    def reference(x: np.ndarray, bias: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        (y,) = straight.reference(x, bias, dtype)
        return y, y.sum(0)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        dy, dsums = cotangents
        return straight.reference_gradient(arguments, (dy + dsums,), dtype)

    return Op(
        name="bias_gelu_colsum",
        formula="y = gelu(x + bias), sum(y, 0)",
        dimensions=straight.dimensions,
        chain=Chain(
            arguments=("x", "bias"),
            stages=(*straight.chain.stages, Stage("colsum", _column_sum, ("y",), ("sums",))),
            results=("y", "sums"),
        ),
        split_after=("gelu",),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(column_sums.bias_gelu_colsum, approximate=approximate),
        kernel_refusal=column_sums.unsupported_bias_gelu_colsum,
        kernel_modes=("forward",),
        recomputed=("bias", "gelu"),
        mixes_rows=True,
    )
