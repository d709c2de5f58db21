"""Softmax cross entropy with integer labels: one pass over the logits, and one for the gradient.

The loss of a row needs no array of the logits' size: 2 read per element at 16 bits, at every width.
The gradient reads the logits once more, 2 read + 2 written; besides the logits, three numbers per
row are all it needs. Columns have then nothing to do with each other, so that rows of any length
are cut among CTAs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import formulas
from pallas_kernels.arguments import mode_of, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.exchange import Parts
from pallas_kernels.inline import LOG2E
from pallas_kernels.launches import RowOperation
from pallas_kernels.plan import Plan, plan_rows, unsupported_rows
from pallas_kernels.row_softmax import exponentials
from pallas_kernels.row_values import Later
from pallas_kernels.rows import Result, run_rows
from pallas_kernels.tuned import Tuning


def plan(rows: int, width: int, dtype: Any, *, tuning: Tuning | None = None) -> Plan:
    """The launch of `cross_entropy_kernel` on [rows, width] logits of `dtype`."""
    return plan_rows(rows, width, dtype, streams=1, held=1, op="cross_entropy", tuning=tuning)


def plan_backward(rows: int, width: int, dtype: Any, *, tuning: Tuning | None = None) -> Plan:
    """The launch of `cross_entropy_backward_kernel` on [rows, width] logits of `dtype`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=1,
        held=1,
        op="cross_entropy_backward",
        reduces=False,
        tuning=tuning,
    )


def expected_bytes(rows: int, width: int, dtype: Any, *, saves: bool = False) -> int:
    """The bytes that the kernel must move: logits and labels read, losses written.

    With `saves`, the maximum and the sum of each row are written too.
    """
    return rows * width * jnp.dtype(dtype).itemsize + rows * (16 if saves else 8)


def expected_bytes_backward(rows: int, width: int, dtype: Any) -> int:
    """The bytes that the gradient must move: logits and four numbers per row read, one written."""
    return 2 * rows * width * jnp.dtype(dtype).itemsize + 16 * rows


def unsupported(logits: Any, labels: Any, *, split: bool = False) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      logits: the first argument.
      labels: the second.
      split: whether devices may share the rows, so that logits can have more elements than a
        kernel.
    """
    if reason := unsupported_rows(logits, split=split):
        return reason
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        return f"labels must be integers, not {labels.dtype}."
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        return (
            f"labels must have the shape {tuple(logits.shape[:-1])} of the logits without their "
            f"last axis, not {tuple(labels.shape)}."
        )
    return None


def softmax_cross_entropy(
    logits: jax.Array, labels: jax.Array, *, fallback: bool = False, interpret: Any = None
) -> jax.Array:
    """log(sum(exp(logits))) - logits[label] for each row, in f32.

        m = logits.max(-1)
        loss = log(exp(logits - m).sum(-1)) + (m - logits[label])

    The gradient is computed in f32, from the logits again, and rounded once:

        dlogits = (exp(logits - m) / exp(logits - m).sum(-1) - (column == label)) * dloss

    It takes an array of its own: a launch cannot be told that it may write over the logits, so
    while it runs both are in memory.

    A label outside of 0 ... width - 1, negative ones included, gives the loss NaN; no column is
    then the label's, and the gradient is that of log(sum(exp(logits))) alone. So labels of -1 may
    mark rows without one, if their losses are dropped by `jnp.where` (not multiplied by 0).
    `optax.softmax_cross_entropy_with_integer_labels` is alike but for labels of -width ... -1,
    which there count from the end.

    A row of -inf, and one with a NaN or +inf, has the loss NaN, and NaN for its gradient.

    Args:
      logits: [..., width], float16, bfloat16 or float32; width up to 262144.
      labels: [...], of any integer dtype.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      The losses, f32 [...].

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    logits, labels = present(logits=logits, labels=labels)
    if reason := unsupported(logits, labels, split=True):
        raise ValueError(reason)
    logits, labels = placed((logits, formulas.as_int32(labels)))
    return _cross_entropy(mode_of(fallback, interpret), logits, labels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(mode, logits, labels):
    return _losses(mode, logits, labels, saves=False)[0]


def _forward(mode, logits, labels):
    loss, *saved = _losses(mode, logits, labels, saves=True)
    return loss, (logits, labels, *saved)


def _backward(mode, saved, dloss):
    operation = RowOperation("softmax_cross_entropy_backward", _backward_kernel, _backward_formula)
    return over_rows(operation, mode, (*saved, dloss))[0], None


_cross_entropy.defvjp(_forward, _backward)


def _losses(mode, logits, labels, *, saves):
    operation = RowOperation("softmax_cross_entropy", _forward_kernel, _forward_formula, saves)
    return over_rows(operation, mode, (logits, labels))[0]


def _forward_kernel(saves, per_row, shared, *, interpret):
    return cross_entropy_kernel(*per_row, saves=saves, interpret=interpret), shared


def _forward_formula(saves, per_row, shared, *, across):
    found = formulas.cross_entropy(*per_row, across=across)
    return found if saves else found[:1], shared


def _backward_kernel(options, per_row, shared, *, interpret):
    del options
    return cross_entropy_backward_kernel(*per_row, interpret=interpret), shared


def _backward_formula(options, per_row, shared, *, across):
    del options
    return formulas.cross_entropy_backward(*per_row, across=across), shared


def cross_entropy_kernel(
    logits: jax.Array,
    labels: jax.Array,
    *,
    saves: bool = False,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, ...]:
    """The loss of each row, one launch.

    Args:
      logits: [rows, width].
      labels: [rows], int32.
      saves: whether to return what the gradient needs.
      interpret: as for `softmax_cross_entropy`.
      tuning: instead of the measured choice.

    Returns:
      The losses; with `saves`, the largest logit m of each row and sum(exp(logits - m)) too. All
      are f32 [rows].
    """
    rows, width = logits.shape
    found = run_rows(
        _transform,
        plan(rows, width, logits.dtype, tuning=tuning),
        [logits],
        [],
        [labels],
        name="cross_entropy",
        later=Later(2, functools.partial(_losses_of, width, saves), Parts.EXPONENTIALS),
        outputs=0,
        row_values=3 if saves else 1,
        cost=pl.CostEstimate(
            flops=7 * logits.size,
            transcendentals=logits.size,
            bytes_accessed=expected_bytes(rows, width, logits.dtype, saves=saves),
        ),
        interpret=interpret,
    )
    return found.row_values


def cross_entropy_backward_kernel(
    logits: jax.Array,
    labels: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    dloss: jax.Array,
    *,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """The cotangent of the logits, one launch.

    Args:
      logits: [rows, width].
      labels: [rows], int32.
      maximum: [rows], f32, from `cross_entropy_kernel`.
      total: likewise.
      dloss: [rows], f32, the cotangent of the losses.
      interpret: as for `softmax_cross_entropy`.
      tuning: instead of the measured choice.

    Returns:
      dlogits, with the shape and dtype of the logits.
    """
    rows, width = logits.shape
    found = run_rows(
        _transform_backward,
        plan_backward(rows, width, logits.dtype, tuning=tuning),
        [logits],
        [],
        [labels, maximum, total, dloss],
        name="cross_entropy_backward",
        cost=pl.CostEstimate(
            flops=6 * logits.size,
            transcendentals=logits.size,
            bytes_accessed=expected_bytes_backward(rows, width, logits.dtype),
        ),
        interpret=interpret,
    )
    return found.outputs[0]


def _transform(blocks, parameters, row_inputs, row):
    del parameters, row_inputs
    e, maximum = exponentials(row.only(blocks[0], -jnp.inf), row)
    return Result(partials=(maximum, row.part_total(e)))


def _losses_of(width, saves, totals, row_inputs, pick):
    (maximum, total), (label,) = totals, row_inputs
    inside = (label >= 0) & (label < width)
    # Not log(total) + maximum first: rounded to the size of the maximum, a small loss is lost.
    loss = jnp.log(total) + (maximum - pick(jnp.where(inside, label, 0)))
    loss = jnp.where(inside, loss, jnp.nan)
    return (loss, maximum, total) if saves else (loss,)


def _transform_backward(blocks, parameters, row_inputs, row):
    del parameters
    label, maximum, total, dloss = row_inputs
    x = blocks[0].astype(jnp.float32)
    # With the maximum and the sum apart: x - log(sum(exp(x))) is off by an ulp of the maximum.
    y = jnp.exp2((x - row.spread(maximum)) * LOG2E) * row.spread(1.0 / total)
    mine = row.columns() == row.spread(label)
    return Result((jnp.where(mine, y - 1.0, y) * row.spread(dloss),))
