"""Values and gradients against float64, and dtypes against Flax."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import (
    BF16,
    F16,
    F32,
    LIBRARIES,
    NORMS,
    RESIDUAL_NORMS,
    dense,
    f64,
    make,
    make_softmax,
    norm64,
    pullback64,
    random,
    randomized,
    values,
)

pytestmark = pytest.mark.filterwarnings("error")

# Of a result of order 1: half of the last place for 16 bits, a few for f32.
TOLERANCE = {F32: 4e-6, BF16: 2.0**-8, F16: 2.0**-11}


def close(found, wanted, tolerance):
    """Within `tolerance` of the larger of 1 and the wanted value."""
    np.testing.assert_allclose(f64(found), wanted, rtol=tolerance, atol=tolerance)


def sum_as_rounded(x, residual):
    return f64(x + residual)


@pytest.mark.parametrize(
    ("library", "name", "dtype", "width"),
    [
        ("linen", "LayerNorm", F32, 100),
        ("linen", "PrenormRMSNorm", F32, 100),
        ("nnx", "ResidualRMSNorm", F32, 100),
        ("linen", "ResidualLayerNorm", F16, 31),
        ("linen", "RMSNorm", BF16, 31),
        ("nnx", "PrenormLayerNorm", BF16, 31),
    ],
)
def test_norms_and_their_gradients(library, name, dtype, width):
    parameters, apply = make(library, name, width, dtype=dtype)
    parameters = randomized(parameters)
    inputs = [random(n, (2, 5, width), dtype, mean=3) for n in (7, 8)[: 1 + (name not in NORMS)]]
    h = sum_as_rounded(*inputs) if len(inputs) > 1 else f64(inputs[0])
    given = {key: f64(value) for key, value in values(parameters).items()}
    if library == "nnx":  # which rounds parameters to the layer's dtype
        given = {key: f64(jnp.asarray(value, dtype)) for key, value in given.items()}
    scale, bias = given["scale"], given.get("bias")

    outs, pull = jax.vjp(apply, parameters, *inputs)
    prenorm = name.startswith("Prenorm")
    y = outs[0] if prenorm else outs
    assert y.dtype == dtype
    close(y, norm64(name, h, scale, bias), TOLERANCE[dtype])
    dy = random(9, h.shape, dtype)
    if prenorm:
        np.testing.assert_array_equal(outs[1], inputs[0] + inputs[1])
        assert outs[1].dtype == dtype
        dh = random(10, h.shape, dtype)
        found = pull((dy, dh))
        wanted = pullback64(name, h, scale, bias, f64(dy), f64(dh))
    else:
        found = pull(dy)
        wanted = pullback64(name, h, scale, bias, f64(dy))
    for dx in found[1:]:
        assert dx.dtype == dtype
        close(dx, wanted[0], 3 * TOLERANCE[dtype])
    for key, gradient in values(found[0]).items():
        assert gradient.dtype == F32
        # Sums of 10 rows; nnx hands them through `dtype`.
        rounded = 4e-6 if library == "linen" else TOLERANCE[dtype]
        close(gradient, wanted[1 if key == "scale" else 2], 10 * rounded)


@pytest.mark.parametrize("library", LIBRARIES)
def test_offset_rows_where_flaxs_default_fails(library):
    x = jnp.asarray(1000 + np.arange(1024, dtype=np.float32)[None] % 7 - 3)
    wanted = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]
    errors = []
    for ours in (True, False):
        parameters, apply = make(library, "LayerNorm", 1024, ours=ours)
        errors.append(np.abs(f64(jax.jit(apply)(parameters, x))[0, :7] - wanted).max())
    assert errors[0] < 1e-5
    assert errors[1] > 5e-5  # how far it is off depends on the platform's sums
    for name in RESIDUAL_NORMS[:1]:
        parameters, apply = make(library, name, 1024)
        y = jax.jit(apply)(parameters, np.asarray(x) - 300, np.full_like(x, 300))
        np.testing.assert_allclose(f64(y)[0, :7], wanted, atol=1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_outputs(library):
    x, r = jnp.array([[1.0, 2, 3, 4]]), jnp.array([[0.5, -0.5, 0.5, -0.5]])
    parameters, apply = make(library, "PrenormRMSNorm", 4)
    (y, s), pull = jax.vjp(lambda x, r: apply(parameters, x, r), x, r)
    np.testing.assert_array_equal(s[0], [1.5, 1.5, 3.5, 3.5])
    np.testing.assert_allclose(y[0], [0.557086, 0.557086, 1.299867, 1.299867], atol=1e-6)
    through_y = np.array([0.179292, 0.179292, -0.076839, -0.076839])
    first = jnp.zeros_like(x).at[0, 0].set(1)
    for dy, ds, wanted in (
        (jnp.ones_like(x), 0 * x, through_y),
        (0 * x, jnp.ones_like(x), np.ones(4)),
        (jnp.ones_like(x), jnp.ones_like(x), 1 + through_y),
        (first, 0 * x, [0.342576, -0.028815, -0.067235, -0.067235]),
    ):
        for gradient in pull((dy, ds)):
            np.testing.assert_allclose(gradient[0], wanted, atol=2e-6)
    alone = jax.grad(lambda r: apply(parameters, x, r)[0].sum())(r)
    np.testing.assert_allclose(alone[0], through_y, atol=2e-6)
    unused = jax.grad(lambda r: apply(parameters, x, r)[1].sum())(r)
    np.testing.assert_array_equal(unused[0], np.ones(4))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("given", "affine", "dtype", "wanted"),
    [(BF16, True, None, F32), (BF16, True, BF16, BF16), (BF16, False, None, BF16)],
)
def test_dtypes(library, given, affine, dtype, wanted):
    x = random(0, (2, 3, 4), given)
    for name in ("LayerNorm", "PrenormRMSNorm"):
        options = {"dtype": dtype, "use_scale": affine}
        if name == "LayerNorm":
            options["use_bias"] = affine
        plain = name.removeprefix("Prenorm")
        _, theirs = make(library, plain, 4, ours=False, **options)
        parameters, ours = make(library, name, 4, **options)
        inputs = (x,) if name == plain else (x, x)
        h = x if name == plain else x + x
        y, *sums = jax.tree.leaves(jax.eval_shape(ours, parameters, *inputs))
        assert y.dtype == wanted == jax.eval_shape(theirs, parameters, h).dtype
        assert all(found.dtype == given for found in sums)
        if affine:
            y = jax.tree.leaves(ours(parameters, *inputs))[0]
            close(y, f64(jax.jit(theirs)(parameters, h)), TOLERANCE[wanted])


@pytest.mark.parametrize(
    ("library", "wanted"),
    [
        ("linen", [-1.34375, -0.447266, 0.447266, 1.34375]),
        ("nnx", [-1.41406, 0, 0, 1.41406]),
    ],
)
def test_what_is_rounded_first(library, wanted):
    x = jnp.array([[256.5, 257.5, 258.5, 259.5]])
    for name in ("LayerNorm", "ResidualLayerNorm", "PrenormLayerNorm"):
        inputs = (x,) if name == "LayerNorm" else (x - 1, jnp.ones_like(x))
        parameters, apply = make(library, name, 4, dtype=BF16)
        outs = jax.jit(apply)(parameters, *inputs)
        y, *sums = outs if isinstance(outs, tuple) else (outs,)
        assert y.dtype == BF16
        np.testing.assert_allclose(f64(y)[0], wanted, rtol=3e-6)
        for h in sums:
            np.testing.assert_array_equal(h, x)
            assert h.dtype == F32


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["ResidualLayerNorm", "PrenormRMSNorm"])
def test_a_residual_in_another_dtype_or_shape(library, name):
    x, r = random(0, (2, 3, 4), BF16), random(1, (3, 4), F32, deviation=0.01)
    parameters, apply = make(library, name, 4, dtype=BF16)
    outs = apply(parameters, x, r)
    y, *sums = outs if isinstance(outs, tuple) else (outs,)
    h = x + r
    flax, theirs = make(
        library, name.removeprefix("Residual").removeprefix("Prenorm"), 4, ours=False, dtype=BF16
    )
    assert y.dtype == BF16
    close(y, f64(jax.jit(theirs)(flax, h)), 2 * TOLERANCE[BF16])
    for found in sums:
        np.testing.assert_array_equal(found, h)
        assert found.dtype == F32
    full = jnp.broadcast_to(r, x.shape)
    jax.tree.map(np.testing.assert_array_equal, apply(parameters, x, full), outs)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_norm_is_of_the_rounded_sum(library):
    """Compiled: XLA would keep the sum in f32."""
    x, r = jnp.array([[256, 1]], BF16), jnp.array([[1, 1]], BF16)
    for dtype, tolerance in ((BF16, 2.0**-9), (F32, 1e-6)):
        parameters, apply = make(library, "PrenormRMSNorm", 2, dtype=dtype)
        y, h = jax.jit(apply)(parameters, x, r)
        np.testing.assert_array_equal(f64(h), [[256, 2]])
        np.testing.assert_allclose(f64(y), [[1.4141704, 0.01104821]], rtol=tolerance)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["LayerNorm", "PrenormRMSNorm"])
def test_no_rows_and_no_columns(library, name):
    count = 1 + (name not in NORMS)
    parameters, apply = make(library, name, 64)
    x = jnp.zeros((0, 64))

    def total(parameters, *inputs):
        return sum(leaf.sum() for leaf in jax.tree.leaves(apply(parameters, *inputs)))

    assert all(y.shape == (0, 64) for y in jax.tree.leaves(apply(parameters, *[x] * count)))
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(parameters, *[x] * count)
    assert gradients[1].shape == (0, 64)
    for gradient in jax.tree.leaves(gradients[0]):
        np.testing.assert_array_equal(gradient, np.zeros(64))
    mapped = jax.vmap(apply, in_axes=(None, *[0] * count))
    found = mapped(parameters, *[jnp.zeros((3, 0, 64))] * count)
    assert all(y.shape == (3, 0, 64) for y in jax.tree.leaves(found))

    parameters, apply = make(library, name, 0)
    outs = jax.jit(apply)(parameters, *[jnp.zeros((3, 0))] * count)
    assert all(y.shape == (3, 0) for y in jax.tree.leaves(outs))


def test_rank_and_layout():
    parameters, apply = make("linen", "LayerNorm", 64)
    parameters = randomized(parameters)
    x, dy = random(0, (364, 64)), random(1, (364, 64))
    deep = lambda array: array.reshape(52, 7, 64)
    y, pull = jax.vjp(apply, parameters, x)
    y_deep, pull_deep = jax.vjp(apply, parameters, deep(x))
    np.testing.assert_allclose(deep(y), y_deep, atol=1e-6)
    (dp, dx), (dp_deep, dx_deep) = pull(dy), pull_deep(deep(dy))
    np.testing.assert_allclose(deep(dx), dx_deep, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), dp, dp_deep)
    square = random(2, (64, 64))
    np.testing.assert_array_equal(apply(parameters, square.T), apply(parameters, square.T.copy()))
    np.testing.assert_allclose(apply(parameters, x[3]), y[3], atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_per_example(library):
    parameters, apply = make(library, "LayerNorm", 16)
    x, dy = random(0, (3, 4, 16)), random(1, (3, 4, 16))
    loss = lambda parameters, x, dy: (apply(parameters, x) * dy).sum()
    several = jax.tree.map(lambda p: jnp.stack([p, p + 1, p - 2]), parameters)
    one_each = jax.vmap(jax.grad(loss, argnums=(0, 1)))(several, x, dy)
    shared = jax.grad(lambda p: jax.vmap(loss, (None, 0, 0))(p, x, dy).sum())(parameters)
    found = values(one_each[0])
    for n, scale in enumerate([1.0, 2.0, -1.0]):
        dx, dscale, dbias = pullback64("LayerNorm", f64(x[n]), scale, 0, f64(dy[n]))
        np.testing.assert_allclose(one_each[1][n], dx, atol=1e-5)
        np.testing.assert_allclose(found["scale"][n], dscale, atol=1e-5)
        np.testing.assert_allclose(found["bias"][n], dbias, atol=1e-5)
    assert found["scale"].shape == (3, 16)
    wanted = pullback64("LayerNorm", f64(x), 1.0, 0, f64(dy))[1:]
    for name, sums in zip(("scale", "bias"), wanted, strict=True):
        np.testing.assert_allclose(values(shared)[name], sums, atol=1e-5)


def gelu64(z, approximate):
    if approximate:
        return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / np.sqrt(2)))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("approximate", "use_bias"), [(True, True), (False, False)])
def test_dense_bias_gelu(library, approximate, use_bias):
    options = {"approximate": approximate, "use_bias": use_bias}
    parameters, apply = make(library, "DenseBiasGelu", 4, 5, **options)
    parameters = randomized(parameters)
    x = random(1, (2, 3, 4))
    kernel, bias = f64(values(parameters)["kernel"]), f64(values(parameters).get("bias", 0.0))
    close(apply(parameters, x), gelu64(f64(x) @ kernel + bias, approximate), 2e-5)

    _, narrow = make(library, "DenseBiasGelu", 4, 5, dtype=BF16, **options)
    y = narrow(parameters, x)
    assert y.dtype == BF16
    np.testing.assert_allclose(f64(y), gelu64(f64(x) @ kernel + bias, approximate), atol=0.05)


@pytest.mark.parametrize("library", LIBRARIES)
def test_gradients_of_dense_bias_gelu_are_those_of_flaxs_layer(library):
    parameters, ours = make(library, "DenseBiasGelu", 4, 5)
    _, theirs = make(library, dense(library), 4, 5, ours=False)
    parameters, x = randomized(parameters), random(1, (2, 3, 4))

    def gradients(f):
        return jax.jit(jax.grad(lambda p, x: jnp.cos(f(p, x)).sum(), (0, 1)))(parameters, x)

    found, wanted = gradients(ours), gradients(lambda p, x: jax.nn.gelu(theirs(p, x)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, wanted)


@pytest.mark.parametrize("library", LIBRARIES)
def test_gelu_is_rounded_once(library):
    """At -3 in bfloat16 Flax's gelu is 60 % off."""
    _, apply = make(library, "DenseBiasGelu", 1, 1, dtype=BF16)
    parameters = {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)}
    if library == "nnx":
        parameters = nnx.State({k: nnx.Param(v) for k, v in parameters.items()})
    y = apply(parameters, jnp.full((1, 1), -3, BF16))
    np.testing.assert_allclose(f64(y), -0.0036374, rtol=2.0**-8)
    assert abs(float(jax.nn.gelu(jnp.bfloat16(-3))) + 0.0036374) > 0.002


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("use_bias", [True, False])
def test_swiglu(library, use_bias):
    parameters, apply = make(library, "SwiGLU", 4, 5, use_bias=use_bias)
    parameters = randomized(parameters)
    x = random(1, (2, 3, 4))
    projections = {
        name: f64(x) @ f64(p["kernel"]) + f64(p.get("bias", 0.0))
        for name, p in values(parameters).items()
    }
    gate = projections["gate_proj"]
    close(apply(parameters, x), gate / (1 + np.exp(-gate)) * projections["up_proj"], 2e-5)
    _, narrow = make(library, "SwiGLU", 4, 5, use_bias=use_bias, dtype=BF16)
    assert narrow(parameters, x).dtype == BF16


@pytest.mark.parametrize("library", LIBRARIES)
def test_softmax(library):
    module = make_softmax(library)
    x = random(0, (3, 5, 100), BF16, deviation=4)
    e = np.exp(f64(x))
    close(module(x), e / e.sum(-1, keepdims=True), 2.0**-9)
    where = jnp.asarray(np.random.default_rng(1).random((5, 100)) < 0.5).at[2].set(False)
    kept = e * f64(where)
    wanted = kept / np.where(kept.sum(-1) == 0, 1, kept.sum(-1))[..., None]
    close(module(x, where=where), wanted, 2.0**-9)
    gradient = jax.grad(lambda x: jnp.square(module(x, where=where).astype(F32)).sum())(x)
    assert np.isfinite(f64(gradient)).all()
    np.testing.assert_array_equal(f64(gradient)[:, 2], 0)
    assert np.isnan(f64(module(jnp.full((1, 4), -jnp.inf)))).all()
    found = module(jnp.array([[0, 1, 2, -jnp.inf]]))
    np.testing.assert_allclose(found[0], [0.0900306, 0.2447285, 0.6652410, 0], atol=1e-6)
