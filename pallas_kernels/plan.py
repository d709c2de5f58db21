"""How a row kernel is laid out on the card: a pure function of shapes and dtypes.

Every kernel of this package walks the rows of [rows, width] arrays with many CTAs. Each CTA owns a
ring of blocks in shared memory; a block is copied in by TMA, transformed in registers, written back
to its slot and copied out by TMA, while the next blocks are in flight. There are two ways to deal
blocks to CTAs:

- **as many CTAs as fit stay** (`run` = 0), and each takes every n-th block. What belongs to columns
  (parameters, sums) is kept on chip over all rows of a CTA.
- **every CTA takes a short run of neighbouring blocks and ends** (`run` > 0). The card starts CTAs
  in order, whenever one has ended, so that the rows being read lie close together at all times and
  no multiprocessor waits at the end for the slowest: 1 to 7 % faster where nothing is summed over
  rows (BUILD_NOTES.md).

What a block is depends on the width:

- **a row per lane** (`Cut.LANE`, below 32): 128 rows, each thread holds a whole one, so that
  reductions stay inside a thread.
- **a row per warp** (`Cut.WARP`): a few rows, each warp takes every fourth one. Reductions stay
  inside a warp, nothing is exchanged. For narrow rows of whole pieces.
- **a row per warp, of rows back to back** (`Cut.PACKED`): for all other narrow rows. A block is so
  many rows that they are a multiple of 16 bytes together: one range of the flat array, whose rows
  start anywhere in it. Four of them are in registers at a time, one in each warp.
- **a row per CTA** (`Cut.CTA`): one row, or one of its `parts`, over all warps of a CTA; each warp
  reduces its part and the results meet in shared memory. A row that is cut into parts has the CTAs
  of a cluster, which exchange their results too, or, where nothing is reduced along rows, simply
  more CTAs.

A row is seen as pieces: a piece is one load of a warp, `vector` elements (up to 16 bytes) to each
lane. Where pieces do not fill the warps, what is past the end of the row is masked in reductions
and never copied. `copies` has the ways between device memory and the ring.

Of a block of rows back to back, each row starts some elements after a multiple of `vector`, and
always as many in one warp, since four rows are such a multiple: what belongs to columns has one
place in a warp's registers.

A row of a CTA that is no multiple of 16 bytes starts `late`, some elements after a multiple of 16
bytes. It is seen through a window that starts there: registers hold elements at their places in the
window, so that they are loaded and stored in vectors as if the row were aligned. What the window
shows of the rows beside is masked in reductions and never copied out. Lateness repeats every
`period` rows. A CTA that takes every n-th row, n a multiple of that, has rows of one lateness: what
belongs to columns, parameters and sums, then has one place in its registers.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.columns import (
    MAX_WARPGROUPS,
    WARP,
    WARPS,
    Columns,
    columns_back_to_back,
    columns_of_cta,
    piece_of_warp,
    rows_of_a_multiple,
    window_of,
)
from pallas_kernels.tuned import COPY_BYTES, Tuning

LANES = WARP * WARPS
NARROW = 32  # columns from which on a row is more than a lane should hold
MOST_COPIED = 256  # elements that a copy with a tensor map takes along one dimension
MAX_ELEMENTS = 2**31 - 1
SHARED_PER_BLOCK = 232448  # Hopper's and Blackwell's opt-in limit, bytes
SHARED_PER_SM = 233472
SHARED_RESERVED = 1024  # per resident CTA
REGISTERS_PER_SM = 65536
MOST_REGISTERS = 255  # of a lane
REGISTERS_TO_WORK = 40  # that a lane needs besides those that it keeps from block to block
# The device is not known while a kernel is traced (it may be lowered with no device at all), so
# the CTA count is Hopper's. On a B200 (148 SMs) the kernels are right and leave 16 SMs idle.
SMS = 132
# Multiprocessors that clusters of a size can use: their CTAs share one of the chip's processing
# clusters, and those have 16 or 18 multiprocessors, or fewer. cudaOccupancyMaxActiveClusters on an
# H200 says 15 clusters of 8 and 30 of 4; one more of them would start when all others are done.
SMS_OF_CLUSTERS = {1: SMS, 2: SMS, 4: 120, 8: 120}
MOST_PACKED = 1536  # columns up to which rows back to back are the choice where nobody measured
MOST_IN_CTA = 32768  # columns, 32 for each thread of the largest CTA
# Where columns have nothing to do with each other, a wide row is as many narrow ones: parts of
# about this width ran fastest for most.
PART = 1024
MAX_CLUSTER = 8  # CTAs; more need a launch attribute that not every card takes
TURNS = 4  # runs that every multiprocessor should have, else CTAs stay
BLOCKS_OF_SUM = 8  # that a CTA should sum before it writes its sum
MAX_BARRIERS = 32  # that Mosaic puts in one group; a ring has one per slot and warpgroup
# Shared memory beside the ring: barriers, partial sums, the compiler's reduction scratch; and in a
# cluster, what its CTAs read of one another.
SHARED_EXTRA = 4096
SHARED_EXTRA_OF_CLUSTERS = 8192
SHARED_OF_RING = SHARED_PER_BLOCK - SHARED_EXTRA_OF_CLUSTERS


class Cut(enum.Enum):
    """Who holds a row; see the module."""

    LANE = "lane"
    WARP = "warp"
    PACKED = "packed"
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
      groups: pieces of a row that one warp holds; where `cut` is `Cut.CTA` or `Cut.PACKED`.
      piece: elements that a warp loads at once.
      vector: neighbouring elements that one lane loads at a time.
      shared_sums: sums along columns that are kept in shared memory, for want of registers.
      stages: slots of the ring.
      run: neighbouring blocks that a CTA takes; 0 where every CTA stays and takes every n-th.
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
    shared_sums: int
    stages: int
    run: int
    ctas: int
    shared_bytes: int

    @property
    def walkers(self) -> int:
        """CTAs, or clusters of them, that share the blocks."""
        return self.ctas // self.parts

    @property
    def span(self) -> int:
        """Columns that one warpgroup holds, padding included; at least two, for layouts' sake."""
        if self.cut is Cut.PACKED:
            return self.groups * self.piece
        return self.groups * WARPS * self.piece if self.cut is Cut.CTA else max(2, self.width)

    @property
    def padded(self) -> int:
        """Columns that all warpgroups hold together; at least `window`."""
        return self.parts * self.warpgroups * self.span

    @property
    def flat(self) -> bool:
        """Whether rows are copied as ranges of the flat array, instead of as whole pieces."""
        return self.cut in (Cut.LANE, Cut.PACKED) or self.padded != self.width

    @property
    def ends_short(self) -> bool:
        """Whether the last block may have fewer rows, instead of some of the block before it."""
        return self.cut in (Cut.LANE, Cut.PACKED)

    @property
    def turns(self) -> int:
        """Times that a CTA goes through rows to be done with a block."""
        return self.rows_per_block // WARPS if self.cut is Cut.PACKED else 1

    @property
    def rows_at_once(self) -> int:
        """Rows that are in registers at a time."""
        return self.rows_per_block // self.turns

    @property
    def shifted(self) -> bool:
        """Whether rows start anywhere between the multiples of 16 bytes that copies start at."""
        return self.cut is Cut.CTA and self.width % self.quantum != 0

    @property
    def masks_shifted(self) -> bool:
        """Whether rows of bytes are."""
        return self.cut is Cut.CTA and self.masks > 0 and self.width % COPY_BYTES != 0

    @property
    def quantum(self) -> int:
        """Elements in 16 bytes."""
        return COPY_BYTES // self.itemsize

    @property
    def period(self) -> int:
        """Rows after which lateness repeats; 1 where no row is late."""
        return self.quantum // math.gcd(self.width, self.quantum) if self.shifted else 1

    @property
    def steady(self) -> bool:
        """Whether all rows of a CTA are equally late."""
        return self.walkers % self.period == 0 or self.walkers >= self.blocks

    @property
    def window(self) -> int:
        """Columns, or places of a window on every row, however late."""
        return window_of(self.width, self.itemsize) if self.shifted else self.width

    def late(self, row: Any) -> Any:
        """Elements by which a row starts after a multiple of 16 bytes."""
        return row * self.width & (self.quantum - 1) if self.shifted else 0

    def late_in_warp(self, warp: Any) -> Any:
        """Elements by which a warp's rows of a block start after a multiple of `vector`."""
        return warp * self.width & (self.vector - 1)

    @property
    def most_late_in_warp(self) -> int:
        """The most elements by which rows back to back do."""
        return self.vector - math.gcd(self.width, self.vector)

    @property
    def mixes_rows(self) -> bool:
        """Whether warps load elements of the rows beside theirs."""
        return self.cut is Cut.PACKED and self.most_late_in_warp > 0

    @property
    def mixes_lanes(self) -> bool:
        """Whether threads load elements that other threads store."""
        return self.cut is Cut.PACKED and self.padded != self.width

    @property
    def registers(self) -> int:
        """What a lane has for values that it keeps from block to block."""
        of_lane = min(MOST_REGISTERS, REGISTERS_PER_SM // (LANES * self.warpgroups))
        return of_lane - REGISTERS_TO_WORK

    @property
    def blocks(self) -> int:
        """Blocks that the CTAs share; the last one may overlap the one before it, or be short."""
        return -(-self.rows // self.rows_per_block)

    @property
    def region(self) -> int:
        """Elements that a warpgroup has of a ring slot."""
        if self.cut is Cut.CTA:
            return self.span + (LANES if self.masks_shifted else 0)
        length = self.rows_per_block * self.width
        # Copies with a tensor map, which end the array, land at multiples of 128 bytes.
        return -(-length // LANES) * LANES if self.cut is Cut.PACKED else length

    @property
    def slot(self) -> int:
        """Elements of a ring slot."""
        return self.warpgroups * self.region

    @property
    def elements_per_lane(self) -> int:
        """Elements of one block and stream that one lane holds in registers."""
        if self.cut is Cut.CTA:
            return self.span // LANES
        if self.cut is Cut.PACKED:
            return self.span // WARP
        return self.rows_per_block * self.width // LANES


def unsupported_rows(
    x: Any, streams: int = 1, *, reduces: bool = True, split: bool = False
) -> str | None:
    """Why `x` (anything with shape and dtype) cannot be given to a row kernel, or None.

    Args:
      x: the array.
      streams: arrays of its shape that the kernel reads.
      reduces: whether it reduces along rows; without, rows of any length are cut into parts.
      split: whether `x` may have more elements than a kernel, which then sees a part of them.
    """
    dtype = jnp.dtype(x.dtype)
    if dtype not in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"The dtype must be float16, bfloat16 or float32, not {dtype}."
    if len(x.shape) < 1:
        return f"The array must have at least one axis, not the shape {tuple(x.shape)}."
    if not all(isinstance(length, int) for length in x.shape):
        return f"The shape {x.shape} is symbolic, and kernels are laid out for lengths in numbers."
    size = math.prod(x.shape)
    if size == 0:
        return None
    if size > MAX_ELEMENTS and not split:
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
    part: int = PART,
    by_column: bool = False,
    sums: int = 0,
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
      part: where it does not, about how many columns a part should have.
      by_column: whether it has parameters, or sums along columns, so that every CTA needs rows
        that are equally late.
      sums: how many sums along columns it has: every CTA then writes as much as a row or two, so
        that few rows are not spread over more CTAs than it takes to use all multiprocessors.
      tuning: instead of the measured choice.
    """
    itemsize = jnp.dtype(dtype).itemsize
    column_bytes = streams * itemsize + masks
    of_width = width if reduces else min(width, part)
    was_measured = tuning is None
    if tuning is None:
        tuning = tuned.lookup(op, of_width, itemsize)
        of_another = tuning is None or tuning.width != of_width
        tuning = tuning or default_tuning(of_width, column_bytes, held)
    else:
        of_another = False
    columns = Columns(parts=1, warpgroups=1, groups=0, piece=1)
    whole = width % 64 == 0
    rows_per_block = tuning.rows_per_block
    if not whole:
        least = rows_of_a_multiple(width, 1 if masks else itemsize)
        rows_per_block = -(-rows_per_block // least) * least
    if width < NARROW:
        cut, rows_per_block = Cut.LANE, LANES
    elif (
        tuning.rows_per_block > 1
        and width == of_width
        and rows >= rows_per_block
        and (whole or 2 * rows_per_block * width * column_bytes <= SHARED_OF_RING)
    ):
        cut = Cut.WARP if whole else Cut.PACKED
        if whole:
            columns = dataclasses.replace(columns, piece=piece_of_warp(width, itemsize))
        else:
            columns = columns_back_to_back(width, itemsize)
    else:
        cut, rows_per_block = Cut.CTA, 1
        if reduces:
            cuts = [_cluster(width, column_bytes, tuning)]
        else:
            cuts = list(range(-(-width // (2 * part)), -(-2 * width // part) + 1))
        columns = columns_of_cta(width, cuts, part, tuning.warpgroups, itemsize)
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
        shared_sums=0,
        stages=1,
        run=0,
        ctas=parts,
        shared_bytes=0,
    )
    block_bytes = plan.slot * column_bytes
    sum_bytes = 4 * plan.slot
    while (
        cut is Cut.CTA
        and plan.shared_sums < sums
        # A sum and what is added to it are f32.
        and 2 * plan.elements_per_lane * (sums - plan.shared_sums) > plan.registers
        and 2 * block_bytes + (plan.shared_sums + 1) * sum_bytes <= SHARED_OF_RING
    ):
        plan = dataclasses.replace(plan, shared_sums=plan.shared_sums + 1)
    # f32 rows are twice as long: fewer of them fit, first per ring, then per SM.
    extra = SHARED_EXTRA_OF_CLUSTERS if plan.cluster else SHARED_EXTRA
    extra += plan.shared_sums * sum_bytes
    room = (SHARED_PER_BLOCK - extra) // block_bytes
    stages = max(1, min(tuning.stages, room, MAX_BARRIERS // columns.warpgroups))
    shared = stages * block_bytes + extra
    ctas_per_sm = max(1, min(tuning.ctas_per_sm, SHARED_PER_SM // (shared + SHARED_RESERVED)))
    if cut is Cut.PACKED and of_another:
        ctas_per_sm = min(ctas_per_sm, _resident_packed(plan.elements_per_lane, held))
    sms = SMS_OF_CLUSTERS[parts] if plan.cluster else SMS
    walkers = max(1, sms * ctas_per_sm // parts)
    run = tuning.run
    if sums or plan.shifted or plan.masks_shifted or cut is Cut.LANE:
        run = 0
    elif was_measured and plan.blocks * parts < TURNS * run * sms:
        run = 0  # it was measured where every multiprocessor has many runs
    if run:
        walkers = -(-plan.blocks // run)
    if sums:
        walkers = min(walkers, max(1, sms // parts, plan.blocks // BLOCKS_OF_SUM))
    if by_column and not run and walkers < plan.blocks:
        walkers = max(1, walkers // plan.period) * plan.period
    return dataclasses.replace(
        plan,
        stages=stages,
        run=run,
        ctas=parts * min(walkers, plan.blocks),
        shared_bytes=shared,
    )


def default_tuning(width: int, bytes_per_column: int, held: int) -> Tuning:
    """A choice for a kernel, width or card that nobody measured, after those that were.

    A thread takes 16 to 64 columns, the fewer the more it holds for each; a CTA is at most four
    warpgroups, and as many as fit share an SM.
    """
    if width <= 512:
        return Tuning(width, rows_per_block=4, warpgroups=1, ctas_per_sm=6, stages=3)
    if width <= MOST_PACKED and width % 64:
        return Tuning(width, rows_per_block=4, warpgroups=1, ctas_per_sm=4, stages=2)
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


def _resident_packed(elements_per_lane: int, held: int) -> int:
    """CTAs that share a multiprocessor, whose registers rows back to back are the first to use up.

    One more would run when all others are done. At 769 columns, the assembler takes 48 (softmax,
    where 1 is held), 96 (bias + GELU, 2), 139 (with sums of columns, 4) and 211 (LayerNorm's
    gradient, 7) of a lane's registers.
    """
    of_lane = REGISTERS_TO_WORK + elements_per_lane * (held + 1)
    return max(1, REGISTERS_PER_SM // (LANES * min(of_lane, MOST_REGISTERS + 1)))
