"""GELU of a biased tensor, transposed: the consumer wants the other ownership.

    z = x + bias
    y = gelu(z)
    t = transpose(y)

Reading along rows and writing along columns, one of the two is scattered unless a tile is turned in
shared memory. Must move: x and bias read once, t written once: 4BH bytes and 2H for a 16-bit
[B, H].
"""

import functools
from typing import Any

import numpy as np

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import transposed


def _transpose(y: Any) -> Any:
    return y.T


def bias_gelu_transpose(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """
    straight = bias_gelu(approximate=approximate)

    def reference(x: np.ndarray, bias: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        return (straight.reference(x, bias, dtype)[0].T,)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        return straight.reference_gradient(arguments, (cotangents[0].T,), dtype)

    return Op(
        name="bias_gelu_transpose",
        formula="transpose(gelu(x + bias))",
        dimensions=straight.dimensions,
        chain=Chain(
            arguments=("x", "bias"),
            stages=(*straight.chain.stages, Stage("transpose", _transpose, ("y",), ("t",))),
            results=("t",),
        ),
        split_after=("gelu",),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(transposed.bias_gelu_transpose, approximate=approximate),
        kernel_refusal=transposed.unsupported,
        kernel_modes=("forward",),
        mixes_rows=True,
    )
