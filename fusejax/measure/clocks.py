"""The card's clock while a program runs over and over: what a power cap does to long runs.

Kernels are timed in short bursts, in which a card may run faster than it can keep up.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

from fusejax.comparison import Clocks

_FIELDS = "clocks.sm,clocks.max.sm,power.draw,enforced.power.limit,clocks_event_reasons.active"
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "power brake",
}
_CALLS = 10  # between two looks at whether the clock has been read
_SETTLING_S = 1.2  # the driver's power is a mean over the last second
_LIMIT_S = 10


def under_load(call: Callable[[], Any]) -> Clocks | None:
    """Reads the clocks by nvidia-smi while `call` runs again and again, for a second or two.

    Returns:
      None where nvidia-smi is missing or does not tell.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    _repeat(call, lambda since: since > _SETTLING_S)
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = [tool, "-i", card, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        _repeat(call, lambda since: process.poll() is not None or since > _LIMIT_S)
        process.kill()
        assert process.stdout is not None
        return parse(process.stdout.read())


def parse(answer: str) -> Clocks | None:
    """Reads nvidia-smi's line of comma-separated numbers; None where one is missing."""
    try:
        *numbers, reasons = answer.strip().split(",")
        sm, most, power, limit = map(float, numbers)
        active = int(reasons, 16)
    except ValueError:
        return None
    named = dict.fromkeys(name for bit, name in _REASONS.items() if active & bit)
    return Clocks(sm, most, power, limit, tuple(named))


def _repeat(call: Callable[[], Any], is_enough: Callable[[float], bool]) -> None:
    begun = time.monotonic()
    while not is_enough(time.monotonic() - begun):
        jax.block_until_ready([call() for _ in range(_CALLS)])
