"""What every public function does with its arguments first: refuse what no kernel makes sense of.

Arrays that are split among devices: a kernel is a call that the compiler cannot split, so that
under plain `jit` it gathers such arrays, and with explicit axes JAX refuses. Inside
`jax.shard_map` each device runs the kernel on its own rows; parameters that all devices have alike
are told there to be one device's, which makes their gradient the sum over all devices.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax


def arrays(optional: dict[str, Any] | None = None, **required: Any) -> list[Any]:
    """The arguments as arrays that vary over the same mesh axes, required ones first.

    Args:
      optional: by name, each an array or None.
      **required: by name, each an array.

    Raises:
      ValueError: one of them is no array, or is split over explicit axes.
    """
    given = {**required, **(optional or {})}
    for name, value in given.items():
        if value is None and name not in required:
            continue
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            raise ValueError(f"{name} must be an array, not {type(value).__name__}.")
        if _explicitly_split(value):
            raise ValueError(
                f"{name} is split over devices ({jax.typeof(value)}): call the function inside "
                "jax.shard_map, where each device has rows of its own."
            )
    axes = frozenset().union(*(varying(value) for value in given.values() if value is not None))
    return [None if value is None else vary(value, axes) for value in given.values()]


def varying(array: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs, inside `jax.shard_map`."""
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[Any]) -> Any:
    """The array, told to differ over `axes` too."""
    missing = axes - varying(array)
    return lax.pcast(array, tuple(sorted(missing, key=str)), to="varying") if missing else array


def number(name: str, value: Any, *, least: float = -math.inf) -> float:
    """An option that must be known while the function is traced.

    Raises:
      ValueError: it is traced, no number, not finite, or less than `least`.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a Python number; as an argument of jit, make it static.")
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or found < least:
        bound = f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, not {value!r}.")
    return found


def flag(name: str, value: Any) -> bool:
    """An option that is True or False.

    Raises:
      ValueError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False and known while tracing, not {value!r}.")
    return bool(value)


def _explicitly_split(array: Any) -> bool:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return any(axis is not None for axis in getattr(sharding, "spec", None) or ())
