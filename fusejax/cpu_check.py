"""Errors of every path against float64, by a run of it on this CPU, on a few rows."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fusejax import accuracy, paths
from fusejax.comparison import PathResult, Refusal
from fusejax.ops.op import Op

# Nothing is checked where even a few rows would not fit in memory.
_CHECKED_ROWS = 4
_CHECKED_ROWS_OF_PRODUCTS = 8
_CHECKED_ELEMENTS = 1 << 24
_CHECKED_SIZES_OF_PRODUCTS = 256


def with_cpu_errors(
    op: Op,
    mode: str,
    shape: Sequence[int],
    dtype: Any,
    results: Mapping[str, PathResult | Refusal],
    progress: Callable[[str], None],
    options: Mapping[str, Any],
) -> dict[str, PathResult | Refusal]:
    """The results with errors from a run of each path on this CPU, on a few rows.

    Args:
      options: of XLA, for compiling them for it.
    """
    checked_shape = _checked_shape(op, shape)
    shapes = paths.argument_shapes(op, mode, checked_shape, dtype)
    if sum(math.prod(value.shape) for value in shapes) > _CHECKED_ELEMENTS:
        return dict(results)
    rows = checked_shape[0]
    values = accuracy.random_values(shapes, seed=0)
    expected = accuracy.reference(op, mode, values)
    checked = {}
    for name, result in results.items():
        if not _runs_on_cpu(op, name, mode, values):
            checked[name] = result
            continue
        where = "simulation" if name in paths.PALLAS else "cpu"
        progress(f"checking {name} in float64 ({where}, {rows} rows)")
        with jax.default_device(jax.devices("cpu")[0]):
            interpret = _simulation() if name in paths.PALLAS else None
            path = paths.build(op, name, mode, interpret=interpret)
            programs = [
                jax.jit(stage.function, compiler_options=dict(options) or None)
                for stage in path.chain.stages
            ]
            got = path.run(programs, values)
        error = accuracy.compare(got, expected, rows=rows, where=where)
        checked[name] = dataclasses.replace(result, error=error)
    return checked


def _checked_shape(op: Op, shape: Sequence[int]) -> tuple[int, ...]:
    """Few rows, and of a product few columns: every size of it multiplies the work."""
    if len(shape) == 2:
        rows = min(shape[0], _CHECKED_ROWS, max(1, _CHECKED_ELEMENTS // (4 * shape[1])))
        return rows, shape[1]
    columns = (min(size, _CHECKED_SIZES_OF_PRODUCTS) for size in shape[1:])
    return min(shape[0], _CHECKED_ROWS_OF_PRODUCTS), *columns


def _runs_on_cpu(op: Op, name: str, mode: str, values: Sequence[Any]) -> bool:
    if name == "recompute":
        return bool(op.recomputed) and mode == "forward"
    if name == "pallas_split":
        return op.split_kernel is not None
    if name != "pallas":
        return True
    if mode not in op.kernel_modes:
        return False
    return op.kernel_refusal(*values[: len(op.chain.arguments)]) is None


def _simulation() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()
