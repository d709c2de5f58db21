"""A producer that is cheap to recompute, and two consumers that want different ownership of it.

    h = x * scale
    row_sums = sum(h, -1)       # in float32
    column_sums = sum(h, 0)     # in float32

A row's sum wants a whole row in one block, a column's sum a whole column. Must move: x and scale
read once, the sums written once: 2BH + 2H + 4B + 4H bytes for a 16-bit [B, H]. Materialised, h is
written and read twice: 6BH bytes more. Recomputed, each consumer reads x: 2BH bytes more, and one
multiplication per element.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import column_sums


def _scale(x: Any, scale: Any) -> Any:
    return x * scale


def _row_sum(h: Any) -> Any:
    return h.astype(jnp.float32).sum(-1)


def _column_sum(h: Any) -> Any:
    return h.astype(jnp.float32).sum(0)


def _reference(x: np.ndarray, scale: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
    del dtype
    h = x * scale
    return h.sum(-1), h.sum(0)


def _reference_gradient(
    arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
) -> tuple[np.ndarray, ...]:
    del dtype
    x, scale = arguments
    of_rows, of_columns = cotangents
    dh = of_rows[:, None] + of_columns
    return dh * scale, (dh * x).sum(0)


def shared_scale() -> Op:
    """The op; see the module's docstring."""
    return Op(
        name="shared_scale",
        formula="h = x * scale, sum(h, -1), sum(h, 0)",
        dimensions={"x": ("rows", "width"), "scale": ("width",)},
        chain=Chain(
            arguments=("x", "scale"),
            stages=(
                Stage("scale", _scale, ("x", "scale"), ("h",)),
                Stage("row_sum", _row_sum, ("h",), ("row_sums",)),
                Stage("column_sum", _column_sum, ("h",), ("column_sums",)),
            ),
            results=("row_sums", "column_sums"),
        ),
        split_after=("scale",),
        reference=_reference,
        reference_gradient=_reference_gradient,
        kernel=column_sums.scale_sums,
        kernel_refusal=column_sums.unsupported_scale_sums,
        kernel_modes=("forward",),
        recomputed=("scale",),
        mixes_rows=True,
    )
