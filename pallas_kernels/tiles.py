"""What kernels on two-dimensional tiles share: how tiles lie in shared memory, and their order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Copies, matrix instructions and transposed stores all take tiles as pieces of 8 rows and SWIZZLE
# bytes, whose 16-byte parts are permuted so that rows and columns of them meet no bank twice. Of a
# tile that leaves its array, pieces outside are read as zeros and not written; the array itself
# must consist of whole pieces.
PIECE_ROWS = 8
SWIZZLE = 128


def piece_columns(dtype: Any) -> int:
    """Columns of a piece."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def pieces(dtype: Any) -> tuple[Any, ...]:
    """The transforms of a tile in shared memory."""
    return (
        plgpu.TilingTransform((PIECE_ROWS, piece_columns(dtype))),  # type: ignore[abstract]
        plgpu.SwizzleTransform(SWIZZLE),  # type: ignore[abstract]
    )


def grouped(step: Any, rows: int, columns: int, group: int) -> tuple[Any, Any]:
    """Row and column of the tile number `step` of `rows` times `columns` tiles.

    Bands of `group` rows, each walked column by column: tiles that follow one another lie in few
    rows and few columns, so that those that run at the same time read the same from the L2 cache.
    """
    first = step // (group * columns) * group
    inside = step % (group * columns)
    height = jnp.minimum(rows - first, group)
    return first + inside % height, inside // height


def simulation(interpret: Any) -> plgpu.InterpretGPUParams | None:
    """The argument `interpret` of a public function, as `plgpu.kernel` takes it.

    Raises:
      ValueError: it is not None, False, True or `plgpu.InterpretGPUParams()`.
    """
    if interpret is True:
        return plgpu.InterpretGPUParams()
    if interpret and not isinstance(interpret, plgpu.InterpretGPUParams):
        raise ValueError(
            f"interpret must be None, True or plgpu.InterpretGPUParams(), not {interpret!r}."
        )
    return interpret or None
