"""The persistent ring that every row kernel runs in; see `plan` for the ways to cut rows.

A kernel is a `Transform`: it gets the registers of one block and returns what to store.
Everything about copies, slots and barriers is here and in `copies`, everything about the
operation is there.

Order inside a CTA, for its block number k: wait for the copy of k; load it into registers and
compute; wait until block k-1 has been read out of its slot and start the copy of block
k + stages - 1 into that slot; write the results over k's own slots and start the copies out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import exchange
from pallas_kernels.copies import Copies, arrivals, row_view, slot_shape
from pallas_kernels.plan import LANES, REGISTERS_PER_SM, WARP, WARPS, Cut, Plan

# Registers that a thread needs besides those that it keeps from row to row.
REGISTERS_TO_WORK = 40
MOST_REGISTERS = 255


class Result(NamedTuple):
    """What a transform makes of a block.

    Attributes:
      outputs: register arrays of the block, in any float dtype; at most as many as streams.
      row_values: row values that are stored.
      column_values: f32 register arrays of the block that are summed over the rows.
    """

    outputs: tuple[jax.Array, ...] = ()
    row_values: tuple[jax.Array, ...] = ()
    column_values: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """What a transform may do along the rows of the block at hand.

    A row value is one number per row: a scalar where a block is one row, else a vector.

    Attributes:
      totals: sums of several blocks in one exchange, as row values.
      maximum: the largest value of each row, as a row value.
      spread: broadcasts a row value against the block.
      columns: the column of every element of the block, int32.
    """

    totals: Callable[..., tuple[jax.Array, ...]]
    maximum: Callable[[jax.Array], jax.Array]
    spread: Callable[[jax.Array], jax.Array]
    columns: Callable[[], jax.Array]


# (block of each stream, each parameter, each row input, row) -> what to store. Blocks and
# parameters are register arrays of one shape. Columns past the end of a row hold anything.
Transform = Callable[
    [list[jax.Array], list[jax.Array], list[jax.Array], Row],
    Result,
]


class Rows(NamedTuple):
    """What `run_rows` returns, as tuples in the order of `Result`."""

    outputs: tuple[jax.Array, ...]
    row_values: tuple[jax.Array, ...]
    column_sums: tuple[jax.Array, ...]


def run_rows(
    transform: Transform,
    plan: Plan,
    streams: Sequence[jax.Array],
    parameters: Sequence[jax.Array] = (),
    row_inputs: Sequence[jax.Array] = (),
    *,
    name: str,
    exchanges: Sequence[int] = (),
    outputs: int = 1,
    row_values: int = 0,
    column_sums: int = 0,
    cost: pl.CostEstimate | None = None,
    interpret: Any = None,
) -> Rows:
    """Runs `transform` over every row of `streams`.

    Args:
      transform: the operation on one block.
      plan: where everything goes.
      streams: [rows, width] arrays, each read once; rows and width of the plan. Those that outputs
        take the place of have one dtype.
      parameters: [width] vectors, read once per CTA and kept in registers where they fit.
      row_inputs: [rows] vectors.
      name: of the kernel, as profilers show it.
      exchanges: how many values each reduction of `transform` along rows has, in order.
      outputs: how many outputs it returns; they are [rows, width] in the dtype of the streams.
      row_values: how many row values it returns; they are f32 [rows].
      column_sums: how many column values it returns; their sums over the rows are f32 [width]. The
        kernel writes one partial sum per CTA, which a small reduction after it adds up, always in
        the same order.
      cost: what the kernel costs, for XLA's scheduler.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    simulated = bool(interpret)
    p = plan
    rows, dtype = p.rows, streams[0].dtype
    walkers = p.ctas // p.parts  # CTAs, or clusters of them, that share the blocks
    block_shape, layout, row_axis = _block(p)
    stored_rows = p.blocks * p.rows_per_block if p.cut is Cut.LANE else rows
    # Parameters stay in registers from row to row where there is room for them beside the sums
    # along columns; else they are read again for each row.
    registers = min(MOST_REGISTERS, REGISTERS_PER_SM // (LANES * p.warpgroups)) - REGISTERS_TO_WORK
    held = len(parameters) + 2 * column_sums + (len(streams) if p.cut is Cut.LANE else 0)
    reload = p.elements_per_lane * held > registers

    def kernel(*refs):
        queue = list(refs)

        def take(count):
            return [queue.pop(0) for _ in range(count)]

        ins, params, per_row = take(len(streams)), take(len(parameters)), take(len(row_inputs))
        outs, values_out, sums_out = take(outputs), take(row_values), take(column_sums)
        exchanged = take(1 if simulated and p.cluster else 0)
        rings = take(len(streams))
        (full,) = take(1)
        places = exchange.Places(p, exchanged, queue, simulated=simulated)

        group = lax.axis_index("warpgroup")
        if p.cluster:
            walker, part = lax.axis_index("walker"), lax.axis_index("part")
        else:
            cta = lax.axis_index("walker")
            walker, part = lax.div(cta, jnp.int32(p.parts)), _rem(cta, p.parts)
        count = (p.blocks - 1 - walker) // walkers + 1
        copies = Copies(p, part, group, simulated)
        first_column = (part * p.warpgroups + group) * p.span

        def nominal_start(k):
            return (walker + k * walkers) * p.rows_per_block

        def block_start(k):
            """The first row of this CTA's block k.

            The last block is moved up to end with the last row, so that no copy leaves the array:
            rows in two blocks are computed twice and written twice with the same bits. Only rows
            of lanes, whose copies know where the array ends, stay where they are.
            """
            last = stored_rows - p.rows_per_block if p.cut is Cut.LANE else rows - p.rows_per_block
            return jnp.minimum(nominal_start(k), last)

        def arrival(k):
            return full.at[_rem(k, p.stages) * p.warpgroups + group]

        def load(ref):
            if p.width == 1:  # layouts have no axis of one: a second column is padding
                return spread(plgpu.load(ref, layout=layout.reduce(1), optimized=False))
            # The simulation cannot reshape references.
            if simulated:
                return ref[...].reshape(block_shape)
            if ref.shape != block_shape:
                ref = ref.reshape(block_shape)
            return plgpu.load(ref, layout=layout, optimized=False)

        def save(ref, block):
            if p.width == 1:
                first = jnp.where(iota(1) == 0, block.astype(jnp.float32), jnp.float32(0))
                _store(ref, jnp.sum(first, axis=1).astype(dtype))
            elif simulated:
                ref[...] = block.reshape(ref.shape)
            else:
                if ref.shape != block_shape:
                    ref = ref.reshape(block_shape)
                _store(ref, plgpu.layout_cast(block, layout))

        def parameter(ref):
            if p.cut is not Cut.CTA:  # every warp or lane has whole rows: the same in each
                row = plgpu.load(ref, layout=layout.reduce(row_axis), optimized=False)
                axes = tuple(axis for axis in range(len(block_shape)) if axis != row_axis)
                return lax.broadcast_in_dim(row, block_shape, axes)
            mine = pl.ds(group * p.groups, p.groups)
            return plgpu.load(ref.at[part, mine], layout=layout, optimized=False)

        def row_input(ref, k):
            if p.cut is Cut.CTA:
                return ref[block_start(k)]
            across = tuple(axis for axis in range(len(block_shape)) if axis != row_axis)
            of_rows = functools.reduce(lambda found, axis: found.reduce(axis), across[::-1], layout)
            block = ref.at[pl.ds(block_start(k), p.rows_per_block)]
            return plgpu.load(block, layout=of_rows, optimized=False)

        def fetch(k):
            for source, ring in zip(ins, rings, strict=True):
                copies.start_in(source, block_start(k), ring, _rem(k, p.stages), arrival(k))

        def iota(axis):
            return plgpu.broadcasted_iota(jnp.int32, block_shape, axis, layout=layout)

        def columns():
            if p.cut is Cut.LANE:
                return iota(1)
            axes = range(len(block_shape))[-3:] if p.cut is Cut.CTA else (1, 2)
            strides = (WARPS * p.piece, p.piece, 1)[-len(axes) :]
            return first_column + sum(iota(a) * s for a, s in zip(axes, strides, strict=True))

        def inside(values, otherwise):
            if p.padded == p.width:
                return values
            return jnp.where(columns() < p.width, values, jnp.asarray(otherwise, values.dtype))

        def spread(value):
            if p.cut is Cut.CTA:
                return value
            return lax.broadcast_in_dim(value, block_shape, (row_axis,))

        def row_operations(k) -> Row:
            use = places.of_block(k, group, exchanges)

            def reduce(along, combine, otherwise, blocks):
                partials = []
                for block in blocks:
                    partial = along(inside(block, otherwise), axis=-1 if p.cut is Cut.LANE else 0)
                    if p.cut is Cut.CTA:
                        partial = along(partial, axis=1)
                    partials.append(partial)
                if p.cut is Cut.CTA:
                    return use(combine, partials)
                return tuple(partials)

            def along_warp(along):
                """Along the pieces and lanes of one warp's rows."""
                if p.cut is not Cut.WARP:
                    return along
                return lambda block, axis: along(along(block, axis=1), axis=1)

            return Row(
                totals=lambda *blocks: reduce(along_warp(jnp.sum), jnp.add, 0, blocks),
                maximum=lambda block: reduce(along_warp(jnp.max), jnp.maximum, -jnp.inf, [block])[
                    0
                ],
                spread=spread,
                columns=columns,
            )

        def store_row_value(ref, k, value):
            if p.cut is not Cut.CTA:
                _store(ref.at[pl.ds(block_start(k), p.rows_per_block)], value)
                return

            @pl.when((group == 0) & (part == 0))
            def _():
                ref[block_start(k)] = value

        def only_once(block, k):
            """Zero in the rows that another block has too."""
            if p.rows_per_block == 1 or rows % p.rows_per_block == 0:
                return block
            row = block_start(k) + iota(row_axis)
            mine = (row >= nominal_start(k)) & (row < rows)
            return jnp.where(mine, block, jnp.float32(0))

        def step(k, carry):
            ahead, sums = carry

            def refill():
                if outputs:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                else:
                    plgpu.commit_smem()  # every warp has read the slot

                @pl.when(k + p.stages - 1 < count)
                def _():
                    fetch(k + p.stages - 1)

            # Numbers of the next block, while this one is on its way.
            next_ahead = [row_input(ref, k + 1) for ref in per_row]
            if p.stages == 1:  # one slot: its last block must leave before the next can come
                refill()
            plgpu.barrier_wait(arrival(k))
            slot = _rem(k, p.stages)
            blocks = [load(copies.in_ring(ring, slot, block_start(k))) for ring in rings]
            given = [parameter(ref) for ref in params] if reload else kept
            result = transform(blocks, given, list(ahead), row_operations(k))
            if p.stages > 1:
                refill()
            for ring, output in zip(rings, result.outputs, strict=False):
                save(copies.in_ring(ring, slot, block_start(k)), output.astype(dtype))
            if outputs:
                plgpu.commit_smem()
            for ring, out in zip(rings, outs, strict=False):
                copies.start_out(ring, slot, out, block_start(k))
            for ref, value in zip(values_out, result.row_values, strict=True):
                store_row_value(ref, k, value)
            added = [
                total + only_once(block, k)
                for total, block in zip(sums, result.column_values, strict=True)
            ]
            return next_ahead, added

        if p.cut is Cut.LANE and not simulated:
            for ring in rings:
                _as_it_is(ring)
        for k in range(p.stages - 1):

            @pl.when(k < count)
            def _(k=k):
                fetch(jnp.int32(k))

        kept = [] if reload else [parameter(ref) for ref in params]
        nothing = [plgpu.layout_cast(jnp.zeros(block_shape, jnp.float32), layout) for _ in sums_out]
        ahead = [row_input(ref, jnp.int32(0)) for ref in per_row]
        _, sums = lax.fori_loop(jnp.int32(0), count, step, (ahead, nothing))
        for ref, total in zip(sums_out, sums, strict=True):
            if p.cut is Cut.CTA:
                mine = pl.ds(group * p.groups, p.groups)
                _store(ref.at[walker, part, mine], total)
            else:
                _store(ref.at[walker], total)
        plgpu.wait_smem_to_gmem(0)
        places.leave()

    whole = slot_shape(p)
    out_type = [jax.ShapeDtypeStruct(row_view(p, rows), dtype)] * outputs
    out_type += [jax.ShapeDtypeStruct((stored_rows,), jnp.float32)] * row_values
    if p.cut is Cut.CTA:
        per_cta: tuple[int, ...] = (p.parts, p.warpgroups * p.groups, WARPS, p.piece)
    else:
        per_cta = block_shape
    out_type += [jax.ShapeDtypeStruct((walkers, *per_cta), jnp.float32)] * column_sums
    if simulated and p.cluster:
        out_type.append(exchange.simulated_buffer(p, walkers, exchanges))
    # JAX 0.11 takes no cost estimate here.
    takes_cost = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
    extra: dict[str, Any] = {"cost_estimate": cost} if takes_cost else {}
    if p.cluster:
        extra |= {"cluster": (p.parts,), "cluster_names": ("part",)}
    found = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(walkers if p.cluster else p.ctas,),
        grid_names=("walker",),
        num_threads=p.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            *(plgpu.SMEM((p.stages, *whole), stream.dtype) for stream in streams),
            plgpu.Barrier(
                num_arrivals=sum(arrivals(p, stream.dtype) for stream in streams),
                num_barriers=p.stages * p.warpgroups,
            ),
            *exchange.scratch(p, exchanges, simulated=simulated),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=interpret,
        **extra,
    )(
        *(stream.reshape(row_view(p, rows)) for stream in streams),
        *(_parameter_view(p, parameter) for parameter in parameters),
        *(jnp.pad(values, (0, stored_rows - rows)) for values in row_inputs),
    )
    queue = list(found)
    arrays = tuple(queue.pop(0).reshape(rows, p.width) for _ in range(outputs))
    numbers = tuple(queue.pop(0)[:rows] for _ in range(row_values))
    sums = tuple(_column_sum(p, queue.pop(0)) for _ in range(column_sums))
    return Rows(arrays, numbers, sums)


def _block(p: Plan) -> tuple[tuple[int, ...], Any, int]:
    """Shape and layout of a block in registers, and its axis of rows.

    The axis of four is the one that is dealt to the four warps of a warpgroup: rows of the block,
    or pieces of the row. Every reduction ends along pieces and lanes of one warp, or in a lane.
    """
    if p.cut is Cut.LANE:
        tiling: tuple[tuple[int, ...], ...] = ((LANES, 1), (WARP, 1))
        shape: tuple[int, ...] = (LANES, p.span)
        warp_dim = -4
    elif p.cut is Cut.WARP:
        tiling = ((WARPS, 1, p.piece), (p.vector,))
        shape = (p.rows_per_block, p.width // p.piece, p.piece)
        warp_dim = -4
    else:
        tiling = ((WARPS, p.piece), (2 * p.vector,), (p.vector,))
        if not p.late:
            tiling = ((WARPS, p.piece), (p.vector,))
        shape = (p.groups, WARPS, p.piece)
        warp_dim = -4 if p.late else -3
    # Lanes as 16 x 2 are the lanes in order, but keep Mosaic from moving matrices, four lanes of
    # 4 bytes at a time, which must start at multiples of 16 bytes.
    lane_dims = (-3, -2) if p.late else (-2,)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=(warp_dim,), lane_dims=lane_dims, vector_dim=-1
    )
    return shape, layout, 0


def _parameter_view(p: Plan, parameter: jax.Array) -> jax.Array:
    if p.padded != p.width:
        parameter = jnp.pad(parameter, (0, p.padded - p.width))
    if p.cut is Cut.LANE:
        return parameter
    if p.cut is Cut.WARP:
        return parameter.reshape(p.width // p.piece, p.piece)
    return parameter.reshape(p.parts, p.warpgroups * p.groups, WARPS, p.piece)


def _column_sum(p: Plan, partials: jax.Array) -> jax.Array:
    rows_of_block = () if p.cut is Cut.CTA else (1,)
    count = partials.shape[0]
    if count > WARP:
        # In two steps: XLA sums few columns with few CTAs.
        first = max(n for n in range(1, WARP + 1) if count % n == 0)
        partials = partials.reshape(first, count // first, *partials.shape[1:])
        partials = lax.optimization_barrier(partials.sum((1, *(a + 1 for a in rows_of_block))))
        rows_of_block = ()
    return partials.sum((0, *rows_of_block)).reshape(p.padded)[: p.width]


def _rem(index, count: int):
    """index % count for index >= 0, in int32 also where x64 makes Python's integers 64 bits."""
    return lax.rem(index, jnp.int32(count))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def _as_it_is(context, ref):
    """Keeps Mosaic from looking for a tiling of a buffer that registers are only loaded from.

    It would look for one of [128, width], and come upon none for widths of 16 or 32 bytes.
    """
    del context, ref


def _store(ref, values):
    """Stores registers as they are.

    JAX 0.12 refuses stores that it finds narrow unless told that they are meant; 0.11 has no way
    to tell.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
