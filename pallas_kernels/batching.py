"""`jax.vmap` of a launch over rows: more rows, not more launches, wherever that can be.

JAX's own rule gives every array of a kernel one more axis. Copies want the strides of such an axis
to be multiples of 16 bytes, which rows of 31 or 769 elements do not give, and those of the
narrowest rows want the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.arguments import vary, varying
from pallas_kernels.plan import COPY_BYTES, MAX_ELEMENTS, NARROW


def over_rows(
    launch: Callable[[Any, Any], tuple[Any, Any]], per_row: Any, shared: Any, *, sums: bool
) -> tuple[Any, Any]:
    """`launch(per_row, shared)`, with a rule for `jax.vmap`.

    - Of no examples, there is nothing to launch.
    - Where every example has the same `shared` and nothing is summed over rows, the examples' rows
      are rows of one larger launch.
    - Else, where the arrays allow it, JAX's own rule holds: one launch with one more axis in its
      grid.
    - Else examples are launched one after another.

    Args:
      launch: (arrays [rows, ...], other arrays) -> (arrays [rows, ...], sums over rows).
      per_row: any structure of arrays with rows first.
      shared: any structure of arrays that all rows have in common.
      sums: whether `launch` returns sums over rows.
    """
    call = custom_vmap(launch)

    def rule(size, batched, per_row, shared):
        with_axis, shared_with_axis = batched
        one_shared = not any(jax.tree.leaves(shared_with_axis))

        def everywhere(array, has):
            return array if has else jnp.broadcast_to(array, (size, *array.shape))

        per_row = jax.tree.map(everywhere, per_row, with_axis)
        leaves = jax.tree.leaves(per_row)
        rows = leaves[0].shape[1]
        fits = max(leaf.size for leaf in leaves) <= MAX_ELEMENTS
        axes = jax.tree.map(lambda has: 0 if has else None, (True, shared_with_axis))
        if size == 0:
            shapes = jax.eval_shape(jax.vmap(launch, in_axes=axes), per_row, shared)
            found = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        elif one_shared and not sums and fits:
            merged = jax.tree.map(lambda a: a.reshape(size * rows, *a.shape[2:]), per_row)
            found, no_sums = call(merged, shared)
            found = jax.tree.map(lambda a: a.reshape(size, rows, *a.shape[1:]), found), no_sums
        elif all(_aligned(leaf) for leaf in leaves if leaf.ndim > 2):
            found = jax.vmap(launch, in_axes=axes)(per_row, shared)
        else:
            every = jax.tree.map(everywhere, shared, shared_with_axis)
            found = jax.lax.map(lambda given: call(*given), (per_row, every))
        return found, jax.tree.map(lambda _: True, found)

    call.def_vmap(rule)
    # Neither a kernel nor a call with such a rule tells over which mesh axes its results differ:
    # over those of its arguments.
    axes = frozenset().union(*map(varying, jax.tree.leaves((per_row, shared))))
    return jax.tree.map(lambda array: vary(array, axes), call(per_row, shared))


def _aligned(array: jax.Array) -> bool:
    """Whether a kernel can be given [examples, rows, width] with one more axis in its grid."""
    bytes_of_example = math.prod(array.shape[1:]) * array.dtype.itemsize
    return bytes_of_example % COPY_BYTES == 0 and array.shape[-1] >= NARROW
