"""The rates of a target that predictions are made from: its own profile, or a scaled one."""

import dataclasses
import functools
import math
import re

from fusejax import profile
from fusejax.compile.targets import Target
from fusejax.errors import UsageError
from fusejax.profile import Profile

# The card whose shipped profile is scaled for those that have none.
_MEASURED = "NVIDIA H200"
_NEEDED = ("copy", "triad", "driver_copy")
_COPIED_BYTES = 1 << 28  # several times what a cache holds
_FIGURES = ("core_count", "clock_rate_ghz", "fpus_per_core")


@dataclasses.dataclass(frozen=True)
class Rates:
    """A measured card's profile, and how much faster this target is by its description.

    For the card itself every factor is 1.
    """

    profile: Profile
    memory: float = 1.0
    arithmetic: float = 1.0

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes read plus written per second by a copy of the size that counts: the effective
        bandwidth."""
        points = self.profile.memory["driver_copy"].points
        copy = min(points, key=lambda point: abs(math.log(point.bytes / _COPIED_BYTES)))
        return copy.bytes / copy.us * 1e6 * self.memory

    @property
    def loop_bytes_per_s(self) -> float:
        """The same of XLA's loops that have many bytes per element."""
        return self.profile.memory["triad"].bytes_per_s * self.memory

    @property
    def element_ps(self) -> float:
        """What an element of XLA's loops takes at least: kernels that only write 16-bit elements
        do not come near the memory's speed. 0 where that was not measured."""
        write = self.profile.emitter_speed("loop_write", "bf16", 8192)
        return 2e12 / write.bytes_per_s / self.arithmetic if write else 0.0

    @property
    def start_us(self) -> float:
        """What a kernel takes however little it does."""
        return self.profile.memory["copy"].fixed_us

    @property
    def launch_us(self) -> float:
        """Between two kernels of one program."""
        return self.profile.launches.launch_us

    @property
    def dispatch_us(self) -> float:
        """Between the kernels of two programs that are dispatched one after another."""
        return self.profile.launches.dispatch_us

    @property
    def flop_per_s(self) -> dict[str, float]:
        """The most that was reached: multiplications of elements as "multiply:f32", products by
        cuBLAS as "matmul:bf16". Operations per second, a product's additions counted too."""
        found = {}
        multiply = self.profile.op_ps("multiply", "f32")
        if multiply:
            found["multiply:f32"] = 1e12 / multiply * self.arithmetic
        for matmul in self.profile.matmuls:
            name = f"matmul:{matmul.dtype}"
            found[name] = max(found.get(name, 0.0), matmul.flop_per_s * self.arithmetic)
        return found

    @property
    def source(self) -> str:
        """Where the rates come from, in words."""
        if self.memory == self.arithmetic == 1.0:
            return f"measured on {self.profile.card}, {self.profile.date[:10]}"
        return f"those of {self.profile.card}, scaled by bandwidth and clocks"


@functools.cache
def of(target: Target) -> Rates | None:
    """The rates of a target; None for the CPU, for which nothing is predicted.

    Raises:
      UsageError: the profile of the card is damaged.
    """
    if target.bandwidth_bytes_per_s is None or target.kind == "cpu":
        return None
    own = _usable(target.title)
    if own is not None:
        return Rates(own)
    from fusejax.compile import targets

    measured = _usable(_MEASURED)
    if measured is None:
        return None
    base = targets.deviceless("h200")
    assert base.bandwidth_bytes_per_s is not None
    return Rates(
        measured,
        memory=target.bandwidth_bytes_per_s / base.bandwidth_bytes_per_s,
        arithmetic=_arithmetic(target) / _arithmetic(base),
    )


def _usable(card: str) -> Profile | None:
    found = profile.load(card)
    missing = [] if found is None else [kind for kind in _NEEDED if kind not in found.memory]
    if missing:
        raise UsageError(
            f"the profile of {card} has no {', '.join(missing)} in its memory, which predictions "
            "need: measure again with scripts/calibrate.py"
        )
    return found


def _arithmetic(target: Target) -> float:
    """Float32 operations per ns, by the description."""
    rate = 1.0
    for field in _FIGURES:
        found = re.search(rf"(?<!\w){field}:\s*([\d.]+)", target.description or "")
        rate *= float(found[1]) if found else 1.0
    return rate
