"""Predicted time of a path, before it is measured.

    memory     = bytes / what kernels of this kind reach
    arithmetic = element-wise operations, each at its own rate
    kernel     = start + max(sqrt(memory^2 + arithmetic^2), matrix product)
    path       = kernels + launches x launch time + further dispatches x dispatch time

Memory and arithmetic overlap in part: the root of the squares is what kernels of XLA come nearest
to. XLA's loops are another case: they take a time per element, however few bytes it has, that
arithmetic comes on top of, and memory overlaps with all of it. All rates are those of the card's
profile, see `fusejax.profile`. What a prediction does not know: spills, occupancy, tiles read again
after they left the cache.
"""

import dataclasses
import math
from collections.abc import Sequence

from fusejax.hlo.analysis import Kernel
from fusejax.rates import Rates

# Emitters that reach a copy's speed where nothing else holds them back.
_AS_A_COPY = frozenset(("mosaic_gpu", "copy"))
# Of the L2 cache, what a kernel leaves in it that is still to be written: the next kernel's memory
# does that. Counters of an H200 miss 16 to 30 MB of the bytes that kernels write.
_LEFT_IN_CACHE = 0.45


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted µs of one call, in terms that add up."""

    traffic_us: float = 0.0
    """Its bytes at the speed of a copy."""
    emitter_us: float = 0.0
    """What kernels of their kind take longer (or less, below 0) for these bytes."""
    compute_us: float = 0.0
    """What arithmetic and matrix products take longer than the bytes."""
    start_us: float = 0.0
    """Starts and ends of kernels."""
    launch_us: float = 0.0
    dispatch_us: float = 0.0

    @property
    def kernels_us(self) -> float:
        """The kernels' own time."""
        return self.traffic_us + self.emitter_us + self.compute_us + self.start_us

    @property
    def total_us(self) -> float:
        """From the first dispatch to the last kernel's end."""
        return self.kernels_us + self.launch_us + self.dispatch_us

    def __add__(self, other: "Cost") -> "Cost":
        terms = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in terms))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(term * times for term in dataclasses.astuple(self)))

    def __sub__(self, other: "Cost") -> "Cost":
        terms = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a - b for a, b in terms))


def path_cost(kernels: Sequence[Kernel], programs: int, rates: Rates) -> Cost:
    """The cost of kernels that are launched in order, over and over, by so many programs."""
    cost = Cost(dispatch_us=(programs - 1) * rates.dispatch_us)
    for one in kernel_costs(kernels, rates):
        cost += one
    return cost


def kernel_costs(kernels: Sequence[Kernel], rates: Rates) -> list[Cost]:
    """The cost of each kernel, all its launches, after the one before it."""
    left = [_left_in_cache(kernel, rates) for kernel in kernels]
    found = []
    for place, kernel in enumerate(kernels):
        cost = Cost()
        if kernel.count:
            cost += _launch_cost(kernel, left[place - 1] - left[place], rates)
        if kernel.count > 1:  # a loop's trip count can be any number
            cost += _launch_cost(kernel, 0, rates) * (kernel.count - 1)
        found.append(cost)
    return found


def _left_in_cache(kernel: Kernel, rates: Rates) -> int:
    return min(kernel.traffic.written, int(rates.profile.l2_bytes * _LEFT_IN_CACHE))


def _launch_cost(kernel: Kernel, inherited: int, rates: Rates) -> Cost:
    """The cost of one launch that writes so many bytes more than its own."""
    moved = kernel.traffic.total
    traffic = moved / rates.copy_bytes_per_s * 1e6
    memory = (moved + inherited) / _bytes_per_s(kernel, rates) * 1e6
    arithmetic = arithmetic_us(kernel, rates)
    if kernel.emitter == "loop" and kernel.work is not None:
        elements = kernel.work.elements * rates.element_ps / 1e6
        emitted = max(memory, elements)
        together = max(memory, math.hypot(elements, arithmetic))
    else:
        emitted, together = memory, math.hypot(memory, arithmetic)
    return Cost(
        traffic_us=traffic,
        emitter_us=emitted - traffic,
        compute_us=max(together, matmul_us(kernel, rates)) - emitted,
        start_us=rates.start_us,
        launch_us=rates.launch_us,
    )


def arithmetic_us(kernel: Kernel, rates: Rates) -> float:
    """Element-wise operations at the rate at which the card does nothing else."""
    if kernel.work is None:
        return 0.0
    ps = 0.0
    for name, count in kernel.work.operations.items():
        ps += count * (operation_ps(name, rates) or 0.0)
    return ps / 1e6 / rates.arithmetic


def operation_ps(name: str, rates: Rates) -> float | None:
    """Picoseconds of an operation of `Work.operations` per element; None where not measured."""
    op, _, dtype = name.partition(":")
    if op == "convert":
        narrow = next((d for d in dtype.split(">") if d in ("bf16", "f16")), None)
        return rates.profile.op_ps(op, narrow) if narrow else None
    return rates.profile.op_ps(op, dtype)


def matmul_us(kernel: Kernel, rates: Rates) -> float:
    """Matrix products at the rate that the library reaches at the nearest measured size."""
    flops = kernel.work.matmul_flops if kernel.work else 0
    if not flops:
        return 0.0
    assert kernel.work is not None
    dtype = kernel.work.matmul_dtype
    alike = [m for m in rates.profile.matmuls if m.dtype == dtype] or list(rates.profile.matmuls)
    nearest = min(alike, key=lambda m: abs(math.log(2 * m.m * m.n * m.k / flops)), default=None)
    return 0.0 if nearest is None else flops / nearest.flop_per_s * 1e6 / rates.arithmetic


def _bytes_per_s(kernel: Kernel, rates: Rates) -> float:
    if kernel.emitter in _AS_A_COPY or kernel.work is None:
        return rates.copy_bytes_per_s
    if kernel.emitter == "loop":
        return rates.loop_bytes_per_s
    kind = kernel.emitter
    if kind == "reduction" and kernel.work.sums_columns:
        kind = "reduction_columns"
    speed = rates.profile.emitter_speed(kind, kernel.work.dtype, kernel.work.width)
    return speed.bytes_per_s * rates.memory if speed else rates.copy_bytes_per_s
