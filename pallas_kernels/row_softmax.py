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

from pallas_kernels import formulas
from pallas_kernels.arguments import mode_of, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.exchange import Parts
from pallas_kernels.inline import LOG2E
from pallas_kernels.launches import RowOperation
from pallas_kernels.plan import Plan, plan_rows, unsupported_rows
from pallas_kernels.rows import Result, Row, run_rows
from pallas_kernels.tuned import Tuning

LOWEST = float(np.finfo(np.float32).min)


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


def unsupported(x: Any, where: Any = None, *, split: bool = False) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do. The gradient reads two arrays
    at once, so that float32 rows end at half of what 16-bit ones may have.

    Args:
      x: the first argument.
      where: the mask, or None.
      split: whether devices may share the rows, so that x can have more elements than a kernel.
    """
    if reason := unsupported_rows(x, streams=2, split=split):
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


def softmax(
    x: jax.Array,
    *,
    where: jax.Array | None = None,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
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
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    x, where = present(x=x, optional={"where": where})
    if reason := unsupported(x, where, split=True):
        raise ValueError(reason)
    mask = None if where is None else jnp.broadcast_to(where, x.shape)
    return _softmax(mask is not None, mode_of(fallback, interpret), *placed((x, mask)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(masked, mode, x, mask):
    return _launched(masked, mode, x, mask)


def _launched(masked, mode, x, mask):
    name = "softmax_where" if masked else "softmax"
    return over_rows(RowOperation(name, _forward_kernel, _forward_formula), mode, (x, mask))[0]


def _forward(masked, mode, x, mask):
    y = _launched(masked, mode, x, mask)
    return y, y


def _backward(masked, mode, y, dy):
    operation = RowOperation("softmax_backward", _backward_kernel, _backward_formula, masked)
    return over_rows(operation, mode, (y, dy))[0], None


_softmax.defvjp(_forward, _backward)


def _forward_kernel(options, per_row, shared, *, interpret):
    del options
    return softmax_kernel(*per_row, interpret=interpret), shared


def _forward_formula(options, per_row, shared, *, across):
    del options
    x, mask = per_row
    return formulas.softmax(x, where=mask, across=across), shared


def _backward_kernel(masked, per_row, shared, *, interpret):
    return softmax_backward_kernel(*per_row, masked=masked, interpret=interpret), shared


def _backward_formula(masked, per_row, shared, *, across):
    return formulas.softmax_backward(*per_row, masked=masked, across=across), shared


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
        exchanges=(2,),
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


def exponentials(x: jax.Array, row: Row) -> tuple[jax.Array, jax.Array]:
    """exp(x - m) of a block, in f32, and m, the largest value of each row or of a warp's part.

    With an m of its own, no warp waits for the others before it has its sum.
    """
    # A part of -inf alone must not become NaN, as long as there is another.
    maximum = jnp.maximum(row.part_maximum(x), LOWEST)
    # Subtracted before the factor, which would round a large x.
    return jnp.exp2((x.astype(jnp.float32) - row.spread_part(maximum)) * LOG2E), maximum


def _normalised(e: jax.Array, of_part: jax.Array, row: Row) -> jax.Array:
    maximum, total = row.exchanged(Parts.EXPONENTIALS, of_part, row.part_total(e))
    factor = 1.0 / total
    if row.in_parts:
        factor = jnp.exp2((of_part - maximum) * LOG2E) * factor
    return e * row.spread_part(factor)


def _transform(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    x = row.only(blocks[0], -jnp.inf)
    return Result((_normalised(*exponentials(x, row), row),))


def _transform_masked(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    kept = blocks[1] != 0
    x = row.only(jnp.where(kept, blocks[0].astype(jnp.float32), -jnp.inf), -jnp.inf)
    return Result((jnp.where(kept, _normalised(*exponentials(x, row), row), 0.0),))


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
