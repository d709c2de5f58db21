"""How the columns of a row are dealt to CTAs, warpgroups and warps: pure functions of sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_kernels.tuned import COPY_BYTES

WARP = 32
WARPS = 4  # of a warpgroup
MAX_WARPGROUPS = 8


@dataclasses.dataclass(frozen=True)
class Columns:
    """How a row is dealt to CTAs (`parts`), warpgroups and warps (`groups` pieces each)."""

    parts: int
    warpgroups: int
    groups: int
    piece: int

    @property
    def span(self) -> int:
        """Columns of one warpgroup."""
        return self.groups * WARPS * self.piece


def window_of(width: int, itemsize: int) -> int:
    """Places of a window on rows of `width` elements, no multiple of 16 bytes, however late."""
    quantum = COPY_BYTES // itemsize
    most_late = quantum - math.gcd(width, quantum)
    return -(-(width + most_late) // quantum) * quantum


def columns_of_cta(
    width: int, parts: Sequence[int], part: int, wish: int, itemsize: int
) -> Columns:
    """The least work: long pieces save instructions, short ones padding."""
    quantum = COPY_BYTES // itemsize
    window = window_of(width, itemsize) if width % quantum else width

    def cost(c: Columns) -> float:
        work = c.parts * c.warpgroups * c.span * (1 + 0.5 * WARP / c.piece)
        # The wish is for a whole row, or for a part of about `part` columns.
        length = width / c.parts / part if len(parts) > 1 else 1.0
        wished = max(1.0, wish * length)
        deviation = max(c.warpgroups / wished, wished / c.warpgroups) - 1
        # Short copies cost more than long ones: 2560 columns take 128.8 µs in parts of 512 and
        # 101.0 in parts of 1280 (bias_gelu_backward, bfloat16, 2^26 elements, H200).
        uneven = 0.1 * (length - 1) if length > 1 else 0.3 * (1 / length - 1)
        ragged = 0.05 * (c.parts * c.warpgroups * c.span != width)
        return work * (1 + 0.25 * deviation + uneven + ragged)

    def can_end(c: Columns) -> bool:
        """Whether one warpgroup has all that is in the window of some rows, and not of others."""
        end = width // quantum * quantum
        return end % c.span + window - end <= c.span

    candidates = (
        Columns(cut, warpgroups, -(-window // (cut * warpgroups * WARPS * piece)), piece)
        for cut in parts
        for warpgroups in range(1, MAX_WARPGROUPS + 1)
        for piece in (32, 64, 128, 256)
        if 4 * WARP <= piece * itemsize <= COPY_BYTES * WARP
    )
    return min(filter(can_end, candidates), key=cost)


def piece_of_warp(width: int, itemsize: int) -> int:
    """The longest piece of which a row holds at least two: layouts have no axis of one."""
    longest = WARP * 16 // itemsize
    return next(c for c in (256, 128, 64, 32) if c <= longest and width % c == 0 and width > c)


def rows_of_a_multiple(width: int, itemsize: int) -> int:
    """Rows, one or more for each warp, that are a multiple of 16 bytes together."""
    quantum = COPY_BYTES // itemsize
    return max(WARPS, quantum // math.gcd(width, quantum))


def columns_back_to_back(width: int, itemsize: int) -> Columns:
    """The least work on rows back to back: long vectors save instructions, short ones padding."""

    def groups(vector: int) -> int:
        most_late = vector - math.gcd(width, vector)
        # At least two: layouts have no axis of one.
        return max(2, -(-(width + most_late) // (WARP * vector)))

    vectors = [
        vector
        for vector in (1, 2, 4, 8)
        # All rows of a warp, which are four apart, are then equally late.
        if vector * itemsize <= COPY_BYTES and WARPS * width % vector == 0
    ]
    # Of some 12 instructions for an element, 3 load and store a vector.
    best = min(vectors, key=lambda vector: groups(vector) * vector * (9 + 3 / vector))
    return Columns(parts=1, warpgroups=1, groups=groups(best), piece=WARP * best)
