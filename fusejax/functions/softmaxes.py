"""Softmax along the last axis, with or without a mask, and its cross entropy with labels.

Computed in f32 and rounded once; in float64 where an argument is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fusejax.functions import split
from fusejax.functions.arguments import labels as check_labels
from fusejax.functions.arguments import mask, rows
from fusejax.functions.call import call
from fusejax.functions.choice import Asked
from fusejax.functions.function import Function
from pallas_kernels import cross_entropy, formulas, row_softmax


def softmax(
    x: jax.Array, *, where: jax.Array | None = None, implementation: Asked = None
) -> jax.Array:
    """exp(x - x.max(-1, keepdims=True)), divided by its sum along the last axis.

    As `jax.nn.softmax`: a row of -inf, and a row that holds a NaN or +inf, is NaN everywhere.

    Args:
      x: [..., width], of any floating-point dtype.
      where: boolean, of a shape that broadcasts to that of x. What it excludes counts for nothing,
        whatever is there: y and its gradient are 0, also in a row that is excluded as a whole.
      implementation: None chooses, see `fusejax.explain_choice`; or "pallas", "xla", "split", or
        several of them, of which the first is taken that can run. Where there may be kernels (None,
        "pallas"), only reverse mode is defined, any number of times; `jax.jvp` takes the others.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: a shape or dtype makes no sense, or what is asked for cannot run.
    """
    return call(SOFTMAX, (x, where), {}, implementation)


def softmax_cross_entropy(
    logits: jax.Array, labels: jax.Array, *, implementation: Asked = None
) -> jax.Array:
    """log(sum(exp(logits))) - logits[label] for each row.

    As `optax.softmax_cross_entropy_with_integer_labels`, but that a label outside of 0 ... width-1,
    negative ones included, gives the loss NaN and the gradient of log(sum(exp(logits))) alone. So
    labels of -1 may mark rows without one, if their losses are dropped by `jnp.where`.

    Args:
      logits: [..., width], of any floating-point dtype.
      labels: [...], of any integer dtype.
      implementation: as in `softmax`.

    Returns:
      The losses [...], f32, or float64 where the logits are.

    Raises:
      ValueError: as in `softmax`.
    """
    return call(SOFTMAX_CROSS_ENTROPY, (logits, labels), {}, implementation)


def _check_softmax(x: Any, where: Any) -> None:
    rows("x", x)
    mask("where", where, x.shape)


def _check_cross_entropy(logits: Any, labels: Any) -> None:
    rows("logits", logits)
    check_labels("labels", labels, logits.shape[:-1])


@jax.custom_jvp
def _softmax(x: jax.Array, where: jax.Array | None) -> jax.Array:
    if where is None:
        return formulas.softmax(x)
    return jnp.where(where, formulas.softmax(jnp.where(where, x, -jnp.inf)), 0.0)


@_softmax.defjvp
def _softmax_slope(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """From the rounded y, as the kernel's; JAX's own would save f32 exponentials."""
    x, where = primals
    y = _softmax(x, where)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # XLA would drop the rounding of y and save it in f32.
    dx, z = tangents[0].astype(wide), jax.lax.optimization_barrier(y).astype(wide)
    if where is not None:
        dx = jnp.where(where, dx, 0.0)
    dy = z * (dx - (z * dx).sum(-1, keepdims=True))
    # What is excluded stays 0 also where the sum is not finite.
    return y, (dy if where is None else jnp.where(where, dy, 0.0)).astype(y.dtype)


SOFTMAX = Function(
    "softmax",
    ("x", "where"),
    _check_softmax,
    row_softmax.unsupported,
    lambda x, where, *, fallback: row_softmax.softmax(x, where=where, fallback=fallback),
    _softmax,
    split.softmax,
    optional=("where",),
)
SOFTMAX_CROSS_ENTROPY = Function(
    "softmax_cross_entropy",
    ("logits", "labels"),
    _check_cross_entropy,
    cross_entropy.unsupported,
    cross_entropy.softmax_cross_entropy,
    formulas.softmax_cross_entropy,
    split.softmax_cross_entropy,
)
