"""How a matrix product is laid out on the card: a pure function of shapes and dtype.

A CTA has one warpgroup that does nothing but start copies into a ring of `stages` slots, each with
a [tile_m, tile_k] block of x and a [tile_k, tile_n] block of weight, and two that consume them.
CTAs are persistent: as many as multiprocessors, each walking over output tiles, and the copies of
the next tile are under way while the last one's epilogue runs. Two ways to share the work:

- **together**: both consumers take half the rows of one tile each. A block of weight serves both,
  and both run their epilogues at the same time, while the tensor cores wait.
- **in turns** (`turns`): each consumer has tiles of its own, and one multiplies while the other is
  in its epilogue. That hides the epilogue, for blocks that are read more often.

Copies take their operands from the L2 cache, whose bandwidth bounds a product of large matrices
before the tensor cores do: large tiles, an order of tiles in which those that run at the same time
share rows and columns, and clusters of two CTAs whose blocks of weight each CTA fetches half of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.plan import LANES, MAX_ELEMENTS, SHARED_PER_BLOCK, SMS
from pallas_kernels.tiles import PIECE_ROWS, piece_columns

DEEP = 2048  # terms of a product from which on its epilogue is a small part of it
CONSUMERS = 2
WARPGROUPS = CONSUMERS + 1
# Rows of one instruction of a warpgroup, and rows and columns of what its epilogue stores at once.
ROWS_OF_WARPGROUP = 64
STORED = 64
STORE_SLOTS = 2  # of STORED x STORED elements, for each consumer
MAX_TILE_N = 256
# Accumulators of a thread, at which it has enough left for the epilogue.
MOST_ACCUMULATORS = 128
# Registers of a thread of a consumer and of the producer: together what a multiprocessor has.
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40
SHARED_EXTRA = 3072  # barriers, and what Mosaic sets aside for reductions
# For choosing a tile: what the copies of a tile cost beside its multiplications, for each row and
# column, as if they took that many more columns or rows. Not measured.
COPY_COST = 32


@dataclasses.dataclass(frozen=True)
class GemmTuning:
    """What a plan chooses; give one to `gemm_plan` to try another choice.

    Attributes:
      tile_m: rows of an output tile; a multiple of 64, or of 128 where consumers work together.
      tile_n: columns of an output tile; a multiple of 64, at most 256.
      tile_k: terms of the product that a slot holds; a multiple of 64.
      stages: slots of the ring.
      group: tiles along rows that are walked before the next column of tiles is.
      cluster: 1, or 2 CTAs, one above the other, that share their blocks of weight.
      turns: whether each consumer has tiles of its own.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    stages: int = 4
    group: int = 8
    cluster: int = 1
    turns: bool = False


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """One launch of y[m, n] = epilogue(x[m, k] @ weight[k, n]).

    Attributes:
      m: rows.
      n: columns.
      k: terms of each product.
      tile_m: rows of an output tile.
      tile_n: columns of an output tile.
      tile_k: terms that a slot holds.
      stages: slots of the ring.
      group: rows of clusters' tiles that are walked column by column.
      cluster: CTAs of a cluster.
      turns: whether each consumer has tiles of its own.
      ctas: CTAs of the launch, a multiple of `cluster`.
      shared_bytes: shared memory per CTA, bytes, an upper bound.
    """

    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    group: int
    cluster: int
    turns: bool
    ctas: int
    shared_bytes: int

    @property
    def rows_of_consumer(self) -> int:
        """Rows of a tile that one consumer computes."""
        return self.tile_m if self.turns else self.tile_m // CONSUMERS

    @property
    def steps_m(self) -> int:
        """Tiles of a cluster along rows."""
        return -(-self.m // (self.tile_m * self.cluster))

    @property
    def tiles_m(self) -> int:
        """Tiles along rows, those that are past the end of the last cluster's included."""
        return self.steps_m * self.cluster

    @property
    def tiles_n(self) -> int:
        """Tiles along columns."""
        return -(-self.n // self.tile_n)

    @property
    def steps(self) -> int:
        """Tiles, or pairs of them, that the CTAs, or the clusters, share."""
        return self.steps_m * self.tiles_n

    @property
    def walkers(self) -> int:
        """CTAs, or clusters of them, that share the steps."""
        return self.ctas // self.cluster

    @property
    def blocks_k(self) -> int:
        """Slots that one tile takes."""
        return -(-self.k // self.tile_k)


def unsupported(x: Any, weight: Any, bias: Any = None) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the left operand.
      weight: the right operand.
      bias: of `gemm_bias_gelu`.
    """
    dtype = jnp.dtype(x.dtype)
    if dtype not in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)):
        return f"The dtype must be float16 or bfloat16, not {dtype}."
    if jnp.dtype(weight.dtype) != dtype:
        return f"weight must have the dtype of x, {dtype}, not {weight.dtype}."
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[0]:
        return (
            "x and weight must have the shapes (M, K) and (K, N), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}."
        )
    (m, k), n = x.shape, weight.shape[1]
    piece = piece_columns(dtype)
    if 0 in (m, n, k) or m % PIECE_ROWS or n % piece or k % piece:
        return (
            f"M must be a multiple of {PIECE_ROWS}, N and K multiples of {piece}, none of them 0, "
            f"and they are {m}, {n} and {k}."
        )
    if max(m * k, k * n, m * n) > MAX_ELEMENTS:
        return f"The arrays may have at most 2**31-1 elements each, and M, N, K are {m}, {n}, {k}."
    if bias is None:
        return None
    if tuple(bias.shape) != (n,):
        return f"bias must have the shape ({n},), not {tuple(bias.shape)}."
    if jnp.dtype(bias.dtype).name not in ("float16", "bfloat16", "float32"):
        return f"bias must be float16, bfloat16 or float32, not {bias.dtype}."
    return None


def gemm_plan(m: int, n: int, k: int, dtype: Any, *, tuning: GemmTuning | None = None) -> GemmPlan:
    """The plan of a product of [m, k] and [k, n], both of `dtype`.

    Args:
      m: at least 1.
      n: at least 1.
      k: at least 1.
      dtype: float16 or bfloat16.
      tuning: instead of the choice of `default_tuning`.

    Raises:
      ValueError: the tuning asks for what does not exist or does not fit.
    """
    t = default_tuning(m, n, k) if tuning is None else tuning
    itemsize = jnp.dtype(dtype).itemsize
    shared = t.stages * (t.tile_m + t.tile_n) * t.tile_k * itemsize
    shared += CONSUMERS * STORE_SLOTS * STORED * STORED * itemsize + SHARED_EXTRA
    if reason := _impossible(t, piece_columns(dtype), shared):
        raise ValueError(f"{t}: {reason}.")
    plan = GemmPlan(
        m=m,
        n=n,
        k=k,
        tile_m=t.tile_m,
        tile_n=t.tile_n,
        tile_k=t.tile_k,
        stages=t.stages,
        group=t.group,
        cluster=t.cluster,
        turns=t.turns,
        ctas=t.cluster,
        shared_bytes=shared,
    )
    walkers = min(SMS // t.cluster, plan.steps)
    return dataclasses.replace(plan, ctas=walkers * t.cluster)


def default_tuning(m: int, n: int, k: int) -> GemmTuning:
    """The tile with the least work for the busiest multiprocessor, its copies included.

    Products of fewer than `DEEP` terms are over so soon that their epilogues count: consumers take
    turns. Measured on an H200 (BUILD_NOTES.md, "The GEMM").
    """

    def cost(t: GemmTuning) -> int:
        tiles = -(-m // t.tile_m) * -(-n // t.tile_n)
        return -(-tiles // SMS) * (t.tile_m * t.tile_n + COPY_COST * (t.tile_m + t.tile_n))

    return min(_candidates() if k >= DEEP else _candidates_in_turns(), key=cost)


def _candidates_in_turns() -> Iterator[GemmTuning]:
    yield GemmTuning(128, 128, stages=6, turns=True)
    yield GemmTuning(64, 128, stages=6, turns=True)


def _candidates() -> Iterator[GemmTuning]:
    yield GemmTuning(128, 256, cluster=2)
    yield GemmTuning(256, 128)
    yield GemmTuning(128, 128, stages=6)
    yield GemmTuning(128, 64, stages=6)


def _impossible(t: GemmTuning, piece: int, shared: int) -> str | None:
    rows = ROWS_OF_WARPGROUP if t.turns else CONSUMERS * ROWS_OF_WARPGROUP
    if t.tile_m < 1 or t.tile_m % rows:
        return f"tile_m must be a multiple of {rows}"
    if not 0 < t.tile_n <= MAX_TILE_N or t.tile_n % STORED:
        return f"tile_n must be a multiple of {STORED} and at most {MAX_TILE_N}"
    if t.tile_k < 1 or t.tile_k % piece:
        return f"tile_k must be a multiple of {piece}"
    lanes = LANES if t.turns else CONSUMERS * LANES
    if t.tile_m * t.tile_n > MOST_ACCUMULATORS * lanes:
        return f"a thread would have more than {MOST_ACCUMULATORS} accumulators"
    if t.stages < 2 or t.group < 1 or t.cluster not in (1, 2):
        return "there must be 2 stages or more, groups of 1 or more and clusters of 1 or 2"
    if shared > SHARED_PER_BLOCK:
        return f"it takes {shared} bytes of shared memory, of {SHARED_PER_BLOCK}"
    return None
