"""Parameters are Flax's own: trees, values, metadata, random numbers; and so are checkpoints."""

import functools

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax_layers import BF16, F32, LIBRARIES, dense, layer_class, make, values

import fusejax.flax.linen as fl
import fusejax.flax.nnx as fn

NORMAL = jax.nn.initializers.normal(1.0)
# ours, Flax's, sizes, options
LAYERS = [
    *(
        (f"{form}{norm}", norm, (4,), options)
        for form, norm, options in (
            ("", "LayerNorm", {"scale_init": NORMAL, "bias_init": NORMAL}),
            ("Residual", "LayerNorm", {"use_bias": False, "param_dtype": BF16}),
            ("Prenorm", "LayerNorm", {"use_scale": False, "bias_init": NORMAL}),
            ("", "RMSNorm", {"scale_init": NORMAL, "epsilon": 1e-3}),
            ("Residual", "RMSNorm", {"use_scale": False}),
            ("Prenorm", "RMSNorm", {"scale_init": NORMAL, "param_dtype": BF16}),
        )
    ),
    ("DenseBiasGelu", None, (4, 5), {}),
    ("DenseBiasGelu", None, (4, 5), {"bias_init": NORMAL, "param_dtype": BF16}),
    ("DenseBiasGelu", None, (4, 5), {"use_bias": False}),
]


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("name", "flax", "sizes", "options"), LAYERS)
def test_same_tree_same_values(library, name, flax, sizes, options):
    ours, _ = make(library, name, *sizes, seed=3, **options)
    theirs, _ = make(library, flax or dense(library), *sizes, ours=False, seed=3, **options)
    assert_same(values(ours), values(theirs))


@pytest.mark.parametrize("library", LIBRARIES)
def test_swiglu_is_two_projections_in_order(library):
    ours, _ = make(library, "SwiGLU", 4, 5, use_bias=True, bias_init=NORMAL)
    options = {"bias_init": NORMAL}

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [nn.Dense(5, name=n, **options)(x) for n in ("gate_proj", "up_proj")]

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.gate_proj = nnx.Linear(4, 5, rngs=rngs, **options)
            self.up_proj = nnx.Linear(4, 5, rngs=rngs, **options)

    if library == "linen":
        theirs = Linen().init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    else:
        theirs = nnx.state(Nnx(nnx.Rngs(0)))
    assert_same(values(ours), values(theirs))
    without, _ = make(library, "SwiGLU", 4, 5)
    assert sorted(values(without)["up_proj"]) == ["kernel"]


class LinenModel(nn.Module):
    ours: bool

    @nn.compact
    def __call__(self, x):
        norm, mlp = (fl.LayerNorm, fl.DenseBiasGelu) if self.ours else (nn.LayerNorm, nn.Dense)
        x = norm(scale_init=NORMAL, name="first")(x)
        x = mlp(5, name="mlp")(x)
        x = x if self.ours else nn.gelu(x)
        x = norm(bias_init=NORMAL, name="second")(x)
        return nn.Dense(3)(x)


class NnxModel(nnx.Module):
    def __init__(self, ours, rngs):
        norm, mlp = (fn.LayerNorm, fn.DenseBiasGelu) if ours else (nnx.LayerNorm, nnx.Linear)
        self.first = norm(4, scale_init=NORMAL, rngs=rngs)
        self.mlp = mlp(4, 5, rngs=rngs)
        self.second = norm(5, bias_init=NORMAL, rngs=rngs)
        self.out = nnx.Linear(5, 3, rngs=rngs)
        self.ours = ours

    def __call__(self, x):
        h = self.mlp(self.first(x))
        return self.out(self.second(h if self.ours else nnx.gelu(h)))


def linen_parameters(ours, seed):
    return LinenModel(ours).init(jax.random.key(seed), jnp.zeros((1, 4)))


def test_random_numbers_are_drawn_in_flaxs_order():
    assert_same(linen_parameters(True, 1), linen_parameters(False, 1))
    assert_same(*(nnx.to_pure_dict(nnx.state(NnxModel(o, nnx.Rngs(1)))) for o in (True, False)))


def test_linen_partitioning_boxes_and_their_use():
    options = {"scale_init": nn.with_partitioning(NORMAL, ("embed",))}
    inits = [
        cls(**options).init(jax.random.key(0), jnp.ones((2, 4))) for cls in (fl.RMSNorm, nn.RMSNorm)
    ]
    assert isinstance(inits[0]["params"]["scale"], nn.Partitioned)
    assert nn.get_partition_spec(inits[0]) == nn.get_partition_spec(inits[1])
    assert_same(*inits)
    found = fl.RMSNorm(**options).apply(inits[1], jnp.ones((2, 4)))
    np.testing.assert_allclose(found, nn.RMSNorm(**options).apply(inits[0], jnp.ones((2, 4))))


def test_nnx_metadata():
    options = {"scale_metadata": {"colour": "red"}, "bias_init": nnx.with_metadata(NORMAL, axis=1)}
    ours, theirs = (
        nnx.state(layer_class("nnx", "LayerNorm", ours=o)(4, rngs=nnx.Rngs(0), **options))
        for o in (True, False)
    )
    assert ours["scale"].get_metadata()["colour"] == "red"
    for name in ("scale", "bias"):
        assert ours[name].get_metadata() == theirs[name].get_metadata()
        assert type(ours[name]) is type(theirs[name])


@pytest.mark.parametrize("writer", [True, False])
def test_checkpoints_of_either_load_into_the_other(writer, tmp_path):
    x = jnp.linspace(-1, 1, 8, dtype=F32).reshape(2, 4)
    written, into = linen_parameters(writer, 1), linen_parameters(not writer, 2)
    packed = flax.serialization.to_bytes(written)
    assert_same(flax.serialization.from_bytes(into, packed), written)

    graph, state = nnx.split(NnxModel(writer, nnx.Rngs(1)))
    other, target = nnx.split(NnxModel(not writer, nnx.Rngs(2)))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (into, target))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "linen", written)
        checkpointer.save(tmp_path / "nnx", state)
        checkpointer.wait_until_finished()
        linen_restored = checkpointer.restore(tmp_path / "linen", abstract[0])
        nnx_restored = checkpointer.restore(tmp_path / "nnx", abstract[1])
    assert_same(linen_restored, written)
    assert_same(nnx.to_pure_dict(nnx_restored), nnx.to_pure_dict(state))

    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    run = jax.jit(lambda graph, state: nnx.merge(graph, state)(x), static_argnums=0)
    close(run(other, nnx_restored), run(graph, state))
    run = jax.jit(lambda model, variables: model.apply(variables, x), static_argnums=0)
    close(run(LinenModel(not writer), linen_restored), run(LinenModel(writer), written))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["LayerNorm", "DenseBiasGelu", "SwiGLU", "Softmax"])
def test_implementation_is_a_name_or_several_and_can_be_hashed(library, name):
    sizes = {"LayerNorm": (4,), "Softmax": ()}.get(name, (4, 5))
    cls = layer_class(library, name)
    if library == "nnx":
        options = {} if name == "Softmax" else {"rngs": nnx.Rngs(0)}
        layer = cls(*sizes, implementation=["pallas", "xla"], **options)
        hash(nnx.graphdef(layer))
    else:
        layer = cls(*sizes[1:], implementation=["pallas", "xla"])
        hash(layer)
    assert layer.implementation == ("pallas", "xla")
