"""The persistent ring that every row kernel runs in; see `plan` for the two ways to cut rows.

A kernel is a `Transform`: it gets the registers of one block and returns the registers to store.
Everything about copies, slots and barriers is here, everything about the operation is there.

Order inside a CTA, for its block number k: wait for the copy of k; load it into registers and
compute; wait until block k-1 has been read out of its slot and start the copy of block
k + stages - 1 into that slot; write the result over k's own slot and start the copy out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.plan import WARPS, Plan

# Elements of a parameter that a lane keeps across rows; beyond, they are read again for each row.
MOST_KEPT = 48


@dataclasses.dataclass(frozen=True)
class Reductions:
    """Reductions along the rows of the block at hand.

    `total` and `maximum` return what broadcasts against the block, `row_totals` what the kernel
    stores: one value per row of the block.
    """

    total: Callable[[jax.Array], jax.Array]
    maximum: Callable[[jax.Array], jax.Array]
    row_totals: Callable[[jax.Array], jax.Array]


# (block of each stream, each parameter, reductions) -> (output block in any float dtype, the row
# values or None). Blocks and parameters are register arrays of one shape.
Transform = Callable[[list[jax.Array], list[jax.Array], Reductions], tuple[jax.Array, Any]]


def run_rows(
    transform: Transform,
    plan: Plan,
    streams: Sequence[jax.Array],
    parameters: Sequence[jax.Array] = (),
    *,
    name: str,
    exchanges: int,
    row_values: bool = False,
    cost: pl.CostEstimate | None = None,
    interpret: Any = None,
) -> Any:
    """Runs `transform` over every row of `streams`.

    Args:
      transform: the operation on one block.
      plan: where everything goes.
      streams: [rows, width] arrays of one dtype, each read once; rows and width of the plan.
      parameters: [slices * width] vectors, read once per CTA and kept in registers where they fit.
      name: of the kernel, as profilers show it.
      exchanges: how many reductions `transform` makes for one block.
      row_values: whether `transform` returns a value per row; they are f32 [rows].
      cost: what the kernel costs, for XLA's scheduler.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.

    Returns:
      The output [rows, width] in the dtype of the streams, with the row values if asked for.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    p = plan
    rows, dtype = p.rows, streams[0].dtype
    row_per_warp = p.rows_per_block > 1
    # The axis of four is the one that is dealt to the four warps of a warpgroup: rows of the
    # block, or pieces of the row. Every reduction ends along pieces and lanes of one warp.
    row_view: tuple[int, ...]
    slot_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    warp_tile: tuple[int, ...]
    if row_per_warp:
        row_view = (p.pieces, p.piece)
        slot_shape = block_shape = (p.rows_per_block, *row_view)
        warp_tile, warp_dim, register_axis = (WARPS, 1, p.piece), -4, 1
    else:
        row_view = (p.pieces // WARPS, WARPS, p.piece)
        slot_shape = row_view
        block_shape = (p.groups, WARPS, p.piece)
        warp_tile, warp_dim, register_axis = (WARPS, p.piece), -3, 0
    layout = plgpu.Layout.TILED(
        plgpu.Tiling((warp_tile, (p.vector,))),
        warp_dims=(warp_dim,),
        lane_dims=(-2,),
        vector_dim=-1,
    )

    # A long part of a row leaves no registers to keep parameters in: they come from L2 each time.
    reload = p.elements_per_lane > MOST_KEPT

    def kernel(*refs):
        queue = list(refs)
        ins = [queue.pop(0) for _ in streams]
        params = [queue.pop(0) for _ in parameters]
        out = queue.pop(0)
        values_out: Any = queue.pop(0) if row_values else None
        parts, full, meet, *rings = queue

        cta = lax.axis_index("cta")
        group = lax.axis_index("warpgroup")
        mine = pl.ds(group * p.groups, p.groups)  # this warpgroup's slice of a shared row
        count = (p.blocks - 1 - cta) // p.ctas + 1

        def block_start(k):
            """The first row of this CTA's block k.

            The last block is moved up to end with the last row, so that no copy leaves the array:
            rows in two blocks are computed twice and written twice with the same bits.
            """
            return jnp.minimum((cta + k * p.ctas) * p.rows_per_block, rows - p.rows_per_block)

        def in_rows(ref, k):
            if row_per_warp:
                return ref.at[pl.ds(block_start(k), p.rows_per_block)]
            return ref.at[block_start(k), mine]

        def in_ring(ring, k):
            slot = _rem(k, p.stages)
            return ring.at[slot] if row_per_warp else ring.at[slot, mine]

        def arrival(k):
            return full.at[_rem(k, p.stages) * p.warpgroups + group]

        def parameter_registers(ref):
            ref = ref.at[_rem(cta, p.slices)]
            if row_per_warp:  # every warp has the whole row: the same registers in each
                row = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
                return lax.broadcast_in_dim(row, block_shape, (1, 2))
            return plgpu.load(ref.at[mine], layout=layout, optimized=False)

        def fetch(k):
            for source, ring in zip(ins, rings, strict=True):
                plgpu.copy_gmem_to_smem(in_rows(source, k), in_ring(ring, k), arrival(k))

        def reductions(k) -> Reductions:
            """Reductions of block k, each with its own place for partial results.

            Two blocks in turn use two sets of places: a warpgroup can be one exchange ahead of
            another, never two, so nothing is overwritten before it is read.
            """
            places = iter(range(exchanges))

            def reduce(along, combine, values):
                partial = along(along(values, axis=register_axis), axis=1)
                if row_per_warp:
                    return partial
                # Reducing to a scalar would be shorter, but Mosaic gives all warpgroups of a CTA
                # one scratch for that, without a barrier among them: they would mix their parts.
                place = _rem(k, 2) * exchanges + next(places)
                parts[place, group] = partial
                if p.warpgroups > 1:
                    plgpu.barrier_arrive(meet)
                    plgpu.barrier_wait(meet)
                warps = [(g, w) for g in range(p.warpgroups) for w in range(WARPS)]
                return functools.reduce(combine, [parts[place, g, w] for g, w in warps])

            def broadcast(value):
                return lax.broadcast_in_dim(value, block_shape, (0,)) if row_per_warp else value

            total = functools.partial(reduce, jnp.sum, jnp.add)
            maximum = functools.partial(reduce, jnp.max, jnp.maximum)
            return Reductions(
                total=lambda values: broadcast(total(values)),
                maximum=lambda values: broadcast(maximum(values)),
                row_totals=total,
            )

        def store_values(k, values):
            if row_per_warp:
                _store(values_out.at[pl.ds(block_start(k), p.rows_per_block)], values)
            else:

                @pl.when(group == 0)
                def _():
                    values_out[block_start(k)] = values

        def step(k, carry):
            def refill():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(k + p.stages - 1 < count)
                def _():
                    fetch(k + p.stages - 1)

            if p.stages == 1:  # one slot: its last block must leave before the next can come
                refill()
            plgpu.barrier_wait(arrival(k))
            blocks = [plgpu.load(in_ring(r, k), layout=layout, optimized=False) for r in rings]
            parameters = [parameter_registers(ref) for ref in params] if reload else kept
            output, values = transform(blocks, parameters, reductions(k))
            if p.stages > 1:
                refill()
            in_ring(rings[0], k)[...] = output.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(in_ring(rings[0], k), in_rows(out, k))
            if row_values:
                store_values(k, values)
            return carry

        for k in range(p.stages - 1):

            @pl.when(k < count)
            def _(k=k):
                fetch(jnp.int32(k))

        kept = [] if reload else [parameter_registers(ref) for ref in params]
        lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    out_type = [jax.ShapeDtypeStruct((rows, *row_view), dtype)]
    if row_values:
        out_type.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    # JAX 0.11 takes no cost estimate here.
    takes_cost = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
    extra: dict[str, Any] = {"cost_estimate": cost} if takes_cost else {}
    results = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(p.ctas,),
        grid_names=("cta",),
        num_threads=p.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((2 * max(1, exchanges), p.warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=p.stages * p.warpgroups),
            plgpu.Barrier(num_arrivals=p.warpgroups),
            *(plgpu.SMEM((p.stages, *slot_shape), dtype) for _ in streams),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=interpret,
        **extra,
    )(
        *(stream.reshape(rows, *row_view) for stream in streams),
        *(parameter.reshape(p.slices, *row_view) for parameter in parameters),
    )
    output = results[0].reshape(rows, p.width)
    return (output, results[1]) if row_values else output


def _rem(index, count: int):
    """index % count for index >= 0, in int32 also where x64 makes Python's integers 64 bits."""
    return lax.rem(index, jnp.int32(count))


def _store(ref, values):
    """Stores the values of a few rows, 4 bytes from each warp, which is all there is to store.

    JAX 0.12 refuses such narrow stores unless told that they are meant; 0.11 has no way to tell.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
