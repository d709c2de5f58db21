"""The formulas in plain JAX against float64, and the public functions that fall back on them."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from norm_references import (
    BF16,
    F16,
    F32,
    NORMS,
    OFFSET,
    arguments,
    assert_columns_close,
    assert_rows_close,
    backward64,
    forward64,
    random,
    refused,
)
from references import assert_close, assert_rounded, f64

import pallas_kernels as pk
from pallas_kernels import column_sums, formulas


def fallback(name, **options):
    return jax.jit(functools.partial(getattr(pk, name), fallback=True, **options))


def formula(name, **options):
    return jax.jit(functools.partial(getattr(formulas, name), **options))


WAYS = {"formula": formula, "fallback": fallback}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


# Each way with one of the dtypes, as compiling takes longest.
BOTH = pytest.mark.parametrize(
    ("way", "dtype"), [("formula", F32), ("fallback", BF16)], indirect=["way"]
)


def gradients(f, cotangents, *given):
    """Results and gradients, compiled."""

    def run(*given):
        found, pull = jax.vjp(f, *given)
        return found, pull(cotangents)

    return jax.jit(run)(*given)


SHAPES = [(3, 100, BF16), (5, 769, F32), (1, 1, F16), (4, 3, F32)]


@pytest.mark.parametrize(
    ("way", "name", "rows", "width", "dtype"),
    [
        (way, name, *SHAPES[(i + j) % 4])
        for i, name in enumerate(NORMS)
        for j, way in enumerate(WAYS)
    ],
    indirect=["way"],
)
def test_norms(way, name, rows, width, dtype):
    norm = NORMS[name]
    given = arguments(name, rows, width, dtype)
    dy, ds = random(1, (rows, width), dtype), random(2, (rows, width), dtype)
    f = way(name, **({} if norm.centred else {"scale_offset": OFFSET}))
    found, got = gradients(f, (dy, ds) if norm.returns_sum else dy, *given)
    y, *sums = found if norm.returns_sum else [found]
    h, scale = given[0] + given[1] if norm.residual else given[0], given[1 + norm.residual]
    assert_rows_close(y, forward64(norm, h, scale, given[-1] if norm.centred else None))
    for s in sums:
        np.testing.assert_array_equal(s, h)
    dx, dscale, dbias = backward64(norm, h, dy, ds if norm.returns_sum else None, scale)
    wide = width > 1  # the deviation of one element is that of epsilon
    for gradient in got[: 1 + norm.residual]:
        if wide:
            assert_rounded(gradient, dx, scale=np.abs(dx).max(), slack=4e-6)
    assert_columns_close(got[1 + norm.residual], dscale, rows)
    if norm.centred:
        assert_columns_close(got[-1], dbias, rows)


def test_norm_of_rows_far_from_zero():  # N1, N2
    x = (1000 + np.arange(1024) % 7 - 3).astype(np.float32)[None]
    want = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]

    def check(y):
        np.testing.assert_allclose(y[0, :7], want, atol=1e-5)

    check(formula("layer_norm")(x))
    fast = (x - x.mean()) / np.sqrt((x * x).mean() - x.mean() ** 2 + np.float32(1e-6))
    assert refused(check, fast)
    y = formula("layer_norm")(jnp.asarray([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(y, [-1.2247440, 0, 1.2247440], atol=1e-6)
    y = formula("layer_norm")(jnp.asarray([1000.0, 1002.0] * 384 + [1000.0]))
    np.testing.assert_allclose(y[:2], [-0.9986999, 1.0013007], atol=1e-6)


def test_rms_norm_with_two_outputs(way):  # N5
    x, r = jnp.asarray([[1.0, 2, 3, 4]]), jnp.asarray([[0.5, -0.5, 0.5, -0.5]])
    ones, none = jnp.ones_like(x), jnp.zeros_like(x)
    f = way("prenorm_rms_norm")
    run = jax.jit(lambda cotangents, *given: gradients(f, cotangents, *given))
    of_y = [0.179292, 0.179292, -0.076839, -0.076839]
    for dy, ds, want in (
        (ones, none, of_y),
        (none, ones, [1, 1, 1, 1]),
        (ones, ones, np.add(of_y, 1)),
        (none.at[0, 0].set(1), none, [0.342576, -0.028815, -0.067235, -0.067235]),
    ):
        (y, s), (dx, dr) = run((dy, ds), x, r)
        np.testing.assert_allclose(y[0], [0.557086, 0.557086, 1.299867, 1.299867], atol=1e-6)
        np.testing.assert_array_equal(s[0], [1.5, 1.5, 3.5, 3.5])
        np.testing.assert_allclose(dx[0], want, atol=1e-6)
        np.testing.assert_array_equal(dx, dr)
    alone = jax.grad(lambda r: f(x, r)[0].sum())(r)
    np.testing.assert_allclose(alone[0], of_y, atol=1e-6)


def test_epsilon_and_rounded_sums(way):  # N6, N11
    norm = way("rms_norm")
    np.testing.assert_allclose(norm(jnp.full((1, 8), 1e-3)), 0.70710678, rtol=1e-6)
    zero = jnp.zeros((1, 4))
    np.testing.assert_array_equal(norm(zero), zero)
    assert jax.grad(lambda x: norm(x)[0, 0])(zero)[0, 0] == pytest.approx(1000, rel=1e-6)
    assert (f64(way("layer_norm")(jnp.full((2, 1000), 7.0))) == 0).all()
    scaled = jax.grad(lambda x, s: norm(x, s).sum(), argnums=(0, 1))
    assert all(np.isfinite(f64(d)).all() for d in scaled(random(0, (2, 8), F32), jnp.zeros(8)))

    def bf16(*values):
        return jnp.asarray([values], BF16)

    y, s = way("prenorm_rms_norm")(bf16(256, 1), bf16(1, 1))
    np.testing.assert_array_equal(f64(s), [[256, 2]])
    assert_close(y, np.asarray([[1.4141704, 0.01104821]]), ulps=0.51)


@pytest.mark.parametrize("deviation", [6e-8, 3.0, 1.5e4])
def test_sums_of_16_bit_rows_are_rounded_as_they_are_stored(deviation):
    """With f16's subnormals and overflows, whatever XLA makes of conversions."""
    values = np.random.default_rng(0).normal(size=(2, 12, 64)) * deviation
    x, r = jnp.asarray(values, F16)
    with np.errstate(over="ignore"):
        want = np.asarray(x) + np.asarray(r)
    y, s = formula("prenorm_rms_norm", epsilon=0)(x, r)
    np.testing.assert_array_equal(s, want)
    finite = np.isfinite(want).all(-1)
    h = f64(want[finite])
    assert_close(y[finite], h / np.sqrt((h * h).mean(-1, keepdims=True)), ulps=0.51, floor=0.2)
    assert finite.any()
    assert finite.all() == (deviation < 1e4)
    assert np.isnan(f64(y[~finite])).any(-1).all()


ACTIVATIONS = [("tanh", True), ("erf", False)]


@pytest.mark.parametrize(("form", "approximate"), ACTIVATIONS)
@BOTH
def test_gelu_with_a_bias(way, form, approximate, dtype):
    x, bias = random(0, (7, 129), dtype, scale=3), random(1, (129,), F32)
    dy, dsums = random(2, (7, 129), dtype), random(3, (7,), F32)
    z = x.astype(F32) + bias
    y, (dx, dbias) = gradients(way("bias_gelu", approximate=approximate), dy, x, bias)
    want, slope = references.gelu(z, approximate), references.gelu_slope(z, approximate)
    assert_rounded(y, want, scale=want, slack=1e-5)
    assert_rounded(dx, f64(dy) * slope, scale=f64(dy), slack=4e-6)
    assert_columns_close(dbias, (f64(dy) * slope).sum(0), 7)
    f = way("bias_gelu_rowsum", approximate=approximate)
    (y, sums), (dx, dbias) = gradients(f, (dy, dsums), x, bias)
    assert_rounded(y, want, scale=want, slack=1e-5)
    assert_rounded(sums, want.sum(-1), scale=np.abs(want).sum(-1))
    dz = (f64(dy) + f64(dsums)[:, None]) * slope
    assert_rounded(dx, dz, scale=1 + np.abs(dz), slack=4e-6)
    assert_columns_close(dbias, dz.sum(0), 7)


@BOTH
def test_gated(way, dtype):
    gate, up, dy = (random(i, (5, 65), dtype, scale=2) for i in range(3))
    forms = [("geglu", {"approximate": a}, a) for _, a in ACTIVATIONS]
    for name, options, approximate in [("swiglu", {}, None), *forms]:
        if approximate is None:
            value, slope = references.silu(gate), references.silu_slope(gate)
        else:
            value = references.gelu(gate, approximate)
            slope = references.gelu_slope(gate, approximate)
        y, (dgate, dup) = gradients(way(name, **options), dy, gate, up)
        size = np.abs(f64(dy)) * (1 + np.abs(f64(up)))
        assert_rounded(y, value * f64(up), scale=value * f64(up), slack=4e-6)
        assert_rounded(dgate, f64(dy) * f64(up) * slope, scale=size, slack=4e-6)
        assert_rounded(dup, f64(dy) * value, scale=size, slack=4e-6)


def test_ends_of_gelu(way):  # N4
    for approximate, dtype, at, want, slope in (
        (True, F16, [60, -60], [60, 0], [1, 0]),
        (False, F16, [60, -60], [60, 0], [1, 0]),
        (True, BF16, [-4, 3, -3], [-7.0246e-5, 2.9963626, -0.0036374], [-3.3512e-4, 1.0115842]),
        (False, BF16, [-4, 3], [-1.26685e-4, 2.9959503], [-5.0365e-4, 1.0119456]),
    ):
        x = jnp.asarray([at], dtype)
        f = way("bias_gelu", approximate=approximate)
        y, (dx, _) = gradients(f, jnp.ones_like(x), x, jnp.zeros(len(at), dtype))
        assert_close(y[0], np.asarray(want), ulps=0.51)
        assert_close(dx[0, : len(slope)], np.asarray(slope), ulps=0.51)
    huge = jnp.asarray([[1e20, -1e20]])
    for name, other in (("bias_gelu", jnp.zeros(2)), ("swiglu", jnp.ones_like(huge))):
        _, (dx, _) = gradients(way(name), jnp.ones_like(huge), huge, other)
        assert np.isfinite(f64(dx)).all()


@BOTH
@pytest.mark.parametrize("masked", [False, True])
def test_softmax(way, dtype, masked):
    x, dy = random(0, (6, 100), dtype, scale=4), random(1, (6, 100), dtype)
    where = np.random.default_rng(2).random((6, 100)) < 0.7
    where[1] = False
    f = way("softmax", where=jnp.asarray(where)) if masked else way("softmax")
    y, (dx,) = gradients(f, dy, x)
    want = references.softmax_where(x, where) if masked else references.softmax(x)
    assert_rounded(y, want, scale=want, slack=1e-5)
    dx64, size = references.softmax_gradient(want, dy)
    assert_rounded(dx, dx64, scale=size, slack=max(1e-5, 2 * float(jnp.finfo(dtype).eps)))
    if masked:
        assert (f64(dx)[~where] == 0).all()


def test_softmax_of_rows_without_a_maximum(way):  # N3
    inf, nan = np.inf, np.nan
    rows = jnp.asarray([[-inf] * 4, [0, 1, nan, 2], [0, inf, 1, 2], [0, 1, 2, -inf]])
    y = way("softmax")(rows)
    assert np.isnan(y[:3]).all()
    np.testing.assert_allclose(y[3], [0.0900306, 0.2447285, 0.6652410, 0], atol=1e-6)
    where = jnp.asarray([[False] * 4, [True, True, False, True]])
    odd = jnp.asarray([[-inf, nan, inf, 1.0], [0, 1, nan, 2]])
    f = way("softmax", where=where)
    y, (dx,) = gradients(f, jnp.arange(8.0).reshape(2, 4), odd)
    np.testing.assert_array_equal(y[0], 0)
    np.testing.assert_array_equal(dx[0], 0)
    np.testing.assert_allclose(y[1], [0.0900306, 0.2447285, 0, 0.6652410], atol=1e-6)
    assert np.isfinite(dx).all()
    assert dx[1, 2] == 0


@BOTH
def test_cross_entropy(way, dtype):
    logits, dlosses = random(0, (6, 129), dtype, scale=4), random(1, (6,), F32)
    labels = jnp.asarray([0, 128, 5, 7, 64, 3])
    f = lambda logits: way("softmax_cross_entropy")(logits, labels)
    losses, (dlogits,) = gradients(f, dlosses, logits)
    want, gradient = references.cross_entropy(logits, labels, dlosses)
    assert_rounded(losses, want, scale=want + 10)
    assert_rounded(dlogits, gradient, scale=np.abs(f64(dlosses))[:, None], slack=2e-6)
    outside = jnp.asarray([-1, 129, 5, 7, 64, 3], jnp.int16)
    f = lambda logits: way("softmax_cross_entropy")(logits, outside)
    losses, (dlogits,) = gradients(f, dlosses, logits)
    assert np.isnan(losses[:2]).all()
    assert_rounded(losses[2:], want[2:], scale=want[2:] + 10)
    softmax = references.softmax(logits) * f64(dlosses)[:, None]
    assert_rounded(dlogits[:2], softmax[:2], scale=np.abs(f64(dlosses))[:2, None], slack=2e-6)


def test_sums_of_columns():
    x, p = random(0, (6, 33), BF16), random(1, (33,), F32)
    y, sums = fallback("bias_gelu")(x, p), references.gelu(f64(x) + f64(p), True).sum(0)
    found, got = column_sums.bias_gelu_colsum(x, p, fallback=True)
    np.testing.assert_array_equal(found, y)
    assert_columns_close(got, sums, 6)
    rows, columns = column_sums.scale_sums(x, p, fallback=True)
    h = f64(x) * f64(p)
    assert_columns_close(rows, h.sum(-1), 33)
    assert_columns_close(columns, h.sum(0), 6)


DIFFERENTIABLE = {
    "prenorm_layer_norm": ((3, 5), (3, 5), (5,), (5,)),
    "bias_gelu_rowsum": ((3, 5), (5,)),
    "swiglu": ((3, 5), (3, 5)),
    "softmax": ((3, 5),),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_in_both_modes(name):
    """Of the formulas in float64 against differences, and of the functions against the formulas."""
    seeds = [np.random.default_rng(i) for i in range(4)]
    given = [
        rng.normal(size=shape) for rng, shape in zip(seeds, DIFFERENTIABLE[name], strict=False)
    ]
    direction = np.random.default_rng(9).normal(size=given[0].shape)

    def slope(f):
        return jax.grad(lambda *given: sum((y**3).sum() for y in jax.tree.leaves(f(*given))))

    def curvatures(f, *given):
        along = lambda x: (slope(f)(x, *given[1:]) * direction).sum()
        tangent = jnp.asarray(direction, given[0].dtype)
        forward = jax.jvp(lambda x: slope(f)(x, *given[1:]), given[:1], (tangent,))[1]
        return jax.grad(along)(given[0]), forward

    with jax.enable_x64(True):
        f = formula(name)
        assert all(found.dtype == jnp.float64 for found in jax.tree.leaves(f(*given)))
        want = jax.jit(functools.partial(curvatures, f))(*map(jnp.asarray, given))
        step, others = 1e-5 * direction, given[1:]
        both = (jax.jit(slope(f))(given[0] + s * step, *others) for s in (1, -1))
        np.testing.assert_allclose(want[0], np.subtract(*both) / 2e-5, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(want[0], want[1], rtol=1e-10, atol=1e-10)
    f32 = (jnp.asarray(a, F32) for a in given)
    for got in jax.jit(functools.partial(curvatures, fallback(name)))(*f32):
        assert got.dtype == F32
        np.testing.assert_allclose(f64(got), want[0], rtol=1e-4, atol=1e-4)


def test_float64():
    with jax.enable_x64(True):
        x, scale, bias = (jnp.asarray(f64(random(i, s, F32))) for i, s in enumerate(((4, 9), 9, 9)))
        np.testing.assert_allclose(
            formula("layer_norm")(x, scale, bias),
            forward64(NORMS["layer_norm"], x, scale, bias),
            rtol=1e-12,
            atol=1e-13,
        )
        want = references.gelu(x + bias, False)
        np.testing.assert_allclose(
            formula("bias_gelu", approximate=False)(x, bias), want, rtol=1e-12
        )


def test_what_a_cpu_gets():
    x = random(0, (2, 64), F32)
    with pytest.raises(ValueError, match="softmax is a kernel for NVIDIA GPUs"):
        pk.softmax(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = jax.vmap(fallback("softmax"))(x)
        np.testing.assert_array_equal(y, fallback("softmax")(x))
        again = jax.checkpoint(fallback("layer_norm"))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-5),
            jax.grad(lambda x: (again(x) ** 3).sum())(x),
            jax.grad(lambda x: (formulas.layer_norm(x) ** 3).sum())(x),
        )
    exported = jax.export.export(jax.jit(fallback("rms_norm")), platforms=["cpu"])(x)
    np.testing.assert_allclose(exported.call(x), formulas.rms_norm(x), atol=1e-6)


def test_nothing_grows_and_nothing_is_traced_twice(monkeypatch):
    x = random(0, (2, 64), F32)
    traced = []
    norm = formulas.norm
    monkeypatch.setattr(formulas, "norm", lambda *a, **k: traced.append(1) or norm(*a, **k))
    f = jax.jit(jax.grad(lambda x: fallback("layer_norm", epsilon=2e-6)(x).sum()))
    eager = functools.partial(pk.layer_norm, epsilon=3e-6, fallback=True)
    f(x), eager(x)
    once = len(traced)
    assert once
    for _ in range(3):
        f(x), eager(x)
    assert len(traced) == once
