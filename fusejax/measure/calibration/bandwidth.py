"""How long kernels take that only move data, from device memory and within the L2 cache."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fusejax.errors import UsageError
from fusejax.measure import timing
from fusejax.measure.calibration import fit, programs
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Built, Probe
from fusejax.profile import Curve, Point

_WIDTH = 1024
# XLA's 16-bit loop kernels are slower than memory is.
_DTYPE = jnp.dtype(jnp.float32)
# Data come from memory where so many times the L2 cache lie between two uses of them.
_CACHES = 4
_DRIVER_COPIES_BYTES = 512 << 20
_LEAST_DRIVER_COPY = 64 << 20
_MOST_COPIES = 256


def probe(kind: str, nbytes: int) -> Probe:
    """The program of one of "copy", "read", "write" and "triad" that moves `nbytes`."""
    arrays = {"copy": 2, "read": 1, "write": 1, "triad": 3}[kind]
    elements = max(1, nbytes // (arrays * _DTYPE.itemsize))
    width = min(elements, _WIDTH)
    shape = (elements // width, width)
    array, scalar = jax.ShapeDtypeStruct(shape, _DTYPE), jax.ShapeDtypeStruct((), _DTYPE)
    if kind == "copy":
        return Probe(jnp.negative, (array,))
    if kind == "read":
        return Probe(lambda x: jnp.sum(x, axis=1), (array,))
    if kind == "write":
        return Probe(lambda scalar: jnp.full(shape, scalar), (scalar,))
    return Probe(lambda a, scalar, b: a * scalar + b, (array, scalar, array))


def memory_curves(
    plan: Plan, l2_bytes: int, tell: Callable[[str], None], leave_out: Callable[[str], None]
) -> dict[str, Curve]:
    """Kernels whose data are in no cache, by kind: see `fusejax.profile.Profile.memory`.

    Smaller ones take turns on so many copies of their arguments that each comes from memory, and
    all results are kept, so that each goes to memory of its own.
    """
    kinds = ("copy", "read", "write", "triad")
    probes = {(kind, size): probe(kind, size) for kind in kinds for size in plan.memory_bytes}
    built = programs.build({f"{k} {s}": one for (k, s), one in probes.items()}, leave_out)
    points: dict[str, list[Point]] = {kind: [] for kind in kinds}
    for (kind, size), one in probes.items():
        if (program := built.get(f"{kind} {size}")) is None:
            continue
        tell(f"memory: {kind} of {size / 1e6:.0f} MB")
        copies = max(2, math.ceil(_CACHES * l2_bytes / size))
        point = _rotated(program, one, copies, plan.rounds, f"{kind} {size}", leave_out)
        points[kind] += [] if point is None else [point]
    return {kind: fit.curve(found) for kind, found in points.items() if found}


def l2_curves(
    plan: Plan, tell: Callable[[str], None], leave_out: Callable[[str], None]
) -> dict[str, Curve]:
    """Kernels that run again and again on the same small array: "copy" and "read"."""
    probes = {
        (kind, size): probe(kind, size) for kind in ("copy", "read") for size in plan.l2_bytes
    }
    built = programs.build({f"L2 {k} {s}": one for (k, s), one in probes.items()}, leave_out)
    points: dict[str, list[Point]] = {"copy": [], "read": []}
    tell("L2 cache")
    for (kind, size), one in probes.items():
        if (program := built.get(f"L2 {kind} {size}")) is None:
            continue
        values = programs.random_values(one.arguments)
        timed = timing.device_times(
            {"again": program.run}, values, rounds=plan.rounds, iterations=20
        )["again"]
        points[kind].append(Point(program.bytes, timed.median_us, timed.low_us, timed.high_us))
    return {kind: fit.curve(found) for kind, found in points.items() if found}


def driver_copies(plan: Plan, tell: Callable[[str], None]) -> Curve:
    """`jnp.copy` from device memory to device memory, gaps between copies included."""
    tell("memory: copies by the driver")
    points = []
    for size in plan.driver_copy_bytes:
        timed, copies = _driver_copies(size, rounds=plan.rounds)
        us = (timed.median_us, timed.low_us, timed.high_us)
        points.append(Point(size, *(one / copies for one in us)))
    return fit.curve(points)


def copy_us(nbytes: int, *, rounds: int) -> float:
    """Median µs for a device-to-device copy that moves `nbytes`: half are read, half written.

    By the driver where it takes longer than the host needs to launch it; else by a kernel.
    """
    if nbytes >= _LEAST_DRIVER_COPY:
        timed, copies = _driver_copies(nbytes, rounds=rounds)
        return timed.median_us / copies

    def fail(line: str) -> None:
        raise UsageError(f"a copy of {nbytes} bytes cannot be timed: {line}")

    one = probe("copy", nbytes)
    program = programs.build({"copy": one}, fail)["copy"]
    copies = min(_MOST_COPIES, math.ceil(_DRIVER_COPIES_BYTES / nbytes))
    point = _rotated(program, one, copies, rounds, "copy", fail)
    assert point is not None
    return point.us


def _driver_copies(nbytes: int, *, rounds: int) -> tuple[timing.CallSlope, int]:
    """Time per call of a program of several copies, and how many they are.

    A copy by the driver is no kernel, so the profiler's times miss it. Back to back the device is
    never idle, and the host's clock sees its time; for that a program must take the device longer
    than the host needs to dispatch the next.
    """
    copies = math.ceil(_DRIVER_COPIES_BYTES / nbytes)
    shape = (max(1, nbytes // (2 * _DTYPE.itemsize)),)
    values = _copied(programs.random_values([jax.ShapeDtypeStruct(shape, _DTYPE)]), copies)
    run = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays])
    arrays = [value for (value,) in values]
    timed = timing.slope_times({"copy": run}, (arrays,), rounds=rounds, calls=(5, 25))
    return timed["copy"], copies


def _rotated(
    program: Built,
    one: Probe,
    copies: int,
    rounds: int,
    name: str,
    leave_out: Callable[[str], None],
) -> Point | None:
    values = _copied(programs.random_values(one.arguments), copies)
    timed = timing.device_times(
        {name: lambda: [program.run(*arguments) for arguments in values]},
        (),
        rounds=rounds,
        iterations=2,
    )[name]
    try:
        return programs.spread(program.bytes, programs.main_kernel_us(program, timed))
    except ValueError as error:
        leave_out(f"{name}: {error}")
        return None


def _copied(values: tuple[jax.Array, ...], copies: int) -> list[tuple[jax.Array, ...]]:
    """The same numbers at several places in memory."""
    return [tuple(jnp.copy(value) for value in values) for _ in range(copies)]
