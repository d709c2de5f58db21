"""Inputs for what is timed and counted: random, made where JAX computes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_MOST = 128  # of integers: what 8 bits hold


def random_on_device(shapes: Sequence[Any], seed: int) -> tuple[jax.Array, ...]:
    """An array per shape, made where JAX computes: standard normal, rounded to its dtype.

    Masks are mostly True. Integers are from 0 up, and below every size of the arrays that is not
    1, so that they can be indices.
    """
    sizes = [size for shape in shapes for size in shape.shape if size > 1]
    end = min([*sizes, _MOST])
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def one(key: jax.Array, shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, end).astype(shape.dtype)
        normal = jax.random.normal(key, shape.shape, "float32")
        return normal < 1 if shape.dtype == bool else normal.astype(shape.dtype)

    make = jax.jit(
        lambda keys: tuple(one(key, shape) for key, shape in zip(keys, shapes, strict=True))
    )
    return make(keys)
