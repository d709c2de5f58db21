"""fusejax.stage keeps values, gradients and vmap, and its boundary survives compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusejax
from fusejax.compile import aot


@fusejax.stage("part_a")
def part_a(x):
    return jnp.exp(x)


@fusejax.stage("part_b")
def part_b(y):
    return (y * 2).sum(-1)


def staged(x):
    return part_b(part_a(x))


def plain(x):
    return (jnp.exp(x) * 2).sum(-1)


def test_values_gradients_and_vmap_are_the_plain_ones():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 16)), jnp.float32)
    np.testing.assert_allclose(staged(x), plain(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(staged)(x), plain(x), rtol=1e-6)
    gradient = jax.grad(lambda x: staged(x).sum())(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: plain(x).sum())(x), rtol=1e-6)


def test_the_boundary_survives_compilation(deviceless):
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    launches = [
        aot.compile_program(f, (x,), deviceless("h100")).program.launch_order.count("kCustomKernel")
        for f in (plain, staged)
    ]
    assert launches == [1, 2]


@pytest.mark.parametrize("name", ["", "a/b"])
def test_names_that_scopes_cannot_have(name):
    with pytest.raises(ValueError, match="path element"):
        fusejax.stage(name)
