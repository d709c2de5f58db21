"""Inputs for what is timed and counted: random, of both signs, made where JAX computes."""

from collections.abc import Sequence
from typing import Any

import jax


def random_on_device(shapes: Sequence[Any], seed: int) -> tuple[jax.Array, ...]:
    """An array per shape: standard normal, rounded to its dtype, made where JAX computes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    make = jax.jit(
        lambda keys: tuple(
            jax.random.normal(key, shape.shape, "float32").astype(shape.dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )
    )
    return make(keys)
