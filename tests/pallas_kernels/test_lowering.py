"""The whole Mosaic pipeline short of the assembler, with no GPU: every launch, every way to cut."""

import jax
import jax.numpy as jnp
import pytest
from references import row_kernels

from pallas_kernels import catalogue
from pallas_kernels.plan import unsupported_rows

pytestmark = pytest.mark.thorough

LAUNCHES = catalogue.launches()
# A row per lane, the flat array with and without shifts, a row per warp, warpgroups, clusters.
WIDTHS = [1, 7, 256, 1000, 2049, 32768]


def lowered(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return row_kernels(text)


# Every launch in some of the ways, every way with a third of the launches.
PAIRS = [
    (op, width)
    for i, op in enumerate(LAUNCHES)
    for j, width in enumerate(WIDTHS)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("op", "width"), PAIRS)
def test_lowers_to_one_kernel(op, width):
    launch = LAUNCHES[op]
    dtype = (jnp.float16, jnp.bfloat16, jnp.float32)[len(op) % 3]
    assert lowered(launch.function, *launch.arguments(500, width, dtype)) == 1


# Every pair of operation, rows with dtype, and width: a Latin square.
@pytest.mark.parametrize(
    ("i", "op"),
    [(0, "prenorm_layer_norm_backward"), (1, "softmax"), (2, "cross_entropy_backward")],
)
@pytest.mark.parametrize(
    ("j", "rows", "dtype"),
    [(0, 1, jnp.float16), (1, 65537, jnp.bfloat16), (2, 1, jnp.float32)],
)
def test_any_row_count_and_dtype_lowers(i, op, j, rows, dtype):
    launch, width = LAUNCHES[op], (31, 384, 2560)[(i + j) % 3]
    assert lowered(launch.function, *launch.arguments(rows, width, dtype)) == 1


@pytest.mark.parametrize("width", [31, 769, 256, 16385])
def test_lowers_in_x64_mode(width):
    launch = LAUNCHES["cross_entropy" if width in (31, 16385) else "layer_norm_backward"]
    with jax.enable_x64(True):
        assert lowered(launch.function, *launch.arguments(300, width, jnp.bfloat16)) == 1


def test_the_longest_rows_lower():
    for number, (op, launch) in enumerate(LAUNCHES.items()):
        for width in (131072, 262144)[number % 2 :: 2]:
            x = jax.ShapeDtypeStruct((16, width), jnp.bfloat16)
            if unsupported_rows(x, launch.streams, reduces=launch.reduces) is None:
                arguments = launch.arguments(16, width, jnp.bfloat16)
                assert lowered(launch.function, *arguments) == 1, op
