"""Times on this machine's clock, for programs that run on its CPU."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fusejax.comparison import Timing

# Enough for a median; a call on a CPU can take a second.
_ROUNDS = 7


def wall_times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Median time of each call, in µs, the calls in turn within every round."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: _timing([s * 1e6 for s in taken]) for name, taken in seconds.items()}


def _timing(us: list[float]) -> Timing:
    tenths = statistics.quantiles(us, n=10, method="inclusive")
    return Timing(
        device_us=None, low_us=tenths[0], high_us=tenths[-1], end_to_end_us=statistics.median(us)
    )
