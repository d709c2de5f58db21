"""What every function asks of its arguments, whatever computes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(name: str, value: Any) -> jax.Array:
    """The argument as an array of JAX.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} must be an array, not {type(value).__name__}.")
    if isinstance(value, np.ndarray | np.generic):
        value = _without_wrapping(value)
    try:
        return jnp.asarray(value)
    except TypeError:
        raise ValueError(f"{name} must be an array of numbers, not of {value.dtype}.") from None


def _without_wrapping(value: Any) -> Any:
    """64-bit integers that are far outside of 32 bits stay outside of every row without x64."""
    if jax.config.jax_enable_x64 or value.dtype.kind not in "iu" or value.dtype.itemsize < 8:
        return value
    return np.clip(value, np.iinfo(np.int32).min, np.iinfo(np.int32).max)


def rows(name: str, value: jax.Array) -> None:
    """Refuses what has no rows of floating-point numbers."""
    floating(name, value)
    if value.ndim < 1:
        raise ValueError(f"{name} must have at least one axis, and it is a scalar.")


def alike(first: str, one: jax.Array, second: str, other: jax.Array) -> None:
    """Refuses two arrays that are not of one shape, or not of floating-point numbers."""
    rows(first, one)
    floating(second, other)
    if one.shape != other.shape:
        raise ValueError(
            f"{first} and {second} must have one shape, not {one.shape} and {other.shape}."
        )


def column(name: str, value: jax.Array | None, width: int) -> None:
    """Refuses a parameter that is not one number for each column."""
    if value is None:
        return
    floating(name, value)
    if value.shape != (width,):
        raise ValueError(f"{name} must have the shape ({width},), not {value.shape}.")


def floating(name: str, value: jax.Array) -> None:
    """Refuses what is no floating-point array."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} must be of a floating-point dtype, not {value.dtype}.")


def mask(name: str, value: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Refuses a mask that is not boolean, or does not broadcast to `shape`."""
    if value is None:
        return
    if value.dtype != jnp.bool_:
        raise ValueError(f"{name} must be boolean, not {value.dtype}.")
    try:
        together: tuple[int, ...] | None = np.broadcast_shapes(shape, value.shape)
    except ValueError:
        together = None
    if together != shape:
        raise ValueError(f"{name} must broadcast to the shape {shape}, and it has {value.shape}.")


def labels(name: str, value: jax.Array, shape: tuple[int, ...]) -> None:
    """Refuses labels that are not one integer for each row."""
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {value.dtype}.")
    if value.shape != shape:
        raise ValueError(
            f"{name} must have the shape {shape} of the logits without their last axis, not "
            f"{value.shape}."
        )
