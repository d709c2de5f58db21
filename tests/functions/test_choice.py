"""Which implementation is chosen, and that it is the one that is lowered."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_references import CASES

import fusejax
from fusejax.compile import aot, targets
from fusejax.functions import card, measured
from fusejax.functions.card import Card

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
HOPPER, AMPERE = Card("NVIDIA H100 80GB HBM3", (9, 0)), Card("NVIDIA A100-SXM4-80GB", (8, 0))


def shapes(name, shape=(64, 256), dtype=BF16):
    of = {"a": (shape, dtype), "w": (shape[-1:], F32), "i": (shape[:-1], "int32")}
    return [jax.ShapeDtypeStruct(*of[letter]) for letter in CASES[name].shapes]


@pytest.fixture(autouse=True)
def nothing_was_measured(monkeypatch):
    monkeypatch.setattr(measured, "_file", dict)


def explained(name, *args, platform="cuda", **more):
    return fusejax.explain_choice(name, *args, platform=platform, **more)


def lowered(function, *args, platform="cuda"):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def kernels_in(text):
    return text.count("mosaic_gpu_v2")


@pytest.mark.parametrize("name", CASES)
def test_what_is_explained_is_what_is_lowered(name):
    args = shapes(name)
    for platform, asked in (("cuda", None), ("cpu", None), ("cuda", ["split", "pallas"])):
        choice = explained(name, *args, platform=platform, implementation=asked)
        call = lambda *a, asked=asked: getattr(fusejax, name)(*a, implementation=asked)
        text = lowered(call, *args, platform=platform)
        assert choice.implementation == {"cuda": "pallas", "cpu": "xla"}[platform] or asked
        assert kernels_in(text) == (choice.implementation == "pallas")
        assert ("optimization_barrier" in text) == (choice.implementation == "split")
        assert choice.function == name
    exact = shapes(name, dtype=F32)[:-1] + shapes(name, shape=(64, 2), dtype=F32)[-1:]
    if "w" in CASES[name].shapes:
        for function in (getattr(fusejax, name), lambda *a: explained(name, *a)):
            with pytest.raises(ValueError, match=r"must have the shape \(256,\), not \(2,\)"):
                jax.eval_shape(function, *exact)


@pytest.mark.parametrize("platform", ["CUDA", "banana", ""])
def test_an_unknown_platform_is_refused(platform):
    with pytest.raises(ValueError, match=f"platform '{platform}' is unknown: give one of 'gpu'"):
        explained("softmax", jax.ShapeDtypeStruct((8, 64), BF16), platform=platform)


def test_more_elements_than_a_kernel_takes_may_be_shared_by_devices():
    x = jax.ShapeDtypeStruct((2**18, 2**13), BF16)
    choice = explained("softmax", x)
    assert choice.implementation == "pallas"
    assert choice.reason.endswith("more than 2**31-1 of the elements computes them in plain JAX.")
    assert not kernels_in(lowered(fusejax.softmax, x))
    assert "2**31" not in explained("softmax", jax.ShapeDtypeStruct((2**17, 2**13), BF16)).reason


def test_a_gradient_is_lowered_to_kernels_or_to_none():
    def loss(x, asked):
        return fusejax.softmax(x, implementation=asked).astype(F32).sum()

    (x,) = shapes("softmax")
    for asked, count in ((None, 2), ("pallas", 2), ("xla", 0), (("pallas", "split"), 2)):
        gradient = jax.grad(lambda x, asked=asked: loss(x, asked))
        assert kernels_in(lowered(gradient, x)) == count
        if asked != "pallas":
            assert kernels_in(lowered(gradient, x, platform="cpu")) == 0


def test_names_and_sequences():
    (x,) = shapes("softmax")
    assert explained("softmax", x, implementation="pallas").reason == "It was asked for by name."
    of_two = explained("softmax", x, implementation=("pallas", "split"), platform="cpu")
    assert (of_two.implementation, list(of_two.refused)) == ("split", ["pallas"])
    for asked in ("triton", ("xla", "triton"), "", (), 3):
        for call in (fusejax.softmax, lambda x, **more: explained("softmax", x, **more)):
            with pytest.raises(ValueError, match="give None, or some of 'pallas', 'xla', 'split'"):
                jax.eval_shape(lambda x, c=call, a=asked: c(x, implementation=a), x)
    wide = jax.ShapeDtypeStruct((2, 2**20), BF16)
    reason = r"implementation='pallas' cannot compute softmax. pallas: The last axis may be at most"
    for call in (fusejax.softmax, lambda x, **more: explained("softmax", x, **more)):
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(lambda x, c=call: c(x, implementation="pallas"), wide)
    with pytest.raises(ValueError, match="lowered for cpu"):
        explained("softmax", x, implementation=["pallas"], platform="cpu")
    with pytest.raises(ValueError, match="Hopper"):
        lowered(lambda x: fusejax.softmax(x, implementation="pallas"), x, platform="cpu")


def test_the_default_goes_to_xla_where_a_kernel_cannot():
    wide = explained("softmax", jax.ShapeDtypeStruct((2, 2**20), BF16))
    assert (wide.implementation, wide.refused) == ("xla", {"pallas": wide.reason})
    assert "at most 262144" in wide.reason
    assert explained("bias_gelu", *shapes("bias_gelu", (2, 2**20))).implementation == "pallas"
    x, scale = shapes("rms_norm")
    mixed = explained("residual_rms_norm", x, jax.ShapeDtypeStruct(x.shape, F32), scale)
    assert (mixed.implementation, "alike" in mixed.reason) == ("xla", True)


def test_the_card_decides():
    (x,) = shapes("softmax")
    text = {}
    jitted = jax.jit(lambda x: fusejax.softmax(x))
    for one in (AMPERE, HOPPER, Card("NVIDIA GeForce RTX 5090", (12, 0)), AMPERE):
        with card.compiling_for(one):
            choice = fusejax.explain_choice(fusejax.softmax, x)
            text = jitted.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert choice.implementation == ("pallas" if one is HOPPER else "xla")
        assert choice.card == one.name
        assert kernels_in(text) == (one is HOPPER)
        if one is not HOPPER:
            assert one.name in choice.reason
            with card.compiling_for(one), pytest.raises(ValueError, match="compute capability"):
                jax.eval_shape(lambda x: fusejax.softmax(x, implementation="pallas"), x)
    assert explained("softmax", x).card == card.current().name


def test_only_targets_that_are_cards_are_compiled_for():
    cards = {}
    for target in (targets.cpu(), targets.deviceless("a100"), targets.deviceless("h100")):
        with aot.compiling_for(target):
            cards[target.name] = card.current()
    assert cards == {"cpu": card.current(), "a100": AMPERE, "h100": HOPPER}


def test_inspecting_for_a_card_is_choosing_for_it(deviceless):
    @jax.jit
    def layer(x, scale):
        return fusejax.rms_norm(x, scale) + x

    for name, launches in (("a100", 0), ("h100", 1), ("a100", 0)):
        report = fusejax.inspect(layer, *shapes("rms_norm", (512, 1024)), target=deviceless(name))
        (module,) = report.modules
        emitters = [kernel.emitter for kernel in module.kernels]
        assert emitters.count("mosaic_gpu") == launches
        scopes = {scope["name"]: scope["status"] for scope in module.to_json()["scopes"]}
        assert scopes["rms_norm"] == "kernels"
        assert "folded" not in scopes.values()


def test_measurements_decide(monkeypatch):
    slower = {"elements": 64 * 256, "width": 256, "pallas_us": 10.4, "xla_us": 10.0}
    table = {card.current().name: {"softmax": {"16": [slower]}}}
    monkeypatch.setattr(measured, "_file", lambda: table)
    (x,) = shapes("softmax")
    choice = explained("softmax", x)
    assert choice.implementation == "xla"
    assert choice.reason == choice.refused["pallas"]
    assert "XLA took 10 µs and the kernels 10.4 µs" in choice.reason
    assert kernels_in(lowered(lambda x: fusejax.softmax(x), x)) == 0
    assert explained("softmax", x, implementation=("pallas", "xla")).implementation == "pallas"
    assert explained("softmax", *shapes("softmax", dtype=F32)).implementation == "pallas"
    with card.compiling_for(Card("another", (9, 0))):
        assert explained("softmax", x).implementation == "pallas"
    slower["pallas_us"] = 10.2
    close = explained("softmax", x)
    assert (close.implementation, "10.2 µs" in close.reason) == ("pallas", True)


def test_it_reads_well():
    (x,) = shapes("softmax")
    assert str(explained("softmax", x, platform="cpu")) == (
        "softmax (cpu): xla. The kernels are for NVIDIA GPUs, and this is lowered for cpu."
    )
    tried = explained("softmax", x, implementation=("pallas", "split"), platform="cpu")
    assert str(tried) == (
        "softmax (cpu): split. Of those that were asked for it is the first that can run.\n"
        "  not pallas: The kernels are for NVIDIA GPUs, and this is lowered for cpu."
    )
    with jax.default_device(jax.devices("cpu")[0]):
        assert fusejax.explain_choice("softmax", x).platform == "cpu"
    assert explained("softmax", x, platform="gpu") == explained("softmax", x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_card_it_is_what_is_compiled(name):
    args = CASES[name].arguments(np.random.default_rng(0), (64, 256), BF16)
    choice = fusejax.explain_choice(name, *args)
    assert (choice.platform, choice.card) == ("cuda", jax.devices()[0].device_kind)
    text = jax.jit(getattr(fusejax, name)).lower(*args).compile().as_text()
    assert ("mosaic_gpu" in text) == (choice.implementation == "pallas")


@pytest.mark.parametrize("function", ["gelu", len, jnp.sin, 3, lambda x: x, None])
def test_only_functions_of_fusejax_are_explained(function):
    with pytest.raises(ValueError, match="is none of layer_norm, rms_norm"):
        fusejax.explain_choice(function, jnp.zeros(3))
    with pytest.raises(TypeError, match="x"):
        fusejax.explain_choice("softmax")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.layer_norm([1.0, 2.0]), "x must be an array, not list"),
        (lambda f: f.layer_norm(None), "x must be an array, not NoneType"),
        (lambda f: f.rms_norm(jnp.float32(3)), "x must have at least one axis"),
        (lambda f: f.rms_norm(jnp.arange(3)), "x must be of a floating-point dtype, not int32"),
        (lambda f: f.rms_norm(jnp.ones(3), jnp.arange(3)), "scale must be of a floating-point"),
        (lambda f: f.layer_norm(jnp.ones(3), epsilon=-1), "epsilon must be a finite number"),
        (lambda f: f.rms_norm(jnp.ones(3), scale_offset="1%"), "scale_offset must be a finite"),
        (lambda f: jax.jit(lambda e: f.rms_norm(jnp.ones(3), epsilon=e))(1e-6), "make it static"),
        (
            lambda f: f.residual_rms_norm(jnp.ones(3), jnp.ones((1, 3))),
            r"x and residual must have one shape, not \(3,\) and \(1, 3\)",
        ),
        (lambda f: f.bias_gelu(jnp.ones(3), None), "bias must be an array"),
        (
            lambda f: f.bias_gelu(jnp.ones(3), jnp.ones(3), approximate="tanh"),
            "approximate must be",
        ),
        (lambda f: f.swiglu(jnp.ones(3), jnp.ones(4)), "gate and up must have one shape"),
        (lambda f: f.softmax(jnp.ones(3), where=jnp.ones(3)), "where must be boolean"),
        (
            lambda f: f.softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)),
            r"where must broadcast to the shape \(3,\), and it has \(2, 3\)",
        ),
        (
            lambda f: f.softmax_cross_entropy(jnp.ones((2, 3)), jnp.ones(2)),
            "labels must be integers, not float32",
        ),
        (
            lambda f: f.softmax_cross_entropy(jnp.ones((2, 3)), jnp.arange(3)),
            r"labels must have the shape \(2,\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(fusejax)


SPLIT_COLUMNS = """
import jax, jax.numpy as jnp, numpy as np, fusejax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
with jax.set_mesh(mesh):
    x = jax.device_put(values, NamedSharding(mesh, P(None, "model")))
    scale = jax.device_put(np.ones(16, np.float32), NamedSharding(mesh, P()))
    choice = fusejax.explain_choice("rms_norm", x, scale, platform="cuda")
    print(choice.implementation, choice.reason)
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    print(fusejax.explain_choice("softmax", struct, platform="cuda").implementation)
    print(fusejax.explain_choice("swiglu", x, x, platform="cuda").implementation)
    rows = jax.device_put(values, NamedSharding(mesh, P("model")))
    print(fusejax.explain_choice("rms_norm", rows, scale, platform="cuda").implementation)
    gradient = jax.grad(lambda *a: jnp.sin(fusejax.rms_norm(*a)).sum(), (0, 1))
    print(*(found.sharding.spec for found in jax.eval_shape(gradient, x, scale)))
    try:
        fusejax.rms_norm(x, scale, implementation="pallas")
    except ValueError as error:
        print(error)
"""


def test_rows_that_explicit_axes_split_are_xlas():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-c", SPLIT_COLUMNS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    why = "The last axis of x is split over the mesh axis 'model', and a kernel needs whole rows."
    assert done.stdout.splitlines() == [
        f"xla {why}",
        "xla",
        "pallas",
        "pallas",
        "P(None, 'model') P(None,)",
        f"implementation='pallas' cannot compute rms_norm. pallas: {why}",
    ]
