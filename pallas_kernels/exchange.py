"""What warps, warpgroups and the CTAs of a cluster reduced along a row, brought together.

Each warp leaves its partial results in shared memory; after a barrier, every thread combines the
parts. In a cluster, each CTA then leaves its own results, and after a barrier of the cluster every
thread reads those of all CTAs out of their shared memory.

What outputs need is brought together here, block by block; what only row values need waits for many
blocks (`row_values`).

Places are used again for the next block. A warpgroup can be one barrier ahead of another, never
two: with two exchanges per block, whoever writes to a place has passed a barrier at which everyone
who read it had arrived. With one exchange per block, two sets of places are used in turn.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline
from pallas_kernels.inline import LOG2E
from pallas_kernels.plan import WARPS, Cut, Plan

# Up to so many, every thread adds up the sums of all warps by itself: 1 to 3 % faster than lanes
# that exchange theirs, and up to a third slower with more (H200).
FEW_WARPGROUPS = 2


class Parts(enum.Enum):
    """What the partial values of a part of a row are."""

    SUMS = "sums"
    # Its largest element m, and sum(exp(x - m)).
    EXPONENTIALS = "exponentials"


def combined(kind: Parts, parts: Sequence[tuple[jax.Array, ...]]) -> tuple[jax.Array, ...]:
    """The values of several parts as those of one."""
    columns = list(zip(*parts, strict=True))
    if kind is Parts.SUMS:
        return tuple(functools.reduce(jnp.add, values) for values in columns)
    maximum = functools.reduce(jnp.maximum, columns[0])
    totals = (total * jnp.exp2((of_part - maximum) * LOG2E) for of_part, total in parts)
    return maximum, functools.reduce(jnp.add, totals)


def _sets(exchanges: Sequence[int]) -> int:
    return 2 if len(exchanges) == 1 else 1


def scratch(p: Plan, exchanges: Sequence[int], *, simulated: bool) -> tuple[Any, ...]:
    """The scratch that the exchanges of a kernel take."""
    if p.cut is not Cut.CTA or not exchanges:
        return _end(p)
    places = _sets(exchanges) * sum(exchanges)
    found: tuple[Any, ...] = (
        plgpu.SMEM((places, p.warpgroups, WARPS), jnp.float32),
        plgpu.Barrier(num_arrivals=p.warpgroups),
    )
    if p.cluster and not simulated:
        # One reference for each: a reference into another CTA cannot be indexed.
        found += tuple(plgpu.SMEM((), jnp.float32) for _ in range(places))
    return found + _end(p)


def _end(p: Plan) -> tuple[Any, ...]:
    if not p.cluster:
        return ()
    return (plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=p.warpgroups),)


def simulated_buffer(p: Plan, walkers: int, exchanges: Sequence[int]) -> jax.ShapeDtypeStruct:
    """Device memory in the place of a cluster's shared memory, which JAX does not simulate."""
    places = _sets(exchanges) * sum(exchanges)
    return jax.ShapeDtypeStruct((walkers, places, p.parts), jnp.float32)


def meet(p: Plan, barrier: Any, *, simulated: bool) -> None:
    """Waits until every warp of the CTA is here, with what it has left in shared memory.

    Args:
      p: the plan.
      barrier: of all warpgroups; not looked at where there is one.
      simulated: where a warpgroup is one thread.
    """
    if p.warpgroups > 1:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
    elif not simulated:
        inline.warpgroup_barrier()


class Places:
    """The places of one kernel."""

    def __init__(
        self,
        p: Plan,
        exchanges: Sequence[int],
        group: Any,
        buffer: Sequence[Any],
        refs: Sequence[Any],
        *,
        simulated: bool,
    ) -> None:
        """Takes the references that `scratch` asked for, in its order."""
        queue = list(refs)
        self._plan = p
        self._exchanges = exchanges
        self._group = group
        self._simulated = simulated
        self._buffer: Any = buffer[0] if buffer else None
        self._cluster: Any = queue.pop() if p.cluster else None
        self._partials: Any = queue.pop(0) if queue else None
        self._meet: Any = queue.pop(0) if queue else None
        self._results = queue

    def of_block(self, k: Any) -> Callable[..., tuple[jax.Array, ...]]:
        """A function that makes the exchanges of block k, one after another."""
        coming = iter(range(len(self._exchanges)))
        odd = self._odd(k)

        def exchange(kind: Parts, partials: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            number = next(coming)
            count = self._exchanges[number]
            if len(partials) != count:
                raise ValueError(
                    f"exchange {number} was planned for {count} values and has {len(partials)}"
                )
            first = sum(self._exchanges[:number])
            self._leave_partials(odd, first, partials)
            self._meet_cta()
            results = self._of_cta(odd, first, count, kind)
            if not self._plan.cluster:
                return results
            self._leave_results(odd, first, results)
            plgpu.commit_smem()  # every warp has left it
            self.meet_cluster()
            return self._of_cluster(odd, first, count, kind)

        return exchange

    def _odd(self, k: Any) -> Any:
        return lax.rem(k, jnp.int32(2)) if _sets(self._exchanges) == 2 else jnp.int32(0)

    def _leave_partials(self, odd: Any, first: int, partials: Sequence[jax.Array]) -> None:
        # Reducing to a scalar would be shorter, but Mosaic gives all warpgroups of a CTA one
        # scratch for that, without a barrier among them: they would mix their parts.
        base = odd * sum(self._exchanges) + first
        for index, partial in enumerate(partials):
            self._partials[base + index, self._group] = partial

    def _meet_cta(self) -> None:
        """Waits until every warp of the CTA has left its part."""
        meet(self._plan, self._meet, simulated=self._simulated)

    def _of_cta(self, odd: Any, first: int, count: int, kind: Parts) -> tuple[jax.Array, ...]:
        groups = self._plan.warpgroups
        base = odd * sum(self._exchanges) + first
        exponentials = kind is Parts.EXPONENTIALS
        if not self._simulated and (exponentials or groups > FEW_WARPGROUPS):
            bases = [(base + index) * (groups * WARPS) for index in range(count)]
            return inline.combine(self._partials, bases, groups * WARPS, exponentials)
        return combined(kind, [
            tuple(self._partials[base + index, group, warp] for index in range(count))
            for group in range(groups)
            for warp in range(WARPS)
        ])  # fmt: skip

    def _leave_results(self, odd: Any, first: int, results: Sequence[jax.Array]) -> None:
        @pl.when(self._group == 0)
        def _():
            for index, result in enumerate(results):
                self._leave_result(odd, first + index, result)

    def _leave_result(self, odd: Any, offset: int, result: jax.Array) -> None:
        count = sum(self._exchanges)
        if self._simulated:
            place = odd * count + offset
            self._buffer[lax.axis_index("walker"), place, lax.axis_index("part")] = result
        elif len(self._results) == count:
            self._results[offset][...] = result
        else:
            for half in range(2):
                pl.when(odd == half)(
                    functools.partial(self._results[half * count + offset].__setitem__, ..., result)
                )

    def _of_cluster(self, odd: Any, first: int, count: int, kind: Parts) -> tuple[jax.Array, ...]:
        return combined(kind, [
            tuple(self._result(odd, first + index, cta) for index in range(count))
            for cta in range(self._plan.parts)
        ])  # fmt: skip

    def _result(self, odd: Any, offset: int, cta: int) -> jax.Array:
        count = sum(self._exchanges)
        if self._simulated:
            return self._buffer[lax.axis_index("walker"), odd * count + offset, cta]
        there: dict[Any, Any] = {"part": jnp.int32(cta)}
        found = [
            plgpu.cluster_ref(self._results[half * count + offset], there)[...]
            for half in range(len(self._results) // count)
        ]
        return found[0] if len(found) == 1 else jnp.where(odd == 0, found[0], found[1])

    def meet_cluster(self) -> None:
        """Waits until every warpgroup of the cluster is here."""
        plgpu.barrier_arrive(self._cluster)
        plgpu.barrier_wait(self._cluster)

    def leave(self) -> None:
        """Keeps this CTA's shared memory until no other CTA can read it any more."""
        if self._plan.cluster:
            self.meet_cluster()
