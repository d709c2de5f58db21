"""How quantities are written."""

from collections.abc import Sequence


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
