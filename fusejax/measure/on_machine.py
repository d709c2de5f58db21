"""Runs compiled paths on this machine: their times, their errors, and what the counters see."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fusejax import accuracy
from fusejax.comparison import Clocks, PathResult, Timing
from fusejax.compile.targets import Target
from fusejax.compiled_path import Compiler
from fusejax.errors import UsageError
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.measure import calibrate, clocks, counters, counting, host, timing
from fusejax.measure.inputs import random_on_device
from fusejax.measure.turns import card_turn
from fusejax.ops.op import Op
from fusejax.paths import Path
from fusejax.resources.matching import match

# Rows whose errors are checked on the card, spread over all of them. A gradient of a parameter, or
# a result that mixes rows, needs every row, in float64 on the host: not for more elements than
# this.
_CHECKED_ROWS = 64
# Inputs smaller than some caches take turns with others, up to so many.
_CACHES = 3
_MOST_SETS = 64
_TIMED_US = 10_000  # of calls in a row that one end-to-end time is the mean of
_CHECKED_ELEMENTS = 1 << 27
# Calls of so many µs whose end-to-end time is so much longer are held up by more than launches.
_LONG_US = 500
_SLOWER = 1.05


Built = Mapping[str, tuple[Path, Sequence[Any]]]
"""Per path, its chain and the compiled programs."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Paths with what was measured of them, and the time of a copy that moves as many bytes."""

    paths: dict[str, PathResult]
    floor_us: float | None
    """Of a copy of the minimum bytes, in the same run; None where nothing ran on a card."""
    clocks: Clocks | None = None
    """Under load, where that can be what makes calls longer than their kernels."""


def measure(
    shapes: Sequence[Any],
    built: Built,
    results: Mapping[str, PathResult],
    compiler: Compiler,
    minimum_bytes: int,
    progress: Callable[[str], None],
    *,
    errors: Callable[[Sequence[jax.Array], Built], Mapping[str, accuracy.Error | None]] | None,
    counted: counting.Request | None = None,
) -> Measured:
    """Times the paths in turn, on the same random data, and checks them afterwards.

    Args:
      results: per path, what is known of it so far.
      errors: per path, those of its results for some arguments; None where they are not wanted.
      counted: what to count with Nsight Compute, or None.
    """
    target = compiler.target
    progress("making random inputs")
    sets = _input_sets(shapes, minimum_bytes, target)
    calls = {name: _rotating(path, programs, sets) for name, (path, programs) in built.items()}
    if target.kind == "cpu":
        progress(f"timing {', '.join(calls)} in turn")
        times = host.wall_times(calls)
        found = {n: dataclasses.replace(results[n], timing=times[n]) for n in calls}
        return Measured(_with_errors(found, sets[0], built, errors, progress), None)
    with card_turn(shared=True):
        # CUDA graphs would hide which kernel took how long.
        without_graphs = {
            name: _without_graphs(path, programs, results[name], sets[0], compiler.options)
            for name, (path, programs) in built.items()
        }
    one_by_one = {
        name: _rotating(path, without_graphs[name], sets) for name, (path, _) in built.items()
    }
    progress(f"timing {', '.join(calls)} in turn")
    with card_turn():
        times = card_times(results, calls, one_by_one)
        floor = calibrate.copy_time_us(minimum_bytes) if calls else None
        clock = _clock(times, calls)
    found = {name: dataclasses.replace(results[name], timing=times[name]) for name in calls}
    with card_turn(shared=True):
        found = _with_errors(found, sets[0], built, errors, progress)
    if counted is not None:
        progress("counting DRAM bytes with ncu")
        found = _with_counters(found, counted, without_graphs)
    return Measured(found, floor, clock)


def _with_errors(
    found: dict[str, PathResult],
    values: Sequence[jax.Array],
    built: Built,
    errors: Callable[[Sequence[jax.Array], Built], Mapping[str, accuracy.Error | None]] | None,
    progress: Callable[[str], None],
) -> dict[str, PathResult]:
    if errors is None:
        return found
    progress("checking the results against float64")
    known = errors(values, built)
    return {name: dataclasses.replace(path, error=known[name]) for name, path in found.items()}


def _input_sets(
    shapes: Sequence[Any], minimum_bytes: int, target: Target
) -> list[tuple[jax.Array, ...]]:
    """Inputs to take in turn, so many that on a card none is still in the cache when it is due."""
    cache = target.figure("l2_cache_size") if target.kind == "device" else None
    wanted = -(-_CACHES * (cache or 0) // max(1, minimum_bytes))
    return [random_on_device(shapes, seed) for seed in range(min(max(1, wanted), _MOST_SETS))]


def _rotating(
    path: Path, programs: Sequence[Any], sets: Sequence[Sequence[jax.Array]]
) -> Callable[[], Any]:
    turns = itertools.cycle(sets)
    return lambda: path.run(programs, next(turns))


def card_times(
    results: Mapping[str, PathResult],
    calls: Mapping[str, Callable[[], Any]],
    one_by_one: Mapping[str, Callable[[], Any]],
) -> dict[str, Timing]:
    """Times calls in turn, kernel by kernel and end to end.

    Args:
      results: with the kernels of each.
      calls: as they are used.
      one_by_one: the same, compiled without CUDA graphs.
    """
    device = timing.device_times(one_by_one, ())
    longest = max(found.median_us for found in device.values())
    enough = max(10, min(200, int(_TIMED_US / longest)))
    wall = timing.end_to_end_times(calls, (), rounds=8, calls=enough)
    plain = timing.end_to_end_times(one_by_one, (), rounds=4, calls=enough)
    return {
        name: Timing(
            device_us=device[name].median_us,
            low_us=device[name].low_us,
            high_us=device[name].high_us,
            end_to_end_us=wall[name].median_us,
            kernel_us=_kernel_us(device[name], results[name].kernels),
            without_graphs_us=plain[name].median_us,
        )
        for name in calls
    }


def _clock(times: Mapping[str, Timing], calls: Mapping[str, Callable[[], Any]]) -> Clocks | None:
    """The clock while the longest path runs, where its calls take longer than launches explain."""
    name = max(times, key=lambda name: times[name].end_to_end_us, default=None)
    if name is None or (times[name].device_us or math.inf) < _LONG_US:
        return None
    slower = times[name].end_to_end_us / (times[name].device_us or 1)
    return clocks.under_load(calls[name]) if slower > _SLOWER else None


def _without_graphs(
    path: Path,
    programs: Sequence[Any],
    result: PathResult,
    values: Sequence[jax.Array],
    options: Mapping[str, Any],
) -> Sequence[Any]:
    """The path's programs, compiled so that the card reports their kernels one by one."""
    if result.launches == len(programs):  # a single kernel is not put into a graph
        return programs
    shapes = path.chain.shapes([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values])
    return [
        jax.jit(stage.function)
        .lower(*(shapes[name] for name in stage.inputs))
        .compile(compiler_options={**options, **timing.GRAPHS_OFF})
        for stage in path.chain.stages
    ]


def _kernel_us(
    measured: timing.DeviceTime, kernels: Sequence[Kernel]
) -> tuple[float | None, ...] | None:
    if len(measured.kernels) == len(kernels) and all(kernel.count == 1 for kernel in kernels):
        return tuple(kernel.median_us for kernel in measured.kernels)
    by_name = timing.kernel_us(measured, kernels)
    return tuple(by_name[kernel.name] for kernel in kernels)


def errors(
    op: Op, mode: str, values: Sequence[jax.Array], built: Built
) -> dict[str, accuracy.Error | None]:
    """The errors of an op's paths on a sample of rows; None where that is too much to compute."""
    rows, size = values[0].shape[0], values[0].size
    picked = np.unique(np.linspace(0, rows - 1, min(rows, _CHECKED_ROWS)).astype(int))
    if mode == "backward" or op.mixes_rows:
        if size > _CHECKED_ELEMENTS:
            return dict.fromkeys(built)
        picked = np.arange(rows)

    def sample(value: jax.Array) -> np.ndarray:
        by_row = value.shape[:1] == (rows,) and (value.ndim > 1 or mode == "forward")
        return np.asarray(value[picked] if by_row and len(picked) < rows else value)

    # A parameter of a square input is as long as there are rows, and is not sampled.
    arguments = tuple(
        sample(value)
        if name not in op.chain.arguments or name in op.row_arguments
        else np.asarray(value)
        for name, value in zip(_argument_names(op, values), values, strict=True)
    )
    expected = accuracy.reference(op, mode, arguments)
    return {
        name: accuracy.compare(
            [sample(result) for result in path.run(programs, values)],
            expected,
            rows=len(picked),
            where="device",
        )
        for name, (path, programs) in built.items()
    }


def _argument_names(op: Op, values: Sequence[Any]) -> list[str]:
    cotangents = len(values) - len(op.chain.arguments)
    return [*op.chain.arguments, *op.chain.results[:cotangents]]


def _with_counters(
    found: Mapping[str, PathResult],
    request: counting.Request,
    executables: Mapping[str, Sequence[Any]],
) -> dict[str, PathResult]:
    try:
        per_path = counting.count(request, executables)
    except UsageError as error:
        raise UsageError(f"--counters: {error}, or leave --counters out") from error
    if per_path is None:
        return dict(found)
    return {
        name: dataclasses.replace(
            path,
            counted=Traffic(
                sum(launch.read_bytes for launch in counted),
                sum(launch.written_bytes for launch in counted),
            ),
            resources=_counted_resources(path, counted),
        )
        for (name, path), counted in zip(found.items(), per_path, strict=True)
    }


def _counted_resources(
    path: PathResult, counted: Sequence[counters.Counted]
) -> dict[str, dict[str, Any]]:
    """The kernels' resources with what the card counted, where launches and kernels pair up."""
    if len(counted) == len(path.kernels):  # each instruction is one launch, whatever its name
        names: Sequence[str | None] = [kernel.name for kernel in path.kernels]
    else:
        names = match([launch.function for launch in counted], path.kernels, per_run=True)
    found = dict(path.resources)
    for name, launch in zip(names, counted, strict=True):
        if name is not None:
            found[name] = {
                **found.get(name, {}),
                "measured_bytes": {"read": launch.read_bytes, "written": launch.written_bytes},
                **_execution_json(launch.execution),
            }
    return found


def _execution_json(execution: counters.Execution | None) -> dict[str, Any]:
    if execution is None:
        return {}
    shown = {
        "occupancy": execution.occupancy,
        "theoretical_occupancy": execution.theoretical_occupancy,
        "registers": execution.registers,
        "shared_bytes": execution.static_shared_bytes + execution.dynamic_shared_bytes,
        "issue": execution.issue,
        "dram": execution.dram,
        "xu_pipe": execution.xu_pipe,
        "tensor_pipe": execution.tensor_pipe,
        "l2_hits": execution.l2_hits,
        "local_bytes": execution.local_bytes,
    }
    return {f"measured_{name}": value for name, value in shown.items()}
