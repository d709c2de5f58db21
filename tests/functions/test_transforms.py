"""The functions under JAX's transformations, on the CPU: by default, and in plain JAX."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_references import CASES, jit

import fusejax

F32 = jnp.float32


def arguments(name, shape=(3, 16), seed=0):
    return CASES[name].arguments(np.random.default_rng(seed), shape, F32)


def total(name, asked=None):
    def run(*arrays):
        found = getattr(fusejax, name)(*arrays, implementation=asked, **CASES[name].options)
        return sum(jnp.sin(value).sum() for value in jax.tree.leaves(found))

    return run


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize(
    ("name", "asked"), [("layer_norm", None), ("bias_gelu", None), ("rms_norm", "split")]
)
def test_vmap_of_gradients(name, asked):
    """Nested, with parameters of each example; and of shared ones, whose gradient is the sum."""
    inexact, count = CASES[name].inexact(), 2
    gradient = jax.grad(total(name, asked), inexact)
    axes = [0 if letter == "a" else None for letter in CASES[name].shapes]
    examples = [arguments(name, (count, count, 3, 16), seed=seed) for seed in range(count**2)]
    x = examples[0][0]
    parameters = [
        jnp.stack([one[position] for one in examples]).reshape(count, count, 16)
        for position in inexact[1:]
    ]
    shared = [parameter[0, 0] for parameter in parameters]

    @jit
    def run(x, parameters, shared):
        of_each = jax.vmap(jax.vmap(gradient))(x, *parameters)
        alone = [gradient(x[i, j], *(p[i, j] for p in parameters)) for i, j in np.ndindex(2, 2)]
        mapped = lambda *given: jax.vmap(total(name, asked), axes)(*given).sum()
        of_shared = [gradient(one, *shared) for one in x[0]]
        return of_each, alone, jax.grad(mapped, inexact)(x[0], *shared), of_shared

    of_each, alone, summed, of_shared = run(x, parameters, shared)
    for (i, j), want in zip(np.ndindex(count, count), alone, strict=True):
        close(tuple(value[i, j] for value in of_each), want)
    for position in inexact:
        each = jnp.stack([one[position] for one in of_shared])
        close(summed[position], each.sum(0) if position else each)


@pytest.mark.parametrize("asked", [None, "split"])
def test_scan_checkpoint_and_donation(asked):
    x, residual, scale = arguments("prenorm_rms_norm")
    norm = functools.partial(fusejax.prenorm_rms_norm, implementation=asked)

    def layer(carry, scale):
        y, h = norm(*carry, scale)
        return (jnp.tanh(y), h), None

    def loop(step, x, residual, scales):
        return sum(v.sum() for v in jax.lax.scan(step, (x, residual), scales)[0])

    def unrolled(x, residual, scales):
        carry = x, residual
        for one in scales:
            carry, _ = layer(carry, one)
        return sum(v.sum() for v in carry)

    scales = jnp.stack([scale, 2 * scale, scale - 1])
    want = jit(jax.grad(unrolled, (0, 1, 2)))(x, residual, scales)
    saving_nothing = functools.partial(loop, jax.checkpoint(layer))
    close(jit(jax.grad(saving_nothing, (0, 1, 2)))(x, residual, scales), want)

    donated = jax.jit(lambda x, residual: norm(x, residual, scale), donate_argnums=(0, 1))
    want = norm(x, residual, scale)
    got = donated(x, residual)
    assert x.is_deleted()
    close(got, want)


@pytest.mark.parametrize("name", ["layer_norm", "bias_gelu_rowsum"])
def test_gradients_of_gradients(name):
    given = arguments(name)
    direction = jnp.cos(jnp.arange(48.0)).reshape(3, 16)
    (x, *rest), step = given, 1e-2

    def slope(asked, x):
        return (jax.grad(total(name, asked))(x, *rest) * direction).sum()

    @jit
    def run(x):
        twice = [jax.grad(functools.partial(slope, asked))(x) for asked in (None, "xla", "split")]
        ahead, behind = (
            jax.grad(total(name))(x + sign * step * direction, *rest) for sign in (1, -1)
        )
        return twice, (ahead - behind) / (2 * step)

    twice, differences = run(x)
    for found in twice:
        np.testing.assert_allclose(found, differences, atol=2e-3 * float(jnp.abs(found).max()))
        close(found, twice[1])


def test_forward_mode_is_xlas():
    (x,) = arguments("softmax")
    direction = jnp.cos(x)

    @jit
    def run(x):
        found = []
        for asked in ("xla", "split"):
            softmax = functools.partial(fusejax.softmax, implementation=asked)
            y, tangent = jax.jvp(softmax, (x,), (direction,))
            hessian = jax.jvp(jax.grad(total("softmax", asked)), (x,), (direction,))[1]
            found.append((y, tangent, hessian))
        return found

    (y, tangent, hessian), other = run(x)
    close(other, (y, tangent, hessian))
    close(tangent, y * (direction - (y * direction).sum(-1, keepdims=True)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fusejax.softmax, (x,), (x,))


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "swiglu"])
def test_symbolic_shapes_are_exported_in_plain_jax(name):
    given = arguments(name)
    (rows,) = jax.export.symbolic_shape("b")
    symbolic = [jax.ShapeDtypeStruct((rows, 16) if x.ndim == 2 else x.shape, F32) for x in given]
    function = jit(getattr(fusejax, name))
    exported = jax.export.export(function, platforms=("cpu", "cuda"))(*symbolic)
    assert "mosaic_gpu_v2" not in exported.mlir_module()
    close(exported.call(*given), function(*given))
    with pytest.raises(ValueError, match="is symbolic, and kernels are laid out for lengths"):
        jax.export.export(jit(lambda *x: getattr(fusejax, name)(*x, implementation="pallas")))(
            *symbolic
        )


def test_export_of_several_platforms():
    given = arguments("residual_rms_norm", (4, 256))
    gradient = jax.jit(jax.grad(total("residual_rms_norm"), (0, 2)))
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(*given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 2
    close(exported.call(*given), gradient(*given))


@pytest.mark.parametrize("name", ["prenorm_layer_norm", "geglu", "softmax_cross_entropy"])
def test_nothing_is_said_on_a_cpu(name, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = arguments(name, (2, 3, 8))
        with jax.enable_x64(True):
            jax.block_until_ready(jit(total(name))(*given))
    assert capfd.readouterr() == ("", "")
