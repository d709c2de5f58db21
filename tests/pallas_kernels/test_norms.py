"""LayerNorm and RMSNorm in simulation against float64, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import (
    BF16,
    EPSILON,
    F16,
    F32,
    NORMS,
    arguments,
    assert_columns_close,
    assert_rows_close,
    backward64,
    forward64,
    function,
    random,
    refused,
    standardised,
)
from references import INTERPRET, assert_close, f64, sampled

import pallas_kernels.norms as pk
from pallas_kernels import norm_kernels, plan
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import Cut
from pallas_kernels.tuned import Tuning

pytestmark = pytest.mark.thorough
# A row per lane, the flat array, a row per warp, one and several warpgroups, a cluster; with fewer
# and with more rows than the CTAs have at once.
CASES = [
    ("layer_norm", 3, 131, BF16),
    ("prenorm_rms_norm", 3, 2, F32),
    ("rms_norm", 31, 5, F16),
    ("prenorm_rms_norm", 100, 7, BF16),
    ("residual_layer_norm", 256, 29, BF16),
    ("prenorm_rms_norm", 256, 3, F16),
    ("rms_norm", 769, 3, F32),
    ("prenorm_layer_norm", 769, 9, F16),
    ("residual_rms_norm", 1024, 9, BF16),
    ("prenorm_layer_norm", 2560, 1, F32),
    ("residual_rms_norm", 2560, 3, F16),
    ("residual_layer_norm", 32768, 2, BF16),
    ("prenorm_layer_norm", 8192, 3, BF16),
]


@pytest.fixture
def few_ctas(monkeypatch):
    """Each CTA gets several blocks of as few rows as can be simulated."""
    monkeypatch.setattr(plan, "SMS", 1)


@pytest.mark.parametrize("name", NORMS)
def test_the_gradients_here_are_slopes_of_the_values_here(name):
    norm = NORMS[name]
    rng = np.random.default_rng(0)
    h, dy, ds = (rng.normal(size=(3, 5)) for _ in range(3))
    scale, bias = (rng.normal(size=5) for _ in range(2))
    gradients = backward64(norm, h, dy, ds, scale)
    for index, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)

        def along(step, index=index, direction=direction):
            moved = [h, scale, bias]
            moved[index] = moved[index] + step * direction
            return (dy * forward64(norm, *moved)).sum() + (ds * moved[0]).sum()

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-7)


@pytest.mark.parametrize(("name", "width", "rows", "dtype"), sampled(CASES))
def test_values_and_gradients(name, width, rows, dtype, few_ctas):
    norm = NORMS[name]
    given = arguments(name, rows, width, dtype)
    scale = given[1 + norm.residual]
    bias = given[-1] if norm.centred else None
    found, pull = jax.vjp(function(name), *given)
    h = given[0] + given[1] if norm.residual else given[0]
    y, s = found if norm.returns_sum else (found, None)
    assert y.dtype == dtype
    assert_rows_close(y, forward64(norm, h, scale, bias))
    if norm.returns_sum:
        assert s.dtype == dtype
        assert (f64(s) == f64(h)).all()

    dy = random(width + 4, y.shape, dtype, mean=0.3)
    ds = random(width + 5, y.shape, dtype) if norm.returns_sum else None
    gradients = list(pull((dy, ds) if norm.returns_sum else dy))
    assert [g.dtype for g in gradients] == [g.dtype for g in given]
    dx, dscale, dbias = backward64(norm, h, dy, ds, scale)
    got = gradients.pop(0)
    assert_rows_close(got, dx)
    if norm.residual:
        assert (f64(gradients.pop(0)) == f64(got)).all()
    assert_columns_close(gradients.pop(0), dscale, rows)
    if norm.centred:
        assert_columns_close(gradients.pop(0), dbias, rows)

    # The same checks see the other norm, a lost term of the gradient and an offset of the scale.
    other = Norm(centred=not norm.centred, scale_offset=norm.scale_offset)
    assert refused(assert_rows_close, y, forward64(other, h, scale, bias))
    assert refused(assert_rows_close, y, forward64(norm, h, f64(scale) + 0.01, bias))
    lost = dy * (f64(scale) + norm.scale_offset) * standardised(norm, h)[1]
    assert refused(assert_rows_close, got, lost + (0.0 if ds is None else f64(ds)))
    assert refused(assert_rows_close, got, backward64(other, h, dy, ds, scale)[0])
    if ds is not None:
        assert refused(assert_rows_close, got, backward64(norm, h, dy, None, scale)[0])


def test_cases_have_every_cut():
    plans = [
        norm_kernels.plan_backward(NORMS[name], rows, width, dtype)
        for name, width, rows, dtype in CASES
    ]
    assert {p.cut for p in plans} == set(Cut)
    assert {p.cluster for p in plans} == {True, False}
    assert {p.flat for p in plans if p.cut is Cut.CTA} == {True, False}
    assert max(p.warpgroups for p in plans if not p.cluster) > 1


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("residual_layer_norm", (False, False)),
        ("residual_layer_norm", (True, False)),
        ("residual_layer_norm", (False, True)),
        ("rms_norm", (False, False)),
    ],
)
def test_without_scale_or_bias(name, has):
    norm = NORMS[name]
    width, rows = 64, 5
    x = random(0, (rows, width), F32)
    scale = random(2, (width,), BF16) if has[0] else None
    bias = random(3, (width,), F16) if has[1] else None
    tensors = [x, jnp.ones_like(x)] if norm.residual else [x]
    parameters = [scale, bias] if norm.centred else [scale]
    y, pull = jax.vjp(function(name), *tensors, *parameters)
    h = sum(tensors)
    assert_rows_close(y, forward64(norm, h, scale, bias))
    dy = random(4, x.shape, F32)
    gradients = pull(dy)[len(tensors) - 1 :]
    dx, dscale, dbias = backward64(norm, h, dy, None, scale)
    assert_rows_close(gradients[0], dx)
    for want, got, there in zip((dscale, dbias), gradients[1:], has, strict=False):
        if there:
            assert_columns_close(got, want, rows)
        else:
            assert got is None


N1 = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]


def test_rows_far_from_zero():
    norm = NORMS["layer_norm"]
    x = jnp.asarray(1000 + np.arange(1024) % 7 - 3, F32)[None]
    # and a random one, whose f32 sum is inexact
    x = jnp.concatenate([x, random(0, (1, 1024), F32, mean=1000.0)])
    y, pull = jax.vjp(function("layer_norm"), x)
    np.testing.assert_allclose(f64(y)[0, :7], N1, atol=1e-5)
    assert_rows_close(y, forward64(norm, x))
    # what the checks are for: E[x^2] - E[x]^2 in f32, and a mean that is rounded to f32
    variance = (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
    fast = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + EPSILON)
    assert np.abs(f64(fast)[0, :7] - N1).max() > 1e-4
    mean = np.float32(f64(x).mean(-1, keepdims=True))
    coarse = (f64(x) - mean) * standardised(norm, x)[1]
    assert refused(assert_rows_close, y[1:], coarse[1:])
    # backward has the same digits: a cotangent along y itself leaves almost nothing of dx
    dy = random(1, x.shape, F32)
    (dx,) = pull(dy)
    assert_rows_close(dx, backward64(norm, x, dy)[0])


def test_short_rows_are_not_padded_into_the_statistics():
    y = pk.layer_norm(jnp.asarray([[1, 2, 3]], F32), interpret=INTERPRET)
    np.testing.assert_allclose(f64(y)[0], [-1.2247440, 0, 1.2247440], atol=2e-7)
    x = jnp.asarray(1000 + 2 * (np.arange(769) % 2), F32)
    y = pk.layer_norm(x, interpret=INTERPRET)
    np.testing.assert_allclose(f64(y)[:2], [-0.9986999, 1.0013007], atol=2e-6)


def test_two_outputs():
    x = jnp.tile(jnp.asarray([1, 2, 3, 4], F32), (4, 1))
    r = jnp.tile(jnp.asarray([0.5, -0.5, 0.5, -0.5], F32), (4, 1))
    f = functools.partial(pk.prenorm_rms_norm, interpret=INTERPRET)
    (y, s), pull = jax.vjp(f, x, r, jnp.ones(4))
    np.testing.assert_array_equal(s[0], [1.5, 1.5, 3.5, 3.5])
    np.testing.assert_allclose(y[0], [0.557086, 0.557086, 1.299867, 1.299867], atol=1e-6)
    # a row for each: y alone, s alone, both, the first column of y
    dy = jnp.asarray([[1] * 4, [0] * 4, [1] * 4, [1, 0, 0, 0]], F32)
    ds = jnp.asarray([[0] * 4, [1] * 4, [1] * 4, [0] * 4], F32)
    dx, dr, _ = pull((dy, ds))
    alone = np.array([0.179292, 0.179292, -0.076839, -0.076839])
    first = [0.342576, -0.028815, -0.067235, -0.067235]
    np.testing.assert_allclose(dx, [alone, np.ones(4), alone + 1, first], atol=1e-6)
    np.testing.assert_array_equal(dx, dr)


def test_gradients_of_one_argument_and_of_one_output():
    x = jnp.asarray([[1, 2, 3, 4]], F32)
    r = jnp.asarray([[0.5, -0.5, 0.5, -0.5]], F32)
    f = functools.partial(pk.prenorm_rms_norm, interpret=INTERPRET)
    dr = jax.grad(lambda r: sum(out.sum() for out in f(x, r)))(r)
    np.testing.assert_allclose(dr[0], [1.179292, 1.179292, 0.923161, 0.923161], atol=1e-6)
    only_sum = jax.grad(lambda x, scale: f(x, r, scale)[1].sum(), argnums=(0, 1))
    dx, dscale = only_sum(x, jnp.ones(4))
    np.testing.assert_array_equal(dx, np.ones((1, 4)))
    np.testing.assert_array_equal(dscale, np.zeros(4))


def test_epsilon():
    x = jnp.asarray([[1e-3] * 128, [0] * 128], F32)
    y, pull = jax.vjp(lambda x: pk.rms_norm(x, jnp.ones(128), interpret=INTERPRET), x)
    np.testing.assert_allclose(y[0], 0.70710678, rtol=1e-6)
    np.testing.assert_array_equal(y[1], np.zeros(128))
    (dx,) = pull(jnp.zeros_like(x).at[1, 0].set(1))
    np.testing.assert_allclose(dx[1], [1000] + [0] * 127, rtol=1e-6)
    larger = pk.rms_norm(x, epsilon=1e-2, interpret=INTERPRET)
    np.testing.assert_allclose(larger[0], 1e-3 / np.sqrt(1e-2 + 1e-6), rtol=1e-6)


def test_a_constant_row_is_the_bias_exactly():
    for width in (100, 256):
        x = jnp.full((3, width), 7, BF16)
        bias = random(0, (width,), F32)
        y = pk.layer_norm(x, jnp.ones(width), bias, interpret=INTERPRET)
        np.testing.assert_array_equal(f64(y), f64(jnp.tile(bias.astype(BF16), (3, 1))))


def test_a_scale_of_zero_has_finite_gradients():
    x, zero = random(0, (3, 128), F32), jnp.zeros(128)
    f = lambda *a: pk.layer_norm(*a, interpret=INTERPRET).sum()
    for gradient in jax.grad(f, argnums=(0, 1, 2))(x, zero, zero):
        assert np.isfinite(gradient).all()


def test_the_norm_is_taken_of_the_rounded_sum():
    x, r = jnp.asarray([[256, 1]], BF16), jnp.asarray([[1, 1]], BF16)
    y, s = pk.prenorm_rms_norm(x, r, interpret=INTERPRET)
    np.testing.assert_array_equal(f64(s), [[256, 2]])
    want = np.array([[1.4141704, 0.01104821]])
    assert_close(y, want, ulps=0.51)
    x, r = random(0, (3, 512), BF16), random(1, (3, 512), BF16, scale=100.0)
    y = pk.residual_layer_norm(x, r, interpret=INTERPRET)
    norm = NORMS["layer_norm"]
    assert_rows_close(y, forward64(norm, x + r))
    assert refused(assert_rows_close, y, forward64(norm, f64(x) + f64(r)))


def test_refusals():
    x = jax.ShapeDtypeStruct((4, 256), F32)
    v = jax.ShapeDtypeStruct((256,), F32)
    assert pk.unsupported(x, x, v, v) is None
    short = jax.ShapeDtypeStruct((128,), F32)
    assert "scale must have the shape (256,)" in pk.unsupported(x, None, short)
    assert "bias must have the shape (256,)" in pk.unsupported(x, None, None, short)
    other = jax.ShapeDtypeStruct((4, 256), BF16)
    assert "must be alike" in pk.unsupported(x, other)
    wide = jax.ShapeDtypeStruct((2, 200_000), F32)
    assert "at most 131072" in pk.unsupported(wide)
    with pytest.raises(ValueError, match="int32"):
        pk.rms_norm(jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="at least one axis"):
        pk.layer_norm(jnp.zeros(()))
    with pytest.raises(ValueError, match="must be alike"):
        pk.prenorm_rms_norm(jnp.zeros((2, 8)), jnp.zeros((1, 8)))


def test_expected_bytes():
    rows, width = 8192, 4096
    array, vector, numbers = 2 * rows * width, 2 * width, 4 * rows
    forward, backward = norm_kernels.expected_bytes, norm_kernels.expected_bytes_backward
    layer, rms = NORMS["layer_norm"], NORMS["prenorm_rms_norm"]
    assert forward(layer, rows, width, BF16) == 2 * array
    assert forward(layer, rows, width, BF16, [BF16, F32]) == 2 * array + 3 * vector
    assert forward(layer, rows, width, BF16, saves=True) == 2 * array + 2 * numbers
    assert forward(layer, rows, width, F32, saves=True) == 4 * array + 3 * numbers
    assert forward(rms, rows, width, BF16, [BF16], saves=True) == 4 * array + vector + numbers
    assert backward(layer, rows, width, BF16) == 3 * array + 2 * numbers
    assert backward(layer, rows, width, BF16, scale_dtype=BF16, bias_dtype=BF16) == (
        3 * array + 3 * vector + 2 * numbers
    )
    assert backward(rms, rows, width, BF16) == 4 * array + numbers


@pytest.mark.parametrize("width", [16384, 16001])
def test_sums_in_shared_memory(width, few_ctas):
    """Where 4 warpgroups have 32 columns to a lane, registers hold one sum of two."""
    norm, rows, tuning = NORMS["layer_norm"], 3, Tuning(width, 1, 4, 1, 2)
    p = norm_kernels.plan_backward(norm, rows, width, BF16, tuning=tuning)
    assert (p.shared_sums, p.warpgroups, p.parts) == (1, 4, 1)
    h, dy = (random(seed, (rows, width), BF16) for seed in range(2))
    scale = random(2, (width,), F32)
    statistics = [f64(h).mean(-1), standardised(norm, h)[1][:, 0]]
    found = norm_kernels.backward_kernel(
        norm,
        h,
        dy,
        None,
        [jnp.asarray(s, F32) for s in statistics],
        scale,
        bias_dtype=F32,
        tuning=tuning,
        interpret=INTERPRET,
    )
    dx, dscale, dbias = backward64(norm, h, dy, None, scale)
    assert_rows_close(found.dx, dx)
    assert_columns_close(found.dscale, dscale, rows)
    assert_columns_close(found.dbias, dbias, rows)
