"""The kernels in JAX's CPU simulation against float64; not a proof for the card, see test_gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import assert_close, f64, gelu, layer_norm, softmax

import pallas_kernels as pk

# (width, rows): one row per warp, blocks that overlap at the end, fewer rows than a block,
# a width with 4-byte loads, one row over several warpgroups.
CASES = [(128, 37), (256, 3), (640, 9), (1024, 5), (1152, 5), (2560, 3), (8192, 2), (16384, 2)]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def random(seed, shape, dtype, scale=1.5, mean=0.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale + mean
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize(("width", "rows"), CASES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_residual_layer_norm(width, rows, dtype):
    x, residual = random(0, (rows, width), dtype), random(1, (rows, width), dtype, mean=3.0)
    scale, bias = random(2, (width,), F32), random(3, (width,), BF16)
    y = pk.residual_layer_norm(x, residual, scale, bias, interpret=True)
    assert y.dtype == dtype
    want = layer_norm(x + residual, scale, bias)
    assert_close(y, want, ulps=0.51 if dtype == BF16 else 8, floor=0.1 if dtype == BF16 else 1.0)


@pytest.mark.parametrize(("width", "rows"), CASES)
@pytest.mark.parametrize("approximate", [True, False])
def test_bias_gelu_rowsum(width, rows, approximate):
    x, bias = random(0, (rows, width), BF16), random(1, (width,), F32)
    y, sums = pk.bias_gelu_rowsum(x, bias, approximate=approximate, interpret=True)
    want = gelu(f64(x) + f64(bias), approximate)
    assert_close(y, want, ulps=0.51)
    assert sums.dtype == F32
    assert np.abs(f64(sums) - want.sum(-1)).max() < 1e-6 * np.abs(want).sum(-1).max()
    # of the unrounded values: sums of the rounded ones are further off
    assert np.abs(f64(y).sum(-1) - want.sum(-1)).max() > 10 * np.abs(f64(sums) - want.sum(-1)).max()
    alone = pk.bias_gelu(x, bias, approximate=approximate, interpret=True)
    assert (f64(alone) == f64(y)).all()


@pytest.mark.parametrize(("width", "rows"), CASES)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_softmax(width, rows, dtype):
    x = random(0, (rows, width), dtype, scale=3.0)
    y = pk.softmax(x, interpret=True)
    # f32: exp2's argument, up to 40 here, is rounded like every other value
    assert_close(y, softmax(x), ulps=0.51 if dtype == F16 else 40)


@pytest.mark.parametrize("width", [256, 4096])
def test_softmax_of_rows_that_are_not_finite(width):
    x = np.random.default_rng(0).normal(size=(6, width))
    x[1], x[2, 5], x[3, 7], x[4, 9] = -np.inf, np.nan, np.inf, -np.inf
    x[5, 4:] = -np.inf
    x[5, :4] = [0, 1, 2, -np.inf]
    y = f64(pk.softmax(jnp.asarray(x, F32), interpret=True))
    for row in (1, 2, 3):
        assert np.isnan(y[row]).all()
    assert np.isfinite(y[[0, 4, 5]]).all()
    assert y[4, 9] == 0
    np.testing.assert_allclose(y[5, :4], [0.0900306, 0.2447285, 0.6652410, 0], atol=1e-7)


N1 = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]


def offset_row():
    return jnp.asarray(1000 + np.arange(1024) % 7 - 3, F32)[None]


def test_layer_norm_of_rows_far_from_zero():
    x = offset_row()
    y = pk.residual_layer_norm(
        x, jnp.zeros_like(x), jnp.ones(1024), jnp.zeros(1024), interpret=True
    )
    np.testing.assert_allclose(f64(y)[0, :7], N1, atol=1e-5)
    # what the check is for: E[x^2] - E[x]^2 in f32 must not pass it
    variance = (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
    fast = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-6)
    assert np.abs(f64(fast)[0, :7] - N1).max() > 1e-3
    # and a random one, whose f32 sum is inexact
    x = random(0, (4, 4096), F32, mean=1000.0)
    y = pk.residual_layer_norm(
        x, jnp.zeros_like(x), jnp.ones(4096), jnp.zeros(4096), interpret=True
    )
    assert_close(y, layer_norm(x, np.ones(4096), np.zeros(4096)), ulps=8, floor=1.0)


def test_layer_norm_of_a_constant_row_is_the_bias_exactly():
    for width in (384, 640, 1024):
        x = jnp.full((5, width), 7, BF16)
        one, zero = jnp.ones(width), jnp.zeros(width)
        y = pk.residual_layer_norm(x, jnp.zeros_like(x), one, zero, interpret=True)
        assert (f64(y) == 0).all()


def test_layer_norm_takes_the_rounded_sum():
    x = jnp.tile(jnp.asarray([256, 1], BF16), (4, 128))
    one = jnp.ones((4, 256), BF16)
    scale, bias = jnp.full(256, 64.0), jnp.zeros(256)
    y = pk.residual_layer_norm(x, one, scale, bias, interpret=True)
    assert_close(y, layer_norm(x + one, scale, bias), ulps=0.51)
    x, residual = random(0, (4, 512), BF16), random(1, (4, 512), BF16, scale=100.0)
    ones, zeros = jnp.ones(512), jnp.zeros(512)
    y = pk.residual_layer_norm(x, residual, ones, zeros, interpret=True)
    unrounded = layer_norm(f64(x) + f64(residual), ones, zeros)
    with pytest.raises(AssertionError, match="eps at"):
        assert_close(y, unrounded, ulps=0.51, floor=0.01)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_gelu_ends(dtype):
    x = jnp.zeros((5, 256), dtype).at[:, 0].set(jnp.asarray([60, -60, -4, -3, 3], dtype))
    zero = jnp.zeros(256, dtype)
    slack = 0.51 * float(jnp.finfo(dtype).eps) + 1e-5
    tanh = f64(pk.bias_gelu(x, zero, interpret=True))[:, 0]
    np.testing.assert_allclose(tanh, [60, 0, -7.0246e-5, -0.0036374, 2.9963626], rtol=slack)
    erf = f64(pk.bias_gelu(x, zero, approximate=False, interpret=True))[:, 0]
    np.testing.assert_allclose(erf[[0, 1, 2, 4]], [60, 0, -1.26685e-4, 2.9959503], rtol=slack)


def test_leading_axes_and_empty_arrays():
    x, bias = random(0, (2, 3, 256), BF16), random(1, (256,), BF16)
    y, sums = pk.bias_gelu_rowsum(x, bias, interpret=True)
    flat, flat_sums = pk.bias_gelu_rowsum(x.reshape(6, 256), bias, interpret=True)
    assert y.shape == x.shape
    assert sums.shape == (2, 3)
    assert (f64(y).reshape(6, 256) == f64(flat)).all()
    assert (f64(sums).reshape(6) == f64(flat_sums)).all()
    assert pk.softmax(x[0, 0], interpret=True).shape == (256,)
    for shape in ((0, 256), (3, 0)):
        x = jnp.zeros(shape, BF16)
        v = jnp.zeros(shape[-1], BF16)
        assert pk.softmax(x).shape == shape
        assert pk.residual_layer_norm(x, x, v, v).shape == shape
        y, sums = pk.bias_gelu_rowsum(x, v)
        assert y.shape == shape
        assert sums.shape == shape[:1]


def test_vmap_with_a_bias_for_each_example():
    x, bias = random(0, (2, 5, 256), BF16), random(1, (2, 256), BF16)
    got = jax.vmap(lambda a, b: pk.bias_gelu(a, b, interpret=True))(x, bias)
    want = gelu(f64(x) + f64(bias)[:, None], True)
    assert_close(got, want, ulps=0.51)


def test_unsupported_arguments_raise():
    with pytest.raises(ValueError, match="multiple of 128"):
        pk.softmax(jnp.zeros((2, 100)))
    with pytest.raises(ValueError, match="bias must have the shape"):
        pk.bias_gelu(jnp.zeros((2, 128)), jnp.zeros(256))
    with pytest.raises(ValueError, match="must be alike"):
        pk.residual_layer_norm(
            jnp.zeros((2, 128)), jnp.zeros((1, 128)), jnp.zeros(128), jnp.zeros(128)
        )
