"""Device time per kernel, and time per call of many calls in a row, for several variants at once.

Clocks drift with heat and with the data, so the variants take turns, in every round in another
order, and each round's warm-up is thrown away. Nothing here needs a GPU to be imported.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fusejax.compile.platform import cuda_backend_works
from fusejax.errors import UsageError, first_line
from fusejax.hlo.analysis import Kernel
from fusejax.resources.matching import match

GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}
"""Compile options that keep XLA from packing launches into CUDA graphs."""


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel that ran once per call."""

    function: str
    """Name of the device function."""
    median_us: float


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What one call costs on the device, gaps between kernels not counted. Times in µs."""

    kernels: tuple[KernelTime, ...]
    """In launch order. The driver's copies and fills (a `copy` of HLO, say) are not among them, and
    their time shows up in the end-to-end time only."""
    median_us: float
    low_us: float
    high_us: float
    """10th and 90th percentile."""
    samples: int


@dataclasses.dataclass(frozen=True)
class CallTime:
    """Wall-clock time per call of many asynchronous calls in a row, in µs."""

    median_us: float
    low_us: float
    high_us: float
    """10th and 90th percentile over batches of calls."""
    samples: int


@dataclasses.dataclass(frozen=True)
class CallSlope:
    """Wall-clock time per further call of asynchronous calls in a row, in µs."""

    median_us: float
    low_us: float
    high_us: float
    """10th and 90th percentile over pairs of batches."""
    samples: int
    batch_us: float
    """What a batch costs once, however long it is: the way to the first kernel and the host's
    waiting for the last. Median."""


def device_times(
    variants: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    rounds: int = 5,
    iterations: int = 10,
) -> dict[str, DeviceTime]:
    """Times the kernels of every variant by the card's own clock (CUPTI).

    Args:
      variants: compiled functions, or Python functions that call several of them. They must not
        donate their arguments.
      arguments: of every variant, or a sequence of them per variant. Larger than the L2 cache
        together, and random, or the times are not those of real data.
      rounds: turns of each variant.
      iterations: timed calls per turn.

    Raises:
      UsageError: there is no GPU, or another profiler (ncu, nsys, JAX's own) has hold of CUPTI.
    """
    per_variant = _arguments(variants, arguments)
    for name, function in variants.items():
        jax.block_until_ready([function(*per_variant[name]) for _ in range(2)])
    calls: dict[str, list[list[tuple[str, float]]]] = {name: [] for name in variants}
    for name in _turns(list(variants), rounds):
        calls[name] += _profile(variants[name], per_variant[name], iterations)
    return {name: _summarise(name, found) for name, found in calls.items()}


def end_to_end_times(
    variants: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    rounds: int = 10,
    calls: int = 50,
) -> dict[str, CallTime]:
    """Times every variant by the host's clock, per call of `calls` asynchronous calls in a row.

    Less `DeviceTime.median_us` this is what the gaps between launches cost. A variant of several
    dispatches (an eager path) is timed with the gaps between its dispatches. Where the host needs
    longer to dispatch than the device to compute, this is the host's time.
    """
    per_variant = _arguments(variants, arguments)
    for name, function in variants.items():
        jax.block_until_ready([function(*per_variant[name]) for _ in range(2)])
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for name in _turns(list(variants), rounds):
        samples[name].append(_batch_us(variants[name], per_variant[name], calls) / calls)
    return {name: CallTime(*_spread(found), len(found)) for name, found in samples.items()}


def slope_times(
    variants: Mapping[str, Callable[..., Any]],
    arguments: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    rounds: int = 10,
    calls: tuple[int, int] = (10, 50),
) -> dict[str, CallSlope]:
    """Times every variant by the host's clock, per call that a longer batch has more.

    The time of a batch is what it costs once plus the time per call, so the difference of two
    batches holds the latter alone; `end_to_end_times` spreads the former over its calls.

    Args:
      rounds: turns of each variant, with a batch of either length.
      calls: the lengths, the shorter first: long enough for the host to be ahead of the device (or
        behind it) for good.
    """
    few, many = calls
    per_variant = _arguments(variants, arguments)
    for name, function in variants.items():
        jax.block_until_ready([function(*per_variant[name]) for _ in range(2)])
    slopes: dict[str, list[float]] = {name: [] for name in variants}
    once: dict[str, list[float]] = {name: [] for name in variants}
    for name in _turns(list(variants), rounds):
        short, long = (_batch_us(variants[name], per_variant[name], count) for count in calls)
        slope = (long - short) / (many - few)
        slopes[name].append(slope)
        once[name].append(short - few * slope)
    return {
        name: CallSlope(*_spread(found), len(found), statistics.median(once[name]))
        for name, found in slopes.items()
    }


def kernel_us(measured: DeviceTime, kernels: Sequence[Kernel]) -> dict[str, float | None]:
    """Median µs of one launch, by the name of the compiled kernel.

    Args:
      measured: of a program that was compiled without CUDA graphs (GRAPHS_OFF), whose launches the
        card reports one by one.
      kernels: of the same program, in launch order.

    Returns:
      An entry for every kernel; None where it cannot be told which launches were the kernel's.
    """
    names = match([kernel.function for kernel in measured.kernels], kernels, per_run=True)
    answer: dict[str, float | None] = {}
    for kernel in kernels:
        own = [
            timed.median_us
            for name, timed in zip(names, measured.kernels, strict=True)
            if name == kernel.name
        ]
        answer[kernel.name] = statistics.median(own) if own else None
    return answer


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _arguments(
    variants: Mapping[str, Any], arguments: Sequence[Any] | Mapping[str, Sequence[Any]]
) -> Mapping[str, Sequence[Any]]:
    if isinstance(arguments, Mapping):
        return arguments
    return dict.fromkeys(variants, arguments)


def _batch_us(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    """Wall-clock µs of as many calls in a row, the first of which finds the device idle."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e6


def _turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once per round, each round beginning with another, so that none has a fixed
    neighbour whose heat or cache contents it inherits."""
    for turn in range(rounds):
        first = turn // 2 % len(names)
        ordered = [*names[first:], *names[:first]]
        yield from ordered if turn % 2 == 0 else reversed(ordered)


def _profile(
    function: Callable[..., Any], arguments: Sequence[Any], iterations: int
) -> list[list[tuple[str, float]]]:
    """Name and µs of every kernel, per call."""
    # `jax.experimental.mosaic.gpu.profiler.measure` would jit a function of several dispatches into
    # one program; this is the extension that it uses.
    from jax._src.lib import mosaic_gpu

    extension = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    if extension is None or not cuda_backend_works():
        raise UsageError(
            "device times need a GPU and the CUDA plugin of JAX (pip install 'fusejax[cuda]')"
        )
    jax.block_until_ready(function(*arguments))
    try:
        extension._cupti_init()
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"device times need CUPTI, which another profiler may hold ({first_line(error)}): "
            "run without ncu, nsys or jax.profiler around it"
        ) from error
    try:
        for _ in range(iterations):
            result = function(*arguments)
        jax.block_until_ready(result)
    finally:
        kernels = extension._cupti_get_timings(True)
    if len(kernels) % iterations:
        raise UsageError(
            f"{len(kernels)} kernels in {iterations} calls: not every call launches the same ones"
        )
    per_call = len(kernels) // iterations
    return [
        [(name, ms * 1e3) for name, ms in kernels[first : first + per_call]]
        for first in range(0, len(kernels), per_call or 1)
    ] or [[]] * iterations


def _summarise(variant: str, calls: Sequence[Sequence[tuple[str, float]]]) -> DeviceTime:
    names = [name for name, _ in calls[0]] if calls else []
    if any([name for name, _ in call] != names for call in calls):
        raise UsageError(f"{variant}: its calls do not launch the same kernels in the same order")
    totals = [sum(us for _, us in call) for call in calls]
    kernels = tuple(
        KernelTime(name, statistics.median(call[index][1] for call in calls))
        for index, name in enumerate(names)
    )
    return DeviceTime(kernels, *_spread(totals), len(totals))


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), percentile(values, 0.1), percentile(values, 0.9)
