"""Rows that lie back to back in shared memory, from there to registers and back.

Rows start anywhere: a warp loads each in vectors that begin at the last multiple of `vector`
elements before it. Only at its ends can a vector hold elements of the rows beside; those are stored
element by element. The places of a warp's rows differ by numbers that are known when the kernel is
compiled, which loads and stores have room for: a row takes no address of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.inline import GREATER_EQUAL, LESS, i32, signedness
from pallas_kernels.plan import WARP, WARPS, Plan


def load(p: Plan, ref: Any, turn: Any, layout: Any) -> jax.Array:
    """The rows of a turn, [rows, pieces, piece]; beside them, elements of any row."""
    shape = (WARPS, p.groups, p.piece)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT()),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def run(context, ref, turn):
        del context
        tiled = layout.to_mgpu()
        places = _Places(p, ref, turn)
        found = np.empty(tiled.registers_shape(shape), object)
        for register in np.ndindex(found.shape):
            pointer = places.pointer(register[1], clamped=True)
            found[register] = llvm.load(ir.VectorType.get((p.vector,), places.element), pointer)
        signed = signedness(places.element)
        return mgpu.FragmentedArray(_registers=found, _layout=tiled, _is_signed=signed)

    return run(ref, jnp.int32(turn))


def save(p: Plan, ref: Any, turn: Any, block: jax.Array, layout: Any) -> None:
    """Stores the rows of a turn, and nothing beside them."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(), layout))
    def run(context, ref, turn, block):
        del context
        places = _Places(p, ref, turn)
        for register in np.ndindex(block.registers.shape):
            values, piece = block.registers[register], register[1]
            if places.inside(piece):
                llvm.store(values, places.pointer(piece))
                continue
            for number in range(p.vector):
                value = vector.extract(values, [], ir.DenseI64ArrayAttr.get([number]))
                pointer = places.pointer(piece, number)
                with utils.when(places.in_row(piece, number)):
                    llvm.store(value, pointer)

    run(ref, jnp.int32(turn), plgpu.layout_cast(block, layout))


def simulated_load(p: Plan, ref: Any, turn: Any) -> jax.Array:
    """As `load`, with what must not matter beside the rows."""
    rows = ref[_of_turn(p, turn)].reshape(WARPS, p.width)
    beside = np.nan if jnp.issubdtype(ref.dtype, jnp.floating) else 1
    ends = [(late, p.span - late - p.width) for late in map(p.late_in_warp, range(WARPS))]
    padded = [
        jnp.pad(row, end, constant_values=beside) for row, end in zip(rows, ends, strict=True)
    ]
    return jnp.stack(padded).reshape(WARPS, p.groups, p.piece)


def simulated_save(p: Plan, ref: Any, turn: Any, block: jax.Array) -> None:
    """As `save`."""
    rows = block.reshape(WARPS, p.span)
    lates = map(p.late_in_warp, range(WARPS))
    inside = [row[late : late + p.width] for row, late in zip(rows, lates, strict=True)]
    ref[_of_turn(p, turn)] = jnp.concatenate(inside)


def _of_turn(p: Plan, turn: Any) -> Any:
    return pl.ds(turn * WARPS * p.width, WARPS * p.width)


class _Places:
    """Where a thread's vectors are in a slot of the ring.

    Attributes:
      element: the type of an element.
    """

    def __init__(self, p: Plan, ref: Any, turn: Any) -> None:
        self._plan = p
        self.element = ir.MemRefType(ref.type).element_type
        thread = utils.thread_idx()
        warp = arith.remui(arith.divui(thread, i32(WARP)), i32(WARPS))
        row = arith.muli(warp, i32(p.width))
        self._late = arith.andi(row, i32(p.vector - 1))
        self._window = arith.subi(row, self._late)
        self._column = arith.muli(arith.remui(thread, i32(WARP)), i32(p.vector))
        before = arith.muli(turn.registers.item(), i32(WARPS * p.width))
        self._slot = utils.getelementptr(utils.memref_ptr(ref), [before], self.element)
        self._first = self._at(arith.addi(self._window, self._column))

    def inside(self, piece: int) -> bool:
        """Whether a piece is inside of every row."""
        p = self._plan
        return p.most_late_in_warp <= piece * p.piece and (piece + 1) * p.piece <= p.width

    def in_row(self, piece: int, number: int) -> Any:
        """Whether an element of this thread's vector is in its row."""
        place = arith.addi(self._column, i32(piece * self._plan.piece + number))
        end = arith.addi(self._late, i32(self._plan.width))
        return arith.andi(
            arith.cmpi(GREATER_EQUAL, place, self._late), arith.cmpi(LESS, place, end)
        )

    def pointer(self, piece: int, number: int = 0, *, clamped: bool = False) -> Any:
        """To an element of this thread's vector; if `clamped`, at most to the row's last vector."""
        p = self._plan
        of_piece = piece * p.piece
        if not clamped or (piece + 1) * p.piece <= p.width:
            return self._at(of_piece + number, self._first)
        end = arith.addi(self._late, i32(p.width - 1))
        last = arith.andi(end, i32(-p.vector))
        place = arith.minsi(arith.addi(self._column, i32(of_piece)), last)
        return self._at(arith.addi(self._window, place))

    def _at(self, index: Any, base: Any = None) -> Any:
        base = self._slot if base is None else base
        return utils.getelementptr(base, [index], self.element)
