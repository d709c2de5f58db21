"""The registers of one block: what a warpgroup loads, computes with and stores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline, packed
from pallas_kernels.exchange import Parts
from pallas_kernels.plan import LANES, WARP, WARPS, Cut, Plan

# A row value is one number per row of a block: a scalar where that is one row, else a vector.
type Exchange = Callable[..., tuple[jax.Array, ...]]


class Registers:
    """Register arrays of a plan's blocks.

    Attributes:
      shape: of a block. The axis of four is the one that is dealt to the four warps of a warpgroup:
        rows of the block, or pieces of the row. Every reduction ends along pieces and lanes of one
        warp, or in a lane.
      layout: of a block, over the threads of a warpgroup.
    """

    def __init__(self, plan: Plan, part: Any, group: Any, late: Any, *, simulated: bool) -> None:
        """For the warpgroup `group` of the CTA that has the part `part` of rows that are `late`."""
        self._plan = plan
        self._part, self._group = part, group
        self._simulated = simulated
        self._late = late
        self._first_place = (part * plan.warpgroups + group) * plan.span
        self.shape, self.layout = shape_and_layout(plan)

    def load(self, ref: Any, turn: Any = 0) -> jax.Array:
        """A block, or the rows of one of its turns, from its place in shared memory."""
        if self._plan.cut is Cut.PACKED:
            if self._simulated:
                return packed.simulated_load(self._plan, ref, turn)
            return packed.load(self._plan, ref, turn, self.layout)
        if self._plan.width == 1:  # layouts have no axis of one: a second column is padding
            return self.spread(plgpu.load(ref, layout=self.layout.reduce(1), optimized=False))
        # The simulation cannot reshape references.
        if self._simulated:
            return ref[...].reshape(self.shape)
        if ref.shape != self.shape:
            ref = ref.reshape(self.shape)
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def save(self, ref: Any, block: jax.Array, turn: Any = 0) -> None:
        """Stores a block, or the rows of one of its turns, in its place in shared memory."""
        if self._plan.cut is Cut.PACKED:
            if self._simulated:
                packed.simulated_save(self._plan, ref, turn, block)
            else:
                packed.save(self._plan, ref, turn, block, self.layout)
        elif self._plan.width == 1:
            first = jnp.where(self.iota(1) == 0, block.astype(jnp.float32), jnp.float32(0))
            store(ref, jnp.sum(first, axis=1).astype(block.dtype))
        elif self._simulated:
            ref[...] = block.reshape(ref.shape)
        else:
            if ref.shape != self.shape:
                ref = ref.reshape(self.shape)
            store(ref, plgpu.layout_cast(block, self.layout))

    def load_own(self, ref: Any) -> jax.Array:
        """An f32 block that `save_own` kept."""
        if self._simulated:
            return self.load(ref)
        return inline.load_own(ref, self.shape, self.layout)

    def save_own(self, ref: Any, block: jax.Array) -> None:
        """Keeps an f32 block in shared memory, for the threads that have it in their registers."""
        if self._simulated:
            self.save(ref, block)
        else:
            inline.save_own(ref, block, self.layout)

    def zeros(self) -> jax.Array:
        """A block of f32 zeros."""
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def parameter(self, ref: Any) -> jax.Array:
        """A parameter as a block, from device memory; see `parameter_view`."""
        p = self._plan
        if p.shifted or p.cut is Cut.PACKED:
            column = jnp.clip(self.columns(), 0, p.width - 1)  # beside the row, any will do
            if self._simulated:
                return jnp.take(ref[...], column)
            return inline.gather(ref, column, self.layout)
        if p.cut is Cut.CTA:
            mine = pl.ds(self._group * p.groups, p.groups)
            return plgpu.load(ref.at[self._part, mine], layout=self.layout, optimized=False)
        # Every warp or lane has whole rows: the same in each.
        row = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, self.shape, tuple(range(1, len(self.shape))))

    def row_value(self, ref: Any, row: Any) -> jax.Array:
        """A row value of the block that begins with `row`, from device memory."""
        p = self._plan
        if p.cut is Cut.CTA:
            return ref[row]
        if p.cut is Cut.PACKED:
            rows = jnp.minimum(row + self.rows(), p.rows - 1)
            if self._simulated:
                return jnp.take(ref[...], rows)
            return inline.gather(ref, rows, self._layout_of_rows())
        values = ref.at[pl.ds(row, p.rows_per_block)]
        return plgpu.load(values, layout=self._layout_of_rows(), optimized=False)

    def save_row_value(self, ref: Any, row: Any, value: jax.Array) -> None:
        """Stores a row value of the block that begins with `row` in device memory."""
        p = self._plan
        if p.cut is Cut.PACKED:
            rows = row + self.rows()
            if not self._simulated:
                inline.scatter(ref, rows, value, rows < p.rows, self._layout_of_rows())
            for number in range(WARPS if self._simulated else 0):
                one = functools.partial(ref.__setitem__, row + number, value[number])
                pl.when(row + number < p.rows)(one)
            return
        if p.cut is not Cut.CTA:
            store(ref.at[pl.ds(row, p.rows_per_block)], value)
            return

        @pl.when((self._group == 0) & (self._part == 0))
        def _():
            ref[row] = value

    def save_sums(self, ref: Any, sums: jax.Array) -> None:
        """Stores sums along columns in this CTA's place in device memory; see `sums_shape`."""
        p = self._plan
        if p.cut is Cut.CTA:
            ref = ref.at[self._part, pl.ds(self._group * p.groups, p.groups)]
        store(ref, sums)

    def spread(self, value: jax.Array) -> jax.Array:
        """A row value, against which a block broadcasts."""
        if self._plan.cut is Cut.CTA:
            return value
        return lax.broadcast_in_dim(value, self.shape, (0,))

    def iota(self, axis: int) -> jax.Array:
        """Indices along an axis of the block."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)

    def rows(self) -> jax.Array:
        """Numbers of the rows, from 0, as a row value; of blocks of several rows."""
        layout = self._layout_of_rows()
        return plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=layout)

    def columns(self) -> jax.Array:
        """The column of every element; outside of 0 ... width - 1 beside the row."""
        p = self._plan
        if p.cut is Cut.LANE:
            return self.iota(1)
        if p.cut is Cut.PACKED:
            return self.iota(1) * p.piece + self.iota(2) - self.spread(self._late_rows())
        axes = (0, 1, 2) if p.cut is Cut.CTA else (1, 2)
        strides = (WARPS * p.piece, p.piece, 1)[-len(axes) :]
        return (
            self._first_place
            - self._late
            + sum(self.iota(a) * s for a, s in zip(axes, strides, strict=True))
        )

    def only(self, block: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """The block, with `otherwise` beside the row."""
        p = self._plan
        if p.padded == p.width:
            return block
        if self._simulated or p.cut is Cut.LANE:
            column = self.columns()
            inside = (column >= 0) & (column < p.width)
            return jnp.where(inside, block, jnp.asarray(otherwise, block.dtype))
        if p.cut is Cut.PACKED:
            always = range(p.most_late_in_warp, p.width)
            rows = self._layout_of_rows()
            return inline.only(
                block, self._late_rows(), p.width, otherwise, self.layout, always, rows
            )
        # Before the warpgroup in which the row ends, all is inside but the start of the window.
        last, end = divmod(p.width, p.span)
        everyone_has = end if last == p.parts * p.warpgroups - 1 else 0
        always = range(p.quantum if p.shifted else 0, everyone_has)
        first = self._late - self._first_place
        return inline.only(block, first, p.width, otherwise, self.layout, always)

    def totals(self, exchange: Exchange, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        """Sums of blocks along their rows and what is beside; one exchange for all."""
        return self.exchanged(exchange, Parts.SUMS, *map(self.part_total, blocks))

    def exchanged(
        self, exchange: Exchange, kind: Parts, *partials: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Values of whole rows, from those of each warp's part."""
        return exchange(kind, partials) if self._plan.cut is Cut.CTA else partials

    def part_total(self, block: jax.Array) -> jax.Array:
        """The sum of a block along each row and what is beside, or of each warp's part of it."""
        return self._along(jnp.sum, "add", block)

    def part_maximum(self, block: jax.Array) -> jax.Array:
        """The largest value of each row and what is beside, or of each warp's part of it; f32."""
        return self._along(jnp.max, "max", block).astype(jnp.float32)

    def spread_part(self, value: jax.Array) -> jax.Array:
        """A value of each row, or of each warp's part of it, against which a block broadcasts."""
        if self._plan.cut is not Cut.CTA:
            return self.spread(value)
        if self._simulated:
            return lax.broadcast_in_dim(value, self.shape, (1,))
        return inline.spread(value, self.layout_of_parts, self.shape, self.layout)

    def _along(self, along: Callable[..., jax.Array], name: str, block: jax.Array) -> jax.Array:
        """A block reduced to a value of each row, or of each warp's part of it."""
        of_cta = self._plan.cut is Cut.CTA
        axes = (0, 2) if of_cta else tuple(range(1, len(self.shape)))
        if self._simulated:
            return along(block, axis=axes)
        return inline.reduce(block, name, axes, self.layout, self.layout_of_parts)

    @property
    def layout_of_parts(self) -> Any:
        """Of a value of each row, or of each warp's part of it."""
        return self.layout.reduce(1) if self._plan.cut is Cut.CTA else self._layout_of_rows()

    def _late_rows(self) -> jax.Array:
        """Elements by which the rows back to back start after a multiple of a vector."""
        if self._plan.most_late_in_warp == 0:  # what is left of the numbers of rows has no layout
            return plgpu.layout_cast(jnp.zeros(self.shape[:1], jnp.int32), self._layout_of_rows())
        return self._plan.late_in_warp(self.rows())

    def _layout_of_rows(self) -> Any:
        across = range(len(self.shape) - 1, 0, -1)
        return functools.reduce(lambda found, axis: found.reduce(axis), across, self.layout)


def shape_and_layout(p: Plan) -> tuple[tuple[int, ...], Any]:
    """Shape and layout of a block."""
    if p.cut is Cut.LANE:
        tiling: tuple[tuple[int, ...], ...] = ((LANES, 1), (WARP, 1))
        shape: tuple[int, ...] = (LANES, p.span)
        warp_dim = -4
    elif p.cut in (Cut.WARP, Cut.PACKED):
        tiling = ((WARPS, 1, p.piece), (p.vector,))
        shape = (p.rows_at_once, p.groups or p.width // p.piece, p.piece)
        warp_dim = -4
    else:
        tiling = ((WARPS, p.piece), (p.vector,))
        if p.masks_shifted:
            tiling = ((WARPS, p.piece), (2 * p.vector,), (p.vector,))
        shape = (p.groups, WARPS, p.piece)
        warp_dim = -4 if p.masks_shifted else -3
    # Lanes as 16 x 2 are the lanes in order, but keep Mosaic from moving matrices, four lanes of
    # 4 bytes at a time, which must start at multiples of 16 bytes.
    lane_dims = (-3, -2) if p.masks_shifted else (-2,)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=(warp_dim,), lane_dims=lane_dims, vector_dim=-1
    )
    return shape, layout


def parameter_view(p: Plan, parameter: jax.Array) -> jax.Array:
    """A [width] parameter as `Registers.parameter` takes it."""
    if p.shifted or p.cut is Cut.PACKED:
        return parameter
    if p.padded != p.width:
        parameter = jnp.pad(parameter, (0, p.padded - p.width))
    if p.cut is Cut.LANE:
        return parameter
    if p.cut is Cut.WARP:
        return parameter.reshape(p.width // p.piece, p.piece)
    return parameter.reshape(p.parts, p.warpgroups * p.groups, WARPS, p.piece)


def sums_shape(p: Plan) -> tuple[int, ...]:
    """The shape of one CTA's (or cluster's) sums along columns."""
    if p.cut is Cut.CTA:
        return (p.parts, p.warpgroups * p.groups, WARPS, p.piece)
    return shape_and_layout(p)[0]


def column_sum(p: Plan, partials: jax.Array) -> jax.Array:
    """The f32 [width] total of [CTAs, *sums_shape] sums."""
    rows_of_block = () if p.cut is Cut.CTA else (1,)
    count = partials.shape[0]
    if p.shifted:
        partials = partials.reshape(count, p.padded)
        if count > p.period:
            partials = jnp.pad(partials, ((0, -count % p.period), (0, 0)))
            partials = partials.reshape(-1, p.period, p.padded)
            partials = lax.optimization_barrier(partials.sum(0))
        found = [row[p.late(cta) : p.late(cta) + p.width] for cta, row in enumerate(partials)]
        return functools.reduce(jnp.add, found)
    if p.cut is Cut.PACKED:
        partials = partials.reshape(count, WARPS, p.span)
        rows_of_block = ()
    if count > WARP:
        # In two steps: XLA sums few columns with few CTAs.
        first = max(n for n in range(1, WARP + 1) if count % n == 0)
        partials = partials.reshape(first, count // first, *partials.shape[1:])
        partials = lax.optimization_barrier(partials.sum((1, *(a + 1 for a in rows_of_block))))
        rows_of_block = ()
    total = partials.sum((0, *rows_of_block))
    if p.cut is Cut.PACKED:
        lates = map(p.late_in_warp, range(WARPS))
        found = [row[late : late + p.width] for row, late in zip(total, lates, strict=True)]
        return functools.reduce(jnp.add, found)
    return total.reshape(p.padded)[: p.width]


def store(ref: Any, values: jax.Array) -> None:
    """Stores registers as they are.

    JAX 0.12 refuses stores that it finds narrow unless told that they are meant; 0.11 has no way
    to tell.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
