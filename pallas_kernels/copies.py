"""Rows in device memory, in the ring, and the copies between.

Copies start at multiples of 16 bytes and take multiples of 16 bytes. So there are five ways:

- Rows of a warp, and rows whose pieces fill the warps of a CTA: [rows, pieces, piece], one copy for
  each.
- Other rows that are multiples of 16 bytes: as ranges of the flat array, each warpgroup's of just
  what it has of the row.
- All other rows of a CTA (`Plan.shifted`): the range is the row's window, which is multiples of 16
  bytes. What comes with it of the rows beside is left alone: on the way out, the copy takes the
  multiples of 16 bytes that are inside the row at any lateness, and what is left of its ends, less
  than 16 bytes before and 32 after, is stored element by element.
- Rows back to back: a block is one range of the flat array. At the end of the array, what is no
  multiple of 16 bytes is a copy with a tensor map.
- Rows of a lane: the 128 rows of a block are one range of the flat array, in chunks with a tensor
  map, which knows where the array ends: it reads zeros from there on and writes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline
from pallas_kernels.plan import COPY_BYTES, LANES, MOST_COPIED, WARPS, Cut, Plan

TENSOR_COPY_BYTES = 128


def row_view(p: Plan, rows: int) -> tuple[int, ...]:
    """The shape in which a [rows, width] array is given to the kernel."""
    return (rows * p.width,) if p.flat else (rows, p.width // p.piece, p.piece)


def slot_shape(p: Plan) -> tuple[int, ...]:
    """The shape of one slot of the ring."""
    if p.flat:
        return (p.slot,)
    if p.cut is Cut.WARP:
        return (p.rows_per_block, p.width // p.piece, p.piece)
    return (p.slot // p.piece, p.piece)


def arrivals(p: Plan, dtype: Any) -> int:
    """Copies of a stream of `dtype` that fill a warpgroup's part of a slot."""
    if p.cut is Cut.LANE:
        return p.region // _lane_chunk(p)
    if p.cut is Cut.PACKED:
        return len(_last_block(p, jnp.dtype(dtype).itemsize))
    if not p.flat:
        return -(-p.groups * WARPS // MOST_COPIED) if p.cut is Cut.CTA else 1
    if jnp.dtype(dtype).itemsize != p.itemsize:
        return len(_pieces_of_masks(p, p.span))
    return 2 if p.rows * p.width % p.quantum else 1


def _lane_chunk(p: Plan) -> int:
    return MOST_COPIED if p.region % MOST_COPIED == 0 else LANES


def _last_block(p: Plan, itemsize: int) -> list[tuple[int, int]]:
    """Start and length of the copies of the last block of rows back to back.

    Only the first is a multiple of 16 bytes for sure, or all of the block.
    """
    length = (p.rows - (p.blocks - 1) * p.rows_per_block) * p.width
    unit = TENSOR_COPY_BYTES // itemsize
    if length * itemsize % COPY_BYTES == 0:
        return [(0, length)]
    inside = length // unit * unit
    return [(0, inside)] * (inside > 0) + [(inside, length - inside)]


def _pieces_of_masks(p: Plan, columns: int) -> list[tuple[int, int]]:
    """Start and length of the copies that bring in the masks of `columns`, however late they are.

    A range of any length is one copy, unless it may end past the end of an array that is no
    multiple of 16 bytes: only copies with a tensor map know the end of such.
    """
    most_late = COPY_BYTES - math.gcd(p.width, COPY_BYTES) if p.masks_shifted else 0
    length = -(-(columns + most_late) // COPY_BYTES) * COPY_BYTES
    if p.rows * p.width % COPY_BYTES == 0:
        return [(0, length)]
    return [(at, min(MOST_COPIED, length - at)) for at in range(0, length, MOST_COPIED)]


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of one warpgroup: of the rows that its CTA is at, the columns that are its own."""

    plan: Plan
    walker: Any
    part: Any
    group: Any
    simulated: bool

    def late(self, row: Any) -> Any:
        """Elements by which `row`, one of this CTA's, starts after a multiple of 16 bytes."""
        return self.plan.late(self.walker if self.plan.steady else row)

    def in_ring(self, ring: Any, slot: Any, row: Any) -> Any:
        """This warpgroup's columns of the block that begins with `row`, in its slot."""
        p = self.plan
        if p.cut is not Cut.CTA:
            return ring.at[slot]
        if not p.flat:
            return ring.at[slot, self._my_pieces(self.group)]
        at = self._base()
        if self._of_masks(ring):
            at = at + lax.rem(self._first(row), jnp.int32(COPY_BYTES))
        return ring.at[slot, pl.ds(at, p.span)]

    def start_in(self, source: Any, row: Any, ring: Any, slot: Any, barrier: Any) -> None:
        """Starts the copies of the block that begins with `row`; `arrivals` come to `barrier`."""
        p = self.plan
        if p.cut is Cut.LANE:
            size = _lane_chunk(p)
            for at in range(0, p.region, size):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row * p.width + at, size)],
                    ring.at[slot, pl.ds(at, size)],
                    barrier,
                )
        elif p.cut is Cut.WARP:
            block = source.at[pl.ds(row, p.rows_per_block)]
            plgpu.copy_gmem_to_smem(block, ring.at[slot], barrier)
        elif p.cut is Cut.PACKED:
            self._by_block(
                row,
                jnp.dtype(ring.dtype).itemsize,
                lambda at, size, cut: self._packed_in(
                    source, row * p.width, ring, slot, barrier, at, size, cut
                ),
                lambda missing: self._arrive(barrier, missing),
            )
        elif not p.flat:
            everyone = self.part * p.warpgroups + self.group
            target = ring.at[slot, self._my_pieces(self.group)]
            plgpu.copy_gmem_to_smem(source.at[row, self._my_pieces(everyone)], target, barrier)
        else:
            copy = self._masks_in if self._of_masks(ring) else self._range_in
            self._by_share(
                lambda at, size: copy(source, row, ring, slot, barrier, at, size),
                lambda: self._arrive(barrier, arrivals(p, ring.dtype)),
            )

    def start_out(self, ring: Any, slot: Any, out: Any, row: Any) -> None:
        """Starts the copies of a slot back to the rows that it came from."""
        p = self.plan
        if p.cut is Cut.LANE:
            size = _lane_chunk(p)
            for at in range(0, p.region, size):
                source, first = ring.at[slot, pl.ds(at, size)], row * p.width + at
                self._copy_out(source, out, first, size)
        elif p.cut is Cut.WARP:
            block = out.at[pl.ds(row, p.rows_per_block)]
            plgpu.copy_smem_to_gmem(ring.at[slot], block, commit_group=False)
        elif p.cut is Cut.PACKED:
            self._by_block(
                row,
                p.itemsize,
                lambda at, size, cut: self._packed_out(
                    ring, slot, out, row * p.width, at, size, cut
                ),
            )
        elif not p.flat:
            everyone = self.part * p.warpgroups + self.group
            source = ring.at[slot, self._my_pieces(self.group)]
            target = out.at[row, self._my_pieces(everyone)]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        else:
            self._by_share(
                lambda at, size: self._range_out(ring, slot, out, row, at, size), lambda: None
            )
            if p.shifted:
                self._ends_out(ring, slot, out, row)
        plgpu.commit_smem_to_gmem_group()

    def _my_pieces(self, warpgroup: Any) -> Any:
        length = self.plan.groups * WARPS
        return pl.ds(warpgroup * length, length)

    def _base(self) -> Any:
        """Where this warpgroup's part of a slot begins."""
        p = self.plan
        return self.group * p.region if p.warpgroups > 1 else 0

    def _first(self, row: Any) -> Any:
        """The first element of this warpgroup's part of the window, in the flat array."""
        p = self.plan
        mine = (self.part * p.warpgroups + self.group) * p.span
        return row * p.width - self.late(row) + mine

    def _of_masks(self, ring: Any) -> bool:
        return jnp.dtype(ring.dtype).itemsize != self.plan.itemsize

    def _by_share(
        self, copy: Callable[[int | None, int], None], nothing: Callable[[], None]
    ) -> None:
        """Calls `copy` for this warpgroup's share of the window, or `nothing` if it has none.

        Its arguments are where the share begins in the window, None where that is not known but
        neither end of the row is in it, and its length.
        """
        p = self.plan
        last, rest = divmod(p.window - 1, p.span)
        rest += 1
        if p.parts * p.warpgroups == 1:
            copy(0, rest)
            return
        mine = self.part * p.warpgroups + self.group
        if not p.shifted and rest == p.span and last == p.parts * p.warpgroups - 1:
            copy(None, p.span)
            return
        first = 1 if p.shifted else 0
        if first and last > 0:
            pl.when(mine == 0)(lambda: copy(0, p.span))
        if last > first:
            pl.when((mine >= first) & (mine < last))(lambda: copy(None, p.span))
        pl.when(mine == last)(lambda: copy(last * p.span, rest))
        if last < p.parts * p.warpgroups - 1:
            pl.when(mine > last)(nothing)

    def _by_block(
        self,
        row: Any,
        itemsize: int,
        copy: Callable[[int, int, bool], None],
        rest: Callable[[int], None] = lambda missing: None,
    ) -> None:
        """Calls `copy` for what the block of rows back to back that begins with `row` has.

        Its arguments are where a copy begins in the block, its length, and whether that is no
        multiple of 16 bytes; `rest` gets the number of copies by which these are fewer than those
        of the last block.
        """
        p = self.plan
        last = _last_block(p, itemsize)
        length = p.rows_per_block * p.width

        def whole() -> None:
            copy(0, length, False)
            rest(len(last) - 1)

        def up_to_end() -> None:
            for at, size in last:
                copy(at, size, size * itemsize % COPY_BYTES > 0)

        if last == [(0, length)]:
            whole()
        else:
            end = p.rows - p.rows_per_block
            pl.when(row <= end)(whole)
            pl.when(row > end)(up_to_end)

    def _packed_in(
        self,
        source: Any,
        first: Any,
        ring: Any,
        slot: Any,
        barrier: Any,
        at: int,
        size: int,
        cut: bool,
    ) -> None:
        mode = plgpu.OOBFillMode.ZEROS if cut else plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        if not self.simulated:
            quantum = COPY_BYTES // jnp.dtype(ring.dtype).itemsize
            size = -(-size // quantum) * quantum
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first + at, size)],
            ring.at[slot, pl.ds(at, size)],
            barrier,
            oob_mode=None if self.simulated else mode,
        )

    def _packed_out(
        self, ring: Any, slot: Any, out: Any, first: Any, at: int, size: int, cut: bool
    ) -> None:
        if cut and not self.simulated:
            size = -(-size // self.plan.quantum) * self.plan.quantum
            inline.copy_out_up_to_end(ring.at[slot, pl.ds(at, size)], out, first + at, size)
            return
        target = out.at[pl.ds(first + at, size)]
        plgpu.copy_smem_to_gmem(ring.at[slot, pl.ds(at, size)], target, commit_group=False)

    def _range_in(
        self, source: Any, row: Any, ring: Any, slot: Any, barrier: Any, at: int | None, size: int
    ) -> None:
        p = self.plan
        base, first = self._base(), self._first(row)

        def copy(at: int, size: int, oob_mode: plgpu.OOBFillMode | None) -> None:
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first + at, size)],
                ring.at[slot, pl.ds(base + at, size)],
                barrier,
                oob_mode=None if self.simulated else oob_mode,
            )

        def whole() -> None:
            copy(0, size, plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            self._arrive(barrier, arrivals(p, ring.dtype) - 1)

        def up_to_end() -> None:
            # Copies with a tensor map know the end of any array; in the ring they start at
            # multiples of 128 bytes.
            unit = TENSOR_COPY_BYTES // p.itemsize
            inside = left if left % p.quantum == 0 else left // unit * unit
            beyond = -(-(left - inside) // p.quantum) * p.quantum
            if inside:
                copy(0, inside, plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            if beyond:
                copy(inside, beyond, plgpu.OOBFillMode.ZEROS)
            self._arrive(barrier, arrivals(p, ring.dtype) - (inside > 0) - (beyond > 0))

        end_of_row = p.late(p.rows - 1) + p.width
        left = size if at is None else min(size, end_of_row - at)  # in the last row
        if left == size:
            whole()
        else:
            pl.when(row < p.rows - 1)(whole)
            pl.when(row == p.rows - 1)(up_to_end)

    def _masks_in(
        self, source: Any, row: Any, ring: Any, slot: Any, barrier: Any, at: int | None, size: int
    ) -> None:
        del at
        p = self.plan
        first = self._first(row)
        first = first - lax.rem(first, jnp.int32(COPY_BYTES))
        pieces = _pieces_of_masks(p, size)
        plain = p.rows * p.width % COPY_BYTES == 0 and not self.simulated
        for at, size in pieces:
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first + at, size)],
                ring.at[slot, pl.ds(self._base() + at, size)],
                barrier,
                # Anything but zeros is a plain copy, cut off at the end of the array.
                oob_mode=plgpu.OOBFillMode.UNDEFINED if plain else None,
            )
        self._arrive(barrier, arrivals(p, ring.dtype) - len(pieces))

    def _range_out(
        self, ring: Any, slot: Any, out: Any, row: Any, at: int | None, size: int
    ) -> None:
        skipped = 0
        if at is not None:
            start, end = self._inside()
            skipped = max(0, start - at)
            size = min(size, end - at) - skipped
        if size:
            source = ring.at[slot, pl.ds(self._base() + skipped, size)]
            first = self._first(row) + skipped
            target = out.at[pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    def _inside(self) -> tuple[int, int]:
        """The multiples of 16 bytes of the window that are inside the row, however late."""
        p = self.plan
        return (p.quantum, p.width // p.quantum * p.quantum) if p.shifted else (0, p.width)

    def _ends_out(self, ring: Any, slot: Any, out: Any, row: Any) -> None:
        """Stores what `_inside` leaves out of a row."""
        p = self.plan
        start, end = self._inside()
        last = end // p.span
        mine = self.part * p.warpgroups + self.group

        def store(*ranges: tuple[int, int]) -> None:
            if self.simulated:
                self._simulate_ends(ring, slot, out, row, ranges)
                return
            late = self.late(row)
            in_slot = slot * p.slot + self._base() - mine * p.span
            in_row = row * p.width - late
            inline.store_ends(ring, out, in_slot, in_row, late, late + p.width, ranges)

        if last == 0:
            pl.when(mine == 0)(lambda: store((0, start), (end, p.window)))
        else:
            pl.when(mine == 0)(lambda: store((0, start)))
            pl.when(mine == last)(lambda: store((end, p.window)))

    def _simulate_ends(
        self, ring: Any, slot: Any, out: Any, row: Any, ranges: Sequence[tuple[int, int]]
    ) -> None:
        p = self.plan
        mine = self.part * p.warpgroups + self.group
        late, base = self.late(row), self._base() - mine * p.span

        def store(first: int, size: int) -> None:
            values = ring[slot, pl.ds(base + first, size)]
            out[pl.ds(row * p.width - late + first, size)] = values

        for known in range(0, p.quantum, p.quantum // p.period):
            for start, end in ranges:
                first, size = max(start, known), min(end, known + p.width) - max(start, known)
                if size > 0:
                    pl.when(late == known)(functools.partial(store, first, size))

    def _copy_out(self, source: Any, out: Any, first: Any, size: int) -> None:
        """Copies out as many elements as the array has from `first` on."""
        if self.simulated:
            target = out.at[pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        else:
            inline.copy_out_up_to_end(source, out, first, size)

    def _arrive(self, barrier: Any, times: int) -> None:
        for _ in range(times):
            plgpu.barrier_arrive(barrier)
