"""Softmax along the last axis in one pass, with or without a mask, and its gradient in another.

XLA makes one kernel of it up to 16384 per row and five beyond (x read three times). Bytes per
element at 16 bits: 2 read + 2 written, the same as XLA's single kernel, at every width; the row is
in registers between its three steps, and the next rows are on their way meanwhile. A mask adds one
byte. The gradient reads the softmax and its cotangent: 4 read + 2 written, mask or not.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.arguments import arrays
from pallas_kernels.batching import over_rows
from pallas_kernels.plan import Plan, plan_rows, unsupported_rows
from pallas_kernels.rows import Result, Row, run_rows
from pallas_kernels.tuned import Tuning

LOG2E = 1.4426950408889634


def plan(
    rows: int, width: int, dtype: Any, *, masked: bool = False, tuning: Tuning | None = None
) -> Plan:
    """The launch of `softmax_kernel` on [rows, width] of `dtype`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=1,
        held=1 + masked,
        masks=int(masked),
        op="softmax_where" if masked else "softmax",
        tuning=tuning,
    )


def plan_backward(rows: int, width: int, dtype: Any, *, tuning: Tuning | None = None) -> Plan:
    """The launch of `softmax_backward_kernel` on [rows, width] of `dtype`."""
    return plan_rows(rows, width, dtype, streams=2, held=2, op="softmax_backward", tuning=tuning)


def expected_bytes(rows: int, width: int, dtype: Any, *, masked: bool = False) -> int:
    """The bytes that the kernel must move: x and the mask read, y written."""
    return rows * width * (2 * jnp.dtype(dtype).itemsize + masked)


def expected_bytes_backward(rows: int, width: int, dtype: Any) -> int:
    """The bytes that the gradient must move: y and its cotangent read, that of x written."""
    return 3 * rows * width * jnp.dtype(dtype).itemsize


def unsupported(x: Any, where: Any = None) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do. The gradient reads two arrays
    at once, so that float32 rows end at half of what 16-bit ones may have.
    """
    if reason := unsupported_rows(x, streams=2):
        return reason
    if where is None:
        return None
    if jnp.dtype(where.dtype) != jnp.dtype(bool):
        return f"where must be boolean, not {where.dtype}."
    try:
        together = np.broadcast_shapes(x.shape, where.shape)
    except ValueError:
        together = ()
    if together != tuple(x.shape):
        return (
            f"where must broadcast to the shape {tuple(x.shape)}, and it has {tuple(where.shape)}."
        )
    return None


def softmax(x: jax.Array, *, where: jax.Array | None = None, interpret: Any = None) -> jax.Array:
    """exp(x - max) / sum(exp(x - max)) along the last axis, in f32, rounded once.

    As `jax.nn.softmax`: a row of -inf, and a row that holds a NaN or +inf, is NaN everywhere.

    The gradient is that of the rounded y, in f32, and rounded once:

        dx = y * (dy - (dy * y).sum(-1, keepdims=True))

    Args:
      x: [..., width], float16, bfloat16 or float32; width up to 131072 for float32, and 262144
        for the others.
      where: boolean, of a shape that broadcasts to that of x. What it excludes counts for nothing,
        whatever is there: y and dx are 0, also in a row that is excluded as a whole, and its
        cotangent is not looked at. The mask is read as one byte for each element of x.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    x, where = arrays(x=x, optional={"where": where})
    if reason := unsupported(x, where):
        raise ValueError(reason)
    if x.size == 0:
        return jnp.zeros_like(x)
    return _softmax(x, where, where is not None, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(x, where, masked, interpret):
    def launch(arrays, _):
        return softmax_kernel(*arrays, interpret=interpret), ()

    width = x.shape[-1]
    mask = jnp.broadcast_to(where, x.shape).reshape(-1, width) if masked else None
    y, _ = over_rows(launch, (x.reshape(-1, width), mask), (), sums=False)
    return y.reshape(x.shape)


def _forward(x, where, masked, interpret):
    y = _softmax(x, where, masked, interpret)
    return y, y


def _backward(masked, interpret, y, dy):
    def launch(arrays, _):
        return softmax_backward_kernel(*arrays, masked=masked, interpret=interpret), ()

    width = y.shape[-1]
    dx, _ = over_rows(launch, (y.reshape(-1, width), dy.reshape(-1, width)), (), sums=False)
    return dx.reshape(y.shape), None


_softmax.defvjp(_forward, _backward)


def softmax_kernel(
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """The softmax of each row of x, one launch.

    Args:
      x: [rows, width].
      mask: [rows, width], boolean, or None.
      interpret: as for `softmax`.
      tuning: instead of the measured choice.

    Returns:
      y, with the shape and dtype of x.
    """
    rows, width = x.shape
    masked = mask is not None
    streams = [x] if mask is None else [x, mask.astype(jnp.int8)]
    found = run_rows(
        _transform_masked if masked else _transform,
        plan(rows, width, x.dtype, masked=masked, tuning=tuning),
        streams,
        name="softmax_where" if masked else "softmax",
        exchanges=(1, 1),
        cost=pl.CostEstimate(
            flops=(8 if masked else 5) * x.size,
            transcendentals=x.size,
            bytes_accessed=expected_bytes(rows, width, x.dtype, masked=masked),
        ),
        interpret=interpret,
    )
    return found.outputs[0]


def softmax_backward_kernel(
    y: jax.Array,
    dy: jax.Array,
    *,
    masked: bool = False,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """The cotangent of each row of x, given its softmax and the cotangent of that, one launch.

    Args:
      y: [rows, width].
      dy: the shape and dtype of y.
      masked: whether there was a mask: where y is 0, dy is then not looked at.
      interpret: as for `softmax`.
      tuning: instead of the measured choice.

    Returns:
      dx, with the shape and dtype of y.
    """
    rows, width = y.shape
    found = run_rows(
        _transform_backward_masked if masked else _transform_backward,
        plan_backward(rows, width, y.dtype, tuning=tuning),
        [y, dy],
        name="softmax_backward",
        exchanges=(1,),
        cost=pl.CostEstimate(
            flops=4 * y.size,
            transcendentals=0,
            bytes_accessed=expected_bytes_backward(rows, width, y.dtype),
        ),
        interpret=interpret,
    )
    return found.outputs[0]


def exponentials(x: jax.Array, maximum: jax.Array, row: Row) -> jax.Array:
    """exp(x - maximum) of a block, in f32."""
    # Subtracted before the factor, which would round a large x. -inf - -inf is NaN, as it must be.
    return jnp.exp2((x.astype(jnp.float32) - row.spread(maximum)) * LOG2E)


def _transform(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    x = row.only(blocks[0], -jnp.inf)
    e = exponentials(x, row.maximum(x), row)
    (total,) = row.totals(e)
    return Result((e * row.spread(1.0 / total),))


def _transform_masked(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    kept = blocks[1] != 0
    x = row.only(jnp.where(kept, blocks[0].astype(jnp.float32), -jnp.inf), -jnp.inf)
    e = exponentials(x, row.maximum(x), row)
    # In a row of which nothing is kept, e is NaN, and so would be 0 / total.
    (total,) = row.totals(jnp.where(kept, e, 0.0))
    return Result((jnp.where(kept, e * row.spread(1.0 / total), 0.0),))


def _transform_backward(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    y, dy = (block.astype(jnp.float32) for block in blocks)
    (total,) = row.totals(row.only(dy * y))
    return Result((y * (dy - row.spread(total)),))


def _transform_backward_masked(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    y, dy = (block.astype(jnp.float32) for block in blocks)
    kept = y != 0.0
    (total,) = row.totals(row.only(jnp.where(kept, dy * y, 0.0)))
    return Result((jnp.where(kept, y * (dy - row.spread(total)), 0.0),))
