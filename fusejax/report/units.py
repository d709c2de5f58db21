"""How quantities are written."""

from collections.abc import Mapping, Sequence
from typing import Any


def mib(size: int) -> str:
    """Bytes as "512.0 MiB", or in bytes or KiB where there are fewer."""
    if size < 1024:
        return f"{size} B"
    if size < 1024**2:
        return f"{size / 1024:.1f} KiB"
    return f"{size / 1024**2:,.1f} MiB"


def tensor(dtype: str, shape: Sequence[int]) -> str:
    """As HLO writes it: "f32[8192,8192]"."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def counted(number: int, noun: str) -> str:
    """ "1 launch", "2 launches"."""
    plural = noun + ("es" if noun.endswith(("s", "sh", "ch")) else "s")
    return f"{number:,} {noun if abs(number) == 1 else plural}"


def clock_sentence(clocks: Mapping[str, Any]) -> str:
    """What the card's clock does under load, from the fields of `comparison.Clocks`."""
    limits = " and ".join(clocks["limited_by"]) or "nothing reported"
    return (
        "While the longest path runs over and over, the card's clock is at "
        f"{clocks['sm_mhz']:,.0f} of {clocks['max_sm_mhz']:,.0f} MHz, held back by: {limits} "
        f"({clocks['power_w']:,.0f} of {clocks['power_limit_w']:,.0f} W, the driver's mean of "
        "about a second). Kernels are timed in short bursts, calls end to end in longer ones."
    )
