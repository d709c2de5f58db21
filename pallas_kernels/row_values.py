"""Row values that no output waits for: left in shared memory, and finished for many rows at once.

A loss, or the sum of a row, is one number per row, and what makes it of a row's sums (a logarithm,
a label to look up, the exchange between warps and CTAs) would cost every thread as many
instructions as some elements. So each warp only leaves what it reduced of its part, and goes on to
the next block. When there is no room for more, or no block is left, warps meet once, and each lane
finishes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline
from pallas_kernels.exchange import Parts, Places, combined, meet
from pallas_kernels.plan import LANES, WARPS, Cut, Plan
from pallas_kernels.registers import Registers


def _totals(totals, row_inputs, pick):
    del row_inputs, pick
    return totals


@dataclasses.dataclass(frozen=True)
class Later:
    """How row values come about.

    Attributes:
      values: how many partial values a transform leaves of each row.
      finish: from the values of whole rows, the row inputs, and a function that looks up elements
        of the first stream by their columns, to the row values; all for a row per lane.
      kind: what partial values are.
    """

    values: int
    finish: Callable[..., tuple[jax.Array, ...]] = _totals
    kind: Parts = Parts.SUMS


def _parts(p: Plan) -> int:
    """Warps of a CTA that share a row."""
    return p.warpgroups * WARPS if p.cut is Cut.CTA else 1


def _slots(p: Plan) -> int:
    """Rows that there is room for; few where many warps leave values of each."""
    return min(32, 64 // p.warpgroups) if p.cut is Cut.CTA else LANES


def _layout() -> Any:
    """A row per lane of a warpgroup."""
    rows = plgpu.Layout.TILED(
        plgpu.Tiling(((LANES, 1), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
    )
    return rows.reduce(1)


def scratch(p: Plan, later: Later, *, simulated: bool) -> tuple[Any, ...]:
    """The scratch of a kernel with such row values."""
    found: tuple[Any, ...] = (
        plgpu.SMEM((later.values, _parts(p), _slots(p)), jnp.float32),
        plgpu.Barrier(num_arrivals=p.warpgroups),
    )
    if p.cluster and not simulated:
        found += (plgpu.SMEM((later.values, _slots(p)), jnp.float32),)
    return found


def simulated_buffer(p: Plan, walkers: int, later: Later) -> jax.ShapeDtypeStruct:
    """Device memory in the place of a cluster's shared memory, which JAX does not simulate."""
    return jax.ShapeDtypeStruct((walkers, p.parts, later.values, _slots(p)), jnp.float32)


class RowValues:
    """The row values of one CTA."""

    def __init__(
        self,
        p: Plan,
        later: Later,
        places: Places,
        refs: Sequence[Any],
        *,
        first_row: Callable[[Any], Any],
        source: Any,
        row_inputs: Sequence[Any],
        outputs: Sequence[Any],
        simulated: bool,
    ) -> None:
        """Takes the references that `scratch` asked for, and for a simulated cluster its buffer.

        Args:
          p: the plan.
          later: how.
          places: where the CTAs of a cluster meet.
          refs: see above.
          first_row: of a block, by its number; also for an array of numbers.
          source: the first stream, in device memory.
          row_inputs: likewise.
          outputs: likewise.
          simulated: whether this is a simulation.
        """
        self._plan = p
        self._later = later
        self._places = places
        self._left, self._meet, *results = refs
        self._results: Any = results[0] if results else None
        self._first_row = first_row
        self._source = source
        self._row_inputs = row_inputs
        self._outputs = outputs
        self._simulated = simulated
        self._group = lax.axis_index("warpgroup")

    @property
    def blocks(self) -> int:
        """Blocks that there is room for."""
        return _slots(self._plan) // self._plan.rows_per_block

    def leave(self, k: Any, turn: Any, registers: Registers, partials: Sequence[jax.Array]) -> None:
        """Leaves what a warp has of the rows of a turn of block k."""
        p = self._plan
        at = lax.rem(k, jnp.int32(self.blocks)) * p.rows_per_block + turn * p.rows_at_once
        of_cta = p.cut is Cut.CTA
        if self._simulated:
            for number, partial in enumerate(partials):
                if of_cta:
                    self._left[number, pl.ds(self._group * WARPS, WARPS), at] = partial
                else:
                    self._left[number, 0, pl.ds(at, p.rows_at_once)] = partial
            return
        base = at + self._group * WARPS * _slots(p) if of_cta else at
        strides = (_parts(p) * _slots(p), _slots(p) if of_cta else 1)
        inline.leave(self._left, base, strides, partials, registers.layout_of_parts)

    def finish(self, begin: Any, end: Any, *, more: bool) -> None:
        """Stores the row values of blocks `begin` to before `end`.

        Args:
          begin: a multiple of `blocks`.
          end: at most `blocks` later.
          more: whether other blocks will leave theirs.
        """
        p = self._plan
        meet(p, self._meet, simulated=self._simulated)
        mine = self._group == 0
        pl.when(mine)(self._leave_results if p.cluster else lambda: self._store(begin, end))
        if p.cluster:
            plgpu.commit_smem()  # every warp has left them
            self._places.meet_cluster()
            pl.when(mine & (lax.axis_index("part") == 0))(lambda: self._store(begin, end))
            if more:
                self._places.meet_cluster()
        elif more:
            meet(p, self._meet, simulated=self._simulated)

    def _store(self, begin: Any, end: Any) -> None:
        p = self._plan
        lane = self._lane()
        height = jnp.int32(p.rows_per_block)
        row = self._first_row(begin + lax.div(lane, height)) + lax.rem(lane, height)
        count = (end - begin) * p.rows_per_block
        inside = (lane < count) & (row < p.rows)
        row = jnp.where(inside, row, 0)
        inputs = [self._gather(ref, row) for ref in self._row_inputs]
        values = self._later.finish(
            self._of_cluster() if p.cluster else self._of_cta(),
            inputs,
            lambda column: self._gather(self._source, row * p.width + column).astype(jnp.float32),
        )
        for ref, value in zip(self._outputs, values, strict=True):
            if self._simulated:
                self._simulate_stores(ref, row, value, inside)
            else:
                inline.scatter(ref, row, value, inside, _layout())

    def _simulate_stores(self, ref: Any, row: jax.Array, value: jax.Array, inside: Any) -> None:
        def store(lane: Any, nothing: Any) -> None:
            ref[row[lane]] = value[lane]

        lax.fori_loop(jnp.int32(0), jnp.sum(inside, dtype=jnp.int32), store, None)

    def _leave_results(self) -> None:
        for number, value in enumerate(self._of_cta()):
            if self._simulated:
                walker, part = lax.axis_index("walker"), lax.axis_index("part")
                self._results[walker, part, number] = value[: _slots(self._plan)]
            else:
                lane, slots = self._lane(), _slots(self._plan)
                inside = lane < slots
                inline.scatter(self._results, number * slots + lane, value, inside, _layout())

    def _of_cta(self) -> tuple[jax.Array, ...]:
        parts = _parts(self._plan)
        if not self._simulated:
            return self._combined(self._left, parts)
        return combined(self._later.kind, [
            tuple(self._simulated_row(self._left[number, part]) for number in self._numbers)
            for part in range(parts)
        ])  # fmt: skip

    def _of_cluster(self) -> tuple[jax.Array, ...]:
        parts = self._plan.parts
        if not self._simulated:
            return self._combined(self._results, parts, of_ctas=True)
        walker = lax.axis_index("walker")
        return combined(self._later.kind, [
            tuple(self._simulated_row(self._results[walker, cta, n]) for n in self._numbers)
            for cta in range(parts)
        ])  # fmt: skip

    @property
    def _numbers(self) -> range:
        return range(self._later.values)

    def _combined(self, ref: Any, parts: int, *, of_ctas: bool = False) -> tuple[jax.Array, ...]:
        slot = jnp.minimum(self._lane(), _slots(self._plan) - 1)
        exponentials = self._later.kind is Parts.EXPONENTIALS
        return inline.combine_rows(ref, slot, parts, exponentials, _layout(), of_ctas=of_ctas)

    def _simulated_row(self, values: jax.Array) -> jax.Array:
        return jnp.resize(values, (LANES,))

    def _gather(self, ref: Any, places: jax.Array) -> jax.Array:
        if self._simulated:
            return jnp.take(ref[...].reshape(-1), places)
        return inline.gather(ref, places, _layout())

    def _lane(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_layout())
