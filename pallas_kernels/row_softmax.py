"""Softmax along the last axis in one pass.

XLA makes one kernel of it up to 16384 per row and five beyond (x read three times). Bytes per
element at 16 bits: 2 read + 2 written, the same as XLA's single kernel; the row is in registers
between its three steps, and the next rows are on their way meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.plan import Plan, Tuning, plan_rows, unsupported_rows
from pallas_kernels.rows import run_rows

# One H200, JAX 0.11.2, 2026-11-29: bfloat16, 2^26 elements per array, CUPTI medians in µs, the
# fastest of 5 to 24 plans per width, in up to three runs. A TMA copy of one array took 68.3.
# The plan for 128 was measured but not searched.
TABLE = (
    Tuning(width=128, rows_per_block=8, warpgroups=1, ctas_per_sm=6, stages=4),  # 71.0
    Tuning(width=256, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=4),  # 68.8
    Tuning(width=512, rows_per_block=8, warpgroups=1, ctas_per_sm=6, stages=2),  # 69.2
    Tuning(width=1024, rows_per_block=1, warpgroups=1, ctas_per_sm=12, stages=3),  # 70.3
    Tuning(width=2048, rows_per_block=1, warpgroups=1, ctas_per_sm=3, stages=5),  # 69.4
    Tuning(width=3072, rows_per_block=1, warpgroups=1, ctas_per_sm=4, stages=3),  # 68.4 at 2560
    Tuning(width=4096, rows_per_block=1, warpgroups=1, ctas_per_sm=3, stages=3),  # 71.3
    Tuning(width=8192, rows_per_block=1, warpgroups=1, ctas_per_sm=3, stages=2),  # 70.5
    Tuning(width=12288, rows_per_block=1, warpgroups=3, ctas_per_sm=1, stages=4),  # 70.5
    Tuning(width=16384, rows_per_block=1, warpgroups=4, ctas_per_sm=1, stages=3),  # 70.8
)
LOG2E = 1.4426950408889634


def plan(rows: int, width: int, dtype: Any) -> Plan:
    """The launch of `softmax` on [rows, width] of `dtype`."""
    return plan_rows(rows, width, dtype, streams=1, table=TABLE)


def expected_bytes(rows: int, width: int, dtype: Any) -> int:
    """The bytes that the kernel must move: x read, y written."""
    return 2 * rows * width * jnp.dtype(dtype).itemsize


def unsupported(x: Any) -> str | None:
    """Why the kernel refuses this argument, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.
    """
    return unsupported_rows(x)


def softmax(x: jax.Array, *, interpret: Any = None) -> jax.Array:
    """exp(x - max) / sum(exp(x - max)) along the last axis, in f32, rounded once.

    As `jax.nn.softmax`: a row of -inf, and a row that holds a NaN or +inf, is NaN everywhere.

    Args:
      x: [..., width], float16, bfloat16 or float32; width a multiple of 128 up to 16384.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    if reason := unsupported(x):
        raise ValueError(reason)
    if x.size == 0:
        return jnp.zeros_like(x)
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    y = run_rows(
        _transform,
        plan(rows, width, x.dtype),
        [x.reshape(rows, width)],
        name="softmax",
        exchanges=2,
        cost=pl.CostEstimate(
            flops=5 * x.size,
            transcendentals=x.size,
            bytes_accessed=expected_bytes(rows, width, x.dtype),
        ),
        interpret=interpret,
    )
    return y.reshape(x.shape)


def _transform(blocks, parameters, reductions):
    del parameters
    (x,) = blocks
    x = x.astype(jnp.float32)
    # Subtracted before the factor, which would round a large x. -inf - -inf is NaN, as it must be.
    e = jnp.exp2((x - reductions.maximum(x)) * LOG2E)
    return e * (1.0 / reductions.total(e)), None
