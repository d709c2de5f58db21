"""Which calls of a layer go to the functional ops, and in which dtypes; for linen and nnx alike.

Flax's layers promote and cast as they go; the ops take and return one dtype for all activations.
Where the two agree (bfloat16 in, `dtype=jnp.bfloat16`, parameters of any dtype), an op gets the
layer's arrays as they are. Elsewhere activations are cast before or after it. Such a cast is one
more pass over memory beside a kernel and costs nothing inside XLA's fusion, so that
`implementation=None` then means "xla".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fusejax
from pallas_kernels.formulas import rounded

Implementation = str | Sequence[str] | None
Axes = int | Sequence[int] | None

_KNOWN = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


class Norm(NamedTuple):
    """A norm: Flax's layer and the functional ops that do its work."""

    flax: Any
    """The class."""
    parameters: tuple[str, ...]
    """Their names, in the order in which Flax makes them and the ops take them."""
    alone: Callable[..., Any]
    residual: Callable[..., Any]
    prenorm: Callable[..., Any]


def known(*dtypes: Any) -> bool:
    """Whether the ops know these dtypes."""
    return all(jnp.dtype(dtype) in _KNOWN for dtype in dtypes)


def is_last(axes: Axes, rank: int) -> bool:
    """Whether the last axis, and no other, is meant."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return {axis + rank if axis is not None and axis < 0 else axis for axis in given} == {rank - 1}


def takes_ops(layer: Any, shape: tuple[int, ...], mask: Any) -> bool:
    """Whether the ops compute what a norm layer of Flax is asked for, dtypes aside.

    They do for either `use_fast_variance`, since their statistics are two-pass and never less
    accurate than Flax's. Statistics of masked rows, over other axes, over devices, or in 16 bits
    are Flax's.
    """
    return (
        mask is None
        and layer.axis_name is None
        and isinstance(layer.epsilon, numbers.Real)  # not one that is traced
        and 0 <= float(layer.epsilon) < math.inf
        and getattr(layer, "force_float32_reductions", True)
        and is_last(layer.reduction_axes, len(shape))
        and is_last(layer.feature_axes, len(shape))
        and shape[-1] > 0
    )


def normalize(
    norm: Norm,
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    parameters: Sequence[jax.Array | None],
    returns_sum: bool,
    computed_in: Any,
    result: Any,
    epsilon: float,
    implementation: Implementation,
) -> Any:
    """The norm of x, or of h = x + residual as an addition by itself would round it.

    Args:
      norm: which.
      x: [..., width].
      residual: what is added to x, of a shape that broadcasts with that of x; or None.
      parameters: those of the norm, each [width] or None.
      returns_sum: whether h is returned too.
      computed_in: the dtype that x, or h, is cast to first.
      result: the dtype of y.
      epsilon: added to the variance.
      implementation: as in the functional ops.

    Returns:
      y, or y and h.
    """

    def call(op: Callable[..., Any], *arrays: jax.Array) -> Any:
        as_is = all(array.dtype == computed_in == result for array in arrays)
        return op(
            *(_cast(array, computed_in) for array in arrays),
            *parameters,
            epsilon=epsilon,
            implementation=_without_casts(implementation, as_is),
        )

    if residual is None:
        return call(norm.alone, x).astype(result)
    if x.shape != residual.shape or jnp.result_type(x, residual) != computed_in:
        h = add(x, residual)
        y = call(norm.alone, h)
    elif returns_sum:
        y, h = call(norm.prenorm, x, residual)
    else:
        h = None
        y = call(norm.residual, x, residual)
    return (y.astype(result), h) if returns_sum else y.astype(result)


def add(x: jax.Array, residual: jax.Array) -> jax.Array:
    """x + residual, rounded to its dtype also where XLA fuses it with what follows."""
    dtype = jnp.result_type(x, residual)
    if not known(dtype) or jnp.finfo(dtype).bits > 16:
        return x + residual
    return _cast(x.astype(jnp.float32) + residual.astype(jnp.float32), dtype)


def bias_gelu(
    y: jax.Array, bias: jax.Array | None, approximate: bool, implementation: Implementation
) -> jax.Array:
    """gelu(y + bias), in the dtype of that sum.

    Args:
      y: [..., width], a matrix product.
      bias: [width] or None.
      approximate: the tanh form; False is the erf form.
      implementation: as in the functional ops.
    """
    if bias is None:
        bias = jnp.zeros(y.shape[-1], y.dtype)
    if not known(y.dtype, bias.dtype) or bias.shape != y.shape[-1:]:
        return jax.nn.gelu(y + bias.reshape((1,) * (y.ndim - 1) + (-1,)), approximate)
    result = jnp.result_type(y, bias)
    chosen = _without_casts(implementation, y.dtype == result)
    return fusejax.bias_gelu(y.astype(result), bias, approximate=approximate, implementation=chosen)


def swiglu(gate: jax.Array, up: jax.Array, implementation: Implementation) -> jax.Array:
    """silu(gate) * up."""
    if not known(gate.dtype, up.dtype) or gate.dtype != up.dtype:
        return jax.nn.silu(gate) * up
    return fusejax.swiglu(gate, up, implementation=implementation)


def softmax(x: Any, axis: Axes, where: Any, implementation: Implementation) -> jax.Array:
    """`jax.nn.softmax(x, axis, where)`."""
    x = jnp.asarray(x)
    where = None if where is None else jnp.asarray(where)
    wider = where is not None and jnp.broadcast_shapes(where.shape, x.shape) != x.shape
    if wider or not known(x.dtype) or not is_last(axis, x.ndim):
        return jax.nn.softmax(x, axis=axis, where=where)
    return fusejax.softmax(x, where=where, implementation=implementation)


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    if jnp.finfo(dtype).bits < jnp.finfo(array.dtype).bits:
        array = rounded(array, dtype)  # XLA drops a conversion to 16 bits and back, but not this
    return array.astype(dtype)


def _without_casts(implementation: Implementation, as_is: bool) -> Implementation:
    return "xla" if implementation is None and not as_is else implementation
