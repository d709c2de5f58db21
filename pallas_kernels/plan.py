"""How a persistent row kernel is laid out on the card: a pure function of shapes and dtypes.

Every kernel of this package walks the rows of a [rows, width] array with a fixed number of CTAs.
Each CTA owns a ring of blocks in shared memory; a block is copied in by TMA, transformed in
registers, written back to its slot and copied out by TMA, while the next blocks are in flight.

A block is one of two things:

- **a row per warp** (`rows_per_block` > 1): `rows_per_block` whole rows, each warp takes every
  fourth one. Reductions stay inside a warp, so nothing is exchanged. For narrow rows.
- **a row per CTA** (`rows_per_block` == 1): one row, cut into `warpgroups` equal slices; each warp
  reduces its part and the parts meet in shared memory. For wide rows.

An operation without reductions may cut its rows into `slices` that it treats as rows of their
own: short ones, which run faster. The CTA count is then a multiple of `slices`, so that a CTA
meets the same columns in every block and keeps its part of the parameters in registers.

In all of them, a row is viewed as (width // piece, piece): TMA copies at most 256 elements along
one dimension, and a piece is one load of a warp, `vector` elements (16 bytes where the width
allows) to each lane.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

WARP = 32
WARPS = 4  # of a warpgroup
MAX_WIDTH = 16384
MAX_ELEMENTS = 2**31 - 1
SHARED_PER_BLOCK = 232448  # Hopper's and Blackwell's opt-in limit, bytes
SHARED_PER_SM = 233472
SHARED_RESERVED = 1024  # per resident CTA
# The device is not known while a kernel is traced (it may be lowered with no device at all), so
# the CTA count is Hopper's. On a B200 (148 SMs) the kernels are right and leave 16 SMs idle.
SMS = 132
MAX_WARPGROUPS = 8
MAX_BARRIERS = 32  # that Mosaic puts in one group; a ring has one per slot and warpgroup
# Shared memory beside the ring: barriers, partial sums, the compiler's reduction scratch.
SHARED_EXTRA = 4096


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch of a row kernel.

    Attributes:
      rows: rows of the array, times `slices`.
      width: elements per row, divided by `slices`.
      rows_per_block: rows that one ring slot holds; 1 means that a row is shared by a CTA.
      warpgroups: warpgroups (128 threads each) per CTA; each owns an equal slice of the row.
      piece: inner extent of the (width // piece, piece) view of a row.
      vector: neighbouring elements that one lane loads at a time.
      stages: slots of the ring.
      ctas: CTAs of the launch.
      shared_bytes: shared memory per CTA, bytes, an upper bound.
      slices: how many of the kernel's rows make up a row of the array.
    """

    rows: int
    width: int
    rows_per_block: int
    warpgroups: int
    piece: int
    vector: int
    stages: int
    ctas: int
    shared_bytes: int
    slices: int = 1

    @property
    def pieces(self) -> int:
        """Pieces of one row."""
        return self.width // self.piece

    @property
    def groups(self) -> int:
        """Pieces of a shared row that one warp takes: a row has four times `warpgroups` as many."""
        return self.pieces // (WARPS * self.warpgroups)

    @property
    def blocks(self) -> int:
        """Blocks that the CTAs share; the last one may overlap the one before it."""
        return -(-self.rows // self.rows_per_block)

    @property
    def elements_per_lane(self) -> int:
        """Elements of one block and stream that one lane holds in registers."""
        return self.rows_per_block * self.width // (WARP * WARPS * self.warpgroups)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was measured to be fastest for rows of at most `width` elements.

    `warpgroups` is a wish: a width that it does not divide gets the nearest count that does.
    `rows_per_block` 1 asks for a row per CTA.
    """

    width: int
    rows_per_block: int
    warpgroups: int
    ctas_per_sm: int
    stages: int


def unsupported_rows(x: Any) -> str | None:
    """Why `x` (anything with shape and dtype) cannot be given to a row kernel, or None."""
    dtype = jnp.dtype(x.dtype)
    if dtype not in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"The dtype must be float16, bfloat16 or float32, not {dtype}."
    if len(x.shape) < 1:
        return f"The array must have at least one axis, not the shape {tuple(x.shape)}."
    size = int(np.prod(x.shape, dtype=object))
    if size == 0:
        return None
    width = x.shape[-1]
    if width % 128:
        return f"The last axis must be a multiple of 128, and {width} is not."
    if width > MAX_WIDTH:
        return f"The last axis may be at most {MAX_WIDTH}, and it is {width}."
    if size > MAX_ELEMENTS:
        return f"The array may have at most 2**31-1 elements, and it has {size}."
    return None


def unsupported_parameter(name: str, parameter: Any, width: int) -> str | None:
    """Why `parameter` cannot be a per-column vector of `width`, or None."""
    if tuple(parameter.shape) != (width,):
        return f"{name} must have the shape ({width},), not {tuple(parameter.shape)}."
    if jnp.dtype(parameter.dtype).name not in ("float16", "bfloat16", "float32"):
        return f"{name} must be float16, bfloat16 or float32, not {parameter.dtype}."
    return None


def plan_rows(
    rows: int,
    width: int,
    dtype: Any,
    *,
    streams: int,
    table: Sequence[Tuning],
    slices: int = 1,
) -> Plan:
    """The plan of a kernel over [rows, width] with `streams` row inputs of `dtype`.

    Args:
      rows: at least 1.
      width: a multiple of 128 from 128 to 16384.
      dtype: float16, bfloat16 or float32.
      streams: arrays of [rows, width] that are read; each has its own ring.
      table: measured choices, narrow to wide; the last entry serves everything wider.
      slices: parts that a row is cut into, each a multiple of 128 wide; only for operations
        without reductions.
    """
    rows, width = rows * slices, width // slices
    itemsize = jnp.dtype(dtype).itemsize
    tuning = next((t for t in table if width <= t.width), table[-1])
    rows_per_block = tuning.rows_per_block
    if rows_per_block == 1 and width <= 2048 and _shared_piece(width, itemsize) < 128:
        rows_per_block = WARPS  # a lane would load 2 or 4 bytes at a time; a warp still loads 8
    if rows < rows_per_block or slices > 1:
        rows_per_block = 1
    if rows_per_block > 1:
        piece = _warp_piece(width, itemsize)
        warpgroups = 1
    else:
        piece = _shared_piece(width, itemsize)
        warpgroups = _warpgroups(width // (piece * WARPS), tuning.warpgroups)
    block_bytes = streams * rows_per_block * width * itemsize
    # f32 rows are twice as long: fewer of them fit, first per ring, then per SM.
    room = (SHARED_PER_BLOCK - SHARED_EXTRA) // block_bytes
    stages = max(1, min(tuning.stages, room, MAX_BARRIERS // warpgroups))
    shared = stages * block_bytes + SHARED_EXTRA
    ctas_per_sm = max(1, min(tuning.ctas_per_sm, SHARED_PER_SM // (shared + SHARED_RESERVED)))
    return Plan(
        rows=rows,
        width=width,
        rows_per_block=rows_per_block,
        warpgroups=warpgroups,
        piece=piece,
        vector=piece // WARP,
        stages=stages,
        ctas=min(SMS * ctas_per_sm // slices * slices, -(-rows // rows_per_block)),
        shared_bytes=shared,
        slices=slices,
    )


def _shared_piece(width: int, itemsize: int) -> int:
    """The longest piece of which a row holds a multiple of four, one for each warp."""
    longest = WARP * 16 // itemsize  # 16 bytes to a lane
    return next(c for c in (256, 128, 64, 32) if c <= longest and width % (c * WARPS) == 0)


def _warp_piece(width: int, itemsize: int) -> int:
    """The longest piece of which a row holds at least two: layouts have no axis of one."""
    longest = WARP * 16 // itemsize
    return next(c for c in (256, 128, 64) if c <= longest and width % c == 0 and width > c)


def _warpgroups(groups: int, wish: int) -> int:
    """The divisor of `groups` that is nearest to `wish` in ratio, the larger of two as near."""
    divisors = [n for n in range(1, MAX_WARPGROUPS + 1) if groups % n == 0]
    return min(divisors, key=lambda n: (max(n / wish, wish / n), -n))
