"""What this machine's card really reaches, measured: its profile."""

import datetime
import pathlib
import re
from collections.abc import Callable

import jax
import jaxlib

from fusejax.compile import targets
from fusejax.measure.calibration import (
    arithmetic,
    bandwidth,
    emitters,
    launches,
    matmul,
)
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.turns import card_turn
from fusejax.profile import Profile

_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Of a card whose description does not tell the size of its L2 cache.
_LIKELY_L2_BYTES = 64 << 20


def copy_time_us(nbytes: int, *, rounds: int = 10) -> float:
    """Median µs for a device-to-device copy that moves `nbytes`: half are read, half written.

    The data come from memory, however few they are.
    """
    return bandwidth.copy_us(nbytes, rounds=rounds)


def calibrate(
    plan: Plan | None = None,
    *,
    command: str = "fusejax.measure.calibrate.calibrate()",
    tell: Callable[[str], None] = lambda doing: None,
) -> Profile:
    """Measures this machine's first GPU, in about a minute.

    Args:
      plan: sizes and repetitions; by default those for a data centre's card.
      command: is kept in the profile.
      tell: is told, in a few words, what is being done.

    Raises:
      UsageError: there is no GPU that JAX can use, or another profiler has hold of it.
    """
    target = targets.usable_device()
    plan = plan or Plan()
    l2_bytes = target.figure("l2_cache_size") or _LIKELY_L2_BYTES
    left_out: list[str] = []
    with card_turn():
        memory = bandwidth.memory_curves(plan, l2_bytes, tell, left_out.append)
        memory["driver_copy"] = bandwidth.driver_copies(plan, tell)
        return Profile(
            card=target.title,
            jax=jax.__version__,
            jaxlib=jaxlib.version.__version__,
            cuda=_cuda(target.description or ""),
            driver=_driver(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=command,
            l2_bytes=l2_bytes,
            memory=memory,
            l2=bandwidth.l2_curves(plan, tell, left_out.append),
            emitters=emitters.speeds(plan, tell, left_out.append),
            arithmetic=arithmetic.costs(plan, tell, left_out.append),
            matmuls=matmul.times(plan, tell, left_out.append),
            launches=launches.measure(plan, tell),
            left_out=tuple(left_out),
        )


def _cuda(description: str) -> str | None:
    found = re.search(r'driver_version: "([^"]+)"', description)
    return found[1] if found else None


def _driver() -> str | None:
    try:
        found = re.search(r"\b\d{3,}\.[\d.]+\b", _DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None
