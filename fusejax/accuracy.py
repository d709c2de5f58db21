"""Errors of the paths against a float64 reference, on random data of both signs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusejax.ops.op import Op


@dataclasses.dataclass(frozen=True)
class Error:
    """The worst error over all results."""

    max_abs: float
    """Largest absolute difference."""
    max_rel: float
    """Largest, over the results, of the absolute difference over the result's largest value."""
    rows: int
    """Rows that were compared."""
    where: str
    """What computed the values: "device", "cpu", or "simulation" of the kernel on a CPU."""


def random_values(shapes: Sequence[Any], seed: int) -> tuple[np.ndarray, ...]:
    """An array per shape: standard normal, rounded to its dtype; masks are mostly True."""
    generator = np.random.default_rng(seed)

    def one(shape: Any) -> np.ndarray:
        normal = generator.standard_normal(shape.shape, np.float32)
        return normal < 1 if shape.dtype == np.bool_ else normal.astype(shape.dtype)

    return tuple(one(shape) for shape in shapes)


def reference(op: Op, mode: str, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The op's results in float64, or its gradients, from values of its own dtype."""
    dtype = values[0].dtype
    wide = tuple(np.asarray(value).astype(np.float64) for value in values)
    count = len(op.chain.arguments)
    if mode == "forward":
        return op.reference(*wide, dtype)
    return op.reference_gradient(wide[:count], wide[count:], dtype)


def compare(
    results: Sequence[Any], expected: Sequence[np.ndarray], *, rows: int, where: str
) -> Error:
    """The error of `results`. A NaN on one side alone counts as an infinite error."""
    max_abs = max_rel = 0.0
    for result, right in zip(results, expected, strict=True):
        got = np.asarray(result).astype(np.float64)
        if got.shape != right.shape:
            raise ValueError(f"results of shape {got.shape} cannot be held against {right.shape}")
        if not right.size:
            continue
        same = (got == right) | (np.isnan(got) & np.isnan(right))
        difference = np.where(same, 0.0, np.abs(got - right))
        worst = float(np.nan_to_num(difference, nan=np.inf).max())
        largest = float(np.nanmax(np.abs(right), initial=0.0))
        max_abs = max(max_abs, worst)
        max_rel = max(max_rel, worst / largest if largest else (np.inf if worst else 0.0))
    return Error(max_abs, max_rel, rows, where)
