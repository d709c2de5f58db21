"""LayerNorm(x + residual) * scale + bias in one pass over both inputs.

XLA makes one kernel of it up to 16384 per row and several beyond, and unfused (add, then norm) it
takes two: 4 read + 2 written + 2 read + 2 written = 10 bytes per element at 16 bits. Here it is
4 read + 2 written = 6; the sum stays in registers for both statistics and the affine step.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.plan import (
    Plan,
    Tuning,
    plan_rows,
    unsupported_parameter,
    unsupported_rows,
)
from pallas_kernels.rows import run_rows

# One H200, JAX 0.11.2, 2026-11-29: bfloat16, 2^26 elements per array, CUPTI medians in µs, the
# fastest of 5 to 24 plans per width, in up to three runs. A TMA copy of one array took 68.3, so
# three arrays would move in 102 at its rate. The plan for 128 was measured but not searched.
TABLE = (
    Tuning(width=128, rows_per_block=8, warpgroups=1, ctas_per_sm=6, stages=3),  # 96.2
    Tuning(width=256, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=3),  # 95.7
    Tuning(width=512, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=2),  # 95.8
    Tuning(width=1024, rows_per_block=1, warpgroups=1, ctas_per_sm=6, stages=3),  # 96.4
    Tuning(width=2048, rows_per_block=1, warpgroups=1, ctas_per_sm=6, stages=2),  # 96.7
    Tuning(width=3072, rows_per_block=1, warpgroups=1, ctas_per_sm=5, stages=2),  # 96.6 at 2560
    Tuning(width=4096, rows_per_block=1, warpgroups=2, ctas_per_sm=2, stages=3),  # 98.8
    Tuning(width=8192, rows_per_block=1, warpgroups=2, ctas_per_sm=2, stages=2),  # 97.2
    Tuning(width=12288, rows_per_block=1, warpgroups=3, ctas_per_sm=1, stages=3),  # 106.4
    Tuning(width=16384, rows_per_block=1, warpgroups=4, ctas_per_sm=1, stages=2),  # 101.2
)


def plan(rows: int, width: int, dtype: Any) -> Plan:
    """The launch of `residual_layer_norm` on [rows, width] of `dtype`."""
    return plan_rows(rows, width, dtype, streams=2, table=TABLE)


def expected_bytes(
    rows: int, width: int, dtype: Any, scale_dtype: Any = None, bias_dtype: Any = None
) -> int:
    """The bytes that the kernel must move: x, residual, scale and bias read, y written."""
    itemsize = jnp.dtype(dtype).itemsize
    parameters = sum(
        jnp.dtype(dtype if given is None else given).itemsize for given in (scale_dtype, bias_dtype)
    )
    return 3 * rows * width * itemsize + width * parameters


def unsupported(x: Any, residual: Any, scale: Any, bias: Any) -> str | None:
    """Why the kernel refuses these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.
    """
    if reason := unsupported_rows(x):
        return reason
    if tuple(x.shape) != tuple(residual.shape) or x.dtype != residual.dtype:
        return (
            f"x and residual must be alike, not {tuple(x.shape)} {x.dtype} and "
            f"{tuple(residual.shape)} {residual.dtype}."
        )
    width = x.shape[-1]
    return unsupported_parameter("scale", scale, width) or unsupported_parameter(
        "bias", bias, width
    )


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float = 1e-6,
    interpret: Any = None,
) -> jax.Array:
    """LayerNorm of the rounded sum h = x + residual, along the last axis.

        h = (x + residual).astype(f32)          # the sum is rounded to x.dtype first
        d = h - h.mean(-1, keepdims=True)
        y = d * rsqrt((d * d).mean(-1, keepdims=True) + epsilon) * scale + bias

    The statistics are two-pass and centred, in f32; y is rounded once, to x.dtype.

    Args:
      x: [..., width], float16, bfloat16 or float32; width a multiple of 128 up to 16384.
      residual: the shape and dtype of x.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      bias: [width], likewise.
      epsilon: added to the variance.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    if reason := unsupported(x, residual, scale, bias):
        raise ValueError(reason)
    if x.size == 0:
        return jnp.zeros_like(x)
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    exact = x.dtype == jnp.float32
    y = run_rows(
        functools.partial(_transform, width, epsilon, exact, bool(interpret)),
        plan(rows, width, x.dtype),
        [x.reshape(rows, width), residual.reshape(rows, width)],
        [scale, bias],
        name="residual_layer_norm",
        exchanges=3 if exact else 2,
        cost=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=rows,
            bytes_accessed=expected_bytes(rows, width, x.dtype, scale.dtype, bias.dtype),
        ),
        interpret=interpret,
    )
    return y.reshape(x.shape)


def _transform(width, epsilon, exact, simulated, blocks, parameters, reductions):
    x, residual = blocks
    scale, bias = parameters
    h = x + residual
    if simulated:  # XLA, which runs the simulation, would keep the f32 sum unrounded
        h = lax.optimization_barrier(h)
    h = h.astype(jnp.float32)
    # Divided, not multiplied by 1 / width: the mean of a constant row is then that constant.
    d = h - reductions.total(h) / width
    if exact:
        # The f32 mean is off by a few ulp of itself, which shows in f32 rows far from zero:
        # what is left of the sum corrects it. 16-bit rows have rounded it away.
        d = d - reductions.total(d) / width
    inverse = lax.rsqrt(reductions.total(d * d) / width + epsilon)
    return d * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32), None
