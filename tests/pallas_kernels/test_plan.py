import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gelu, layer_norm, row_softmax
from pallas_kernels.plan import (
    MAX_BARRIERS,
    SHARED_PER_BLOCK,
    SHARED_PER_SM,
    SHARED_RESERVED,
    SMS,
    WARPS,
    Plan,
)

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
PLANS = {
    "residual_layer_norm": (layer_norm.plan, 2),
    "bias_gelu": (gelu.plan, 1),
    "bias_gelu_rowsum": (lambda *a: gelu.plan(*a, row_sums=True), 1),
    "softmax": (row_softmax.plan, 1),
}


@pytest.mark.parametrize("op", PLANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_has_a_plan_that_fits_the_card(op, dtype):
    plan, streams = PLANS[op]
    itemsize = jnp.dtype(dtype).itemsize
    for width in range(128, 16385, 128):
        for rows in (1, 2, 3, 5, 131, 65537):
            p = plan(rows, width, dtype)
            where = f"{rows=} {width=} {p}"
            assert p.rows * p.width == rows * width, where
            assert p.pieces * p.piece == p.width, where
            assert p.piece <= 256, where
            assert p.vector * itemsize <= 16, where
            assert p.stages * p.warpgroups <= MAX_BARRIERS, where
            assert p.elements_per_lane <= 128, where
            ring = p.stages * streams * p.rows_per_block * p.width * itemsize
            assert ring < p.shared_bytes <= SHARED_PER_BLOCK, where
            assert 1 <= p.ctas <= p.blocks, where
            assert p.ctas % p.slices == 0, where
            if p.rows_per_block == 1:
                assert p.pieces % (WARPS * p.warpgroups) == 0, where
            else:
                assert p.warpgroups == 1, where
                assert p.rows_per_block % WARPS == 0, where
                assert p.rows_per_block <= p.rows, where
                assert p.pieces >= 2, where
            resident = -(-p.ctas // SMS)
            assert resident * (p.shared_bytes + SHARED_RESERVED) <= SHARED_PER_SM, where


@pytest.mark.parametrize("op", PLANS)
def test_power_of_two_rows_load_16_bytes_to_a_lane(op):
    plan, _ = PLANS[op]
    for dtype in DTYPES:
        for width in (512, 1024, 2048, 4096, 8192, 16384):
            assert plan(8192, width, dtype).vector * jnp.dtype(dtype).itemsize == 16


def test_a_width_that_no_warpgroup_count_divides_still_gets_one():
    assert layer_norm.plan(64, 127 * 128, jnp.bfloat16).warpgroups == 1


def test_few_rows_do_not_use_blocks_of_several():
    assert row_softmax.plan(3, 256, jnp.bfloat16).rows_per_block == 1
    assert row_softmax.plan(4, 256, jnp.bfloat16).rows_per_block == 4


def test_plans_are_frozen_values():
    p = gelu.plan(8192, 8192, jnp.bfloat16)
    assert p == gelu.plan(8192, 8192, jnp.bfloat16)
    assert isinstance(p, Plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.ctas = 1


def test_expected_bytes():
    rows, width = 8192, 8192
    tensor = rows * width * 2
    b16, f32 = jnp.bfloat16, jnp.float32
    assert gelu.expected_bytes(rows, width, b16) == 2 * tensor + 2 * width
    assert gelu.expected_bytes(rows, width, b16, f32, row_sums=True) == (
        2 * tensor + 4 * width + 4 * rows
    )
    assert layer_norm.expected_bytes(rows, width, b16, f32, b16) == 3 * tensor + 6 * width
    assert row_softmax.expected_bytes(rows, width, f32) == 4 * tensor


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((8, 100), jnp.float32, "multiple of 128"),
        ((8, 16512), jnp.float32, "at most 16384"),
        ((8, 128), jnp.int32, "int32"),
        ((2**20, 2048), jnp.bfloat16, "2**31-1 elements"),
        ((), jnp.float32, "at least one axis"),
    ],
)
def test_refusals_say_why_in_one_sentence(shape, dtype, words):
    x = jax.ShapeDtypeStruct(shape, dtype)
    width = shape[-1] if shape else 1
    v = jax.ShapeDtypeStruct((width,), jnp.float32)
    reasons = (
        row_softmax.unsupported(x),
        gelu.unsupported(x, v),
        layer_norm.unsupported(x, x, v, v),
    )
    for reason in reasons:
        assert words in reason
        assert reason.endswith(".")
        assert ". " not in reason


def test_refusals_of_parameters():
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    assert gelu.unsupported(x, v) is None
    assert layer_norm.unsupported(x, x, v, v) is None
    short = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    assert "bias must have the shape (256,)" in gelu.unsupported(x, short)
    assert "scale must have the shape" in layer_norm.unsupported(x, x, short, v)
    other = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    assert "must be alike" in layer_norm.unsupported(x, other, v, v)
    integers = jax.ShapeDtypeStruct((256,), jnp.int8)
    assert "int8" in gelu.unsupported(x, integers)
