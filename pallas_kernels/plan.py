"""How a persistent row kernel is laid out on the card: a pure function of shapes and dtypes.

Every kernel of this package walks the rows of [rows, width] arrays with a fixed number of CTAs.
Each CTA owns a ring of blocks in shared memory; a block is copied in by TMA, transformed in
registers, written back to its slot and copied out by TMA, while the next blocks are in flight.

What a block is depends on the width:

- **a row per lane** (`Cut.LANE`, below 32): 128 rows, each thread holds a whole one, so that
  reductions stay inside a thread.
- **a row per warp** (`Cut.WARP`): a few rows, each warp takes every fourth one. Reductions stay
  inside a warp, nothing is exchanged. For narrow rows of whole pieces.
- **a row per CTA** (`Cut.CTA`): one row, or one of its `parts`, over all warps of a CTA; each warp
  reduces its part and the results meet in shared memory. A row that is cut into parts has the CTAs
  of a cluster, which exchange their results too, or, where nothing is reduced along rows, simply
  more CTAs.

A row is seen as pieces: a piece is one load of a warp, `vector` elements (up to 16 bytes) to each
lane. Where pieces do not fill the warps, what is past the end of the row is masked in reductions
and never copied. `copies` has the ways between device memory and the ring.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.tuned import Tuning

WARP = 32
WARPS = 4  # of a warpgroup
LANES = WARP * WARPS
NARROW = 32  # columns from which on a row is more than a lane should hold
MOST_COPIED = 256  # elements that a copy with a tensor map takes along one dimension
COPY_BYTES = 16  # what copies start at multiples of, and are multiples of
EDGE = WARP  # elements at either end of a row that are stored from registers where copies cannot
MAX_ELEMENTS = 2**31 - 1
SHARED_PER_BLOCK = 232448  # Hopper's and Blackwell's opt-in limit, bytes
SHARED_PER_SM = 233472
SHARED_RESERVED = 1024  # per resident CTA
REGISTERS_PER_SM = 65536
# The device is not known while a kernel is traced (it may be lowered with no device at all), so
# the CTA count is Hopper's. On a B200 (148 SMs) the kernels are right and leave 16 SMs idle.
SMS = 132
# Multiprocessors that clusters of a size can use: their CTAs share one of the chip's processing
# clusters, and those have 16 or 18 multiprocessors, or fewer. cudaOccupancyMaxActiveClusters on an
# H200 says 15 clusters of 8 and 30 of 4; one more of them would start when all others are done.
SMS_OF_CLUSTERS = {1: SMS, 2: SMS, 4: 120, 8: 120}
MAX_WARPGROUPS = 8
MOST_IN_CTA = 32768  # columns, 32 for each thread of the largest CTA
# Where columns have nothing to do with each other, a wide row is as many narrow ones: parts of
# about this width ran fastest.
PART = 1024
MAX_CLUSTER = 8  # CTAs; more need a launch attribute that not every card takes
BLOCKS_OF_SUM = 8  # that a CTA should sum before it writes its sum
MAX_BARRIERS = 32  # that Mosaic puts in one group; a ring has one per slot and warpgroup
# Shared memory beside the ring: barriers, partial sums, the compiler's reduction scratch; and in a
# cluster, what its CTAs read of one another.
SHARED_EXTRA = 4096
SHARED_EXTRA_OF_CLUSTERS = 8192


class Cut(enum.Enum):
    """Who holds a row; see the module."""

    LANE = "lane"
    WARP = "warp"
    CTA = "CTA"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch of a row kernel.

    Attributes:
      rows: rows of the array.
      width: elements per row.
      itemsize: bytes of an element.
      masks: arrays of bytes that are read besides.
      cut: who holds a row.
      rows_per_block: rows that one ring slot holds.
      parts: column ranges of a row, each for a CTA of its own.
      cluster: whether the CTAs of the parts are a cluster and exchange what they reduced.
      warpgroups: warpgroups (128 threads each) per CTA; each owns an equal range of columns.
      groups: pieces of a row that one warp holds.
      piece: elements that a warp loads at once.
      vector: neighbouring elements that one lane loads at a time.
      stages: slots of the ring.
      ctas: CTAs of the launch, a multiple of `parts`.
      shared_bytes: shared memory per CTA, bytes, an upper bound.
    """

    rows: int
    width: int
    itemsize: int
    masks: int
    cut: Cut
    rows_per_block: int
    parts: int
    cluster: bool
    warpgroups: int
    groups: int
    piece: int
    vector: int
    stages: int
    ctas: int
    shared_bytes: int

    @property
    def span(self) -> int:
        """Columns that one warpgroup holds, padding included; at least two, for layouts' sake."""
        return self.groups * WARPS * self.piece if self.cut is Cut.CTA else max(2, self.width)

    @property
    def padded(self) -> int:
        """Columns that all warpgroups hold together; at least `width`."""
        return self.parts * self.warpgroups * self.span

    @property
    def flat(self) -> bool:
        """Whether rows are copied as ranges of the flat array, instead of as whole pieces."""
        return self.cut is Cut.LANE or self.padded != self.width

    @property
    def shifted(self) -> bool:
        """Whether rows start anywhere between the multiples of 16 bytes that copies start at."""
        return self.cut is Cut.CTA and self.width * self.itemsize % COPY_BYTES != 0

    @property
    def late(self) -> bool:
        """Whether rows of elements, or rows of bytes, are shifted."""
        of_bytes = self.masks > 0 and self.width % COPY_BYTES != 0
        return self.cut is Cut.CTA and (self.shifted or of_bytes)

    @property
    def blocks(self) -> int:
        """Blocks that the CTAs share; the last one may overlap the one before it, or be short."""
        return -(-self.rows // self.rows_per_block)

    @property
    def region(self) -> int:
        """Elements that a warpgroup has of a ring slot."""
        if self.cut is Cut.CTA:
            return self.span + (LANES if self.late else 0)
        return self.rows_per_block * self.width

    @property
    def slot(self) -> int:
        """Elements of a ring slot."""
        return self.warpgroups * self.region

    @property
    def elements_per_lane(self) -> int:
        """Elements of one block and stream that one lane holds in registers."""
        if self.cut is Cut.CTA:
            return self.span // LANES
        return self.rows_per_block * self.width // LANES


def unsupported_rows(x: Any, streams: int = 1, *, reduces: bool = True) -> str | None:
    """Why `x` (anything with shape and dtype) cannot be given to a row kernel, or None.

    Args:
      x: the array.
      streams: arrays of its shape that the kernel reads.
      reduces: whether it reduces along rows; without, rows of any length are cut into parts.
    """
    dtype = jnp.dtype(x.dtype)
    if dtype not in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"The dtype must be float16, bfloat16 or float32, not {dtype}."
    if len(x.shape) < 1:
        return f"The array must have at least one axis, not the shape {tuple(x.shape)}."
    size = math.prod(x.shape)
    if size == 0:
        return None
    if size > MAX_ELEMENTS:
        return f"The array may have at most 2**31-1 elements, and it has {size}."
    if reduces and x.shape[-1] > (most := most_width(dtype, streams)):
        return (
            f"The last axis may be at most {most} for {streams} arrays of {dtype}, "
            f"and it is {x.shape[-1]}."
        )
    return None


def most_width(dtype: Any, streams: int) -> int:
    """The longest row that the shared memory of a cluster holds, one slot in each CTA."""
    room = (SHARED_PER_BLOCK - SHARED_EXTRA_OF_CLUSTERS) // (streams * jnp.dtype(dtype).itemsize)
    return MAX_CLUSTER * min(1 << (room.bit_length() - 1), MOST_IN_CTA)


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
    held: int,
    op: str,
    masks: int = 0,
    reduces: bool = True,
    sums: bool = False,
    tuning: Tuning | None = None,
) -> Plan:
    """The plan of a kernel over [rows, width] with `streams` row inputs of `dtype`.

    Args:
      rows: at least 1.
      width: at least 1.
      dtype: float16, bfloat16 or float32.
      streams: arrays of [rows, width] of `dtype` that are read; each has its own ring.
      held: values that a lane holds for each of its columns: streams, parameters, and two for
        each sum along columns.
      op: the name under which measured choices are kept, see `tuned`.
      masks: arrays of [rows, width] bytes that are read besides.
      reduces: whether the kernel reduces along rows, so that parts of a row form a cluster.
      sums: whether it sums along columns: every CTA then writes as much as a row or two, so that
        few rows are not spread over more CTAs than it takes to use all multiprocessors.
      tuning: instead of the measured choice.
    """
    itemsize = jnp.dtype(dtype).itemsize
    column_bytes = streams * itemsize + masks
    if tuning is None:
        of_width = width if reduces else min(width, PART)
        tuning = tuned.lookup(op, of_width, itemsize) or default_tuning(
            of_width, column_bytes, held
        )
    columns = Columns(parts=1, warpgroups=1, groups=0, piece=1)
    if width < NARROW:
        cut, rows_per_block = Cut.LANE, LANES
    elif tuning.rows_per_block > 1 and width % 64 == 0 and rows >= tuning.rows_per_block:
        cut, rows_per_block = Cut.WARP, tuning.rows_per_block
        columns = dataclasses.replace(columns, piece=_warp_piece(width, itemsize))
    else:
        cut, rows_per_block = Cut.CTA, 1
        if reduces:
            cuts = [_cluster(width, column_bytes, tuning)]
        else:
            cuts = list(range(-(-width // (2 * PART)), -(-2 * width // PART) + 1))
        columns = _columns(width, cuts, tuning.warpgroups, itemsize)
    parts = columns.parts
    plan = Plan(
        rows=rows,
        width=width,
        itemsize=itemsize,
        masks=masks,
        cut=cut,
        rows_per_block=rows_per_block,
        parts=parts,
        cluster=reduces and parts > 1,
        warpgroups=columns.warpgroups,
        groups=columns.groups,
        piece=columns.piece,
        vector=max(1, columns.piece // WARP),
        stages=1,
        ctas=parts,
        shared_bytes=0,
    )
    block_bytes = plan.slot * column_bytes
    # f32 rows are twice as long: fewer of them fit, first per ring, then per SM.
    extra = SHARED_EXTRA_OF_CLUSTERS if plan.cluster else SHARED_EXTRA
    room = (SHARED_PER_BLOCK - extra) // block_bytes
    stages = max(1, min(tuning.stages, room, MAX_BARRIERS // columns.warpgroups))
    shared = stages * block_bytes + extra
    ctas_per_sm = max(1, min(tuning.ctas_per_sm, SHARED_PER_SM // (shared + SHARED_RESERVED)))
    sms = SMS_OF_CLUSTERS[parts] if plan.cluster else SMS
    walkers = max(1, sms * ctas_per_sm // parts)
    if sums:
        walkers = min(walkers, max(1, sms // parts, plan.blocks // BLOCKS_OF_SUM))
    return dataclasses.replace(
        plan,
        stages=stages,
        ctas=parts * min(walkers, plan.blocks),
        shared_bytes=shared,
    )


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


def default_tuning(width: int, bytes_per_column: int, held: int) -> Tuning:
    """A choice for a kernel, width or card that nobody measured, after those that were.

    A thread takes 16 to 64 columns, the fewer the more it holds for each; a CTA is at most four
    warpgroups, and as many as fit share an SM.
    """
    if width <= 512:
        return Tuning(width, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=3)
    most = 64 if held <= 1 else 32 if held <= 4 else 16
    parts = 1
    while parts < MAX_CLUSTER and width > parts * 4 * LANES * most:
        parts *= 2
    part = -(-width // parts)
    warpgroups = min(MAX_WARPGROUPS, -(-part // (LANES * most)))
    ctas = 6 if warpgroups == 1 else max(1, 5 // warpgroups)
    stages = SHARED_PER_SM // ctas // (part * bytes_per_column)
    return Tuning(width, 1, warpgroups, ctas, max(1, min(4, stages)), parts)


def _cluster(width: int, bytes_per_column: int, tuning: Tuning) -> int:
    """CTAs of a cluster: a power of two, enough for a part to fit into shared memory."""
    most = min((SHARED_PER_BLOCK - SHARED_EXTRA_OF_CLUSTERS) // bytes_per_column, MOST_IN_CTA)
    least = max(tuning.parts, -(-width // most))
    return min(MAX_CLUSTER, 1 << (least - 1).bit_length())


def _columns(width: int, parts: Sequence[int], wish: int, itemsize: int) -> Columns:
    """The least work: long pieces save instructions, short ones padding.

    Rows that start anywhere can only be loaded element by element.
    """

    def cost(c: Columns) -> float:
        work = c.parts * c.warpgroups * c.span * (1 + 0.5 * WARP / c.piece)
        # The wish is for a whole row, or for a part of about PART columns.
        part = width / c.parts / PART if len(parts) > 1 else 1.0
        wished = max(1.0, wish * part)
        deviation = max(c.warpgroups / wished, wished / c.warpgroups) - 1
        uneven = max(part, 1 / part) - 1
        return work * (1 + 0.25 * deviation + 0.1 * uneven)

    longest = WARP if width * itemsize % COPY_BYTES else WARP * COPY_BYTES // itemsize
    candidates = (
        Columns(cut, warpgroups, -(-width // (cut * warpgroups * WARPS * piece)), piece)
        for cut in parts
        for warpgroups in range(1, MAX_WARPGROUPS + 1)
        for piece in (32, 64, 128, 256)
        if piece <= longest
    )
    return min((c for c in candidates if _can_end(c, width)), key=cost)


def _can_end(columns: Columns, width: int) -> bool:
    """Whether the warpgroup with the end of the row has enough of it to store both its ends."""
    return (width - 1) % columns.span + 1 >= EDGE


def _warp_piece(width: int, itemsize: int) -> int:
    """The longest piece of which a row holds at least two: layouts have no axis of one."""
    longest = WARP * 16 // itemsize
    return next(c for c in (256, 128, 64, 32) if c <= longest and width % c == 0 and width > c)
