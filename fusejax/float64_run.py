"""A function run in float64 on this machine's CPU, for results to be held against."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax import accuracy
from fusejax.errors import first_line
from fusejax.inspection import inner_programs

# Nothing is run in float64 for more elements than this: arguments and results take 8 bytes each.
_MOST_ELEMENTS = 1 << 28
_RANDOM = frozenset(
    ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a function returns in float64."""

    results: tuple[np.ndarray, ...] | None
    """None where it could not be run so."""
    note: str = ""
    """Why not, or where the run itself has fewer bits."""


def of(function: Callable[..., tuple[Any, ...]], values: Sequence[np.ndarray]) -> Reference:
    """Runs a function of arrays with all floating-point ones in float64 (or complex128).

    Args:
      function: returns a tuple of arrays.
      values: its arguments.
    """
    size = sum(value.size for value in values)
    if size > _MOST_ELEMENTS:
        return Reference(
            None, f"No errors: {size:,} elements are too many for a run in float64 on this host."
        )
    try:
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = [value.astype(_wide(value.dtype)) for value in values]
            traced = jax.jit(lambda *arrays: function(*arrays)).trace(*wide)
            names, dtypes = _inside(traced.jaxpr.jaxpr)
            if names & _RANDOM:
                return Reference(
                    None, "No errors: the function draws random numbers, others in float64."
                )
            found = traced.lower().compile()(*wide)
            results = tuple(as_real(np.asarray(result)) for result in found)
    except Exception as error:  # a function may well be written for other dtypes alone
        return Reference(None, f"No errors: the run in float64 fails: {first_line(error)}")
    narrow = sorted(dtypes)
    note = (
        "Errors are against a run in float64, except where the function itself computes in "
        f"{' and '.join(narrow)}."
    )
    return Reference(results, note if narrow else "")


def error(got: Sequence[Any], right: Reference, *, where: str) -> accuracy.Error | None:
    """The error of results, over all their elements; None without a reference."""
    if right.results is None:
        return None
    real = [as_real(np.asarray(result)) for result in got]
    rows = max((result.shape[0] for result in real if result.ndim), default=1)
    return accuracy.compare(real, right.results, rows=rows, where=where)


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.complex128
    return np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def as_real(result: np.ndarray) -> np.ndarray:
    """float64; of complex numbers, both parts."""
    if result.dtype.kind == "c":
        result = np.stack([result.real, result.imag])
    return result.astype(np.float64)


def _inside(jaxpr: Any) -> tuple[set[str], set[str]]:
    """Primitives of a program, and its floating-point dtypes of fewer than 64 bits."""
    names, dtypes = set(), set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for result in equation.outvars:
            dtype = getattr(result.aval, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                continue
            if dtype != _wide(dtype):
                dtypes.add(np.dtype(dtype).name)
        for inner in inner_programs(equation.params.values()):
            inner_names, inner_dtypes = _inside(inner)
            names |= inner_names
            dtypes |= inner_dtypes
    return names, dtypes
