"""Why measured kernels take longer, or less, than was predicted of them."""

import dataclasses
import math

from fusejax import rates
from fusejax.comparison import PathResult
from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.over_fused import strained
from fusejax.predict import kernel_costs

# Nearer than this to the prediction nothing is said.
_NEAR = 0.1
# Counted reads that differ by more than this from the modelled ones explain something.
_READ_AGAIN = 1.05
_LOW_OCCUPANCY = 0.3
_BUSY = 0.6


def attributed(path: PathResult, target: Target) -> PathResult:
    """The path with its attribution; as it is where nothing was measured or predicted."""
    rate = rates.of(target)
    device = path.timing.device_us if path.timing else None
    if device is None or path.cost is None or rate is None:
        return path
    share = device / path.cost.kernels_us
    if abs(share - 1) <= _NEAR:
        return path
    times = (path.timing.kernel_us if path.timing else None) or (None,) * len(path.kernels)
    costs = kernel_costs(path.kernels, rate)
    found = [
        (time, cost.kernels_us / kernel.count, kernel)
        for time, cost, kernel in zip(times, costs, path.kernels, strict=True)
        if time is not None
    ]
    if not found:
        return path
    sign = 1 if share > 1 else -1
    time, predicted, kernel = max(found, key=lambda one: sign * (one[0] - one[1]) * one[2].count)
    said = f"{_short(kernel.name)}: {_cause(kernel, path, time, predicted, target)}"
    return dataclasses.replace(path, attribution=said)


def _cause(kernel: Kernel, path: PathResult, time: float, predicted: float, target: Target) -> str:
    """The first of the things that predictions leave out which this kernel shows."""
    used = path.resources.get(kernel.name, {})
    counted = used.get("measured_bytes")
    read = Traffic(counted["read"], counted["written"]).read if counted else None
    cache = target.figure("l2_cache_size") or 0
    if time < predicted:
        if read is not None and read * _READ_AGAIN < kernel.traffic.read:
            return (
                f"reads {read / 1e6:,.0f} of {kernel.traffic.read / 1e6:,.0f} MB, the rest is L2's"
            )
        if kernel.traffic.total < cache:
            return "its data fit into L2"
        return "faster than the kernels that its rates were measured with"
    if read is not None and read > kernel.traffic.read * _READ_AGAIN:
        return f"reads {read / max(1, kernel.traffic.read):.1f}x its operands (they left the cache)"
    if used.get("spill_bytes"):
        return str(strained(kernel, used))
    blocks, multiprocessors = math.prod(used.get("grid") or ()), target.figure("core_count") or 0
    if used.get("grid") and blocks < multiprocessors:
        idle = multiprocessors - blocks
        return f"its {blocks} blocks leave {idle} of {multiprocessors} multiprocessors idle"
    occupancy = used.get("measured_occupancy") or used.get("occupancy")
    issue = used.get("measured_issue")
    if issue is not None and issue > _BUSY:
        return f"arithmetic: {issue:.0%} of the issue slots are in use"
    if occupancy is not None and occupancy < _LOW_OCCUPANCY:
        limiter = used.get("occupancy_limiter")
        return f"latency: occupancy {occupancy:.0%}{f', limited by {limiter}' if limiter else ''}"
    rate_reached = kernel.traffic.total / time / 1e6
    return f"latency or arithmetic: {rate_reached:.2f} TB/s, no spills"


def _short(name: str) -> str:
    return name if len(name) <= 32 else name[:29] + "..."
