"""Softmax and its gradient: simulated against float64, and lowered with no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import (
    INTERPRET,
    assert_close,
    assert_rounded,
    f64,
    sampled,
    softmax,
    softmax_gradient,
    softmax_where,
)

from pallas_kernels import row_softmax
from pallas_kernels.plan import Cut
from pallas_kernels.tuned import Tuning

pytestmark = pytest.mark.thorough

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
KINDS = ["plain", "where"]

# A row per lane; in a CTA, as ranges of the flat array; in a CTA; over warpgroups.
CASES = [
    ("plain", 3, 130, BF16),
    ("plain", 100, 5, F16),
    ("plain", 769, 3, F32),
    ("plain", 1024, 3, BF16),
    ("plain", 8192, 2, F16),
    ("where", 6, 130, F32),
    ("where", 96, 1, BF16),
    ("where", 127, 3, F32),
    ("where", 2560, 3, BF16),
    ("where", 8192, 2, F32),
]


def random(seed, shape, dtype, scale=1.5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def random_mask(seed, shape, share=0.5):
    mask = np.random.default_rng(seed).random(shape) < share
    if len(mask) > 2:
        mask[1] = False
    return mask


def kernel(x, where=None):
    return row_softmax.softmax(x, where=where, interpret=INTERPRET)


@pytest.mark.parametrize(("kind", "width", "rows", "dtype"), sampled(CASES))
def test_value_and_gradient(kind, width, rows, dtype):
    # f32: exp2's argument, up to 20 here, is rounded like every other value
    ulps = 24 if dtype == F32 else 0.51
    x, dy = random(0, (rows, width), dtype, 3.0), random(1, (rows, width), dtype)
    where = None if kind == "plain" else random_mask(2, (rows, width))
    y, pull = jax.vjp(lambda x: kernel(x, where), x)
    (dx,) = pull(dy)
    assert y.dtype == dx.dtype == dtype
    kept = np.ones(x.shape, bool) if where is None else where
    assert_close(y, softmax_where(x, kept), ulps=ulps)
    want, terms = softmax_gradient(y, dy)
    assert_rounded(dx, want, scale=terms)
    # and against the gradient of the exact softmax, of which y keeps half an ulp
    exact, terms = softmax_gradient(softmax_where(x, kept), dy)
    slack = ulps * float(jnp.finfo(dtype).eps) * 2
    assert (np.abs(f64(dx) - exact) <= slack * terms + 2 * float(jnp.finfo(dtype).tiny)).all()
    if where is not None:
        assert (f64(y)[~kept] == 0).all()
        assert (f64(dx)[~kept] == 0).all()


PER_WARP = Tuning(256, rows_per_block=4, warpgroups=1, ctas_per_sm=2, stages=2)


def run_per_warp(x, where, dy, interpret=None):
    options = {"interpret": interpret, "tuning": PER_WARP}
    y = row_softmax.softmax_kernel(x, where, **options)
    return y, row_softmax.softmax_backward_kernel(y, dy, masked=where is not None, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_per_warp(kind):
    x, dy = random(0, (21, 256), F16, 3.0), random(1, (21, 256), F16)
    where = None if kind == "plain" else jnp.asarray(random_mask(2, x.shape))
    assert row_softmax.plan(21, 256, F16, masked=True, tuning=PER_WARP).cut is Cut.WARP
    y, dx = run_per_warp(x, where, dy, True)
    kept = np.ones(x.shape, bool) if where is None else np.asarray(where)
    assert_close(y, softmax_where(x, kept), ulps=0.51)
    want, terms = softmax_gradient(y, dy)
    assert_rounded(dx, want, scale=terms)
    assert lowered(run_per_warp, x, where, dy) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_over_several_ctas(kind):
    width = 16385 if kind == "plain" else 32768
    x = random(0, (2, width), BF16, 3.0)
    where = None if kind == "plain" else random_mask(1, (2, width))
    tuning = Tuning(width, 1, 4, 1, 2, parts=2)
    assert row_softmax.plan(2, width, BF16, masked=where is not None, tuning=tuning).cluster
    y = row_softmax.softmax_kernel(
        x, None if where is None else jnp.asarray(where), interpret=INTERPRET, tuning=tuning
    )
    assert_close(y, softmax_where(x, True if where is None else where), ulps=0.51)


def test_gradient_of_a_row_over_several_ctas():
    y, dy = jnp.asarray(softmax(random(0, (2, 16385), F32)), BF16), random(1, (2, 16385), BF16)
    tuning = Tuning(16385, 1, 3, 1, 2, parts=2)
    assert row_softmax.plan_backward(2, 16385, BF16, tuning=tuning).cluster
    dx = row_softmax.softmax_backward_kernel(y, dy, interpret=INTERPRET, tuning=tuning)
    want, terms = softmax_gradient(y, dy)
    assert_rounded(dx, want, scale=terms)


@pytest.mark.parametrize("scale", [20.0, 0.05])
@pytest.mark.parametrize("seed", [0, 1])
def test_standard_deviations(scale, seed):
    x = random(seed, (9, 640), F32, scale)
    y, want = f64(kernel(x)), softmax(x)
    # The simulation, as the card, has no subnormal numbers.
    eps, tiny = float(jnp.finfo(F32).eps), float(jnp.finfo(F32).tiny)
    assert (np.abs(y - want) <= (4 + 6 * scale) * eps * want + tiny).all()


@pytest.mark.parametrize("width", [6, 256])
def test_rows_that_are_not_finite(width):
    x = np.random.default_rng(0).normal(size=(6, width))
    x[1], x[2, 3], x[3, 2], x[4, 1] = -np.inf, np.nan, np.inf, -np.inf
    x[5, 4:] = -np.inf
    x[5, :4] = [0, 1, 2, -np.inf]
    y, pull = jax.vjp(kernel, jnp.asarray(x, F32))
    y, dx = f64(y), f64(pull(jnp.ones_like(y))[0])
    for row in (1, 2, 3):
        assert np.isnan(y[row]).all()
        assert np.isnan(dx[row]).all()
    assert np.isfinite(y[[0, 4, 5]]).all()
    assert np.isfinite(dx[[0, 4, 5]]).all()
    assert y[4, 1] == 0
    np.testing.assert_allclose(y[5, :4], [0.0900306, 0.2447285, 0.6652410, 0], atol=1e-7)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(jax.nn.softmax(jnp.asarray(x, F32))))


@pytest.mark.parametrize(("width", "dtype"), [(6, F16), (100, F32), (256, F16)])
def test_excluded_elements_count_for_nothing(width, dtype):
    x = np.random.default_rng(0).normal(size=(8, width))
    where = np.ones(x.shape, bool)
    where[0] = where[1] = where[2] = False  # nothing left
    x[1], x[2, 1] = -np.inf, np.nan
    where[3:6, 1] = False  # what is not finite is excluded
    x[3, 1], x[4, 1], x[5, 1] = np.nan, np.inf, -np.inf
    x[6] = -np.inf  # what is left is -inf: as without a mask
    where[6, 2] = where[7, 2] = False
    x[7, 3] = np.nan
    x = jnp.asarray(x, dtype)
    y, pull = jax.vjp(lambda x: kernel(x, where), x)
    dy = np.random.default_rng(1).normal(size=x.shape)
    dy[~where] = np.nan
    dx = f64(pull(jnp.asarray(dy, dtype))[0])
    excluded = ~where
    assert (f64(y)[excluded] == 0).all()
    assert (dx[excluded] == 0).all()
    assert (f64(y)[:3] == 0).all()
    assert (dx[:3] == 0).all()
    for row in (6, 7):
        assert np.isnan(f64(y)[row, where[row]]).all()
        assert np.isnan(dx[row, where[row]]).all()
    assert_close(y[3:6], softmax_where(x[3:6], where[3:6]), ulps=8 if dtype == F32 else 0.51)
    want, terms = softmax_gradient(y[3:6], np.where(where, f64(jnp.asarray(dy, dtype)), 0)[3:6])
    assert_rounded(jnp.asarray(dx[3:6], dtype), want, scale=terms)
    np.testing.assert_array_equal(
        np.isnan(y), np.isnan(jax.nn.softmax(x, where=jnp.asarray(where)))
    )


def test_no_finite_stand_in_for_minus_infinity():
    # A mask that were -1e4, or f16's or bf16's lowest number, would let these win.
    lowest = float(jnp.finfo(F32).min)
    x = jnp.full((3, 256), lowest, F32).at[:, 7].set(-jnp.inf)
    where = np.arange(256) != 5
    y = f64(kernel(x, where))
    assert (y[:, [5, 7]] == 0).all()
    np.testing.assert_allclose(np.delete(y, [5, 7], axis=1), 1 / 254, rtol=1e-6)
    assert (f64(kernel(x))[:, 7] == 0).all()


@pytest.mark.parametrize("shape", [(), (7, 1), (3, 1, 6)])
def test_where_broadcasts(shape):
    x = random(0, (3, 7, 6), F32)
    where = np.random.default_rng(1).random(shape) < 0.7
    assert_close(kernel(x, where), softmax_where(x, np.broadcast_to(where, x.shape)), ulps=8)


def test_leading_axes_and_layouts():
    x, where = random(0, (2, 3, 6), F16), random_mask(1, (2, 3, 6))
    flat, flat_where = x.reshape(6, 6), where.reshape(6, 6)
    y, pull = jax.vjp(kernel, x, jnp.asarray(where))
    want = kernel(flat, flat_where)
    assert (f64(y).reshape(6, 6) == f64(want)).all()
    assert (f64(kernel(x[0, 0], where[0, 0])) == f64(y)[0, 0]).all()
    turned = kernel(flat.T, flat_where.T)
    assert (f64(turned) == f64(kernel(jnp.array(flat.T), flat_where.T.copy()))).all()
    dx, dwhere = pull(jnp.ones_like(y))
    summed = jax.grad(lambda x: kernel(x, flat_where).astype(F32).sum())(flat)
    assert (f64(dx).reshape(6, 6) == f64(summed)).all()
    assert dwhere.dtype == jax.dtypes.float0
    assert dwhere.shape == where.shape


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 3, 5)])
def test_empty_arrays(shape):
    x, where = jnp.zeros(shape, BF16), jnp.ones(shape, bool)
    for mask in (None, where):

        def both(x, mask):
            y, pull = jax.vjp(lambda x: row_softmax.softmax(x, where=mask), x)
            return y, pull(y)[0]

        for found in (both(x, mask), jax.jit(both)(x, mask)):
            assert [a.shape for a in found] == [shape, shape]
            assert [a.dtype for a in found] == [BF16, BF16]
    assert jax.vmap(row_softmax.softmax)(x).shape == shape


def test_transformations():
    x, where = random(0, (2, 3, 6), F32), jnp.asarray(random_mask(1, (3, 6)))

    def loss(x):
        return (kernel(x, where) * jnp.arange(6.0)).sum()

    want, _ = softmax_gradient(softmax_where(x, np.broadcast_to(where, x.shape)), np.arange(6.0))
    for grad in (jax.jit(jax.vmap(jax.grad(loss))), jax.grad(lambda x: jax.vmap(loss)(x).sum())):
        np.testing.assert_allclose(grad(x), want, rtol=1e-5, atol=1e-6)


def test_vmap_over_masks_alone():
    x, where = random(0, (3, 6), F32), random_mask(1, (4, 3, 6))
    y = jax.vmap(kernel, in_axes=(None, 0))(x, jnp.asarray(where))
    assert_close(y, softmax_where(np.broadcast_to(f64(x), where.shape), where), ulps=8)


def test_x64_mode():
    x, where = random(0, (3, 100), BF16), random_mask(1, (3, 100))
    with jax.enable_x64(True):
        y, pull = jax.vjp(lambda x: kernel(x, where), x)
        assert_close(y, softmax_where(x, where), ulps=0.51)
        assert pull(y)[0].dtype == BF16


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (np.ones((2, 64), np.int8), "boolean, not int8"),
        (np.ones((3, 64), bool), "must broadcast to the shape (2, 64), and it has (3, 64)"),
        (np.ones((1, 2, 64), bool), "must broadcast to the shape (2, 64)"),
        (np.ones(63, bool), "must broadcast"),
    ],
)
def test_refusals_of_masks(where, words):
    x = jnp.zeros((2, 64))
    assert words in (reason := row_softmax.unsupported(x, where))
    assert reason.endswith(".")
    with pytest.raises(ValueError) as raised:
        row_softmax.softmax(x, where=where)
    assert str(raised.value) == reason


def test_widths_end_where_the_gradient_ends():
    for dtype, most in ((BF16, 262144), (F16, 262144), (F32, 131072)):
        assert row_softmax.unsupported(jax.ShapeDtypeStruct((2, most), dtype)) is None
        reason = row_softmax.unsupported(jax.ShapeDtypeStruct((2, most + 1), dtype))
        assert f"at most {most}" in reason


def test_slots_have_room_for_masks_that_start_late():
    for width in range(64, 2100):
        for dtype in (BF16, F32):
            p = row_softmax.plan(3, width, dtype, masked=True)
            if p.cut is Cut.CTA and p.flat:
                late = max((row * width - p.late(row)) % 16 for row in range(16))
                assert late + p.span <= p.region, width


def test_expected_bytes():
    assert row_softmax.expected_bytes(8, 100, BF16) == 8 * 100 * 4
    assert row_softmax.expected_bytes(8, 100, F32, masked=True) == 8 * 100 * 9
    assert row_softmax.expected_bytes_backward(8, 100, BF16) == 8 * 100 * 6


def lowered(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("mosaic_gpu_v2")


def gradient(x, where, dy):
    return jax.vjp(lambda x: row_softmax.softmax(x, where=where), x)[1](dy)


WIDTHS = [2, 100, 769, 131072]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_lowers_to_one_kernel_and_one_for_the_gradient(kind, width):
    dtype = F32 if width in (6, 769, 131072) else BF16
    x = jax.ShapeDtypeStruct((300, width), dtype)
    where = None if kind == "plain" else jax.ShapeDtypeStruct((300, width), bool)
    if width == 256:
        assert lowered(lambda x, where: row_softmax.softmax(x, where=where), x, where) == 1
    assert lowered(gradient, x, where, x) == 2


@pytest.mark.parametrize("rows", [1, 3, 65537])
def test_any_row_count_lowers(rows):
    x = jax.ShapeDtypeStruct((rows, 384), F16)
    assert lowered(gradient, x, jax.ShapeDtypeStruct((384,), bool), x) == 2


def test_lowers_in_x64_mode_and_under_vmap():
    for width in (5, 100, 256, 8192):
        x = jax.ShapeDtypeStruct((3, 64, width), BF16)
        where = jax.ShapeDtypeStruct((3, 1, width), bool)
        with jax.enable_x64(True):
            assert lowered(jax.vmap(gradient), x, where, x) == 2
        shared = jax.ShapeDtypeStruct((64, width), bool)
        assert lowered(jax.vmap(gradient, in_axes=(0, None, 0)), x, shared, x) == 2


def test_lowers_under_checkpoint():
    x = jax.ShapeDtypeStruct((64, 256), F32)
    softmax_again = jax.checkpoint(row_softmax.softmax)
    assert lowered(jax.grad(lambda x: (softmax_again(x) ** 2).sum()), x) == 3


def test_exports():
    x = jax.ShapeDtypeStruct((8, 256), BF16)
    where = jax.ShapeDtypeStruct((8, 256), bool)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    for arguments in ((x, None, x), (x, where, x)):
        exported = jax.export.export(jax.jit(gradient), platforms=["cuda"], disabled_checks=checks)(
            *arguments
        )
        assert exported.out_avals[0].shape == x.shape
