"""bias + GELU in one pass, alone and with the f32 sum of each row.

XLA fuses the first well; the second it splits into two kernels with an f32 [rows, width] between
them, because its cost model will not compute the GELU twice for two consumers. Bytes per element
at 16 bits: 2 read + 4 written + 4 read + 2 written = 12 before, 2 read + 2 written = 4 here.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gelu_math import gelu_erf, gelu_tanh
from pallas_kernels.plan import (
    Plan,
    Tuning,
    plan_rows,
    unsupported_parameter,
    unsupported_rows,
)
from pallas_kernels.rows import run_rows

# One H200, JAX 0.11.2, 2026-11-29: bfloat16, 2^26 elements per array, CUPTI medians in µs, the
# fastest of 5 to 24 plans per width, in up to three runs. A TMA copy of one array took 68.3.
# With row sums; without them, multiples of 1024 take the entry of 1024 (67.7 to 68.0). The plan for
# 128 was measured but not searched.
TABLE = (
    Tuning(width=128, rows_per_block=8, warpgroups=1, ctas_per_sm=6, stages=4),  # 70.9
    Tuning(width=256, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=4),  # 70.3
    Tuning(width=512, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=3),  # 70.8
    Tuning(width=1024, rows_per_block=1, warpgroups=1, ctas_per_sm=6, stages=4),  # 71.0
    # 70.9 at 2048, 68.7 at 2560
    Tuning(width=3072, rows_per_block=1, warpgroups=1, ctas_per_sm=3, stages=4),
    Tuning(width=4096, rows_per_block=1, warpgroups=1, ctas_per_sm=3, stages=3),  # 70.4
    Tuning(width=8192, rows_per_block=1, warpgroups=1, ctas_per_sm=2, stages=3),  # 71.7
    # 70.7, 71.6 at 12288
    Tuning(width=16384, rows_per_block=1, warpgroups=4, ctas_per_sm=1, stages=3),
)


# Without row sums, columns have nothing to do with each other: a wide row is as many narrow ones.
SLICE = 1024


def plan(rows: int, width: int, dtype: Any, *, row_sums: bool = False) -> Plan:
    """The launch of `bias_gelu`, or of `bias_gelu_rowsum`, on [rows, width] of `dtype`."""
    slices = width // SLICE if width % SLICE == 0 and not row_sums else 1
    return plan_rows(rows, width, dtype, streams=1, table=TABLE, slices=slices)


def expected_bytes(
    rows: int, width: int, dtype: Any, bias_dtype: Any = None, *, row_sums: bool = False
) -> int:
    """The bytes that the kernel must move: x and the bias read, y (and the f32 sums) written."""
    itemsize = jnp.dtype(dtype).itemsize
    bias_itemsize = jnp.dtype(dtype if bias_dtype is None else bias_dtype).itemsize
    return 2 * rows * width * itemsize + width * bias_itemsize + (4 * rows if row_sums else 0)


def unsupported(x: Any, bias: Any) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.
    """
    return unsupported_rows(x) or unsupported_parameter("bias", bias, x.shape[-1])


def bias_gelu(
    x: jax.Array, bias: jax.Array, *, approximate: bool = True, interpret: Any = None
) -> jax.Array:
    """gelu(x + bias), computed in f32 and rounded once.

    The same as `jax.nn.gelu(x.astype(f32) + bias.astype(f32), approximate).astype(x.dtype)`,
    and accurate relative to the result in the negative tail, where that one is not.

    Args:
      x: [..., width], float16, bfloat16 or float32; width a multiple of 128 up to 16384.
      bias: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    return _run(x, bias, approximate, False, interpret)


def bias_gelu_rowsum(
    x: jax.Array, bias: jax.Array, *, approximate: bool = True, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """gelu(x + bias) as `bias_gelu` gives it, and the sum of each row before rounding.

    Args:
      x: [..., width], float16, bfloat16 or float32; width a multiple of 128 up to 16384.
      bias: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y with the shape and dtype of x, and f32 sums of the unrounded GELU, of x.shape[:-1].

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    return _run(x, bias, approximate, True, interpret)


def _run(x, bias, approximate: bool, row_sums: bool, interpret: Any) -> Any:
    if reason := unsupported(x, bias):
        raise ValueError(reason)
    if x.size == 0:
        y = jnp.zeros_like(x)
        return (y, jnp.zeros(x.shape[:-1], jnp.float32)) if row_sums else y
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    p = plan(rows, width, x.dtype, row_sums=row_sums)
    result = run_rows(
        functools.partial(_transform, gelu_tanh if approximate else gelu_erf, row_sums),
        p,
        [x.reshape(p.rows, p.width)],
        [bias],
        name="bias_gelu_rowsum" if row_sums else "bias_gelu",
        exchanges=1 if row_sums else 0,
        row_values=row_sums,
        cost=pl.CostEstimate(
            flops=(8 if approximate else 20) * x.size,
            transcendentals=2 * x.size,
            bytes_accessed=expected_bytes(rows, width, x.dtype, bias.dtype, row_sums=row_sums),
        ),
        interpret=interpret,
    )
    if not row_sums:
        return result.reshape(x.shape)
    return result[0].reshape(x.shape), result[1].reshape(x.shape[:-1])


def _transform(gelu, row_sums, blocks, parameters, reductions):
    (x,), (bias,) = blocks, parameters
    y = gelu(x.astype(jnp.float32) + bias.astype(jnp.float32))
    return y, reductions.row_totals(y) if row_sums else None
