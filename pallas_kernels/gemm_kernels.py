"""The matrix product of `gemm_plan`, with GELU and what goes with it in its epilogue."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gelu_math import gelu_erf, gelu_tanh
from pallas_kernels.gemm_plan import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    STORE_SLOTS,
    STORED,
    WARPGROUPS,
    GemmPlan,
    GemmTuning,
    gemm_plan,
)
from pallas_kernels.registers import store
from pallas_kernels.tiles import grouped, pieces, simulation


class Sums(enum.Enum):
    """What is summed along each row, in f32, before it is rounded."""

    NOTHING = "nothing"
    OF_PRODUCT = "of x @ weight (+ bias)"
    OF_GELU = "of its GELU"


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What happens to x @ weight before it is stored: y = gelu(x @ weight + bias).

    Attributes:
      bias: whether a bias is added.
      approximate: GELU's tanh form; False is the erf form.
      sums: what is summed along rows.
    """

    bias: bool = False
    approximate: bool = True
    sums: Sums = Sums.NOTHING

    @property
    def name(self) -> str:
        """Of the kernel, as profilers show it."""
        if self.sums is Sums.NOTHING:
            return "gemm_bias_gelu" if self.bias else "gemm_gelu"
        return "gemm_gelu_rowsum" if self.sums is Sums.OF_GELU else "gemm_shared"

    def cost(self, m: int, n: int, k: int, operands: Sequence[jax.Array]) -> pl.CostEstimate:
        """What the kernel costs, for XLA's scheduler."""
        y_bytes = m * n * operands[0].dtype.itemsize
        return pl.CostEstimate(
            flops=m * n * (2 * k + (12 if self.approximate else 24)),
            transcendentals=2 * m * n,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in operands) + y_bytes,
        )


def gemm_kernel(
    epilogue: Epilogue,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    tuning: GemmTuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """The launch behind the functions of `gemm`, for arguments that `unsupported` lets pass.

    Args:
      epilogue: what happens to the product.
      x: [M, K].
      weight: [K, N].
      bias: [N], where the epilogue has one.
      tuning: instead of the plan's own choice.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.

    Returns:
      y [M, N], and the f32 sums [M] where the epilogue has them.
    """
    (m, k), n, dtype = x.shape, weight.shape[1], x.dtype
    p = gemm_plan(m, n, k, dtype, tuning=tuning)
    out_type = [jax.ShapeDtypeStruct((m, n), dtype)]
    if epilogue.sums is not Sums.NOTHING:
        shape = (p.tiles_n, p.tiles_m * p.tile_m)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    operands = [x, weight]
    if bias is not None:
        # Unlike the copies, loads do not know where an array ends.
        operands.append(jnp.pad(bias, (0, p.tiles_n * p.tile_n - n)))
    emptied: dict[str, Any] = {
        "num_arrivals": 1 if p.turns else CONSUMERS,
        "num_barriers": p.stages,
    }
    extra: dict[str, Any] = {}
    if p.cluster > 1:
        extra = {"cluster": (p.cluster,), "cluster_names": ("part",)}
    # JAX 0.11 takes no cost estimate here.
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        extra["cost_estimate"] = epilogue.cost(m, n, k, operands)
    y, *partial_sums = plgpu.kernel(
        functools.partial(_kernel, p, epilogue),
        out_type=tuple(out_type),
        grid=(p.walkers,),
        grid_names=("walker",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((p.stages, p.tile_m, p.tile_k), dtype, transforms=pieces(dtype)),
            plgpu.SMEM((p.stages, p.tile_k, p.tile_n), dtype, transforms=pieces(dtype)),
            plgpu.SMEM((CONSUMERS, STORE_SLOTS, STORED, STORED), dtype, transforms=pieces(dtype)),
            plgpu.Barrier(
                num_arrivals=2,  # the copies of x and of weight
                num_barriers=p.stages * (CONSUMERS if p.turns else 1),
            ),
            plgpu.ClusterBarrier(collective_axes=("part",), **emptied)
            if p.cluster > 1
            else plgpu.Barrier(**emptied),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=epilogue.name,
        interpret=simulation(interpret),
        **extra,
    )(*operands)
    return y, *(partial.sum(0)[:m] for partial in partial_sums)


def _kernel(p: GemmPlan, epilogue: Epilogue, x, weight, *refs):
    bias, refs = (refs[0], refs[1:]) if epilogue.bias else (None, refs)
    y, *partial_sums, blocks_x, blocks_weight, staging, full, emptied = refs
    ring = Ring(p, blocks_x, blocks_weight, full, emptied)
    walk = Walk(p)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(p, walk, ring, x, weight)

    @pl.when(warpgroup != CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        end = Finish(p, epilogue, bias, y, partial_sums, staging.at[warpgroup])
        _consume(p, walk, ring, warpgroup, end)


class Walk:
    """The tiles of one CTA, in its order."""

    def __init__(self, plan: GemmPlan) -> None:
        self._plan = plan
        self._walker = lax.axis_index("walker")
        self._part = lax.axis_index("part") if plan.cluster > 1 else 0
        self.count = (plan.steps - 1 - self._walker) // plan.walkers + 1

    def tile(self, number: Any) -> tuple[Any, Any]:
        """Row and column, in tiles, of this CTA's tile number `number`."""
        p = self._plan
        step = self._walker + number * p.walkers
        row, column = grouped(step, p.steps_m, p.tiles_n, p.group)
        return row * p.cluster + self._part, column


@dataclasses.dataclass(frozen=True)
class Ring:
    """The slots, which the blocks of all tiles of a CTA go through one after another.

    Attributes:
      plan: the launch.
      x: [stages, tile_m, tile_k].
      weight: [stages, tile_k, tile_n].
      full: barriers of slots that copies have filled. Consumers in turns have their own, because
        who waits at a barrier must not miss a phase of it.
      emptied: barriers of slots that all their readers have read.
    """

    plan: GemmPlan
    x: Any
    weight: Any
    full: Any
    emptied: Any

    def slot(self, fill: Any) -> Any:
        """The slot of a fill."""
        return lax.rem(fill, jnp.int32(self.plan.stages))

    def arrival(self, number: Any, fill: Any) -> Any:
        """Where the consumer of the tile `number` waits for a fill."""
        slot = self.slot(fill)
        if self.plan.turns:
            slot += lax.rem(number, jnp.int32(CONSUMERS)) * self.plan.stages
        return self.full.at[slot]

    def departure(self, fill: Any) -> Any:
        """Where the producer waits until the slot of a fill is free again."""
        return self.emptied.at[self.slot(fill)]


def _produce(p: GemmPlan, walk: Walk, ring: Ring, x, weight):
    """Fills the slots with the blocks of one tile after another."""

    def of_tile(number, carry):
        row, column = walk.tile(number)

        def of_block(k, carry):
            fill = number * p.blocks_k + k
            slot = ring.slot(fill)

            @pl.when(fill >= p.stages)
            def _():
                plgpu.barrier_wait(ring.departure(fill))

            terms = pl.ds(k * p.tile_k, p.tile_k)
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(row * p.tile_m, p.tile_m), terms],
                ring.x.at[slot],
                ring.arrival(number, fill),
            )
            plgpu.copy_gmem_to_smem(
                weight.at[terms, pl.ds(column * p.tile_n, p.tile_n)],
                ring.weight.at[slot],
                ring.arrival(number, fill),
                collective_axes="part" if p.cluster > 1 else None,
            )
            return carry

        return lax.fori_loop(jnp.int32(0), jnp.int32(p.blocks_k), of_block, ())

    lax.fori_loop(jnp.int32(0), walk.count, of_tile, ())

    # The other CTA of the cluster writes and arrives here: not after this one has ended.
    def drain(fill, carry):
        plgpu.barrier_wait(ring.departure(fill))
        return carry

    fills = walk.count * p.blocks_k
    lax.fori_loop(jnp.maximum(fills - p.stages, 0), fills, drain, ())


def _consume(p: GemmPlan, walk: Walk, ring: Ring, consumer, finish):
    """Multiplies the blocks of this consumer's tiles, and hands over their products."""
    first = 0 if p.turns else consumer * p.rows_of_consumer
    rows = pl.ds(first, p.rows_of_consumer)

    def of_tile(turn, carry):
        number = turn * CONSUMERS + consumer if p.turns else turn
        row, column = walk.tile(number)
        biases = finish.biases(column, 0)

        def multiply(accumulators):
            def of_block(k, carry):
                fill = number * p.blocks_k + k
                slot = ring.slot(fill)
                plgpu.barrier_wait(ring.arrival(number, fill))
                plgpu.wgmma(accumulators, ring.x.at[slot, rows], ring.weight.at[slot])
                plgpu.wgmma_wait(1)  # for that of the block before

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(ring.departure(fill - 1))

                return carry

            lax.fori_loop(jnp.int32(0), jnp.int32(p.blocks_k), of_block, ())
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(ring.departure((number + 1) * p.blocks_k - 1))
            return accumulators[...]

        accumulators = plgpu.ACC((p.rows_of_consumer, p.tile_n), jnp.float32)
        product = pl.run_scoped(multiply, accumulators)
        finish(product, row * p.tile_m + first, column, biases)
        return carry

    tiles = (walk.count - consumer + 1) // CONSUMERS if p.turns else walk.count
    lax.fori_loop(jnp.int32(0), tiles, of_tile, ())
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Finish:
    """The epilogue of one consumer's part of a tile, STORED x STORED elements at a time.

    Attributes:
      plan: the launch.
      epilogue: what it does.
      bias: in device memory, as long as all tiles; or None.
      y: in device memory.
      partial_sums: a list of one [tiles_n, rows of all tiles] array in device memory, or of none.
      staging: [STORE_SLOTS, STORED, STORED] in shared memory, this consumer's own.
    """

    plan: GemmPlan
    epilogue: Epilogue
    bias: Any
    y: Any
    partial_sums: Sequence[Any]
    staging: Any

    def biases(self, column: Any, block: int) -> jax.Array | None:
        """The f32 biases of one column of blocks of a tile in the tile column `column`."""
        if self.bias is None:
            return None
        here = self.bias.at[pl.ds(column * self.plan.tile_n + block * STORED, STORED)]
        of_columns = plgpu.Layout.WGMMA.reduce(0)
        return plgpu.load(here, layout=of_columns, optimized=False).astype(jnp.float32)

    def __call__(self, product: jax.Array, first_row: Any, column: Any, biases: Any) -> None:
        """Stores what becomes of the product.

        Args:
          product: f32 accumulators of the consumer's rows and the tile's columns.
          first_row: of the product, in y.
          column: of the tile, in tiles.
          biases: of the first column of blocks.
        """
        p, epilogue = self.plan, self.epilogue
        gelu = gelu_tanh if epilogue.approximate else gelu_erf
        blocks_m, blocks_n = p.rows_of_consumer // STORED, p.tile_n // STORED
        sums = [jnp.float32(0)] * blocks_m
        for number in range(blocks_m * blocks_n):
            j, i = divmod(number, blocks_m)
            h = product[i * STORED : (i + 1) * STORED, j * STORED : (j + 1) * STORED]
            if biases is not None:
                h = h + lax.broadcast_in_dim(biases, h.shape, (1,))
                if i + 1 == blocks_m and j + 1 < blocks_n:
                    biases = self.biases(column, j + 1)
            block = gelu(h)
            if epilogue.sums is not Sums.NOTHING:
                summed = h if epilogue.sums is Sums.OF_PRODUCT else block
                sums[i] = sums[i] + jnp.sum(summed, axis=1)
            # Each tile begins with the first slot, which may be the one the last tile ended with.
            same = number == 0 and blocks_m * blocks_n % STORE_SLOTS != 0
            plgpu.wait_smem_to_gmem(0 if same else STORE_SLOTS - 1, wait_read_only=True)
            slot = number % STORE_SLOTS
            self.staging[slot] = block.astype(self.y.dtype)
            plgpu.commit_smem()
            rows = pl.ds(first_row + i * STORED, STORED)
            columns = pl.ds(column * p.tile_n + j * STORED, STORED)
            plgpu.copy_smem_to_gmem(self.staging.at[slot], self.y.at[rows, columns])
        for ref in self.partial_sums:
            for i, total in enumerate(sums):
                store(ref.at[column, pl.ds(first_row + i * STORED, STORED)], total)
