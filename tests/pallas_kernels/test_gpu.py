"""The kernels on a card at sizes that keep all of it busy: rings go round, clusters take turns.

Simulation shows neither races nor approximate instructions. The other tests of this folder run on
the card too where there is one, on few rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import backward64, forward64
from references import (
    assert_close,
    cross_entropy,
    f64,
    gelu,
    gelu_slope,
    row_kernels,
    silu,
    silu_slope,
    softmax,
    softmax_gradient,
)

import pallas_kernels as pk
from pallas_kernels.norm_kernels import Norm

pytestmark = pytest.mark.gpu
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# A row per lane, shifted, aligned and whole rows of a CTA, a row per warp, clusters of all sizes.
WIDTHS = (1, 7, 31, 65, 128, 256, 769, 1000, 1024, 2560, 8192, 16256, 16385, 32768, 65536, 131072)


def arrays(width, dtype, count, elements=2**21):
    rows = max(300, elements // width) + 3 if width < 65536 else 67
    rng = np.random.default_rng(width)
    return [jnp.asarray(rng.normal(size=(rows, width)) * 1.5 + 0.5, dtype) for _ in range(count)]


def vector(width, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=width), F32)


def value_and_gradients(function, inputs, cotangents):
    """Twice: the bits must be the same from run to run."""

    @jax.jit
    def run(inputs, cotangents):
        found, pull = jax.vjp(function, *inputs)
        return found, pull(cotangents)

    first, second = run(inputs, cotangents), run(inputs, cotangents)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (np.asarray(one).view(np.uint8) == np.asarray(other).view(np.uint8)).all()
    return first


def assert_array(got, want, size):
    """Within little more than one rounding of `want`, whose terms are of the given size."""
    eps = float(jnp.finfo(got.dtype).eps)
    assert got.shape == want.shape
    error = np.abs(f64(got) - want) / (0.51 * eps * np.abs(want) + 4e-6 * size + 1e-30)
    assert error.max() <= 1, error.max()


def assert_columns(got, want, size, rows):
    error = np.abs(f64(got) - want) / (5e-6 * np.sqrt(rows) * np.maximum(np.abs(want), size))
    assert error.max() <= 1, error.max()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_norms(width, dtype):
    x, residual, dy, ds = arrays(width, dtype, 4)
    rows, scale, bias = len(x), vector(width), vector(width, 2)
    h = x + residual
    size = 1.0 if width > 8 else 30.0  # rows of few elements may have next to no deviation
    if width > 1:
        y, (dx, dr, dscale, dbias) = value_and_gradients(
            pk.residual_layer_norm, (x, residual, scale, bias), dy
        )
        norm = Norm(centred=True)
        assert_array(y, forward64(norm, h, scale, bias), size)
        want_dx, want_dscale, want_dbias = backward64(norm, h, dy, None, scale)
        assert_array(dx, want_dx, size * 10)
        assert (f64(dx) == f64(dr)).all()
        assert_columns(dscale, want_dscale, np.abs(want_dscale).mean(), rows)
        assert_columns(dbias, want_dbias, np.abs(want_dbias).mean(), rows)
    (y, s), (dx, _, dscale) = value_and_gradients(
        pk.prenorm_rms_norm, (x, residual, scale), (dy, ds)
    )
    norm = Norm(centred=False)
    assert (f64(s) == f64(h)).all()
    assert_array(y, forward64(norm, h, scale), size)
    want_dx, want_dscale, _ = backward64(norm, h, dy, ds, scale)
    assert_array(dx, want_dx, size * 10)
    assert_columns(dscale, want_dscale, np.abs(want_dscale).mean(), rows)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_softmax(width, dtype):
    x, dy = arrays(width, dtype, 2)
    y, (dx,) = value_and_gradients(pk.softmax, (x,), dy)
    want = softmax(x)
    tiny = float(jnp.finfo(dtype).tiny) / 4e-6
    assert_array(y, want, want * 4 + tiny)
    want_dx, terms = softmax_gradient(y, dy)
    assert_array(dx, want_dx, terms + tiny)


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_where(width):
    (x,) = arrays(width, BF16, 1)
    where = jnp.asarray(np.random.default_rng(3).random(x.shape) < 0.5)
    y = jax.jit(lambda x, where: pk.softmax(x, where=where))(x, where)
    e = np.where(where, np.exp(f64(x)), 0)
    total = e.sum(-1, keepdims=True)
    want = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    assert_array(y, want, want * 4 + 1e-33)


@pytest.mark.parametrize("width", [*WIDTHS, 262144])
def test_cross_entropy(width):
    (logits,) = arrays(width, BF16, 1)
    rng = np.random.default_rng(0)
    labels = jnp.asarray(rng.integers(0, width, len(logits)))
    dlosses = jnp.asarray(rng.normal(size=len(logits)), F32)
    losses, (dlogits, _) = value_and_gradients(pk.softmax_cross_entropy, (logits, labels), dlosses)
    want, want_gradient = cross_entropy(logits, labels, dlosses)
    np.testing.assert_allclose(f64(losses), want, atol=4e-6, rtol=2e-6)
    assert_array(dlogits, want_gradient, np.abs(f64(dlosses))[:, None])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("approximate", [True, False])
def test_bias_gelu(width, approximate):
    x, dy = arrays(width, BF16, 2)
    bias = vector(width)
    function = functools.partial(pk.bias_gelu, approximate=approximate)
    y, (dx, dbias) = value_and_gradients(function, (x, bias), dy)
    z = f64(x) + f64(bias)
    want = f64(dy) * gelu_slope(z, approximate)
    assert_array(y, gelu(z, approximate), np.abs(z))
    assert_array(dx, want, np.abs(f64(dy)))
    assert_columns(dbias, want.sum(0), np.abs(want.sum(0)).mean(), len(x))

    function = functools.partial(pk.bias_gelu_rowsum, approximate=approximate)
    dsums = vector(len(x), 3)
    (same, sums), (dx, _) = value_and_gradients(function, (x, bias), (dy, dsums))
    assert (f64(same) == f64(y)).all()
    total = np.abs(gelu(z, approximate)).sum(-1)
    assert (np.abs(f64(sums) - gelu(z, approximate).sum(-1)) <= 2e-6 * total + 1e-6).all()
    down = f64(dy) + f64(dsums)[:, None]
    assert_array(dx, down * gelu_slope(z, approximate), np.abs(down) + 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(width):
    gate, up, dy = arrays(width, BF16, 3)
    y, (dgate, dup) = value_and_gradients(pk.swiglu, (gate, up), dy)
    size = np.abs(f64(gate) * f64(up))
    assert_array(y, silu(gate) * f64(up), size)
    assert_array(dgate, f64(dy) * f64(up) * silu_slope(gate), np.abs(f64(dy) * f64(up)))
    assert_array(dup, f64(dy) * silu(gate), np.abs(f64(dy) * f64(gate)))


@pytest.mark.parametrize(("rows", "width"), [(70001, 128), (65537, 384), (1, 8192), (131, 16384)])
def test_row_counts(rows, width):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, width)), BF16)
    assert_close(pk.softmax(x), softmax(x), ulps=0.52)


def test_a_constant_row_is_the_bias_exactly():
    for width in (100, 300, 769, 1000, 1151, 5120, 20000):
        x = jnp.full((5, width), 7, BF16)
        assert (f64(pk.layer_norm(x)) == 0).all(), width


def test_vmap_of_gradients():
    for width in (31, 100, 769, 1024):
        x, dy = (a[:6].reshape(2, 3, width) for a in arrays(width, F32, 2))
        scale = jnp.stack([vector(width), vector(width, 2)])
        loss = lambda x, scale, dy: (pk.rms_norm(x, scale) * dy).sum()
        dx, dscale = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1))))(x, scale, dy)
        for one in range(2):
            want, want_dscale, _ = backward64(
                Norm(centred=False), x[one], dy[one], None, scale[one]
            )
            assert_array(dx[one], want, 10)
            assert_columns(dscale[one], want_dscale, np.abs(want_dscale).mean(), 3)


@pytest.mark.parametrize("width", [100, 4096])
def test_the_kernel_runs_where_there_is_a_fallback(width):
    (x, dy), scale = arrays(width, BF16, 2), vector(width)
    plain = value_and_gradients(pk.rms_norm, (x, scale), dy)
    with_fallback = functools.partial(pk.rms_norm, fallback=True)
    found = value_and_gradients(with_fallback, (x, scale), dy)
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    run = jax.jit(lambda *given: jax.vjp(with_fallback, *given)[1](dy))
    assert row_kernels(run.lower(x, scale).compile().as_text()) == 2


def test_derivatives_of_gradients():
    """Along one direction, in both modes, against differences of float64 gradients."""
    width, norm = 1000, Norm(centred=False)
    x, direction = (a[:5] for a in arrays(width, F32, 2))

    def slope(x):
        return jax.grad(lambda x: (pk.rms_norm(x) ** 3).sum())(x)

    def slope64(x):
        return backward64(norm, x, 3 * forward64(norm, x) ** 2)[0]

    step = 1e-6 * f64(direction)
    want = (slope64(f64(x) + step) - slope64(f64(x) - step)) / 2e-6
    reverse = jax.jit(jax.grad(lambda x: (slope(x) * direction).sum()))(x)
    forward = jax.jit(lambda x: jax.jvp(slope, (x,), (direction,))[1])(x)
    for found in (reverse, forward):
        assert np.abs(f64(found) - want).max() < 2e-5 * np.abs(want).max()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs several cards")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_rows_over_cards(kind):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(kind,))
    width = 2560
    x, dy = (a[:512].reshape(16, 32, width) for a in arrays(width, BF16, 2))
    scale, bias = vector(width), vector(width, 2)

    def run(x, scale, bias, dy):
        y, pull = jax.vjp(pk.layer_norm, x, scale, bias)
        return y, pull(dy)

    want = jax.jit(run)(x, scale, bias, dy)
    place = lambda a: jax.device_put(
        a, jax.NamedSharding(mesh, jax.P("data") if a.ndim > 1 else jax.P())
    )
    with jax.set_mesh(mesh):
        given = [place(a) for a in (x, scale, bias, dy)]
        program = jax.jit(run).lower(*given).compile()
        y, (dx, *sums) = program(*given)
    assert "all-gather" not in program.as_text()
    np.testing.assert_array_equal(np.asarray(y), want[0])
    np.testing.assert_array_equal(np.asarray(dx), want[1][0])
    for one, other in zip(sums, want[1][1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
