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

from pallas_kernels.plan import TMA_LIMIT, WARPS, Plan

# The 2-D arrays that make up one block of one stream. Row i of such an array lives in warp i % 4,
# which is what keeps a reduction along axis 1 inside a warp.
Registers = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Reductions:
    """Reductions along the rows of the block at hand.

    `total` and `maximum` return what broadcasts against the block's arrays, `row_totals` what the
    kernel stores: one value per row of the block.
    """

    total: Callable[[Registers], Any]
    maximum: Callable[[Registers], Any]
    row_totals: Callable[[Registers], Any]


# (registers of each stream, registers of each parameter, reductions) -> (registers of the output
# in any float dtype, the row values or None)
Transform = Callable[[list[Registers], list[Registers], Reductions], tuple[Registers, Any]]


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
      streams: [rows, width] arrays of one dtype, each read once.
      parameters: [width] vectors, read once per CTA and kept in registers.
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
    block = (p.rows_per_block, p.pieces, p.piece) if row_per_warp else (p.pieces, p.piece)
    slice_pieces = p.pieces // p.warpgroups
    spans = [
        (start, min(TMA_LIMIT, slice_pieces - start)) for start in range(0, slice_pieces, TMA_LIMIT)
    ]
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, p.piece), (p.vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    load = functools.partial(plgpu.load, optimized=False)

    def kernel(*refs):
        queue = list(refs)
        ins = [queue.pop(0) for _ in streams]
        params = [queue.pop(0) for _ in parameters]
        out = queue.pop(0)
        values_out = queue.pop(0) if row_values else None
        parts, full, meet, *rings = queue

        cta = lax.axis_index("cta")
        group = lax.axis_index("warpgroup")
        first = group * slice_pieces  # of this warpgroup's slice, in pieces
        count = (p.blocks - 1 - cta) // p.ctas + 1

        def block_start(k):
            """The first row of this CTA's block k.

            The last block is moved up to end with the last row, so that no copy leaves the array:
            rows in two blocks are computed twice and written twice with the same bits.
            """
            return jnp.minimum((cta + k * p.ctas) * p.rows_per_block, rows - p.rows_per_block)

        def global_view(ref, k, span):
            if row_per_warp:
                return ref.at[pl.ds(block_start(k), p.rows_per_block)]
            return ref.at[block_start(k), pl.ds(first + span[0], span[1])]

        def slot_view(ring, slot, span):
            if row_per_warp:
                return ring.at[slot]
            return ring.at[slot, pl.ds(first + span[0], span[1])]

        def register_views(ring, slot):
            if row_per_warp:
                return [ring.at[slot, :, c] for c in range(p.pieces)]
            return [
                ring.at[slot, pl.ds(first + c, WARPS)] for c in range(0, slice_pieces, WARPS)
            ]

        def parameter_registers(ref) -> Registers:
            if row_per_warp:
                pieces = [load(ref.at[c], layout=layout.reduce(0)) for c in range(p.pieces)]
                shape = (p.rows_per_block, p.piece)
                return [lax.broadcast_in_dim(piece, shape, (1,)) for piece in pieces]
            return [
                load(ref.at[pl.ds(first + c, WARPS)], layout=layout)
                for c in range(0, slice_pieces, WARPS)
            ]

        def fetch(k):
            slot = lax.rem(k, p.stages)
            barrier = full.at[slot * p.warpgroups + group]
            for source, ring in zip(ins, rings, strict=True):
                for span in spans:
                    plgpu.copy_gmem_to_smem(
                        global_view(source, k, span), slot_view(ring, slot, span), barrier
                    )

        def reductions(k) -> Reductions:
            """Reductions of block k, each with its own place for partial results.

            Two blocks in turn use two sets of places: a warpgroup can be one exchange ahead of
            another, never two, so nothing is overwritten before it is read.
            """
            places = iter(range(exchanges))

            def reduce(combine, along_rows, values: Registers):
                partial = along_rows(functools.reduce(combine, values), axis=1)
                if row_per_warp:
                    return partial
                # `jnp.sum` to a scalar would be shorter, but all warpgroups of a CTA would share
                # its one scratch and read each other's parts.
                place = lax.rem(k, 2) * exchanges + next(places)
                parts[place, group] = partial
                if p.warpgroups > 1:
                    plgpu.barrier_arrive(meet)
                    plgpu.barrier_wait(meet)
                warps = [(g, w) for g in range(p.warpgroups) for w in range(WARPS)]
                return functools.reduce(combine, [parts[place, g, w] for g, w in warps])

            def broadcast(value):
                if not row_per_warp:
                    return value
                return lax.broadcast_in_dim(value, (p.rows_per_block, p.piece), (0,))

            total = functools.partial(reduce, jnp.add, jnp.sum)
            maximum = functools.partial(reduce, jnp.maximum, jnp.max)
            return Reductions(
                total=lambda values: broadcast(total(values)),
                maximum=lambda values: broadcast(maximum(values)),
                row_totals=total,
            )

        def step(k, carry):
            slot = lax.rem(k, p.stages)

            def refill():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(k + p.stages - 1 < count)
                def _():
                    fetch(k + p.stages - 1)

            if p.stages == 1:  # one slot: its last block must leave before the next can come
                refill()
            plgpu.barrier_wait(full.at[slot * p.warpgroups + group])
            blocks = [
                [load(view, layout=layout) for view in register_views(ring, slot)]
                for ring in rings
            ]
            outputs, values = transform(blocks, kept, reductions(k))
            if p.stages > 1:
                refill()
            for view, output in zip(register_views(rings[0], slot), outputs, strict=True):
                view[...] = output.astype(dtype)
            plgpu.commit_smem()
            for span in spans:
                plgpu.copy_smem_to_gmem(
                    slot_view(rings[0], slot, span), global_view(out, k, span)
                )
            if row_per_warp and values_out is not None:
                values_out[pl.ds(block_start(k), p.rows_per_block)] = values
            elif values_out is not None:

                @pl.when(group == 0)
                def _():
                    values_out[block_start(k)] = values

            return carry

        for k in range(p.stages - 1):

            @pl.when(k < count)
            def _(k=k):
                fetch(jnp.int32(k))

        kept = [parameter_registers(ref) for ref in params]
        lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    view = (rows, p.pieces, p.piece)
    out_type = [jax.ShapeDtypeStruct(view, dtype)]
    if row_values:
        out_type.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    # JAX 0.11 takes no cost estimate here.
    takes_cost = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
    extra = {"cost_estimate": cost} if takes_cost else {}
    results = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(p.ctas,),
        grid_names=("cta",),
        num_threads=p.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((2 * max(1, exchanges), p.warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(
                num_arrivals=len(streams) * len(spans), num_barriers=p.stages * p.warpgroups
            ),
            plgpu.Barrier(num_arrivals=p.warpgroups),
            *(plgpu.SMEM((p.stages, *block), dtype) for _ in streams),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **extra,
        kernel_name=name,
        interpret=interpret,
    )(
        *(stream.reshape(view) for stream in streams),
        *(parameter.reshape(p.pieces, p.piece) for parameter in parameters),
    )
    output = results[0].reshape(rows, p.width)
    return (output, results[1]) if row_values else output
