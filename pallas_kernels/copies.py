"""Rows in device memory, in the ring, and the copies between.

Copies start at multiples of 16 bytes and take multiples of 16 bytes. So there are four ways:

- Rows of a warp, and rows whose pieces fill the warps of a CTA: [rows, pieces, piece], one copy for
  each.
- Other rows that are multiples of 16 bytes: as ranges of the flat array, each warpgroup's of just
  what it has of the row.
- All other rows of a CTA (`Plan.shifted`): the range is widened to multiples of 16 bytes, and what
  comes with it of the rows beside is left alone. In its slot the row then starts some elements
  late. On the way out, the copy takes the multiples of 16 bytes that are inside the row, and the
  first and the last `EDGE` elements are stored from registers, most of them for a second time with
  the same bits.
- Rows of a lane: the 128 rows of a block are one range of the flat array, in chunks with a tensor
  map, which knows where the array ends: it reads zeros from there on and writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.plan import COPY_BYTES, EDGE, LANES, MOST_COPIED, WARP, WARPS, Cut, Plan
from pallas_kernels.registers import store


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
    if not p.flat:
        return -(-p.groups * WARPS // MOST_COPIED) if p.cut is Cut.CTA else 1
    return len(_pieces_of(p, dtype, p.span))


def _lane_chunk(p: Plan) -> int:
    return MOST_COPIED if p.region % MOST_COPIED == 0 else LANES


def _quantum(dtype: Any) -> int:
    """Elements of `dtype` in 16 bytes."""
    return COPY_BYTES // jnp.dtype(dtype).itemsize


def _pieces_of(p: Plan, dtype: Any, columns: int) -> list[tuple[int, int]]:
    """Start and length of the copies that bring in `columns` of a row of the flat array.

    A range of any length is one copy, unless it may end past the end of the array: that has to be
    known to the copy, and only those with a tensor map know it for arrays of any length.
    """
    quantum = _quantum(dtype)
    length = columns if p.width % quantum == 0 else -(-(columns + quantum - 1) // quantum) * quantum
    if p.rows * p.width % quantum == 0:
        return [(0, length)]
    return [(at, min(MOST_COPIED, length - at)) for at in range(0, length, MOST_COPIED)]


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of one warpgroup: of the rows that its CTA is at, the columns that are its own."""

    plan: Plan
    part: Any
    group: Any
    simulated: bool

    def in_ring(self, ring: Any, slot: Any, row: Any) -> Any:
        """This warpgroup's columns of the block that begins with `row`, in its slot."""
        p = self.plan
        if p.cut is not Cut.CTA:
            return ring.at[slot]
        if not p.flat:
            return ring.at[slot, self._my_pieces(self.group)]
        return ring.at[slot, pl.ds(self._base() + self._late(ring, row), p.span)]

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
        elif not p.flat:
            everyone = self.part * p.warpgroups + self.group
            target = ring.at[slot, self._my_pieces(self.group)]
            plgpu.copy_gmem_to_smem(source.at[row, self._my_pieces(everyone)], target, barrier)
        else:
            self._by_share(
                lambda columns: self._range_in(source, row, ring, slot, barrier, columns),
                lambda: self._arrive(barrier, arrivals(p, ring.dtype)),
            )

    def start_out(self, ring: Any, slot: Any, out: Any, row: Any) -> None:
        """Starts the copies of a slot back to the rows that it came from."""
        p = self.plan
        if p.cut is Cut.LANE:
            size = _lane_chunk(p)
            for at in range(0, p.region, size):
                source, first = ring.at[slot, pl.ds(at, size)], row * p.width + at
                if self.simulated:
                    target = out.at[pl.ds(first, size)]
                    plgpu.copy_smem_to_gmem(source, target, commit_group=False)
                else:
                    _copy_out_up_to_end(source, out, first, size)
        elif p.cut is Cut.WARP:
            block = out.at[pl.ds(row, p.rows_per_block)]
            plgpu.copy_smem_to_gmem(ring.at[slot], block, commit_group=False)
        elif not p.flat:
            everyone = self.part * p.warpgroups + self.group
            source = ring.at[slot, self._my_pieces(self.group)]
            target = out.at[row, self._my_pieces(everyone)]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        else:
            self._by_share(
                lambda columns: self._range_out(ring, slot, out, row, columns), lambda: None
            )
        plgpu.commit_smem_to_gmem_group()

    def _my_pieces(self, warpgroup: Any) -> Any:
        length = self.plan.groups * WARPS
        return pl.ds(warpgroup * length, length)

    def _base(self) -> Any:
        """Where this warpgroup's part of a slot begins."""
        p = self.plan
        return self.group * p.region if p.warpgroups > 1 else 0

    def _first(self, row: Any) -> Any:
        """The first element of this warpgroup's columns in the flat array."""
        p = self.plan
        return row * p.width + (self.part * p.warpgroups + self.group) * p.span

    def _late(self, ring: Any, row: Any) -> Any:
        """Elements by which the columns of a row start late in this warpgroup's part of a slot."""
        quantum = _quantum(ring.dtype)
        if self.plan.width % quantum == 0:
            return 0
        return lax.rem(row * self.plan.width, jnp.int32(quantum))

    def _by_share(self, copy: Callable[[int], None], nothing: Callable[[], None]) -> None:
        """Calls `copy` with the number of columns that this warpgroup has, or `nothing` if none."""
        p = self.plan
        last, rest = divmod(p.width - 1, p.span)
        rest += 1
        if p.parts * p.warpgroups == 1:
            copy(rest)
            return
        mine = self.part * p.warpgroups + self.group
        if rest == p.span and last == p.parts * p.warpgroups - 1:
            copy(p.span)
            return
        pl.when(mine < last)(lambda: copy(p.span))
        pl.when(mine == last)(lambda: copy(rest))
        if last < p.parts * p.warpgroups - 1:
            pl.when(mine > last)(nothing)

    def _range_in(
        self, source: Any, row: Any, ring: Any, slot: Any, barrier: Any, columns: int
    ) -> None:
        p = self.plan
        first = self._first(row) - self._late(ring, row)
        pieces = _pieces_of(p, ring.dtype, columns)
        for at, size in pieces:
            plain = len(pieces) == 1 and p.rows * p.width % _quantum(ring.dtype) == 0
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first + at, size)],
                ring.at[slot, pl.ds(self._base() + at, size)],
                barrier,
                # Anything but zeros is a plain copy, cut off at the end of the array.
                oob_mode=plgpu.OOBFillMode.UNDEFINED if plain and not self.simulated else None,
            )
        self._arrive(barrier, arrivals(p, ring.dtype) - len(pieces))

    def _range_out(self, ring: Any, slot: Any, out: Any, row: Any, columns: int) -> None:
        quantum = _quantum(ring.dtype)
        late = self._late(ring, row)
        first, base = self._first(row), self._base()
        skipped: Any = 0
        size = columns
        if self.plan.width % quantum:
            skipped = lax.rem(quantum - late, jnp.int32(quantum))
            size = (columns - (quantum - 1)) // quantum * quantum
            for at in (0, columns - EDGE):
                edge = ring.at[slot, pl.ds(base + late + at, EDGE)]
                _store_edge(edge, out.at[pl.ds(first + at, EDGE)], simulated=self.simulated)
        plgpu.copy_smem_to_gmem(
            ring.at[slot, pl.ds(base + late + skipped, size)],
            out.at[pl.ds(first + skipped, size)],
            commit_group=False,
        )

    def _arrive(self, barrier: Any, times: int) -> None:
        for _ in range(times):
            plgpu.barrier_arrive(barrier)


def _store_edge(source: Any, target: Any, *, simulated: bool) -> None:
    """Stores `EDGE` elements from shared memory; all four warps store the same."""
    if simulated:
        target[...] = source[...]
        return
    layout = plgpu.Layout.TILED(  # with lanes as in `rows`, for the same reason
        plgpu.Tiling(((WARP,), (2,), (1,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    values = plgpu.load(source, layout=layout, optimized=False)
    store(target, values)


def _copy_out_up_to_end(source: Any, out: Any, first: Any, size: int) -> None:
    """Copies `size` elements to `first` in the flat array, as many of them as it has.

    Mosaic takes a contiguous copy out for a plain one, which wants a multiple of 16 bytes up to the
    end of the array: the copy with a tensor map has to be asked for by its own name.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT()))
    def start(context, source, out, first):
        index = arith.index_cast(ir.IndexType.get(), first.registers.item())
        context.async_copy(
            src_ref=source,
            dst_ref=out,
            gmem_slice=(mosaic_utils.DynamicSlice(index, size),),
            swizzle=None,
            arrive=False,
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )

    start(source, out, jnp.int32(first))
