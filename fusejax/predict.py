"""Predicted time of a path, before it is measured.

    time = bytes / effective bandwidth + launches x launch time + further dispatches x dispatch time

Arithmetic is not in it: what a path loses to it shows as the difference from the measured time.
"""

from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Traffic


def time_us(traffic: Traffic, launches: int, programs: int, target: Target) -> float | None:
    """Predicted µs from the first dispatch to the last kernel's end; None for the CPU."""
    bandwidth = target.effective_bandwidth
    if bandwidth is None:
        return None
    return (
        traffic.total / bandwidth * 1e6
        + launches * target.launch_us
        + (programs - 1) * target.dispatch_us
    )
