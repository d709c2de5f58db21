"""What is lost between kernels, between programs, and on the host."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fusejax.measure import timing
from fusejax.measure.calibration import programs
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Probe
from fusejax.profile import Launches

# Programs in a row, with a kernel each: as many as one program of as many kernels.
_PROGRAMS = 4
_TINY_ELEMENTS = 128


def chain(kernels: int) -> Callable[[Any], Any]:
    """A function that is compiled to as many kernels, each waiting for the one before."""

    def function(x: Any) -> Any:
        for _ in range(kernels):
            x = jax.lax.optimization_barrier(x * 0.5 + 0.25)
        return x

    return function


def measure(plan: Plan, tell: Callable[[str], None]) -> Launches:
    """All of it from slopes: what a batch of calls costs once would else be taken for a gap.

    Gap between programs: four programs of a kernel against one program of four, on the same array,
    differ by three gaps between programs for three between kernels. By the profiler: time per
    program less the kernel's own time. Gap between kernels: programs of few and of many kernels,
    less their kernels' own time.
    """
    tell("gaps between launches")
    few, many = plan.links
    array = {
        "large": jax.ShapeDtypeStruct((plan.program_bytes // 2048, 1024), "bfloat16"),
        "link": jax.ShapeDtypeStruct((plan.link_bytes // 2048, 1024), "bfloat16"),
        "tiny": jax.ShapeDtypeStruct((_TINY_ELEMENTS,), "float32"),
    }
    sizes = {"large": (1, _PROGRAMS), "link": (few, many), "tiny": (1, *plan.tiny_links)}
    probes = {}
    for name, lengths in sizes.items():
        for length in lengths:
            plain = Probe(chain(length), (array[name],))
            probes[f"{name} {length}"] = plain
            if name != "large":
                probes[f"{name} {length} graph"] = dataclasses.replace(plain, options={})
    built = {name: one.run for name, one in _build(probes).items()}
    values = {name: programs.random_values([shape]) for name, shape in array.items()}
    arguments = {name: values[name.split()[0]] for name in built}
    single = built["large 1"]

    def in_programs(x: Any) -> Any:
        for _ in range(_PROGRAMS):
            x = single(x)
        return x

    tiny = {name: one for name, one in built.items() if name.startswith("tiny")}
    long = {name: one for name, one in built.items() if name not in tiny}
    long["programs"], arguments["programs"] = in_programs, values["large"]
    wall = timing.slope_times(long, arguments, rounds=2 * plan.rounds, calls=(10, 40))
    host = timing.slope_times(tiny, arguments, rounds=2 * plan.rounds, calls=(50, 250))
    device = timing.device_times(
        {name: one for name, one in long.items() if not name.endswith("graph")},
        arguments,
        rounds=plan.rounds,
        iterations=5,
    )

    def wall_us(name: str) -> float:
        return wall[name].median_us

    def gap(graph: str) -> float:
        on_device = device[f"link {many}"].median_us - device[f"link {few}"].median_us
        in_all = wall_us(f"link {many}{graph}") - wall_us(f"link {few}{graph}")
        return max(0.0, (in_all - on_device) / (many - few))

    def period(graph: str) -> float:
        few, many = plan.tiny_links
        in_all = host[f"tiny {many}{graph}"].median_us - host[f"tiny {few}{graph}"].median_us
        return max(0.0, in_all / (many - few))

    launch = gap("")
    more = (wall_us("programs") - wall_us(f"large {_PROGRAMS}")) / (_PROGRAMS - 1)
    by_profiler = (wall_us("programs") - device["programs"].median_us) / _PROGRAMS
    return Launches(
        launch_us=launch,
        launch_in_graph_us=gap(" graph"),
        dispatch_us=max(0.0, launch + more),
        dispatch_by_profiler_us=max(0.0, by_profiler),
        batch_us=max(0.0, wall["large 1"].batch_us),
        host_dispatch_us=host["tiny 1"].median_us,
        tiny_kernel_us=period(""),
        tiny_kernel_in_graph_us=period(" graph"),
    )


def _build(probes: dict[str, Probe]) -> dict[str, programs.Built]:
    def fail(line: str) -> None:
        raise RuntimeError(f"gaps between launches cannot be measured: {line}")

    return programs.build(probes, fail)
