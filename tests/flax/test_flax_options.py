"""Every option of Flax's layers: nothing that works there raises here, and who computes it."""

import functools

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
    RESIDUAL_NORMS,
    dense,
    layer_class,
    make,
    make_softmax,
    random,
)

import fusejax
from fusejax.flax import dispatch

pytestmark = pytest.mark.filterwarnings("error")

I32, C64, F8 = jnp.int32, jnp.complex64, jnp.float8_e4m3fn
NORMAL, ONES = jax.nn.initializers.normal(), jax.nn.initializers.ones
SHAPE = (2, 3, 4)

OPS, FLAX = True, False
# options, dtype of x, shape of x, who computes it
BOTH = [
    ({}, F32, SHAPE, OPS),
    ({}, F32, (4,), OPS),
    ({"dtype": F16}, BF16, SHAPE, OPS),
    ({"dtype": "bfloat16"}, BF16, SHAPE, OPS),
    ({"dtype": float}, F32, SHAPE, OPS),
    ({"param_dtype": BF16}, BF16, SHAPE, OPS),
    ({"use_scale": False}, BF16, SHAPE, OPS),
    ({"use_fast_variance": False}, F32, SHAPE, OPS),
    ({"epsilon": np.float32(0.1)}, F32, SHAPE, OPS),
    ({"epsilon": jnp.float32(0.1)}, F32, SHAPE, FLAX),
    ({"reduction_axes": 2, "feature_axes": [-1]}, F32, SHAPE, OPS),
    ({"reduction_axes": (-1, 2), "feature_axes": 2}, F32, SHAPE, OPS),
    ({"reduction_axes": -2}, F32, SHAPE, FLAX),
    ({"reduction_axes": (1, -1)}, F32, SHAPE, FLAX),
    ({"axis_index_groups": [[0]]}, F32, SHAPE, OPS),
    ({"param_dtype": C64}, F32, SHAPE, FLAX),
    ({"dtype": C64}, F32, SHAPE, FLAX),
    ({}, C64, SHAPE, FLAX),
    ({}, I32, SHAPE, FLAX),
]
LINEN = [
    ({"force_float32_reductions": False}, BF16, SHAPE, FLAX),
    ({"feature_axes": (-2, -1), "reduction_axes": (-2, -1)}, F32, SHAPE, FLAX),
]
NNX = [
    ({"promote_dtype": lambda arrays, dtype: arrays}, BF16, SHAPE, FLAX),
    ({"dtype": BF16}, F8, SHAPE, FLAX),
]
NORM_CASES = [
    (library, name, *case)
    for library, more in (("linen", LINEN), ("nnx", NNX))
    for n, case in enumerate(BOTH + more)
    for name in (("LayerNorm", "RMSNorm")[n % 2],)
]


@pytest.fixture
def who(monkeypatch):
    """Who computed a norm: one entry, OPS, for each call of an op."""
    found = []
    normalize = dispatch.normalize

    def spy(*args, **options):
        found.append(OPS)
        return normalize(*args, **options)

    monkeypatch.setattr(dispatch, "normalize", spy)
    return found


def same(found, wanted, exact=False):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = 0 if exact else {F32: 1e-5, BF16: 2.0**-7, F16: 2.0**-9}.get(wanted.dtype.type, 0)
    as_c = lambda array: np.asarray(array).astype(np.complex128)
    np.testing.assert_allclose(as_c(found), as_c(wanted), rtol=tolerance, atol=tolerance)


def inputs(dtype, shape):
    values = random(0, shape, deviation=3)
    values = np.asarray(values) + (1j * np.asarray(random(1, shape)) if dtype == C64 else 0)
    return jnp.asarray(values.astype(dtype))


@pytest.mark.parametrize(
    ("library", "name", "options", "dtype", "shape", "computed_by"), NORM_CASES
)
def test_norm_options(library, name, options, dtype, shape, computed_by, who):
    x = inputs(dtype, shape)
    parameters, ours = make(library, name, 4, leading=shape[:-1], **options)
    del who[:]
    _, theirs = make(library, name, 4, ours=False, leading=shape[:-1], **options)
    found = ours(parameters, x)
    assert who == [OPS] * computed_by
    same(found, theirs(parameters, x), exact=computed_by is FLAX)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("given", "residual", "dtype", "chosen"),
    [
        (BF16, None, BF16, None),
        (F32, F32, None, None),
        (BF16, BF16, BF16, None),
        (BF16, None, None, "xla"),
        (F32, None, BF16, "xla"),
        (BF16, F32, None, "xla"),
        (BF16, F32, BF16, "xla"),
    ],
)
def test_casts_of_activations_are_left_to_xla_unless_it_is_told_otherwise(
    library, given, residual, dtype, chosen, monkeypatch
):
    inputs = [jnp.ones(SHAPE, d) for d in (given, residual) if d is not None]
    name = "LayerNorm" if residual is None else "ResidualLayerNorm"
    module = getattr(fusejax.flax, library)
    asked = []

    def op(x, *rest, epsilon, implementation):
        asked.append(implementation)
        return x

    monkeypatch.setattr(module, "_LAYER_NORM", module._LAYER_NORM._replace(alone=op, residual=op))
    for told in (None, "split", ("pallas", "xla")):
        parameters, apply = make(library, name, 4, dtype=dtype, implementation=told)
        apply(parameters, *inputs)
        assert asked[-1] == (chosen if told is None else told)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["LayerNorm", *RESIDUAL_NORMS])
def test_masks_are_flaxs(library, name, who):
    x, mask = random(0, SHAPE), jnp.arange(4) < 3
    plain = name.removeprefix("Residual").removeprefix("Prenorm")
    parameters, ours = make(library, name, 4)
    del who[:]
    _, theirs = make(library, plain, 4, ours=False)
    outs = ours(parameters, *[x] * (1 + (name != plain)), mask=mask)
    y, *sums = outs if isinstance(outs, tuple) else (outs,)
    h = x if name == plain else x + x
    same(y, theirs(parameters, h, mask=mask), exact=True)
    for found in sums:
        same(found, h, exact=True)
    assert not who


@pytest.mark.parametrize("library", LIBRARIES)
def test_statistics_over_devices_are_flaxs(library):
    x = random(0, (2, 5, 4))
    options = {"axis_name": "i"}
    parameters, theirs = make(library, "LayerNorm", 4, ours=False)
    results = []
    for ours in (True, False):
        if library == "linen":
            layer = layer_class(library, "LayerNorm", ours=ours)(**options)
            apply = lambda x, layer=layer: layer.apply({"params": parameters}, x)
        else:
            _, apply = make(library, "LayerNorm", 4, ours=ours, **options)
            apply = functools.partial(apply, parameters)
        results.append(jax.jit(jax.vmap(apply, axis_name="i"))(x))
    same(*results, exact=True)
    assert np.abs(results[0] - theirs(parameters, x)).max() > 0.1


def test_linen_looks_at_what_is_stored():
    """A checkpoint may hold another dtype than `param_dtype`."""
    x = random(0, SHAPE, BF16)
    for dtype in (BF16, F32, C64):
        parameters = {"scale": random(1, (4,)).astype(dtype), "bias": random(2, (4,)).astype(dtype)}
        results = (
            layer_class("linen", "LayerNorm", ours=ours)().apply({"params": parameters}, x)
            for ours in (True, False)
        )
        same(*results)


def test_what_flax_refuses_is_refused():
    _, apply = make("nnx", "LayerNorm", 4)
    parameters, _ = make("nnx", "LayerNorm", 3)
    for x in (jnp.ones((2, 4)), jnp.float32(1)):
        with pytest.raises((TypeError, ValueError, IndexError)):
            apply(parameters, x)
    with pytest.raises(jax.dtypes.TypePromotionError):
        apply(parameters, jnp.ones((2, 3), F8))
    with pytest.raises(ValueError, match="inexact"):
        make("linen", "RMSNorm", 4, dtype=I32)


def doubled(*args, **options):
    return 2 * jax.lax.dot_general(*args, **options)


def in_f32(*args, **options):
    return jax.lax.dot_general(*args, **{**options, "preferred_element_type": F32})


DENSE_CASES = [
    ({}, F32, (4,)),
    ({"precision": "highest", "param_dtype": F16, "kernel_init": ONES}, F16, SHAPE),
    ({"dot_general": doubled, "use_bias": False}, F32, SHAPE),
    ({"dot_general": in_f32, "dtype": BF16, "bias_init": NORMAL}, BF16, SHAPE),
    ({"param_dtype": C64, "kernel_init": ONES}, F32, SHAPE),
    ({}, I32, SHAPE),
    ({}, F32, (0, 4)),
]


@pytest.mark.parametrize(
    ("library", "options", "dtype", "shape"),
    [(library, *case) for library in LIBRARIES for case in DENSE_CASES]
    + [
        ("linen", {"dot_general_cls": lambda: doubled}, F32, SHAPE),
        ("linen", {"promote_dtype": lambda *arrays, dtype: arrays}, BF16, SHAPE),
        ("nnx", {"promote_dtype": lambda arrays, dtype: arrays}, BF16, SHAPE),
        ("nnx", {"preferred_element_type": F32, "dtype": BF16}, BF16, SHAPE),
    ],
)
def test_dense_options(library, options, dtype, shape):
    x = inputs(dtype, shape)
    parameters, ours = make(library, "DenseBiasGelu", shape[-1], 5, **options)
    _, theirs = make(library, dense(library), shape[-1], 5, ours=False, **options)
    wanted = jax.jit(lambda *given: jax.nn.gelu(theirs(*given)))(parameters, x)
    found = ours(parameters, x)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.complex64), np.asarray(wanted, np.complex64), rtol=2e-2, atol=4e-2
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_swiglu_options(library):
    for options, dtype in (({"dot_general": doubled}, F32), ({"use_bias": True}, C64)):
        x = inputs(dtype, SHAPE)
        parameters, ours = make(library, "SwiGLU", 4, 5, **options)
        dense_options = {"use_bias": False, **options}
        _, theirs = make(library, dense(library), 4, 5, ours=False, **dense_options)
        gate, up = (theirs(parameters[name], x) for name in ("gate_proj", "up_proj"))
        same(ours(parameters, x), jax.nn.silu(gate) * up)


@pytest.mark.parametrize("library", LIBRARIES)
def test_softmax_options(library):
    x = random(0, SHAPE)
    for axis in (-1, 0, None):
        same(make_softmax(library, axis=axis)(x), jax.nn.softmax(x, axis=axis))
    layer = make_softmax(library)
    for given in (x.astype(C64), x.astype(I32), jnp.zeros((3, 0))):
        same(layer(given), jax.nn.softmax(given))
    for where in (jnp.arange(4) < 2, np.ones((1, 4), bool), True, jnp.ones((2, *SHAPE), bool)):
        same(layer(x, where=where), jax.nn.softmax(x, where=where))
    with pytest.raises(ValueError, match="where must be"):
        layer(x, where=jnp.arange(4))


@pytest.mark.parametrize("library", LIBRARIES)
def test_numpy_arrays(library):
    x = np.random.default_rng(0).normal(size=SHAPE)  # float64
    parameters, ours = make(library, "PrenormLayerNorm", 4)
    _, theirs = make(library, "LayerNorm", 4, ours=False)
    y, h = ours(parameters, x, x)
    same(y, theirs(parameters, x + x))
    assert h.dtype == F32


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_implementation_that_cannot_run_is_an_error_with_the_reason(library):
    options = {"implementation": "pallas"}
    width = 200_000  # more than the shared memory of a cluster holds
    x = jnp.ones((1, width))
    if library == "linen":
        run = lambda: layer_class(library, "LayerNorm")(**options).init(jax.random.key(0), x)
    else:
        run = lambda: layer_class(library, "LayerNorm")(width, rngs=nnx.Rngs(0), **options)(x)
    with pytest.raises(ValueError, match=f"last axis may be at most .* {width}"):
        jax.eval_shape(run)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("asked", ["fast", 3, []])
def test_a_name_that_is_none_is_told_at_once(library, asked):
    arguments = () if library == "linen" else (4,)
    options = {} if library == "linen" else {"rngs": nnx.Rngs(0)}
    with pytest.raises(ValueError, match=r"implementation .* is"):
        layer_class(library, "LayerNorm")(
            *arguments, **options, implementation=asked, reduction_axes=0
        )
