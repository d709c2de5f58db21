"""bias + GELU, stored transposed, in one pass: each element is read once and written once.

A transposition by itself reads along rows and writes along columns, and one of the two would touch
DRAM a few bytes at a time. Here a tile comes by TMA with its rows in one piece, is turned on its
way from registers into a second tile in shared memory, and leaves by TMA with its own rows in one
piece. Bytes per element at 16 bits: 2 read + 2 written, where a kernel for GELU and one for the
transposition take 8.

A CTA is one warpgroup with a ring of tiles, of which it works on one while others arrive; several
CTAs share a multiprocessor.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import arrays, flag, vary, varying
from pallas_kernels.forward_only import forward_only
from pallas_kernels.gelu_math import gelu_erf, gelu_tanh
from pallas_kernels.plan import (
    MAX_ELEMENTS,
    SHARED_PER_BLOCK,
    SHARED_PER_SM,
    SHARED_RESERVED,
    SMS,
)
from pallas_kernels.tiles import grouped, piece_columns, pieces, simulation

SQUARE = 64  # rows and columns of what a warpgroup turns at once
TURNED_SLOTS = 2  # tiles on their way out
SHARED_EXTRA = 1024  # barriers


@dataclasses.dataclass(frozen=True)
class TransposeTuning:
    """What a plan chooses; give one to `plan` to try another choice.

    Attributes:
      tile_m: rows of x in a tile; a multiple of 64, at most 256.
      tile_n: columns of x in a tile; a multiple of 64, at most 256.
      stages: tiles of the ring.
      ctas_per_sm: CTAs that share a multiprocessor; fewer where shared memory has no room.
      group: tiles along rows of x that are walked before the next column of tiles is.
    """

    tile_m: int
    tile_n: int
    stages: int
    ctas_per_sm: int
    group: int = 8


# By bytes of an element: measured on an H200 for 2, not measured for 4.
TUNINGS = {2: TransposeTuning(128, 64, 3, 2), 4: TransposeTuning(64, 64, 2, 3)}


@dataclasses.dataclass(frozen=True)
class TransposePlan:
    """One launch of y[n, m] = gelu(x[m, n] + bias).T.

    Attributes:
      m: rows of x.
      n: columns of x.
      tile_m: rows of x in a tile.
      tile_n: columns of x in a tile.
      stages: tiles of the ring.
      group: tiles along rows that are walked column by column.
      ctas: CTAs of the launch.
      shared_bytes: shared memory per CTA, bytes, an upper bound.
    """

    m: int
    n: int
    tile_m: int
    tile_n: int
    stages: int
    group: int
    ctas: int
    shared_bytes: int

    @property
    def tiles_m(self) -> int:
        """Tiles along rows of x."""
        return -(-self.m // self.tile_m)

    @property
    def tiles_n(self) -> int:
        """Tiles along columns of x."""
        return -(-self.n // self.tile_n)

    @property
    def tiles(self) -> int:
        """Tiles that the CTAs share."""
        return self.tiles_m * self.tiles_n


def plan(m: int, n: int, dtype: Any, *, tuning: TransposeTuning | None = None) -> TransposePlan:
    """The launch of `bias_gelu_transpose` on [m, n] of `dtype`.

    Args:
      m: at least 1.
      n: at least 1.
      dtype: float16, bfloat16 or float32.
      tuning: instead of the choice in `TUNINGS`.

    Raises:
      ValueError: the tuning asks for what does not exist or does not fit.
    """
    itemsize = jnp.dtype(dtype).itemsize
    t = TUNINGS[itemsize] if tuning is None else tuning
    for name, size in (("tile_m", t.tile_m), ("tile_n", t.tile_n)):
        if size % SQUARE or not 0 < size <= 256:
            raise ValueError(f"{t}: {name} must be a multiple of {SQUARE} from {SQUARE} to 256.")
    shared = (t.stages + TURNED_SLOTS) * t.tile_m * t.tile_n * itemsize + SHARED_EXTRA
    if min(t.stages, t.ctas_per_sm, t.group) < 1 or shared > SHARED_PER_BLOCK:
        raise ValueError(
            f"{t}: stages, ctas_per_sm and group must be 1 or more, and {shared} bytes of shared "
            f"memory at most {SHARED_PER_BLOCK}."
        )
    ctas_per_sm = max(1, min(t.ctas_per_sm, SHARED_PER_SM // (shared + SHARED_RESERVED)))
    found = TransposePlan(m, n, t.tile_m, t.tile_n, t.stages, t.group, 1, shared)
    return dataclasses.replace(found, ctas=min(SMS * ctas_per_sm, found.tiles))


def expected_bytes(m: int, n: int, dtype: Any, bias_dtype: Any = None) -> int:
    """The bytes that the kernel must move: x and the bias read, y written."""
    bias_dtype = dtype if bias_dtype is None else bias_dtype
    return 2 * m * n * jnp.dtype(dtype).itemsize + n * jnp.dtype(bias_dtype).itemsize


def unsupported(x: Any, bias: Any) -> str | None:
    """Why the kernel refuses these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the first argument.
      bias: the second.
    """
    dtype = jnp.dtype(x.dtype)
    if dtype.name not in ("float16", "bfloat16", "float32"):
        return f"The dtype must be float16, bfloat16 or float32, not {dtype}."
    if len(x.shape) != 2:
        return f"x must have two axes, not the shape {tuple(x.shape)}."
    m, n = x.shape
    piece = piece_columns(dtype)
    if 0 in (m, n) or m % piece or n % piece:
        return (
            f"Both axes of x must be multiples of {piece} for {dtype}, none of them 0, and the "
            f"shape is {(m, n)}."
        )
    if m * n > MAX_ELEMENTS:
        return f"The array may have at most 2**31-1 elements, and it has {m * n}."
    if tuple(bias.shape) != (n,):
        return f"bias must have the shape ({n},), not {tuple(bias.shape)}."
    if jnp.dtype(bias.dtype).name not in ("float16", "bfloat16", "float32"):
        return f"bias must be float16, bfloat16 or float32, not {bias.dtype}."
    return None


def bias_gelu_transpose(
    x: jax.Array, bias: jax.Array, *, approximate: bool = True, interpret: Any = None
) -> jax.Array:
    """gelu(x + bias).T, computed in f32 and rounded once.

    Args:
      x: [M, N], float16, bfloat16 or float32; M and N multiples of 64, of 32 for float32.
      bias: [N], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y [N, M], with the dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
      TypeError: the call is differentiated.
    """
    x, bias = arrays(x=x, bias=bias)
    options = {"approximate": flag("approximate", approximate), "interpret": interpret}
    if reason := unsupported(x, bias):
        raise ValueError(reason)
    call = functools.partial(bias_gelu_transpose_kernel, **options)
    # A kernel does not tell over which mesh axes its result differs: over those of its arguments.
    return vary(forward_only("bias_gelu_transpose", call)(x, bias), varying(x))


def bias_gelu_transpose_kernel(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    tuning: TransposeTuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The launch behind `bias_gelu_transpose`."""
    (m, n), dtype = x.shape, x.dtype
    p = plan(m, n, dtype, tuning=tuning)
    # JAX 0.11 takes no cost estimate here.
    extra: dict[str, Any] = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        extra["cost_estimate"] = pl.CostEstimate(
            flops=(12 if approximate else 24) * x.size,
            transcendentals=2 * x.size,
            bytes_accessed=expected_bytes(m, n, dtype, bias.dtype),
        )
    return plgpu.kernel(
        functools.partial(_kernel, p, gelu_tanh if approximate else gelu_erf, bool(interpret)),
        out_type=jax.ShapeDtypeStruct((n, m), dtype),
        grid=(p.ctas,),
        grid_names=("walker",),
        scratch_types=(
            plgpu.SMEM((p.stages, p.tile_m, p.tile_n), dtype, transforms=pieces(dtype)),
            plgpu.SMEM((TURNED_SLOTS, p.tile_n, p.tile_m), dtype, transforms=pieces(dtype)),
            plgpu.Barrier(num_barriers=p.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="bias_gelu_transpose",
        interpret=simulation(interpret),
        **extra,
        # Unlike the copies, loads do not know where an array ends.
    )(x, jnp.pad(bias, (0, p.tiles_n * p.tile_n - n)))


def _kernel(p: TransposePlan, gelu, simulated, x, bias, y, ring, turned, arrivals):
    walker = lax.axis_index("walker")
    count = (p.tiles - 1 - walker) // p.ctas + 1

    def place(number):
        """First row and column of x of this CTA's tile number `number`."""
        row, column = grouped(walker + number * p.ctas, p.tiles_m, p.tiles_n, p.group)
        return row * p.tile_m, column * p.tile_n

    def fetch(number):
        row, column = place(number)
        slot = lax.rem(number, jnp.int32(p.stages))
        here = x.at[pl.ds(row, p.tile_m), pl.ds(column, p.tile_n)]
        plgpu.copy_gmem_to_smem(here, ring.at[slot], arrivals.at[slot])

    def work(number, carry):
        row, column = place(number)
        slot = lax.rem(number, jnp.int32(p.stages))
        out = lax.rem(number, jnp.int32(TURNED_SLOTS))
        plgpu.barrier_wait(arrivals.at[slot])
        plgpu.wait_smem_to_gmem(TURNED_SLOTS - 1, wait_read_only=True)
        for j in range(0, p.tile_n, SQUARE):
            columns = pl.ds(j, SQUARE)
            biases = plgpu.load(
                bias.at[pl.ds(column + j, SQUARE)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            spread = lax.broadcast_in_dim(biases.astype(jnp.float32), (SQUARE, SQUARE), (1,))
            for i in range(0, p.tile_m, SQUARE):
                rows = pl.ds(i, SQUARE)
                block = plgpu.load(ring.at[slot, rows, columns], layout=plgpu.Layout.WGMMA)
                block = gelu(block.astype(jnp.float32) + spread).astype(y.dtype)
                save_turned(turned.at[out, columns, rows], block, simulated)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned.at[out], y.at[pl.ds(column, p.tile_n), pl.ds(row, p.tile_m)])

        @pl.when(number + p.stages < count)
        def _():
            fetch(number + p.stages)

        return carry

    for number in range(p.stages):

        @pl.when(number < count)
        def _(number=number):
            fetch(jnp.int32(number))

    lax.fori_loop(jnp.int32(0), count, work, ())
    plgpu.wait_smem_to_gmem(0)


def save_turned(ref: Any, block: jax.Array, simulated: bool) -> None:
    """Stores the transposed block, in a layout whose rows are what lies together in `ref`."""
    if simulated:  # which has no transposed stores
        ref[...] = block.T
        return
    if block.dtype.itemsize == 4:
        block = plgpu.layout_cast(block, plgpu.Layout.WGMMA_TRANSPOSED)
    ref.transpose((1, 0))[...] = block
