"""Inputs for what is timed and counted: random, of both signs, made where JAX computes."""

from collections.abc import Sequence
from typing import Any

import jax


def random_on_device(shapes: Sequence[Any], seed: int) -> tuple[jax.Array, ...]:
    """An array per shape, made where JAX computes: standard normal, rounded to its dtype; masks are
    mostly True."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def one(key: jax.Array, shape: Any) -> jax.Array:
        normal = jax.random.normal(key, shape.shape, "float32")
        return normal < 1 if shape.dtype == bool else normal.astype(shape.dtype)

    make = jax.jit(
        lambda keys: tuple(one(key, shape) for key, shape in zip(keys, shapes, strict=True))
    )
    return make(keys)
