"""The norms under JAX's transformations, and lowered for cards that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import (
    BF16,
    F16,
    F32,
    NORMS,
    arguments,
    assert_columns_close,
    assert_rows_close,
    backward64,
    forward64,
    function,
    lowered,
    lowered_text,
    random,
    shapes,
    value_and_gradients,
)
from references import INTERPRET, f64, row_kernels, totals

import pallas_kernels.norms as pk
from pallas_kernels.norm_kernels import Norm

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", ["residual_layer_norm", "rms_norm"])
def test_without_derivatives_the_values_are_the_same_and_less_is_written(name):
    given = arguments(name, 5, 256, BF16)
    plain = function(name)(*given)
    differentiated, _ = jax.vjp(function(name), *given)
    jax.tree.map(np.testing.assert_array_equal, plain, differentiated)
    statistics = "tensor<37xf32>"
    given = shapes(name, 37, 256, BF16)
    assert statistics not in lowered_text(function(name, None), *given)
    assert statistics in lowered_text(value_and_gradients(name), *given)


def test_leading_axes_and_layout():
    f = function("prenorm_layer_norm")
    x, r, *parameters = arguments("prenorm_layer_norm", 15, 64, BF16)
    dy, ds = random(4, x.shape, BF16), random(5, x.shape, BF16)
    deep = lambda array: array.reshape(3, 5, 64)
    (y, s), pull = jax.vjp(f, deep(x), deep(r), *parameters)
    dx, dr, dscale, dbias = pull((deep(dy), deep(ds)))
    assert {out.shape for out in (y, s, dx, dr)} == {(3, 5, 64)}
    norm, h = NORMS["prenorm_layer_norm"], x + r
    assert_rows_close(y.reshape(15, 64), forward64(norm, h, *parameters))
    np.testing.assert_array_equal(s.reshape(15, 64), h)
    want = backward64(norm, h, dy, ds, parameters[0])
    assert_rows_close(dx.reshape(15, 64), want[0])
    np.testing.assert_array_equal(dx, dr)
    assert_columns_close(dscale, want[1], 15)
    assert_columns_close(dbias, want[2], 15)
    square = random(0, (3, 5), F32).T
    np.testing.assert_array_equal(
        pk.rms_norm(square, interpret=INTERPRET), pk.rms_norm(square.copy(), interpret=INTERPRET)
    )
    assert pk.rms_norm(square[0], interpret=INTERPRET).shape == (3,)


@pytest.mark.parametrize("width", [8, 7])  # examples begin at multiples of 16 bytes, or do not
def test_vmap_of_gradients_and_gradients_of_vmap(width):
    norm = NORMS["layer_norm"]
    x, dy = random(0, (3, 5, width), F32), random(1, (3, 5, width), F32)
    f = lambda x, dy, scale: (dy * pk.layer_norm(x, scale, interpret=INTERPRET)).sum()
    per_example = random(2, (3, width), F32)
    dx, dscale = jax.vmap(jax.grad(f, argnums=(0, 2)))(x, dy, per_example)
    assert dscale.shape == (3, width)
    for example in range(3):
        want = backward64(norm, x[example], dy[example], None, per_example[example])
        assert_rows_close(dx[example], want[0])
        assert_columns_close(dscale[example], want[1], 5)
    mapped = jax.vmap(f, in_axes=(0, 0, None))
    total = lambda x, scale: mapped(x, dy, scale).sum()
    dx, dscale = jax.grad(total, argnums=(0, 1))(x, per_example[0])
    assert dscale.shape == (width,)
    rows = lambda array: array.reshape(15, width)
    want = backward64(norm, rows(x), rows(dy), None, per_example[0])
    assert_rows_close(rows(dx), want[0])
    assert_columns_close(dscale, want[1], 15)


def test_vmap_of_values():
    norm = NORMS["rms_norm"]
    x, scale = random(0, (3, 5, 7), BF16), random(1, (3, 7), F32)
    f = function("rms_norm")
    y = jax.vmap(f, in_axes=(0, None))(x, scale[0])
    assert_rows_close(y, forward64(norm, x, scale[0]))
    y = jax.vmap(f, in_axes=(1, None), out_axes=1)(x, scale[0])
    assert_rows_close(y, forward64(norm, x, scale[0]))
    y = jax.vmap(f, in_axes=(None, 0))(x[0], scale)
    assert_rows_close(y, forward64(norm, x[0], f64(scale)[:, None]))


def test_jit_and_x64_mode():
    x, scale = random(0, (3, 64), F32), random(1, (64,), F32)
    gradients = jax.grad(lambda *a: pk.rms_norm(*a, interpret=INTERPRET).sum(), argnums=(0, 1))
    want = backward64(Norm(centred=False), x, np.ones((3, 64)), None, scale)
    with jax.enable_x64(True):
        wide = gradients(x, scale)
    for dx, dscale in (jax.jit(gradients)(x, scale), wide):
        assert dx.dtype == dscale.dtype == F32
        assert_rows_close(dx, want[0])
        assert_columns_close(dscale, want[1], 3)


def test_checkpoint():
    # lowered only: JAX's simulation has effects, which a checkpoint refuses
    given = shapes("prenorm_rms_norm", 65, 256, BF16)

    def loss(*given):
        y, s = jax.checkpoint(function("prenorm_rms_norm", None))(*given)
        return (y * s).sum()

    # forward, forward again with what backward needs, backward
    assert lowered(jax.value_and_grad(loss, argnums=(0, 1, 2)), *given) == 3


@pytest.mark.parametrize("name", NORMS)
def test_empty_arrays(name):
    norm = NORMS[name]
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        given = [jnp.zeros(shape, BF16)] * (1 + norm.residual)
        given += [jnp.ones(shape[-1])] * (1 + norm.centred)
        f = function(name, None)
        total = lambda *a, f=f: sum(out.sum() for out in jax.tree.leaves(f(*a)))
        for out in jax.tree.leaves(jax.jit(f)(*given)):
            assert out.shape == shape
            assert out.dtype == BF16
        gradients = jax.jit(jax.grad(total, argnums=range(len(given))))(*given)
        for gradient, argument in zip(gradients, given, strict=True):
            assert gradient.shape == argument.shape
            assert gradient.dtype == argument.dtype
            assert (f64(gradient) == 0).all()
        if shape[0] < 3:  # no examples, or examples of no rows
            axes = [0] * (1 + norm.residual) + [None] * (1 + norm.centred)
            mapped = jax.vmap(f, in_axes=axes)
            total = lambda *a, f=mapped: sum(out.sum() for out in jax.tree.leaves(f(*a)))
            for out in jax.tree.leaves(mapped(*given)):
                assert out.shape == shape
            dscale = jax.grad(total, argnums=1 + norm.residual)(*given)
            np.testing.assert_array_equal(dscale, np.zeros(64))


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [
        ("prenorm_layer_norm", 1, F32),
        ("layer_norm", 3, BF16),
        ("prenorm_layer_norm", 2, F16),
        ("residual_rms_norm", 64, F32),
        ("prenorm_layer_norm", 100, F16),
        ("residual_layer_norm", 256, BF16),
        ("prenorm_rms_norm", 769, BF16),
        ("layer_norm", 1024, F32),
        ("prenorm_layer_norm", 2560, F16),
        ("residual_layer_norm", 8192, BF16),
        ("prenorm_rms_norm", 32768, F32),
        ("prenorm_layer_norm", 131072, F32),
    ],
)
def test_lowers_to_one_kernel_each_way(name, width, dtype):
    given = shapes(name, 300, width, dtype)
    assert lowered(function(name, None), *given) == 1
    assert lowered(value_and_gradients(name), *given) == 2


@pytest.mark.parametrize("width", [3, 8192])
def test_lowers_in_x64_mode_with_parameters_of_any_dtype(width):
    dtypes = (F16, BF16, F32)
    with jax.enable_x64(True):
        for name, scale, bias in zip(NORMS, dtypes * 2, dtypes[1:] * 3, strict=True):
            given = shapes(name, 65, width, BF16, scale, bias)
            assert lowered(value_and_gradients(name), *given) == 2


@pytest.mark.parametrize("width", [256, 7])
def test_lowers_under_vmap(width):
    run = value_and_gradients("prenorm_layer_norm")
    x, _, scale, bias = shapes("prenorm_layer_norm", 5, width, BF16)
    x, scales, biases = (jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in (x, scale, bias))
    shared = function("prenorm_layer_norm", None)
    assert lowered(jax.vmap(shared, in_axes=(0, 0, None, None)), x, x, scale, bias) == 1
    text = lowered_text(jax.vmap(run), x, x, scales, biases)
    assert (row_kernels(text), totals(text)) == (2, width == 256)
    jaxpr = jax.make_jaxpr(jax.vmap(shared, in_axes=(0, 0, None, None)))(x, x, scale, bias)
    assert "scan" not in str(jaxpr)  # one launch, not one for each example


def test_exports_for_cards():
    given = shapes("residual_layer_norm", 64, 1024, BF16)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(
        jax.jit(value_and_gradients("residual_layer_norm")),
        platforms=["cuda"],
        disabled_checks=checks,
    )(*given)
    assert row_kernels(exported.mlir_module()) == 2
