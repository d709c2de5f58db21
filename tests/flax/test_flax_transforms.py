"""The layers in models, under Flax's and JAX's transformations, and in compiled programs."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import BF16, F32, F64, LIBRARIES, make, norm64, random, randomized

import fusejax
import fusejax.flax.linen as fl
import fusejax.flax.nnx as fn
from fusejax.inspection import traced_scopes

pytestmark = pytest.mark.filterwarnings("error")

WIDTH = 8
X = random(0, (4, 3, WIDTH))


class LinenBlock(nn.Module):
    ours: bool

    @nn.compact
    def __call__(self, carry, _=None):
        x, h = carry
        if self.ours:
            h, x = fl.PrenormRMSNorm(name="norm")(h, x)
            h = fl.DenseBiasGelu(2 * WIDTH, name="up")(h)
        else:
            x = x + h
            h = nn.RMSNorm(name="norm")(x)
            h = nn.gelu(nn.Dense(2 * WIDTH, name="up")(h))
        return (x, nn.Dense(WIDTH, name="down")(h)), None


class LinenModel(nn.Module):
    ours: bool

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            nn.remat(LinenBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        (x, h), _ = blocks(self.ours, name="blocks")((x, jnp.zeros_like(x)), None)
        if self.ours:
            return fl.ResidualLayerNorm(name="last")(h, x)
        return nn.LayerNorm(name="last")(x + h)


class NnxBlock(nnx.Module):
    def __init__(self, ours, rngs):
        norm, up = (fn.PrenormRMSNorm, fn.DenseBiasGelu) if ours else (nnx.RMSNorm, nnx.Linear)
        self.norm = norm(WIDTH, rngs=rngs)
        self.up = up(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.ours = ours

    def __call__(self, x, h):
        if self.ours:
            h, x = self.norm(h, x)
            return x, self.down(self.up(h))
        x = x + h
        return x, self.down(nnx.gelu(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, ours, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(axis_size=2)
        def blocks(rngs):
            return NnxBlock(ours, rngs)

        self.blocks = blocks(rngs)
        last = fn.ResidualLayerNorm if ours else nnx.LayerNorm
        self.last = last(WIDTH, rngs=rngs)
        self.ours = ours

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def through(block, carry):
            return block(*carry)

        x, h = through(self.blocks, (x, jnp.zeros_like(x)))
        return self.last(h, x) if self.ours else self.last(x + h)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_scanned_and_rematerialized_model_trains_as_flaxs(library):
    loss = lambda forward: jnp.square(forward(X) - X).mean()
    if library == "linen":
        parameters = jax.jit(LinenModel(True).init)(jax.random.key(0), X)
        step = jax.value_and_grad(lambda p, m: loss(functools.partial(m.apply, p)))
        step = jax.jit(step, static_argnums=1)
        steps = [step(parameters, LinenModel(ours)) for ours in (True, False)]
    else:
        models = [NnxModel(ours, nnx.Rngs(0)) for ours in (True, False)]
        steps = [nnx.jit(nnx.value_and_grad(loss))(model) for model in models]
    found, wanted = map(jax.tree.leaves, steps)
    assert len(found) > 5
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_ensemble(library):
    """Two layers mapped over by Flax's vmap, on the same rows."""
    x = X[0]
    if library == "linen":
        several = nn.vmap(
            fl.LayerNorm,
            in_axes=None,
            axis_size=2,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )(scale_init=jax.nn.initializers.normal())
        parameters = several.init(jax.random.key(0), x)
        found, scales = several.apply(parameters, x), parameters["params"]["scale"]
    else:

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def create(rngs):
            return fn.LayerNorm(WIDTH, scale_init=jax.nn.initializers.normal(), rngs=rngs)

        layers = create(nnx.Rngs(0))
        found, scales = nnx.vmap(lambda layer: layer(x))(layers), layers.scale[...]
    assert scales.shape == (2, WIDTH)
    for y, scale in zip(found, scales, strict=True):
        np.testing.assert_allclose(y, norm64("LayerNorm", x, scale), atol=1e-5)


def test_export_and_donation():
    parameters, apply = make("nnx", "PrenormLayerNorm", WIDTH)
    leaves, structure = jax.tree.flatten(parameters)

    def gradients(leaves, x):
        tree = jax.tree.unflatten(structure, leaves)
        return jax.grad(lambda t: jnp.sin(apply(t, x, x)[0] + x).sum())(tree)

    step = jax.jit(
        lambda *a: [p - g for p, g in zip(a[0], jax.tree.leaves(gradients(*a)), strict=True)],
        donate_argnums=0,
    )
    wanted = [
        np.array(p - g) for p, g in zip(leaves, jax.tree.leaves(gradients(leaves, X)), strict=True)
    ]
    for found in (jax.export.export(step)(leaves, X).call(leaves, X), step(leaves, X)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert all(leaf.is_deleted() for leaf in leaves)


@pytest.mark.parametrize("library", LIBRARIES)
def test_x64(library):
    with jax.enable_x64(True):
        x = random(0, (3, WIDTH), F64)
        parameters, apply = make(library, "PrenormLayerNorm", WIDTH, param_dtype=F64)
        y, h = jax.jit(apply)(randomized(parameters), x, x)
        given = dict(randomized(parameters).items())
        wanted = norm64("LayerNorm", 2 * np.asarray(x), given["scale"][...], given["bias"][...])
        assert y.dtype == h.dtype == F64
        np.testing.assert_allclose(y, wanted, atol=1e-13)
        for dtype, given in ((BF16, F64), (BF16, BF16), (F64, F32)):
            parameters, apply = make(library, "LayerNorm", WIDTH, dtype=dtype)
            y = jax.jit(apply)(parameters, x.astype(given))
            assert y.dtype == dtype
        np.testing.assert_allclose(y, norm64("LayerNorm", x.astype(F32)), atol=1e-13)


def lowered(apply, *arguments):
    """StableHLO for a GPU of NVIDIA."""
    return jax.jit(apply).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("library", "name", "inputs"),
    [
        ("linen", "LayerNorm", 1),
        ("nnx", "LayerNorm", 1),
        ("linen", "PrenormRMSNorm", 2),
        ("nnx", "ResidualLayerNorm", 2),
    ],
)
def test_in_bfloat16_the_kernel_gets_the_layers_arrays(library, name, inputs):
    rows, width = 64, 256
    parameters, apply = make(library, name, width, dtype=BF16, implementation=("pallas", "xla"))
    given = [jax.ShapeDtypeStruct((rows, width), BF16)] * inputs
    texts = [lowered(apply, parameters, *given)]
    if library == "linen":
        outs = jax.eval_shape(apply, parameters, *given)
        texts.append(lowered(lambda dy, *a: jax.vjp(apply, *a)[1](dy), outs, parameters, *given))
    for kernels, text in enumerate(texts, start=1):
        # Behind the backward kernel, one adds up its partial sums.
        totals = text.count("_totals_mosaic_gpu")
        assert (text.count("mosaic_gpu_v2"), totals) == (2 * kernels - 1, kernels - 1)
        assert not re.findall(rf"stablehlo\.(?:convert|reduce_prec).*{rows}x{width}", text)


@pytest.mark.parametrize(
    ("library", "name", "products"), [("linen", "SwiGLU", 2), ("nnx", "DenseBiasGelu", 1)]
)
def test_products_then_one_kernel(library, name, products):
    rows, width = 64, 256
    options = {"dtype": BF16, "implementation": ("pallas", "xla")}
    parameters, apply = make(library, name, 128, width, **options)
    text = lowered(apply, parameters, jax.ShapeDtypeStruct((rows, 128), BF16))
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("stablehlo.dot_general") == products
    assert not re.findall(rf"stablehlo\.convert.*{rows}x{width}", text)


def test_linens_bookkeeping_sees_one_call():
    x = X[0]
    layer = fl.LayerNorm()
    variables = layer.init(jax.random.key(0), x)
    for mask in (None, jnp.arange(WIDTH) < 5):
        seen = []

        def intercept(call, args, kwargs, context, seen=seen):
            seen.append(context.method_name)
            return call(*args, **kwargs)

        with nn.intercept_methods(intercept):
            y, state = layer.apply(variables, x, mask=mask, capture_intermediates=True)
        assert seen == ["__call__"]
        (captured,) = state["intermediates"]["__call__"]
        np.testing.assert_array_equal(captured, y)
        scopes = traced_scopes(functools.partial(layer.apply, mask=mask), (variables, x), "cpu")
        assert all(scope.split("/")[:2] != ["LayerNorm", "LayerNorm"] for scope in scopes)


def test_tables():
    wide = {"console_kwargs": {"width": 200, "force_terminal": False}}
    layer = fl.ResidualLayerNorm()
    assert "ResidualLayerNorm" in layer.tabulate(jax.random.key(0), X, X, **wide)
    layer = fn.ResidualLayerNorm(WIDTH, rngs=nnx.Rngs(0))
    assert "ResidualLayerNorm" in nnx.tabulate(layer, X, X, **wide)


def test_shared_scope_of_linen():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = fl.RMSNorm()
            nn.share_scope(self, inner)
            return inner(x)

    variables = Named().init(jax.random.key(0), X)
    assert variables["params"]["scale"].shape == (WIDTH,)


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(True, rngs) for _ in range(2)])

    def __call__(self, x):
        h = jnp.zeros_like(x)
        for block in self.blocks:
            x, h = block(x, h)
        return x + h


class LinenTower(nn.Module):
    def setup(self):
        self.blocks = [LinenBlock(True) for _ in range(2)]

    def __call__(self, x):
        carry = x, jnp.zeros_like(x)
        for block in self.blocks:
            carry, _ = block(carry)
        return sum(carry)


def test_scopes_by_module_path():
    tower = Tower(nnx.Rngs(0))
    named = fn.named_scopes(tower)
    assert type(tower.blocks[0]) is NnxBlock
    assert isinstance(named.blocks[0], NnxBlock)
    graph, state = nnx.split(named)
    assert graph == nnx.graphdef(fn.named_scopes(tower))  # so that nnx.jit does not trace again
    jax.tree.map(np.testing.assert_array_equal, state, nnx.state(tower))
    forward = lambda state, x: nnx.merge(graph, state)(x)
    found = traced_scopes(forward, (state, X), "cpu")

    linen = LinenTower()
    wanted = traced_scopes(linen.apply, (linen.init(jax.random.key(0), X), X), "cpu")
    as_nnx = [scope.replace("LinenTower", "Tower") for scope in wanted]
    assert set(found) == set(as_nnx)
    assert any(scope.startswith("Tower/blocks_1/up") for scope in found)


def test_kernels_and_boundaries_of_a_model_by_module_path(deviceless):
    graph, state = nnx.split(fn.named_scopes(Tower(nnx.Rngs(0))))
    forward = lambda state, x: nnx.merge(graph, state)(x)
    (module,) = fusejax.inspect(forward, state, X, target=deviceless("h100")).modules
    scopes = {scope for kernel in module.kernels for scope in kernel.scopes}
    for path in ("blocks_0/norm", "blocks_0/up", "blocks_1/down"):
        assert any(f"Tower/{path}" in scope for scope in scopes)
    assert any("Tower/blocks_" in scope for b in module.boundaries for scope in b.scopes)
