"""GELU of a biased tensor.

    z = x + bias
    y = gelu(z)

Must move: x and bias read once, y written once: 4BH bytes and 2H for a 16-bit [B, H].
"""

import functools
from typing import Any

import numpy as np

from fusejax.ops.gelu import gelu64, gelu64_slope, gelu_stage
from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import gelu as gelu_kernels


def _bias(x: Any, bias: Any) -> Any:
    return x + bias


def bias_gelu(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """

    def reference(x: np.ndarray, bias: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        del dtype
        return (gelu64(x + bias, approximate=approximate),)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        x, bias = arguments
        dz = cotangents[0] * gelu64_slope(x + bias, approximate=approximate)
        return dz, dz.sum(0)

    return Op(
        name="bias_gelu",
        formula="gelu(x + bias)",
        dimensions={"x": ("rows", "width"), "bias": ("width",)},
        chain=Chain(
            arguments=("x", "bias"),
            stages=(
                Stage("bias", _bias, ("x", "bias"), ("z",)),
                gelu_stage("z", "y", approximate=approximate),
            ),
            results=("y",),
        ),
        split_after=("bias",),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(gelu_kernels.bias_gelu, approximate=approximate),
        kernel_refusal=gelu_kernels.unsupported,
    )
