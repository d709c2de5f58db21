"""A mix of calls whose batches vary, and ways to make fewer shapes of it."""

import dataclasses
from collections.abc import Callable, Sequence

WIDTHS = (4096, 8192)
ROWS = (8192, 8192, 4096, 8192, 8191, 4096, 1000, 37, 3, 1)
"""Of ten calls at each width: full batches, and the tails that they end with."""
DEPTH = 1024
"""Of products."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """How many rows a call with some rows is given."""

    name: str
    rows: Callable[[int], int]


def power_of_two(rows: int) -> int:
    """The least power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


POLICIES = (
    Policy("exact", lambda rows: rows),
    Policy("2^n", power_of_two),
    Policy("2^n, 64 up", lambda rows: max(64, power_of_two(rows))),
)
"""Nothing padded; powers of two; powers of two from 64 up."""


def calls(axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Shapes of twenty calls of an op with these axes, in turn over the widths."""
    more = (DEPTH,) * (len(axes) - 2)
    return tuple((rows, width, *more) for rows in ROWS for width in WIDTHS)
