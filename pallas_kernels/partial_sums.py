"""Partial sums along columns, added up: several sums of [count, columns] in one launch.

Row kernels that sum along columns leave one partial sum for each CTA. XLA takes two launches for
each sum, since it sums few columns with few CTAs, and every launch waits for memory. Here all sums
are one launch, in which a thread has nearly all that it reads on its way at once.

A warpgroup takes 512 numbers at a time, four neighbouring columns to a thread: of one partial sum
where columns are many, of up to 64 where they are few. CTAs have columns of their own, so that
nothing is added up between them. Inside one, the sums of threads meet within warps, by shuffles,
and then in shared memory. The order is always the same, and so are the bits.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline
from pallas_kernels.plan import LANES, MAX_WARPGROUPS, WARPS, Cut, Plan
from pallas_kernels.registers import column_sum, store

VECTOR = 4  # f32 that a thread loads at once
TILE = VECTOR * LANES  # f32 that a warpgroup loads at once
# Partial sums that a warpgroup can take at a time: with 64 of them, it has 8 columns, 32 bytes, the
# least that comes from memory.
ROWS = (1, 4, 8, 16, 32, 64)
FEWEST = 4  # partial sums that are worth a launch
WANTED_CTAS = 250  # about two for each multiprocessor
IN_FLIGHT = 20  # loads of a thread, four registers each


@dataclasses.dataclass(frozen=True)
class SumsPlan:
    """One launch that adds up partial sums.

    Attributes:
      sums: how many sums there are.
      count: partial sums of each.
      width: columns of each.
      rows: partial sums that a warpgroup takes at a time, one of `ROWS`.
      warpgroups: of a CTA, which take turns along the partial sums; one where `rows` is 1.
    """

    sums: int
    count: int
    width: int
    rows: int
    warpgroups: int

    @property
    def columns(self) -> int:
        """Columns of a CTA."""
        return TILE // self.rows

    @property
    def ctas(self) -> int:
        """CTAs of each sum; the last one's columns are moved up to end with the last column."""
        return -(-self.width // self.columns)

    @property
    def step(self) -> int:
        """Partial sums that a CTA takes at a time."""
        return self.rows * self.warpgroups

    @property
    def rows_of_warp(self) -> int:
        """Partial sums that a warp takes at a time."""
        return max(1, self.rows // WARPS)


def plan_sums(sums: int, count: int, width: int) -> SumsPlan | None:
    """The launch for `sums` sums of `count` partial ones each, or None where XLA adds as well.

    CTAs are as wide as leaves enough of them, since wide ones read whole cache lines, and as deep
    as it takes for a thread to read all that it adds up at once.
    """
    plans = [
        SumsPlan(sums, count, width, rows, warpgroups=1)
        for rows in ROWS
        if rows <= count and TILE // rows <= width
    ]
    # Vectors begin at multiples of their length, those of columns that are moved up, too.
    if width % VECTOR or count < FEWEST or not plans:
        return None
    found = next((p for p in plans if sums * p.ctas >= WANTED_CTAS), plans[-1])
    while found.rows > 1 and found.warpgroups < MAX_WARPGROUPS and found.step * IN_FLIGHT < count:
        found = dataclasses.replace(found, warpgroups=2 * found.warpgroups)
    return found


def totals(
    p: Plan, partials: jax.Array, *, name: str, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """The f32 [width] totals of the sums that the CTAs of a row kernel left.

    Args:
      p: of the row kernel.
      partials: [sums, CTAs, *sums_shape].
      name: of the row kernel.
      interpret: as of the row kernel. A simulated one has few CTAs, and its sums are added up in
        plain JAX.
    """
    if p.walkers > 1 and p.cut is not Cut.LANE and not interpret:
        lates = _lates(p)
        rows = partials.reshape(len(partials), -1, len(lates) * p.padded)
        width = p.width if lates == [0] else rows.shape[-1]
        if found := plan_sums(len(rows), rows.shape[1], width):
            sums = add_up(found, rows, name=f"{name}_totals")
            return tuple(_brought_together(p, lates, one) for one in sums)
    return tuple(column_sum(p, of_one) for of_one in partials)


def _lates(p: Plan) -> list[int]:
    """Where the columns begin in each of the sums that repeat, [padded] each."""
    if p.mixes_rows:
        return [p.late_in_warp(warp) for warp in range(WARPS)]
    if p.shifted and p.walkers % p.period == 0:
        return [p.late(cta) for cta in range(p.period)]
    if p.shifted:
        return [p.late(cta) for cta in range(p.walkers)]
    return [0]


def _brought_together(p: Plan, lates: Sequence[int], sums: jax.Array) -> jax.Array:
    if len(lates) == 1:
        return sums
    rows = sums.reshape(len(lates), p.padded)
    return functools.reduce(
        jnp.add, [row[late : late + p.width] for row, late in zip(rows, lates, strict=True)]
    )


def add_up(
    p: SumsPlan, partials: jax.Array, *, name: str, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """The sums over the second axis.

    Args:
      p: where everything goes.
      partials: f32 [sums, count, width or more].
      name: of the kernel, as profilers show it.
      interpret: None compiles; `plgpu.InterpretGPUParams()` simulates on the CPU.

    Returns:
      f32 [width] for each sum.
    """
    scratch: list[Any] = []
    if p.rows > 1:
        scratch.append(plgpu.SMEM((p.warpgroups, p.rows, p.columns), jnp.float32))
    if p.warpgroups > 1:
        scratch.append(plgpu.Barrier(num_arrivals=p.warpgroups))
    # JAX 0.11 takes no cost estimate here.
    extra: dict[str, Any] = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        elements = p.sums * p.count * p.width
        extra["cost_estimate"] = pl.CostEstimate(
            flops=elements,
            transcendentals=0,
            bytes_accessed=4 * (elements + p.sums * p.width),
        )
    found = plgpu.kernel(
        functools.partial(_kernel, p, bool(interpret)),
        # One for each sum: parts of one array would be copied.
        out_type=(jax.ShapeDtypeStruct((p.width,), jnp.float32),) * p.sums,
        grid=(p.sums * p.ctas,),
        grid_names=("cta",),
        num_threads=p.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch),
        kernel_name=name,
        interpret=interpret,
        **extra,
    )(partials)
    return tuple(found)


def _kernel(p: SumsPlan, simulated: bool, partials: Any, *refs: Any) -> None:
    of_each, scratch = refs[: p.sums], refs[p.sums :]
    number, group = jnp.int32(0), lax.axis_index("warpgroup")
    cta = lax.axis_index("cta")
    if p.sums > 1:
        number, cta = lax.div(cta, jnp.int32(p.ctas)), lax.rem(cta, jnp.int32(p.ctas))
    columns = pl.ds(jnp.minimum(cta * p.columns, p.width - p.columns), p.columns)
    total = _of_thread(p, partials, number, columns, group)
    if p.rows > 1:
        total = _of_cta(p, total, scratch, group, simulated)
    for one, ref in enumerate(of_each):

        @pl.when((number == one) & (group == 0))
        def _(ref=ref):
            store(ref.at[columns], total)


def _layout(p: SumsPlan) -> Any:
    lane_dims: tuple[int, ...] = (-2,)
    if p.rows == 1:
        tiles: tuple[tuple[int, ...], ...] = ((TILE,), (TILE // WARPS,), (VECTOR,))
        warp_dim = -3
    elif p.rows == WARPS:
        tiles = ((WARPS, p.columns), (VECTOR,))
        warp_dim = -3
    else:
        tiles = ((p.rows, p.columns), (p.rows_of_warp, p.columns), (VECTOR,))
        warp_dim, lane_dims = -5, (-3, -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(warp_dim,), lane_dims=lane_dims, vector_dim=-1
    )


def _of_thread(p: SumsPlan, partials: Any, number: Any, columns: Any, group: Any) -> jax.Array:
    """What each thread adds up by itself: [rows, columns] of a warpgroup, or [columns]."""
    layout = _layout(p)

    def load(start: Any) -> jax.Array:
        rows = start if p.rows == 1 else pl.ds(start + group * p.rows, p.rows)
        return plgpu.load(partials.at[number, rows, columns], layout=layout, optimized=False)

    steps, rest = divmod(p.count, p.step)
    if rest:  # the last step is moved up, and leaves out what others have
        row = plgpu.broadcasted_iota(jnp.int32, (p.rows, p.columns), 0, layout=layout)
        mine = row + group * p.rows >= p.step - rest
        total = jnp.where(mine, load(jnp.int32(p.count - p.step)), jnp.float32(0))
    else:
        steps -= 1
        total = load(jnp.int32(steps * p.step))

    def several(first: Any, count: int, total: jax.Array) -> jax.Array:
        blocks = [load((first + step) * p.step) for step in range(count)]
        return functools.reduce(jnp.add, blocks, total)

    turns, more = divmod(steps, IN_FLIGHT)
    total = lax.fori_loop(
        jnp.int32(0),
        jnp.int32(turns),
        lambda turn, total: several(turn * IN_FLIGHT, IN_FLIGHT, total),
        total,
    )
    return several(jnp.int32(turns * IN_FLIGHT), more, total)


def _of_cta(
    p: SumsPlan, block: jax.Array, scratch: Sequence[Any], group: Any, simulated: bool
) -> jax.Array:
    """The rows of all warpgroups' blocks added up: [columns]."""
    if simulated:
        by_warp = block.reshape(WARPS, p.rows_of_warp, p.columns).sum(1, keepdims=True)
        block = jnp.broadcast_to(by_warp, (WARPS, p.rows_of_warp, p.columns)).reshape(block.shape)
    else:
        block = inline.add_across_lanes(block, p.columns // VECTOR, _layout(p))
    places = scratch[0]
    store(places.at[group], block)
    if p.warpgroups > 1:
        plgpu.barrier_arrive(scratch[1])
        plgpu.barrier_wait(scratch[1])
    of_warps = [
        plgpu.load(places.at[g, w * p.rows_of_warp], layout=_layout(p).reduce(0), optimized=False)
        for g in range(p.warpgroups)
        for w in range(WARPS)
    ]
    return functools.reduce(jnp.add, of_warps)
