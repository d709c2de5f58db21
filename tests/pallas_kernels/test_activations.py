"""bias + GELU with its gradients: simulated against float64, and lowered for the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import (
    INTERPRET,
    assert_close,
    assert_rounded,
    f64,
    gelu,
    gelu_slope,
    row_kernels,
    sampled,
)

import pallas_kernels.gelu as kernels
from pallas_kernels.gelu import bias_gelu, bias_gelu_rowsum
from pallas_kernels.plan import Cut

pytestmark = pytest.mark.thorough

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

# Width, rows, dtype, dtype of the bias, approximate, how the rows are cut.
ALONE = [
    (3, 131, BF16, F32, False, Cut.LANE),  # two blocks, which overlap
    (100, 3, BF16, F32, False, Cut.CTA),
    (256, 21, BF16, F32, True, Cut.WARP),
    (769, 3, F16, F32, True, Cut.CTA),
    (2560, 5, F32, F32, True, Cut.CTA),
    (8192, 1, BF16, BF16, True, Cut.CTA),
]
WITH_SUMS = [
    (1, 3, F32, F32, True, Cut.LANE),
    (31, 5, F16, BF16, True, Cut.LANE),
    (256, 7, F32, F32, False, Cut.WARP),
    (1024, 3, BF16, F32, True, Cut.CTA),
    (1151, 3, F16, BF16, False, Cut.CTA),
    (8192, 1, BF16, F32, True, Cut.CTA),
    (16385, 2, BF16, F32, True, Cut.CTA),
]


def random(seed, shape, dtype, scale=1.5, mean=0.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale + mean
    return jnp.asarray(values, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(function, approximate, x, bias, cotangents):
    """The simulated value and gradients; the same shapes are compiled once."""
    f = functools.partial(function, approximate=approximate, interpret=INTERPRET)
    value, gradient = jax.vjp(f, x, bias)
    return value, *gradient(cotangents)


def assert_values(y, want, z):
    assert_rounded(y, want, scale=z, slack=4e-7 if y.dtype == F32 else 2e-6)


def assert_column_sums(got, terms):
    """`got` is the sum of float64 `terms` over rows, accurate in f32 before it is rounded."""
    want = terms.sum(0)
    slack = 5e-6 * np.sqrt(len(terms))
    assert_rounded(got, want, scale=np.abs(want).max(), slack=slack)


@pytest.mark.parametrize(
    ("width", "rows", "dtype", "bias_dtype", "approximate", "cut"), sampled(ALONE)
)
def test_bias_gelu(width, rows, dtype, bias_dtype, approximate, cut):
    x, dy = random(width, (rows, width), dtype), random(1, (rows, width), dtype)
    bias = random(2, (width,), bias_dtype)
    assert kernels.plan_backward(rows, width, dtype).cut is cut
    y, dx, dbias = run(bias_gelu, approximate, x, bias, dy)
    z = f64(x) + f64(bias)
    assert (y.dtype, dx.dtype, dbias.dtype) == (dtype, dtype, bias_dtype)
    assert_values(y, gelu(z, approximate), z)
    want = f64(dy) * gelu_slope(z, approximate)
    assert_rounded(dx, want, scale=dy)
    assert_column_sums(dbias, want)


@pytest.mark.parametrize(
    ("width", "rows", "dtype", "bias_dtype", "approximate", "cut"), sampled(WITH_SUMS)
)
def test_bias_gelu_rowsum(width, rows, dtype, bias_dtype, approximate, cut):
    x, dy = random(width + 1, (rows, width), dtype), random(1, (rows, width), dtype)
    bias, dsums = random(2, (width,), bias_dtype), random(3, (rows,), F32)
    assert kernels.plan(rows, width, dtype, row_sums=True).cut is cut
    (y, sums), dx, dbias = run(bias_gelu_rowsum, approximate, x, bias, (dy, dsums))
    z = f64(x) + f64(bias)
    want = gelu(z, approximate)
    assert_values(y, want, z)
    assert (sums.dtype, sums.shape) == (F32, (rows,))
    assert np.abs(f64(sums) - want.sum(-1)).max() < 1e-6 * np.abs(want).sum(-1).max()
    total = f64(dy) + f64(dsums)[:, None]
    want = total * gelu_slope(z, approximate)
    scale = np.abs(f64(dy)) + np.abs(f64(dsums))[:, None]
    assert_rounded(dx, want, scale=scale)
    assert_column_sums(dbias, want)


def test_the_checks_tell_wrong_from_right():
    x, dy = random(0, (5, 256), BF16), random(1, (5, 256), BF16)
    bias, dsums = random(2, (256,), F32), random(3, (5,), F32)
    (y, sums), dx, dbias = run(bias_gelu_rowsum, True, x, bias, (dy, dsums))
    z = f64(x) + f64(bias)
    total = f64(dy) + f64(dsums)[:, None]
    want = total * gelu_slope(z, True)
    # sums of the unrounded values and gradients, not of what was stored
    right, stored = gelu(z, True).sum(-1), f64(y).sum(-1)
    assert np.abs(stored - right).max() > 10 * np.abs(f64(sums) - right).max()
    assert_column_sums(dbias, want)
    with pytest.raises(AssertionError, match="of one rounding"):
        assert_column_sums(dbias, f64(dx))
    # the other form, the sums' cotangent forgotten, the sum rounded before it is taken
    with pytest.raises(AssertionError, match="of one rounding"):
        assert_values(y, gelu(z, False), z)
    for wrong in (
        total * gelu_slope(z, False),
        f64(dy) * gelu_slope(z, True),
        total * gelu_slope((x + bias.astype(BF16)).astype(BF16), True),
    ):
        with pytest.raises(AssertionError, match="of one rounding"):
            assert_rounded(dx, wrong, scale=total)


def test_calls_without_gradients_have_the_same_bits():
    x, bias, dy = random(0, (5, 256), BF16), random(1, (256,), F32), random(2, (5, 256), BF16)
    y, sums = bias_gelu_rowsum(x, bias, interpret=INTERPRET)
    alone = bias_gelu(x, bias, interpret=INTERPRET)
    (other, other_sums), *_ = run(bias_gelu_rowsum, True, x, bias, (dy, sums))
    assert (f64(other_sums) == f64(sums)).all()
    for got in (alone, other, run(bias_gelu, True, x, bias, dy)[0]):
        assert (f64(got) == f64(y)).all()


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("approximate", [True, False])
def test_ends(dtype, approximate):
    given = [60, -60, -4, -3, 3]
    x = jnp.zeros((5, 256), dtype).at[:, 0].set(jnp.asarray(given, dtype))
    zero, one = jnp.zeros(256, dtype), jnp.ones((5, 256), dtype)
    y, slope, _ = run(bias_gelu, approximate, x, zero, one)
    y, slope = f64(y)[:, 0], f64(slope)[:, 0]
    slack = 0.51 * float(jnp.finfo(dtype).eps) + 1e-5
    at = [0, 1, 2, 3, 4] if approximate else [0, 1, 2, 4]
    tanh, erf = [60, 0, -7.0246e-5, -0.0036374, 2.9963626], [60, 0, -1.26685e-4, 2.9959503]
    # in float16 these are subnormal
    tiny = 3e-8 if dtype == F16 else 0
    np.testing.assert_allclose(y[at], tanh if approximate else erf, rtol=slack, atol=tiny)
    want = [1, 0, -3.3512e-4, 1.0115842] if approximate else [1, 0, -5.0365e-4, 1.0119456]
    np.testing.assert_allclose(slope[[0, 1, 2, 4]], want, rtol=slack, atol=tiny)


def test_values_that_are_not_finite_stay_where_they_are():
    x = random(0, (5, 256), BF16).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    y, dx, dbias = run(bias_gelu, True, x, jnp.zeros(256), jnp.ones_like(x))
    bad = np.zeros((5, 256), bool)
    bad[1, 3] = True
    assert (np.isnan(f64(y)) == bad).all()
    assert (np.isnan(f64(dx)) == bad).all()
    assert np.flatnonzero(np.isnan(f64(dbias))).tolist() == [3]
    assert f64(y)[2, 5] == np.inf
    assert f64(dx)[2, 5] == 1


@pytest.mark.parametrize("scale", [20, 0.05])
def test_other_standard_deviations(scale):
    x, dy = random(0, (5, 256), BF16, scale), random(1, (5, 256), BF16)
    bias = random(2, (256,), F32, scale)
    y, dx, dbias = run(bias_gelu, True, x, bias, dy)
    z = f64(x) + f64(bias)
    assert_close(y, gelu(z, True), ulps=0.51, floor=1e-30)
    want = f64(dy) * gelu_slope(z, True)
    assert_rounded(dx, want, scale=dy)
    assert_column_sums(dbias, want)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["plain", "jit", "vmap"])
def test_empty_arrays(wrap):
    for shape in ((0, 64), (3, 0)):
        x = jnp.zeros(shape, BF16)
        bias = jnp.zeros((shape[0], shape[1]) if wrap is jax.vmap else shape[1:], F32)
        if wrap is jax.vmap:  # each example is empty
            x, bias = jnp.zeros((2, *shape), BF16), jnp.zeros((2, shape[1]), F32)
        y, gradient = jax.vjp(wrap(bias_gelu), x, bias)
        dx, dbias = gradient(y)
        assert (y.shape, dx.shape, dx.dtype) == (x.shape, x.shape, BF16)
        assert (dbias.shape, dbias.dtype) == (bias.shape, F32)
        assert not dbias.any()
        (y, sums), gradient = jax.vjp(wrap(bias_gelu_rowsum), x, bias)
        dx, dbias = gradient((y, sums))
        assert (y.shape, sums.shape, sums.dtype) == (x.shape, x.shape[:-1], F32)
        assert dx.shape == x.shape
        assert dbias.shape == bias.shape
        assert not dbias.any()
        assert not sums.any()


def test_leading_axes_and_layout():
    x, dy = random(0, (5, 7, 64), F16), random(1, (5, 7, 64), F16)
    bias, dsums = random(2, (64,), F32), random(3, (5, 7), F32)
    found = run(bias_gelu_rowsum, True, x, bias, (dy, dsums))
    flat = run(
        bias_gelu_rowsum, True, x.reshape(35, 64), bias, (dy.reshape(35, 64), dsums.reshape(35))
    )
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(flat), strict=True):
        assert (f64(got).reshape(-1) == f64(want).reshape(-1)).all()
    x = random(4, (64, 6), F16)
    turned = jax.jit(lambda x, bias: bias_gelu(x.T, bias, interpret=INTERPRET))(x, bias)
    assert (f64(turned) == f64(bias_gelu(jnp.array(x.T), bias, interpret=INTERPRET))).all()
    assert bias_gelu(x[:, 0], bias, interpret=INTERPRET).shape == (64,)


def test_gradients_of_one_output():
    x, bias = random(0, (5, 256), BF16), random(1, (256,), F32)
    slope = gelu_slope(f64(x) + f64(bias), True)
    for loss in (
        lambda x: bias_gelu(x, bias, interpret=INTERPRET).sum(),
        lambda x: bias_gelu_rowsum(x, bias, interpret=INTERPRET)[0].sum(),
        lambda x: bias_gelu_rowsum(x, bias, interpret=INTERPRET)[1].sum(),
    ):
        assert_rounded(jax.jit(jax.grad(loss))(x), slope, scale=np.ones(1))


def gradients(function):
    def loss(x, bias):
        return jax.tree.reduce(lambda s, y: s + y.astype(F32).sum(), function(x, bias), F32(0))

    return jax.grad(loss, argnums=(0, 1))


def test_vmap():
    x, each = random(0, (3, 4, 16), BF16), random(1, (3, 16), F32)
    function = functools.partial(bias_gelu, interpret=INTERPRET)
    dx, dbias = jax.jit(jax.vmap(gradients(function)))(x, each)
    want = gelu_slope(f64(x) + f64(each)[:, None], True)
    assert_rounded(dx, want, scale=np.ones(1))
    assert dbias.shape == (3, 16)
    np.testing.assert_allclose(f64(dbias), want.sum(1), atol=1e-5)
    bias = each[0]
    y, gradient = jax.vjp(jax.vmap(function, in_axes=(0, None)), x, bias)
    assert_values(y, gelu(f64(x) + f64(bias), True), f64(x) + f64(bias))
    dx, dbias = gradient(jnp.ones_like(x))
    want = gelu_slope(f64(x) + f64(bias), True)
    assert_rounded(dx, want, scale=np.ones(1))
    assert dbias.shape == (16,)
    np.testing.assert_allclose(f64(dbias), want.sum((0, 1)), atol=1e-5)


def test_vmap_of_a_kernel_whose_ctas_share_columns():
    x, dy = random(0, (2, 3, 2560), BF16), random(1, (2, 3, 2560), BF16)
    bias, dsums = random(2, (2, 2560), F32), random(3, (2, 3), F32)
    backward = functools.partial(kernels.bias_gelu_rowsum_backward_kernel, interpret=INTERPRET)
    dx, dbias = jax.vmap(backward)(x, bias, dy, dsums)
    total = f64(dy) + f64(dsums)[..., None]
    want = total * gelu_slope(f64(x) + f64(bias)[:, None], True)
    assert_rounded(dx, want, scale=np.abs(f64(dy)) + np.abs(f64(dsums))[..., None])
    for example in range(2):
        assert_column_sums(dbias[example], want[example])


def test_x64_mode_changes_nothing():
    x, bias, dy = random(0, (5, 256), BF16), random(1, (256,), F32), random(2, (5, 256), BF16)
    given = bias_gelu_rowsum, True, x, bias, (dy, random(3, (5,), F32))
    want = run(*given)
    with jax.enable_x64(True):
        wide = run(*given)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(wide), strict=True):
        assert a.dtype == b.dtype
        assert (f64(a) == f64(b)).all()


def test_refusals():
    shape = jax.ShapeDtypeStruct
    for x, bias, words in (
        (shape((2, 8), jnp.int32), shape((8,), F32), "not int32"),
        (shape((2, 8), F32), shape((9,), F32), "bias must have the shape (8,)"),
        (shape((2, 8), F32), shape((8,), jnp.int8), "int8"),
        (shape((), F32), shape((1,), F32), "at least one axis"),
        (shape((2**20, 2048), BF16), shape((2048,), F32), "2**31-1 elements"),
    ):
        assert words in kernels.unsupported(x, bias)
        assert words in kernels.unsupported(x, bias, row_sums=True)
    wide = shape((2, 2**20), BF16), shape((2**20,), BF16)
    assert kernels.unsupported(*wide) is None
    assert "The last axis may be at most" in kernels.unsupported(*wide, row_sums=True)
    with pytest.raises(ValueError, match="bias must have the shape"):
        bias_gelu(jnp.zeros((2, 128)), jnp.zeros(256))
    with pytest.raises(ValueError, match="The last axis may be at most"):
        jax.eval_shape(bias_gelu_rowsum, *wide)


def test_expected_bytes():
    rows, width = 8192, 4096
    tensor = rows * width * 2
    assert kernels.expected_bytes(rows, width, BF16) == 2 * tensor + 2 * width
    assert kernels.expected_bytes(rows, width, BF16, F32, row_sums=True) == (
        2 * tensor + 4 * width + 4 * rows
    )
    assert kernels.expected_bytes_backward(rows, width, BF16, F32) == 3 * tensor + 8 * width
    assert kernels.expected_bytes_backward(rows, width, BF16, row_sums=True) == (
        3 * tensor + 4 * width + 4 * rows
    )


def kernels_in(function, *arguments):
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return row_kernels(lowered.as_text())


@pytest.mark.parametrize(
    ("function", "width", "dtype", "bias_dtype"),
    [
        (bias_gelu, 1, F32, BF16),
        (bias_gelu, 100, BF16, F32),
        (bias_gelu, 1024, BF16, BF16),
        (functools.partial(bias_gelu, approximate=False), 2**17, F16, F32),
        (bias_gelu_rowsum, 3, BF16, F32),
        (bias_gelu_rowsum, 256, BF16, F32),
        (bias_gelu_rowsum, 1000, F32, BF16),
        (bias_gelu_rowsum, 2560, F16, F16),
        (bias_gelu_rowsum, 16385, BF16, F32),
        (functools.partial(bias_gelu_rowsum, approximate=False), 65536, BF16, F32),
    ],
)
def test_lowers_to_one_kernel_forward_and_one_backward(function, width, dtype, bias_dtype):
    x = jax.ShapeDtypeStruct((5000, width), dtype)
    bias = jax.ShapeDtypeStruct((width,), bias_dtype)
    assert kernels_in(function, x, bias) == 1
    assert kernels_in(gradients(function), x, bias) == 1  # saves nothing but the arguments


def test_lowers_in_x64_mode_under_transformations_and_for_export():
    x, bias = jax.ShapeDtypeStruct((3, 5, 256), BF16), jax.ShapeDtypeStruct((3, 256), F32)
    one, shared = jax.ShapeDtypeStruct((5, 256), BF16), jax.ShapeDtypeStruct((256,), F32)
    for function in (bias_gelu, bias_gelu_rowsum):
        with jax.enable_x64(True):
            assert kernels_in(function, one, shared) == 1
            assert kernels_in(gradients(function), one, shared) == 1
        assert kernels_in(jax.vmap(gradients(function)), x, bias) == 1
        assert kernels_in(gradients(jax.vmap(function, in_axes=(0, None))), x, shared) == 1
        assert kernels_in(gradients(jax.checkpoint(function)), one, shared) == 1
        check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
        exported = jax.export.export(
            jax.jit(gradients(function)), platforms=["cuda"], disabled_checks=[check]
        )(one, shared)
        assert row_kernels(exported.mlir_module()) == 1
