"""What warps, warpgroups and the CTAs of a cluster reduced along a row, brought together.

Each warp leaves its partial result in shared memory; after a barrier, every thread combines the
parts. In a cluster, each CTA then leaves its own result, and after a barrier of the cluster every
thread reads those of all CTAs out of their shared memory.

Places are used again for the next block. A warpgroup can be one barrier ahead of another, never
two: with two exchanges per block, whoever writes to a place has passed a barrier at which everyone
who read it had arrived. With one exchange per block, two sets of places are used in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.plan import WARPS, Cut, Plan


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


class Places:
    """The places of one kernel."""

    def __init__(
        self, p: Plan, buffer: Sequence[Any], refs: Sequence[Any], *, simulated: bool
    ) -> None:
        """Takes the references that `scratch` asked for, in its order."""
        queue = list(refs)
        self._plan = p
        self._simulated = simulated
        self._buffer: Any = buffer[0] if buffer else None
        self._cluster: Any = queue.pop() if p.cluster else None
        self._partials: Any = queue.pop(0) if queue else None
        self._meet: Any = queue.pop(0) if queue else None
        self._results = queue

    def of_block(
        self, k: Any, group: Any, exchanges: Sequence[int]
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """A function that makes the exchanges of block k, one after another."""
        coming = iter(range(len(exchanges)))
        odd = lax.rem(k, jnp.int32(2)) if _sets(exchanges) == 2 else jnp.int32(0)

        def exchange(combine, partials):
            number = next(coming)
            if len(partials) != exchanges[number]:
                raise ValueError(
                    f"exchange {number} was planned for {exchanges[number]} values and has "
                    f"{len(partials)}"
                )
            first = sum(exchanges[:number])
            base = odd * sum(exchanges) + first
            return self._exchange(combine, partials, group, base, first, odd, sum(exchanges))

        return exchange

    def _exchange(self, combine, partials, group, base, first, odd, count):
        p = self._plan
        # Reducing to a scalar would be shorter, but Mosaic gives all warpgroups of a CTA one
        # scratch for that, without a barrier among them: they would mix their parts.
        for index, partial in enumerate(partials):
            self._partials[base + index, group] = partial
        if p.warpgroups > 1:
            plgpu.barrier_arrive(self._meet)
            plgpu.barrier_wait(self._meet)
        warps = [(g, w) for g in range(p.warpgroups) for w in range(WARPS)]
        results = [
            functools.reduce(combine, [self._partials[base + index, g, w] for g, w in warps])
            for index in range(len(partials))
        ]
        if not p.cluster:
            return tuple(results)

        @pl.when(group == 0)
        def _():
            for index, result in enumerate(results):
                self._leave_result(base + index, first + index, odd, count, result)

        plgpu.commit_smem()  # every warp has left it
        self.meet_cluster()
        return tuple(
            functools.reduce(
                combine,
                [self._result(base + i, first + i, odd, count, c) for c in range(p.parts)],
            )
            for i in range(len(partials))
        )

    def _leave_result(self, place, offset, odd, count, result):
        if self._simulated:
            self._buffer[lax.axis_index("walker"), place, lax.axis_index("part")] = result
        elif len(self._results) == count:
            self._results[offset][...] = result
        else:
            for half in range(2):
                pl.when(odd == half)(
                    functools.partial(self._results[half * count + offset].__setitem__, ..., result)
                )

    def _result(self, place, offset, odd, count, cta):
        if self._simulated:
            return self._buffer[lax.axis_index("walker"), place, cta]
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
