"""A producer that is dear to recompute, and two consumers of it.

    h = x @ weight
    y = gelu(h)
    sums = sum(h, -1)      # in float32

x is [B, D], weight [D, H], h and y [B, H]. Materialised, h is written and read twice: 6BH bytes at
16 bits. Recomputed, each consumer has a product of its own: 2BDH operations more. In one kernel
both consumers take it from the product's registers.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.gelu import gelu64, gelu64_slope, gelu_stage
from fusejax.ops.op import Chain, Op, Stage
from fusejax.ops.products import AXES, DIMENSIONS, MATMUL, product_gradient
from pallas_kernels import gemm


def _row_sum(h: Any) -> Any:
    return h.astype(jnp.float32).sum(-1)


def shared_matmul(*, approximate: bool = True) -> Op:
    """The op; see the module's docstring.

    Args:
      approximate: the tanh form of GELU; otherwise the erf form.
    """

    def reference(x: np.ndarray, weight: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
        del dtype
        h = x @ weight
        return gelu64(h, approximate=approximate), h.sum(-1)

    def reference_gradient(
        arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
    ) -> tuple[np.ndarray, ...]:
        del dtype
        x, weight = arguments
        dy, dsums = cotangents
        dh = dy * gelu64_slope(x @ weight, approximate=approximate) + dsums[:, None]
        return product_gradient(x, weight, dh)

    return Op(
        name="shared_matmul",
        formula="h = x @ weight, gelu(h), sum(h, -1)",
        axes=AXES,
        dimensions=DIMENSIONS,
        chain=Chain(
            arguments=("x", "weight"),
            stages=(
                MATMUL,
                gelu_stage("h", "y", approximate=approximate),
                Stage("rowsum", _row_sum, ("h",), ("sums",)),
            ),
            results=("y", "sums"),
        ),
        split_after=("matmul",),
        reference=reference,
        reference_gradient=reference_gradient,
        kernel=functools.partial(gemm.gemm_shared, approximate=approximate),
        kernel_refusal=gemm.unsupported,
        kernel_modes=("forward",),
        kernel_is_for_hopper=True,
        recomputed=("matmul",),
    )
