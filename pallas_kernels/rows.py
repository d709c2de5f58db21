"""The ring that every row kernel runs in; see `plan` for the ways to cut rows.

A kernel is a `Transform`: it gets the registers of one block and returns what to store.
Everything about copies, slots and barriers is here and in `copies`, everything about the
operation is there.

Order inside a CTA, for its block number k: wait for the copy of k; load it into registers and
compute; write the results over k's own slots; wait until block k-1 has been read out of its slot
and start the copy of block k + stages - 1 into that slot; start the copies of the results out.

What keeps threads apart: a thread stores where it loaded from, in its own registers' layout. The
warps of a warpgroup meet when the last copy out has left (`refill`), before the next copy into its
slot; and when results are in their slot (`commit_smem`), before the copy out, or a look at what
others left there. Exchanges have barriers of their own. Rows back to back are loaded with elements
that other threads store, and which count for nothing: there, warps meet before and after that.
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

from pallas_kernels import exchange, inline, partial_sums
from pallas_kernels import row_values as row_values_of
from pallas_kernels.copies import Copies, arrivals, row_view, slot_shape
from pallas_kernels.plan import Cut, Plan
from pallas_kernels.registers import Registers, parameter_view, sums_shape
from pallas_kernels.row_values import Later, RowValues


class Result(NamedTuple):
    """What a transform makes of a block.

    Attributes:
      outputs: register arrays of the block, in any float dtype; at most as many as streams.
      row_values: row values that are stored.
      column_values: f32 register arrays of the block that are summed over the rows.
      partials: of row values that come `Later`, a value of each row or of each warp's part of it.
    """

    outputs: tuple[jax.Array, ...] = ()
    row_values: tuple[jax.Array, ...] = ()
    column_values: tuple[jax.Array, ...] = ()
    partials: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """What a transform may do along the rows of the block at hand.

    A row value is one number per row: a scalar where a block is one row, else a vector.

    Attributes:
      again: the blocks and parameters once more, so that nothing of them need be kept in registers
        over a reduction; read again where registers are scarce.
      only: a block with 0, or another value, beside the row: what is there counts in reductions.
      totals: sums of several blocks in one exchange, as row values.
      in_parts: whether warps share a row, so that a part of it is not the whole.
      part_total: the sum of a block along each row, or along what this warp has of it.
      part_maximum: the same of the largest value, f32.
      exchanged: row values of `exchange.Parts` and partial values of that kind, in one exchange.
      spread: broadcasts a row value against the block.
      spread_part: broadcasts a value of each row, or of each warp's part of it, likewise.
      columns: the column of every element of the block, int32.
    """

    again: Callable[[], tuple[list[jax.Array], list[jax.Array]]]
    only: Callable[..., jax.Array]
    totals: Callable[..., tuple[jax.Array, ...]]
    in_parts: bool
    part_total: Callable[[jax.Array], jax.Array]
    part_maximum: Callable[[jax.Array], jax.Array]
    exchanged: Callable[..., tuple[jax.Array, ...]]
    spread: Callable[[jax.Array], jax.Array]
    spread_part: Callable[[jax.Array], jax.Array]
    columns: Callable[[], jax.Array]


# (block of each stream, each parameter, each row input, row) -> what to store. Blocks and
# parameters are register arrays of one shape. Beside the row, they hold anything.
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
    later: Later | None = None,
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
      later: how row values come about, if not in `transform`, which then has no row inputs.
      outputs: how many outputs it returns; they are [rows, width] in the dtype of the streams.
      row_values: how many row values it returns; they are f32 [rows].
      column_sums: how many column values it returns; their sums over the rows are f32 [width]. The
        kernel writes one partial sum per CTA, which a small launch after it adds up, always in the
        same order.
      cost: what the kernel costs, for XLA's scheduler.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.

    Raises:
      ValueError: `interpret` is something else.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    if interpret and not isinstance(interpret, plgpu.InterpretGPUParams):
        raise ValueError(
            f"interpret must be None, True or plgpu.InterpretGPUParams(), not {interpret!r}."
        )
    simulated = bool(interpret)
    p = plan
    rows, dtype = p.rows, streams[0].dtype
    walkers = p.walkers
    stored_rows = p.blocks * p.rows_per_block if p.cut is Cut.LANE else rows
    # Parameters stay in registers from row to row where there is room for them beside the sums
    # along columns; else they are read again for each row.
    held = len(parameters) + 2 * (column_sums - p.shared_sums)
    held += len(streams) if p.cut is Cut.LANE else 0
    reload = p.elements_per_lane * held > p.registers
    # So do blocks from before a reduction until after it, two f32 of each stream.
    crowded = p.elements_per_lane * (held + 2 * len(streams)) > p.registers
    most_blocks = p.run or -(-p.blocks // walkers)

    def kernel(*refs):
        queue = list(refs)

        def take(count):
            return [queue.pop(0) for _ in range(count)]

        ins, params, per_row = take(len(streams)), take(len(parameters)), take(len(row_inputs))
        outs, values_out, sums_out = take(outputs), take(row_values), take(column_sums > 0)
        exchanged = take(1 if simulated and p.cluster else 0)
        rings, shared_sums = take(len(streams)), take(p.shared_sums)
        (full,) = take(1)
        left = take((3 if p.cluster and not simulated else 2) if later else 0)
        group = lax.axis_index("warpgroup")
        places = exchange.Places(
            p, exchanges, group, [] if later else exchanged, queue, simulated=simulated
        )

        if p.cluster:
            walker, part = lax.axis_index("walker"), lax.axis_index("part")
        else:
            cta = lax.axis_index("walker")
            walker, part = lax.div(cta, jnp.int32(p.parts)), _rem(cta, p.parts)
        if p.run:
            first, stride = walker * p.run, 1
            count = jnp.minimum(jnp.int32(p.run), p.blocks - first)
        else:
            first, stride = walker, walkers
            count = (p.blocks - 1 - walker) // walkers + 1
        copies = Copies(p, walker, part, group, simulated)

        def nominal_start(k):
            return (first + k * stride) * p.rows_per_block

        def block_start(k):
            """The first row of this CTA's block k.

            The last block is moved up to end with the last row, so that no copy leaves the array:
            rows in two blocks are computed twice and written twice with the same bits. Only blocks
            whose copies know where the array ends stay where they are.
            """
            end = p.blocks * p.rows_per_block if p.ends_short else rows
            return jnp.minimum(nominal_start(k), end - p.rows_per_block)

        def arrival(k):
            return full.at[_rem(k, p.stages) * p.warpgroups + group]

        def fetch(k):
            for source, ring in zip(ins, rings, strict=True):
                copies.start_in(source, block_start(k), ring, _rem(k, p.stages), arrival(k))

        def registers_of(k) -> Registers:
            late = copies.late(block_start(k))
            return Registers(p, part, group, late, simulated=simulated)

        def turn_start(k, turn):
            return block_start(k) + turn * p.rows_at_once

        def numbers_of(start, registers):
            return [registers.row_value(ref, start) for ref in per_row]

        def row_operations(k, registers, again) -> Row:
            of_block = places.of_block(k)
            return Row(
                again=again,
                only=registers.only,
                totals=functools.partial(registers.totals, of_block),
                in_parts=p.cut is Cut.CTA,
                part_total=registers.part_total,
                part_maximum=registers.part_maximum,
                exchanged=functools.partial(registers.exchanged, of_block),
                spread=registers.spread,
                spread_part=registers.spread_part,
                columns=registers.columns,
            )

        def in_shared(ref):
            """This warpgroup's columns of a sum."""
            return ref.at[pl.ds(group * p.span if p.warpgroups > 1 else 0, p.span)]

        def only_once(block, k, turn, registers):
            """Zero in the rows that another block has too, or that there are not."""
            row = turn_start(k, turn) + registers.rows()
            mine = (row >= nominal_start(k)) & (row < rows)
            return jnp.where(registers.spread(mine), block, jnp.float32(0))

        if later:
            finished = RowValues(
                p,
                later,
                places,
                left + exchanged,
                first_row=block_start,
                source=ins[0],
                row_inputs=per_row,
                outputs=values_out,
                simulated=simulated,
            )
            per_row = []

        def make_room(k):
            if later and most_blocks > finished.blocks:

                @pl.when((k > 0) & (_rem(k, finished.blocks) == 0))
                def _():
                    finished.finish(k - finished.blocks, k, more=True)

        def step(k, carry, *, partly=False):
            registers = registers_of(k)

            def refill():
                if outputs:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                else:
                    plgpu.commit_smem()  # every warp has read the slot

                @pl.when(k + p.stages - 1 < count)
                def _():
                    fetch(k + p.stages - 1)

            if p.turns == 1:
                # Numbers of the next block, while this one is on its way.
                ahead = numbers_of(block_start(k + 1), registers)
            if p.stages == 1:  # one slot: its last block must leave before the next can come
                refill()
            plgpu.barrier_wait(arrival(k))
            slot = _rem(k, p.stages)

            def load(turn):
                places = [copies.in_ring(ring, slot, block_start(k)) for ring in rings]
                blocks = [registers.load(place, turn) for place in places]
                return blocks, [registers.parameter(ref) for ref in params] if reload else kept

            make_room(k)

            def take_turn(turn, carry):
                """Stores a turn's outputs; returns all that the transform made, and sums."""
                numbers, sums = carry
                blocks, given = load(turn)
                again = functools.partial(load, turn) if crowded else lambda: (blocks, given)
                result = transform(
                    blocks, given, list(numbers), row_operations(k, registers, again)
                )
                adds = list(result.column_values)
                if partly:
                    adds = [only_once(block, k, turn, registers) for block in adds]
                sums = [total + block for total, block in zip(sums, adds, strict=False)]
                if p.mixes_lanes and not simulated:
                    inline.warpgroup_barrier()
                for ring, output in zip(rings, result.outputs, strict=False):
                    place = copies.in_ring(ring, slot, block_start(k))
                    registers.save(place, output.astype(dtype), turn)
                if p.mixes_lanes and p.turns > 1 and not simulated:
                    inline.warpgroup_barrier()
                for ref, block in zip(shared_sums, adds[len(sums) :], strict=True):
                    registers.save_own(in_shared(ref), registers.load_own(in_shared(ref)) + block)
                return result, sums

            def put_row_values(turn, result):
                if later:
                    finished.leave(k, turn, registers, result.partials)
                    return
                for ref, value in zip(values_out, result.row_values, strict=True):
                    registers.save_row_value(ref, turn_start(k, turn), value)

            def one_of_turns(turn, carry):
                last = turn == p.turns - 1
                following = jnp.where(last, block_start(k + 1), turn_start(k, turn + 1))
                ahead = numbers_of(following, registers)
                result, sums = take_turn(turn, carry)
                put_row_values(turn, result)
                return ahead, sums

            if p.turns > 1:
                # A loop: unrolled, registers of several turns would be in use at a time.
                carry = lax.fori_loop(jnp.int32(0), jnp.int32(p.turns), one_of_turns, carry)
            else:
                result, sums = take_turn(0, carry)
                carry = ahead, sums
            if p.stages > 1:
                refill()
            if outputs:
                plgpu.commit_smem()
            for ring, out in zip(rings, outs, strict=False):
                copies.start_out(ring, slot, out, block_start(k))
            if p.turns == 1:
                put_row_values(0, result)
            return carry

        if p.cut is Cut.LANE and not simulated:
            for ring in rings:
                inline.as_it_is(ring)
        for k in range(p.stages - 1):

            @pl.when(k < count)
            def _(k=k):
                fetch(jnp.int32(k))

        registers = registers_of(jnp.int32(0))
        kept = [] if reload else [registers.parameter(ref) for ref in params]
        for ref in shared_sums:
            registers.save_own(in_shared(ref), registers.zeros())
        nothing = [registers.zeros() for _ in range(column_sums - p.shared_sums)]
        ahead = numbers_of(block_start(jnp.int32(0)), registers)
        # Of the last block, rows may be in another too, or missing. To leave them out of sums takes
        # several instructions for each element: that block has a loop of its own.
        partly = column_sums > 0 and rows % p.rows_per_block > 0
        ends = nominal_start(count - 1) + p.rows_per_block
        whole = jnp.where(ends > rows, count - 1, count) if partly else count
        carry = lax.fori_loop(jnp.int32(0), whole, step, (ahead, nothing))
        if partly:
            carry = lax.fori_loop(whole, count, functools.partial(step, partly=True), carry)
        sums = carry[1]
        if later:
            finished.finish(count - 1 - _rem(count - 1, finished.blocks), count, more=False)
        totals = sums + [registers.load_own(in_shared(ref)) for ref in shared_sums]
        for number, total in enumerate(totals):
            registers.save_sums(sums_out[0].at[number, walker], total)
        plgpu.wait_smem_to_gmem(0)
        places.leave()

    whole = slot_shape(p)
    out_type = [jax.ShapeDtypeStruct(row_view(p, rows), dtype)] * outputs
    out_type += [jax.ShapeDtypeStruct((stored_rows,), jnp.float32)] * row_values
    if column_sums:
        shape = (column_sums, walkers, *sums_shape(p))
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if simulated and p.cluster and later:
        out_type.append(row_values_of.simulated_buffer(p, walkers, later))
    elif simulated and p.cluster:
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
            *(plgpu.SMEM((p.slot,), jnp.float32) for _ in range(p.shared_sums)),
            plgpu.Barrier(
                num_arrivals=sum(arrivals(p, stream.dtype) for stream in streams),
                num_barriers=p.stages * p.warpgroups,
            ),
            *(row_values_of.scratch(p, later, simulated=simulated) if later else ()),
            *exchange.scratch(p, exchanges, simulated=simulated),
        ),
        # Threads are kept apart as the module says. Mosaic's own barriers, around every store and
        # in front of every copy, would cost 1 to 5 % (BUILD_NOTES.md).
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=name,
        interpret=interpret,
        **extra,
    )(
        *(stream.reshape(row_view(p, rows)) for stream in streams),
        *(parameter_view(p, parameter) for parameter in parameters),
        *(jnp.pad(values, (0, stored_rows - rows)) for values in row_inputs),
    )
    queue = list(found)
    arrays = tuple(queue.pop(0).reshape(rows, p.width) for _ in range(outputs))
    numbers = tuple(queue.pop(0)[:rows] for _ in range(row_values))
    sums: tuple[jax.Array, ...] = ()
    if column_sums:
        sums = partial_sums.totals(p, queue.pop(0), name=name, interpret=interpret)
    return Rows(arrays, numbers, sums)


def _rem(index, count: int):
    """index % count for index >= 0, in int32 also where x64 makes Python's integers 64 bits."""
    return lax.rem(index, jnp.int32(count))
