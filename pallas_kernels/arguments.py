"""What every public function does with its arguments first: refuse what no kernel makes sense of.

Inside `jax.shard_map` each device runs the kernel on its own rows; parameters that all devices have
alike are told there to be one device's, which makes their gradient the sum over all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.launches import Mode
from pallas_kernels.tiles import simulation


def arrays(optional: dict[str, Any] | None = None, **required: Any) -> list[Any]:
    """The arguments as arrays that vary over the same mesh axes, required ones first.

    Args:
      optional: by name, each an array or None.
      **required: by name, each an array.

    Raises:
      ValueError: one of them is no array, or is split over explicit axes.
    """
    found = present(optional, **required)
    for name, value in zip({**required, **(optional or {})}, found, strict=True):
        if value is not None and explicit_axes(value):
            raise ValueError(
                f"{name} is split over devices ({jax.typeof(value)}): call the function inside "
                "jax.shard_map, where each device has rows of its own."
            )
    return found


def present(optional: dict[str, Any] | None = None, **required: Any) -> list[Any]:
    """As `arrays`, for functions that take arrays which are split over explicit axes."""
    given = {**required, **(optional or {})}
    for name, value in given.items():
        if value is None and name not in required:
            continue
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            raise ValueError(f"{name} must be an array, not {type(value).__name__}.")
    axes = frozenset().union(*(varying(value) for value in given.values() if value is not None))
    return [None if value is None else vary(value, axes) for value in given.values()]


def placed(per_row: Sequence[Any], shared: Sequence[Any] = ()) -> list[Any]:
    """Arrays of the same rows split alike over explicit axes, what they have in common as columns.

    Args:
      per_row: arrays [..., width], the first one, and [..., width] or [...], or None.
      shared: arrays [width], or None.

    Raises:
      ValueError: arrays of the same rows are split over different explicit axes.
    """
    given = [*per_row, *shared]
    entries: dict[int, Any] = {}
    for array in per_row:
        for i, entry in enumerate(() if array is None else _spec(array)):
            if entry is not None and entries.setdefault(i, entry) != entry:
                raise ValueError(
                    f"Arrays of the same rows are split over {entries[i]!r} and over {entry!r}: "
                    "make them alike with jax.sharding.reshard."
                )

    def place(array, entries):
        if array is None:
            return None
        wanted = tuple(entries.get(i) for i in range(np.ndim(array)))
        if tuple(_spec(array)) == wanted:
            return array
        return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*wanted)))

    split = [array for array in given if array is not None and explicit_axes(array)]
    if not split:
        return given
    mesh = jax.typeof(split[0]).sharding.mesh
    columns = {0: entries.get(np.ndim(per_row[0]) - 1)}
    return [place(a, entries) for a in per_row] + [place(a, columns) for a in shared]


def explicit_axes(array: Any) -> bool:
    """Whether an array is split over mesh axes that are in its type."""
    return any(entry is not None for entry in _spec(array))


def _spec(array: Any) -> Sequence[Any]:
    sharding = getattr(jax.typeof(array), "sharding", None)
    spec = tuple(getattr(sharding, "spec", None) or ())
    return (*spec, *[None] * (np.ndim(array) - len(spec)))


def varying(array: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs, inside `jax.shard_map`."""
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[Any]) -> Any:
    """The array, told to differ over `axes` too."""
    missing = axes - varying(array)
    return lax.pcast(array, tuple(sorted(missing, key=str)), to="varying") if missing else array


def mode_of(fallback: Any, interpret: Any) -> Mode:
    """The arguments `fallback` and `interpret` of a public function.

    Raises:
      ValueError: they are none of what they may be.
    """
    return Mode(flag("fallback", fallback), simulation(interpret))


def number(name: str, value: Any, *, least: float = -math.inf) -> float:
    """An option that must be known while the function is traced.

    Raises:
      ValueError: it is traced, no number, not finite, or less than `least`.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a Python number; as an argument of jit, make it static.")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
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
