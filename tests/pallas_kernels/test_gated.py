"""Gated activations with their gradients: simulated against float64, and lowered for the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import (
    INTERPRET,
    assert_rounded,
    f64,
    gelu,
    gelu_slope,
    sampled,
    silu,
    silu_slope,
)

from pallas_kernels import gated
from pallas_kernels.gated import geglu, swiglu
from pallas_kernels.plan import Cut

pytestmark = pytest.mark.thorough

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
geglu_erf = functools.partial(geglu, approximate=False)
# The function, the activation and its slope in float64.
SWIGLU = (swiglu, silu, silu_slope)
GEGLU = (geglu, lambda z: gelu(z, True), lambda z: gelu_slope(z, True))
GEGLU_ERF = (geglu_erf, lambda z: gelu(z, False), lambda z: gelu_slope(z, False))
OPS = {"swiglu": SWIGLU, "geglu": GEGLU, "geglu_erf": GEGLU_ERF}

# Operation, width, rows, dtype, how the rows are cut.
CASES = [
    ("swiglu", 1, 3, F32, Cut.LANE),
    ("geglu", 3, 131, BF16, Cut.LANE),  # two blocks, which overlap
    ("geglu_erf", 31, 5, F16, Cut.LANE),
    ("geglu_erf", 100, 3, BF16, Cut.CTA),
    ("swiglu", 256, 21, BF16, Cut.WARP),
    ("geglu", 512, 7, F32, Cut.WARP),
    ("geglu_erf", 769, 3, F16, Cut.CTA),
    ("swiglu", 1024, 3, BF16, Cut.CTA),
    ("swiglu", 2560, 5, F32, Cut.CTA),
    ("geglu", 8192, 1, BF16, Cut.CTA),
]


def random(seed, shape, dtype, scale=1.5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


@functools.partial(jax.jit, static_argnums=0)
def run(function, gate, up, dy):
    """The simulated value and gradients; the same shapes are compiled once."""
    y, gradient = jax.vjp(functools.partial(function, interpret=INTERPRET), gate, up)
    return y, *gradient(dy)


def gradients(function):
    return jax.grad(lambda gate, up: function(gate, up).astype(F32).sum(), argnums=(0, 1))


def check(op, gate, up, dy):
    function, value, slope = OPS[op]
    y, dgate, dup = run(function, gate, up, dy)
    assert y.dtype == dgate.dtype == dup.dtype == gate.dtype
    gate, up, dy = f64(gate), f64(up), f64(dy)
    slack = 1e-6
    assert_rounded(y, value(gate) * up, scale=gate * up, slack=slack)
    assert_rounded(dgate, dy * up * slope(gate), scale=dy * up, slack=slack)
    assert_rounded(dup, dy * value(gate), scale=dy * gate, slack=slack)


@pytest.mark.parametrize(("op", "width", "rows", "dtype", "cut"), sampled(CASES))
def test_against_float64(op, width, rows, dtype, cut):
    assert gated.plan_backward(rows, width, dtype, op=op.split("_")[0]).cut is cut
    check(op, *(random(width + seed, (rows, width), dtype) for seed in range(3)))


@pytest.mark.parametrize("scale", [20, 0.05])
def test_other_standard_deviations(scale):
    gate = random(0, (5, 256), BF16, scale)
    for op in ("swiglu", "geglu"):
        check(op, gate, random(1, (5, 256), BF16, scale), random(2, (5, 256), BF16))


def test_the_check_tells_wrong_from_right():
    gate, up, dy = (random(seed, (5, 256), BF16) for seed in range(3))
    for op, other in (("geglu", GEGLU_ERF), ("geglu_erf", GEGLU)):
        y, dgate, dup = run(OPS[op][0], gate, up, dy)
        _, value, slope = other
        for got, want in (
            (y, value(gate) * f64(up)),
            (dgate, f64(dy) * f64(up) * slope(gate)),
            (dup, f64(dy) * value(gate)),
            # activations that were rounded before they were multiplied
            (y, f64(jnp.asarray(OPS[op][1](gate), BF16)) * f64(up)),
        ):
            with pytest.raises(AssertionError, match="of one rounding"):
                assert_rounded(got, want, scale=4 * np.ones(1), slack=1e-6)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_ends(dtype):
    gate = jnp.zeros((5, 256), dtype).at[:, 0].set(jnp.asarray([60, -60, -4, 3, 0], dtype))
    up, dy = jnp.full((5, 256), 2, dtype), jnp.ones((5, 256), dtype)
    slack = 0.51 * float(jnp.finfo(dtype).eps) + 1e-5
    tiny = 6e-8 if dtype == F16 else 1e-20  # in float16 the tails are subnormal
    for function, values, slopes in (
        (geglu, [60, 0, -7.0246e-5, 2.9963626, 0], [1, 0, -3.3512e-4, 1.0115842, 0.5]),
        (geglu_erf, [60, 0, -1.26685e-4, 2.9959503, 0], [1, 0, -5.0365e-4, 1.0119456, 0.5]),
        (swiglu, [60, 0, -0.07194484, 2.8577224, 0], [1, 0, -0.05266462, 1.0881041, 0.5]),
    ):
        y, dgate, dup = run(function, gate, up, dy)
        close = functools.partial(np.testing.assert_allclose, rtol=slack, atol=tiny)
        close(f64(y)[:, 0], 2 * np.array(values))
        close(f64(dgate)[:, 0], 2 * np.array(slopes))
        close(f64(dup)[:, 0], values)


def test_values_that_are_not_finite_stay_where_they_are():
    gate = random(0, (5, 256), BF16).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    one, bad = jnp.ones_like(gate), np.zeros((5, 256), bool)
    bad[1, 3] = True
    for function in (swiglu, geglu):
        y, dgate, dup = run(function, gate, one, one)
        for found in (y, dgate, dup):
            assert (np.isnan(f64(found)) == bad).all()
        assert f64(y)[2, 5] == f64(dup)[2, 5] == np.inf
        assert f64(dgate)[2, 5] == 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["plain", "jit", "vmap"])
def test_empty_arrays(wrap):
    for shape in ((0, 64), (3, 0)):
        x = jnp.zeros((2, *shape) if wrap is jax.vmap else shape, BF16)
        for function in (swiglu, geglu):
            y, gradient = jax.vjp(wrap(function), x, x)
            for found in (y, *gradient(y)):
                assert (found.shape, found.dtype) == (x.shape, BF16)


def test_leading_axes_layout_and_vmap():
    gate, up, dy = (random(seed, (3, 7, 128), F16) for seed in range(3))
    function = functools.partial(swiglu, interpret=INTERPRET)
    found = run(swiglu, gate, up, dy)
    flat = run(swiglu, *(a.reshape(21, 128) for a in (gate, up, dy)))
    y, gradient = jax.vjp(jax.vmap(function), gate, up)
    mapped = (y, *gradient(dy))
    for a, b, c in zip(found, flat, mapped, strict=True):
        assert (f64(a).reshape(21, 128) == f64(b)).all()
        assert (f64(a) == f64(c)).all()
    shared = jax.vmap(function, in_axes=(0, None))(gate, up[0])
    assert (f64(shared[0]) == f64(found[0][0])).all()
    x = random(4, (64, 6), F16)
    turned = jax.jit(lambda a: function(a.T, a.T))(x)
    assert (f64(turned) == f64(function(jnp.array(x.T), jnp.array(x.T)))).all()
    assert function(x[:, 0], x[:, 1]).shape == (64,)


def test_x64_mode_changes_nothing():
    given = [random(seed, (5, 256), BF16) for seed in range(3)]
    want = run(geglu, *given)
    with jax.enable_x64(True):
        wide = run(geglu, *given)
    for a, b in zip(want, wide, strict=True):
        assert a.dtype == b.dtype == BF16
        assert (f64(a) == f64(b)).all()


def test_refusals():
    shape = jax.ShapeDtypeStruct
    x = shape((2, 8), BF16)
    for gate, up, words in (
        (shape((2, 8), jnp.int32), x, "not int32"),
        (x, shape((2, 8), F32), "must be alike"),
        (x, shape((1, 8), BF16), "must be alike"),
        (shape((), BF16), shape((), BF16), "at least one axis"),
    ):
        assert words in gated.unsupported(gate, up)
        for function in (swiglu, geglu):
            with pytest.raises(ValueError) as raised:
                jax.eval_shape(function, gate, up)
            assert str(raised.value) == gated.unsupported(gate, up)
    assert gated.unsupported(shape((2, 2**20), BF16), shape((2, 2**20), BF16)) is None
    large = shape((2**20, 2048), BF16)
    assert "2**31-1 elements" in gated.unsupported(large, large)
    assert gated.unsupported(large, large, split=True) is None


def test_expected_bytes():
    assert gated.expected_bytes(8192, 4096, BF16) == 6 * 8192 * 4096
    assert gated.expected_bytes_backward(8192, 4096, F32) == 20 * 8192 * 4096


def kernels_in(function, *arguments):
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("mosaic_gpu_v2")


@pytest.mark.parametrize(
    ("function", "width", "dtype"),
    [
        (swiglu, 1, F32),
        (geglu, 3, BF16),
        (swiglu, 100, BF16),
        (geglu, 256, F16),
        (geglu_erf, 1000, F32),
        (swiglu, 2560, BF16),
        (geglu, 16385, BF16),
        (swiglu, 2**17, BF16),
    ],
)
def test_lowers_to_one_kernel_forward_and_one_backward(function, width, dtype):
    x = jax.ShapeDtypeStruct((5000, width), dtype)
    assert kernels_in(function, x, x) == 1
    assert kernels_in(gradients(function), x, x) == 1  # saves nothing but the arguments


def test_lowers_in_x64_mode_under_transformations_and_for_export():
    x, one = jax.ShapeDtypeStruct((3, 5, 256), BF16), jax.ShapeDtypeStruct((5, 256), BF16)
    for function in (swiglu, geglu):
        with jax.enable_x64(True):
            assert kernels_in(function, one, one) == 1
            assert kernels_in(gradients(function), one, one) == 1
        assert kernels_in(jax.vmap(gradients(function)), x, x) == 1
        assert kernels_in(gradients(jax.vmap(function, in_axes=(0, None))), x, one) == 1
        assert kernels_in(gradients(jax.checkpoint(function)), one, one) == 1
        check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
        exported = jax.export.export(
            jax.jit(gradients(function)), platforms=["cuda"], disabled_checks=[check]
        )(one, one)
        assert exported.mlir_module().count("mosaic_gpu_v2") == 1
