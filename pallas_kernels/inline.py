"""What Pallas has no words for, as MLIR in the middle of a kernel; never simulated.

Register arrays are Mosaic's `FragmentedArray`s here: for every thread of a warpgroup, an array of
vector registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector

GREATER_EQUAL, LESS = arith.CmpIPredicate.sge, arith.CmpIPredicate.slt
WARP = 32
LANES = 128  # of a warpgroup
LOG2E = 1.4426950408889634


def gather(ref: Any, places: jax.Array, layout: Any) -> jax.Array:
    """Elements of a contiguous reference by their places in memory, each loaded by itself.

    Places (int32) and result are register arrays of `layout`; integers are signed.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(places.shape, ref.dtype, layout=layout),
    )
    def run(context, ref, places):
        del context
        ref = _flat(ref)
        return places.foreach(
            lambda place, _: memref.load(ref, [_index(place)]),
            create_array=True,
            is_signed=signedness(ir.MemRefType(ref.type).element_type),
        )

    return run(ref, places)


def reduce(
    block: jax.Array, operation: str, axes: Sequence[int], layout: Any, reduced: Any
) -> jax.Array:
    """A block of `layout`, reduced inside warps to one of layout `reduced`, in one step.

    `jnp.sum` takes a step for each axis, and in each adds zero to every element.
    """
    shape = tuple(size for axis, size in enumerate(block.shape) if axis not in axes)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(shape, block.dtype, layout=reduced),
    )
    def run(context, block):
        del context
        return block.reduce(operation, axes)

    return run(plgpu.layout_cast(block, layout))


def scatter(ref: Any, places: jax.Array, values: jax.Array, inside: jax.Array, layout: Any) -> None:
    """Stores values at their places in the memory of a contiguous reference, those `inside`.

    Values, places (int32) and `inside` (boolean) are register arrays of `layout`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))
    def run(context, ref, places, values, inside):
        del context
        ref = _flat(ref)
        for register in np.ndindex(places.registers.shape):
            place, value, stored = (
                vector.extract(a.registers[register], [], ir.DenseI64ArrayAttr.get([0]))
                for a in (places, values, inside)
            )
            with utils.when(stored):
                memref.store(value, ref, [_index(place)])

    run(ref, places, values, inside)


def leave(
    ref: Any, base: jax.Array, strides: tuple[int, int], values: Sequence[jax.Array], layout: Any
) -> None:
    """Stores register arrays of `layout`, one-dimensional, in a contiguous reference.

    Element i of the v-th goes to the place base + v * strides[0] + i * strides[1].
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(), *[layout] * len(values))
    )
    def run(context, ref, base, *values):
        del context
        ref = _flat(ref)
        base = base.registers.item()
        for number, array in enumerate(values):

            def store(value, index, number=number):
                place = arith.muli(_as_i32(index[0]), i32(strides[1]))
                place = arith.addi(place, arith.addi(base, i32(number * strides[0])))
                memref.store(value, ref, [_index(place)])

            array.foreach(store)

    run(ref, base, *(plgpu.layout_cast(array, layout) for array in values))


def combine(
    ref: Any, bases: Sequence[jax.Array], parts: int, exponentials: bool
) -> tuple[jax.Array, ...]:
    """Values of many parts as those of one; see `exchange.combined`.

    A lane takes a part, and lanes exchange theirs: fewer instructions than if each took all parts.

    Args:
      ref: contiguous.
      bases: of each value, where its parts begin.
      parts: how many there are; at most 32.
      exponentials: which way to combine them.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.float32), layout=plgpu.Layout.WG_SPLAT())
    lanes = 1 << (parts - 1).bit_length()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT()] * len(bases)),
        return_type=(scalar,) * len(bases),
    )
    def run(context, ref, *bases):
        del context
        ref = _flat(ref)
        lane = arith.remui(utils.thread_idx(), i32(lanes))
        mine = arith.minui(lane, i32(parts - 1))
        values = [
            _splat(memref.load(ref, [_index(arith.addi(base.registers.item(), mine))]))
            for base in bases
        ]

        def across(value, step):
            distance = lanes // 2
            while distance:
                value = step(value, _splat(utils.shfl_bfly(value.registers.item(), distance)))
                distance //= 2
            return value

        def total(value):
            if lanes > parts:
                inside = arith.cmpi(LESS, lane, i32(parts))
                zero = utils.c(0.0, value.registers.item().type)
                value = _splat(arith.select(inside, value.registers.item(), zero))
            return across(value, lambda one, other: one + other)

        if not exponentials:
            return tuple(map(total, values))
        maxima, totals = values
        maximum = across(maxima, lambda one, other: one.max(other))
        return maximum, total(totals * _exponential(maxima - maximum))

    return tuple(run(ref, *map(jnp.int32, bases)))


def combine_rows(
    ref: Any, slot: jax.Array, parts: int, exponentials: bool, layout: Any, *, of_ctas: bool
) -> tuple[jax.Array, ...]:
    """The same for a row in each lane.

    Args:
      ref: [values, parts, slots]; or [values, slots] in each CTA of the cluster.
      slot: int32, a register array of `layout`.
      parts: how many there are.
      exponentials: which way to combine them.
      layout: of the results.
      of_ctas: whether a part is what a CTA has.
    """
    values, slots = ref.shape[0], ref.shape[-1]
    of_lane = plgpu.ShapeDtypeStruct(slot.shape, jnp.dtype(jnp.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=(of_lane,) * values)
    def run(context, ref, slot):
        del context
        here = _flat(ref)

        def load(value, part):
            there, row = here, value * parts + part
            if of_ctas:
                there, row = utils.get_cluster_ref(here, gpu.Dimension.x, _index(i32(part))), value
            return slot.foreach(
                lambda place, _: memref.load(there, [_index(arith.addi(place, i32(row * slots)))]),
                create_array=True,
            )

        def total(arrays):
            return functools.reduce(lambda one, other: one + other, arrays)

        columns = [[load(value, part) for part in range(parts)] for value in range(values)]
        if not exponentials:
            return tuple(map(total, columns))
        maxima, totals = columns
        maximum = functools.reduce(lambda one, other: one.max(other), maxima)
        return maximum, total([
            of_part * _exponential(part - maximum)
            for part, of_part in zip(maxima, totals, strict=True)
        ])  # fmt: skip

    return tuple(run(ref, slot))


def load_own(ref: Any, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """What `save_own` left."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def run(context, ref):
        del context
        ref, tiled = _flat(ref), layout.to_mgpu()
        element = ir.MemRefType(ref.type).element_type
        registers = np.empty(tiled.registers_shape(shape), object)
        for number, register in enumerate(np.ndindex(registers.shape)):
            registers[register] = utils.vector_concat(
                [
                    vector.load(ir.VectorType.get((size,), element), ref, [place])
                    for _, place, size in _own_places(number, tiled.vector_length)
                ]
            )
        return fa.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return run(ref)


def save_own(ref: Any, block: jax.Array, layout: Any) -> None:
    """Keeps every thread's registers of a block for itself, without conflicts of banks."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def run(context, ref, block):
        del context
        ref = _flat(ref)
        for number, register in enumerate(block.registers.flat):
            (length,) = ir.VectorType(register.type).shape
            for at, place, size in _own_places(number, length):
                part = utils.vector_slice(register, slice(at, at + size))
                vector.store(part, ref, [place])

    run(ref, plgpu.layout_cast(block, layout))


def _own_places(number: int, length: int) -> Iterator[tuple[int, Any, int]]:
    """Parts of a register, of 16 bytes at most: where each begins in it, its place, its length."""
    size = min(4, length)
    lane = arith.remui(utils.thread_idx(), i32(LANES))
    for at in range(0, length, size):
        first = (number * length + at) * LANES
        yield at, _index(arith.addi(arith.muli(lane, i32(size)), i32(first))), size


def spread(values: jax.Array, layout: Any, shape: tuple[int, ...], spread_layout: Any) -> jax.Array:
    """One value of each warp, in every place that the warp has of a block."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(shape, values.dtype, layout=spread_layout),
    )
    def run(context, values):
        del context
        value = vector.extract(values.registers.item(), [], ir.DenseI64ArrayAttr.get([0]))
        tiled = spread_layout.to_mgpu()
        block = ir.VectorType.get((tiled.vector_length,), value.type)
        registers = np.full(tiled.registers_shape(shape), vector.broadcast(block, value), object)
        return type(values)(_registers=registers, _layout=tiled, _is_signed=values.is_signed)

    return run(plgpu.layout_cast(values, layout))


def add_across_lanes(block: jax.Array, distance: int, layout: Any) -> jax.Array:
    """A block of one vector per lane, with the sum of those of all lanes of its warp that are a
    multiple of `distance` away, a power of two, in the place of each.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(block.shape, block.dtype, layout=layout),
    )
    def run(context, block):
        del context
        total, step = block.registers.item(), distance
        while step < WARP:
            total = arith.addf(total, utils.shfl_bfly(total, step))
            step *= 2
        registers = np.full_like(block.registers, total)
        return type(block)(_registers=registers, _layout=block.layout, _is_signed=block.is_signed)

    return run(block)


def only(
    block: jax.Array,
    first: jax.Array,
    count: int,
    otherwise: float,
    layout: Any,
    always: range,
    rows: Any = None,
) -> jax.Array:
    """The block, with `otherwise` outside of the `count` places from `first` on.

    A place is an index into the flattened block, or, where `first` is an array, the layout of which
    is then `rows`, into the flattened row; those in `always` are known to be inside. One logical
    operation on 4 bytes does for one element or two, where `jnp.where` takes an instruction or more
    for each.
    """
    dtype = jnp.dtype(block.dtype)
    strides = [math.prod(block.shape[axis + 1 :]) for axis in range(len(block.shape))]
    pieces = 0 if rows is None else 1  # the axis that registers go along
    strides[:pieces] = [0] * pieces

    @plgpu.inline_mgpu(
        arg_types=(layout, rows or plgpu.Layout.WG_SPLAT()),
        return_type=plgpu.ShapeDtypeStruct(block.shape, dtype, layout=layout),
    )
    def run(context, block, first):
        del context
        first = first.registers.item()
        if rows is not None:
            first = vector.extract(first, [], ir.DenseI64ArrayAttr.get([0]))
        end = arith.addi(first, i32(count))
        chosen = block.registers.copy()
        indices = block.layout.thread_idxs(block.shape)
        for register, index in zip(np.ndindex(chosen.shape), indices, strict=True):
            begin = register[pieces] * strides[pieces]
            if begin in always and begin + strides[pieces] - 1 in always:
                continue
            place = i32(0)
            for axis, stride in zip(index, strides, strict=True):
                place = arith.addi(place, arith.muli(_as_i32(axis), i32(stride)))
            (length,) = ir.VectorType(chosen[register].type).shape
            size = min(length, 4 // dtype.itemsize)
            width = 8 * dtype.itemsize
            word = ir.IntegerType.get_signless(size * width)
            bits = int.from_bytes(size * np.asarray(otherwise, dtype).tobytes(), "little")
            words = utils.bitcast(chosen[register], ir.VectorType.get((length // size,), word))
            for number in range(length // size):
                mask = _bits(0, word)
                for part in range(size):
                    at = arith.addi(place, i32(number * size + part))
                    inside = arith.andi(
                        arith.cmpi(GREATER_EQUAL, at, first), arith.cmpi(LESS, at, end)
                    )
                    ones = _bits((2**width - 1) << (width * part), word)
                    mask = arith.ori(mask, arith.select(inside, ones, _bits(0, word)))
                at_word = ir.DenseI64ArrayAttr.get([number])
                kept = arith.andi(vector.extract(words, [], at_word), mask)
                others = arith.andi(arith.xori(mask, _bits(-1, word)), _bits(bits, word))
                words = vector.insert(arith.ori(kept, others), words, [], at_word)
            chosen[register] = utils.bitcast(words, chosen[register].type)
        return type(block)(_registers=chosen, _layout=block.layout, _is_signed=block.is_signed)

    return run(plgpu.layout_cast(block, layout), jnp.asarray(first, jnp.int32))


def store_ends(
    ring: Any,
    out: Any,
    in_ring: Any,
    in_out: Any,
    first: Any,
    end: Any,
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Stores the places of `ranges` that are from `first` to before `end`, one to a lane.

    `in_ring` and `in_out` are where the places count from in the flattened references.
    """
    numbers = [jnp.int32(number) for number in (in_ring, in_out, first, end)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT()] * len(numbers))
    )
    def run(context, ring, out, *numbers):
        del context
        in_ring, in_out, first, end = (number.registers.item() for number in numbers)
        lane = arith.remui(utils.thread_idx(), i32(LANES))
        place, lanes = lane, 0
        for start, stop in ranges:
            beyond = arith.cmpi(GREATER_EQUAL, lane, i32(lanes))
            place = arith.select(beyond, arith.addi(lane, i32(start - lanes)), place)
            lanes += stop - start
        inside = arith.andi(arith.cmpi(GREATER_EQUAL, place, first), arith.cmpi(LESS, place, end))
        with utils.when(arith.andi(inside, arith.cmpi(LESS, lane, i32(lanes)))):
            value = memref.load(_flat(ring), [_index(arith.addi(in_ring, place))])
            memref.store(value, out, [_index(arith.addi(in_out, place))])

    run(ring, out, *numbers)


def copy_out_up_to_end(source: Any, out: Any, first: Any, size: int) -> None:
    """Copies `size` elements to `first` in a one-dimensional array, as many of them as it has.

    Mosaic takes a contiguous copy out for a plain one, which wants a multiple of 16 bytes up to the
    end of the array: the copy with a tensor map has to be asked for by its own name.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT()))
    def start(context, source, out, first):
        context.async_copy(
            src_ref=source,
            dst_ref=out,
            gmem_slice=(utils.DynamicSlice(_index(first.registers.item()), size),),
            swizzle=None,
            arrive=False,
            oob_mode=plgpu.OOBFillMode.ZEROS,
        )

    start(source, out, jnp.int32(first))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def as_it_is(context, ref):
    """Keeps Mosaic from looking for a tiling of a buffer that registers are only loaded from.

    It would look for one of [128, width], and come upon none for widths of 16 or 32 bytes.
    """
    del context, ref


@plgpu.inline_mgpu()
def warpgroup_barrier(context):
    """Waits for all warps of the warpgroup, with what they stored in shared memory."""
    del context
    utils.warpgroup_barrier()


def _splat(value: Any) -> Any:
    return fa.FragmentedArray.splat(value, ())


def _exponential(array: Any) -> Any:
    return (array * LOG2E).exp2(approx=True)


def _flat(ref: Any) -> Any:
    return utils.memref_reshape(ref, (math.prod(ir.MemRefType(ref.type).shape),))


def signedness(element: Any) -> bool | None:
    """What a register array of such elements says of it: integers here are signed."""
    return True if isinstance(element, ir.IntegerType) else None


def i32(value: int) -> Any:
    """A constant, by its 32 bits."""
    return _bits(value, ir.IntegerType.get_signless(32))


def _bits(value: int, word: Any) -> Any:
    wrapped = value - 2**word.width if value >= 2 ** (word.width - 1) else value
    return utils.c(wrapped, word)


def _as_i32(index: Any) -> Any:
    return arith.index_cast(ir.IntegerType.get_signless(32), index)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)
