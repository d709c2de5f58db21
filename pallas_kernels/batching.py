"""A launch over rows under `jax.vmap`, differentiation and `jax.jit`, on one device or several.

Under `jax.vmap` it becomes a launch over more rows, not more launches, wherever that can be: where
every example has the same arrays in common and nothing is summed over rows. Else examples are one
more axis in the kernel's grid, where the arrays allow that, or are launched one after another.

The public functions have backward kernels (`jax.custom_vjp`). What is beyond them, derivatives of
derivatives and forward mode inside of them, is that of the formula.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.arguments import vary, varying
from pallas_kernels.launches import Launch, Mode, RowOperation
from pallas_kernels.partitioning import on_each_device


def over_rows(
    operation: RowOperation, mode: Mode, per_row: Any, shared: Any = ()
) -> tuple[Any, Any]:
    """Launches an operation on all rows.

    Args:
      operation: which; equal ones are traced once for arrays of the same types.
      mode: how.
      per_row: any structure of arrays [..., width], the first leaf, and [..., width] or [...] like
        it.
      shared: any structure of arrays [width] that all rows have in common.

    Returns:
      Arrays of every row, and sums over rows, as the operation has them.
    """
    return _traced_once(Launch(operation, mode), per_row, shared)


def _over_rows(launch: Launch, per_row: Any, shared: Any) -> tuple[Any, Any]:
    if any(array.size == 0 for array in jax.tree.leaves(per_row)):
        return launch.formula(per_row, shared)
    sums = jax.tree.leaves(launch.results(per_row, shared)[1])
    batched = custom_vmap(functools.partial(on_each_device, launch))

    @batched.def_vmap
    def rule(size, has_axis, per_row, shared):
        def everywhere(arrays, has_axis):
            return jax.tree.map(
                lambda a, has: a if has else jnp.broadcast_to(a, (size, *a.shape)),
                arrays,
                has_axis,
            )

        per_row = everywhere(per_row, has_axis[0])
        if launch.examples or sums or any(jax.tree.leaves(has_axis[1])):
            more = dataclasses.replace(launch, examples=launch.examples + 1)
            found = _over_rows(more, per_row, everywhere(shared, has_axis[1]))
        else:
            found = _over_rows(launch, per_row, shared)
        return found, jax.tree.map(lambda _: True, found)

    @jax.custom_jvp
    def differentiable(per_row, shared):
        return batched(per_row, shared)

    @differentiable.defjvp
    def derivative(primals, tangents):
        return jax.jvp(launch.formula, primals, tangents)

    # Neither a launch nor a call with such rules tells over which mesh axes its results differ:
    # over those of its arguments.
    axes = frozenset().union(*map(varying, jax.tree.leaves((per_row, shared))))
    return jax.tree.map(lambda array: vary(array, axes), differentiable(per_row, shared))


_traced_once = jax.jit(_over_rows, static_argnums=0, inline=jax.Inline.JAX_EARLY)
