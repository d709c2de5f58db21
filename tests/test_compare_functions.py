"""`fusejax.compare`: functions of the user's own, models among them, side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fusejax
from fusejax.errors import UsageError
from fusejax.flax import linen as fnn

BF16, F32 = jnp.bfloat16, jnp.float32


def plain(x):
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def stages(x):
    e = fusejax.stage("exp")(jnp.exp)(x)
    return e / e.sum(-1, keepdims=True)


def test_on_a_card_that_is_not_there(deviceless):
    x = jax.ShapeDtypeStruct((1024, 4096), F32)
    found = fusejax.compare(
        {"stages": stages, "plain": plain, "ours": fusejax.softmax}, x, target=deviceless("h200")
    )
    document = found.to_json()
    paths = document["paths"]
    assert document["schema"] == "fusejax.compare/1"
    assert list(paths) == ["stages", "plain", "ours"]
    assert document["minimum_bytes"] == 2 * 4 * 1024 * 4096
    assert paths["ours"]["launches"] == 1
    assert paths["ours"]["bytes"]["modelled"]["total"] == document["minimum_bytes"]
    more = paths["stages"]["bytes"]["modelled"]["total"] - document["minimum_bytes"]
    assert more >= 2 * 4 * 1024 * 4096  # the stage's result is written and read again
    assert any("exp" in boundary["scopes"] for boundary in paths["stages"]["boundaries"])
    assert document["verdict"]["basis"] == "predicted"
    assert document["verdict"]["fastest"] != "stages"
    assert all(path["time_us"]["measured"] is None for path in paths.values())
    assert document["differences"] == {}
    text = str(found)
    assert "stages, plain, ours  of f32[1024,4096]" in text
    assert "times are predicted" in text
    assert max(map(len, text.splitlines())) <= 100


class Block(nn.Module):
    layers: object

    @nn.compact
    def __call__(self, h, x):
        if self.layers is fnn:
            h, x = fnn.PrenormLayerNorm(name="norm", dtype=BF16)(h, x)
        else:
            x = h + x
            h = nn.LayerNorm(name="norm", dtype=BF16)(x)
        return nn.Dense(512, name="down", dtype=BF16)(h), x


def test_models_by_module_path(deviceless):
    x = jax.ShapeDtypeStruct((2048, 512), BF16)
    variables = jax.eval_shape(Block(nn).init, jax.random.key(0), x, x)
    found = fusejax.compare(
        {"flax": Block(nn).apply, "ours": Block(fnn).apply},
        variables, x, x, target=deviceless("h100"),
    )  # fmt: skip
    paths = found.to_json()["paths"]
    for path in paths.values():
        handed = [boundary for boundary in path["boundaries"] if "Block/down" in boundary["scopes"]]
        assert any("Block/norm" in scope for boundary in handed for scope in boundary["scopes"])
    assert paths["ours"]["launches"] < paths["flax"]["launches"]
    assert "Block/norm" in str(found)


def test_on_this_machine_they_are_run_and_their_results_compared():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), F32)
    functions = {"plain": plain, "off": lambda x: plain(x) * 1.01, "stages": jax.jit(stages)}
    found = fusejax.compare(functions, x, target="cpu")
    document = found.to_json()
    assert document["differences"]["plain"] == 0
    assert document["differences"]["off"] == pytest.approx(0.01, rel=1e-3)
    assert document["differences"]["stages"] < 1e-6
    assert document["verdict"]["basis"] == "measured"
    assert all(path["time_us"]["measured"] > 0 for path in document["paths"].values())
    assert "Results differ from those of plain" in str(found)
    shapes_only = fusejax.compare(functions, jax.ShapeDtypeStruct((64, 256), F32), target="cpu")
    assert shapes_only.differences == {}
    assert shapes_only.to_json()["paths"]["off"]["time_us"]["measured"] is None


def test_what_does_not_compile_is_a_row_with_its_reason():
    x = jnp.ones((4, 8))
    pallas = lambda x: fusejax.softmax(x, implementation="pallas")
    found = fusejax.compare({"plain": plain, "pallas": pallas}, x, target="cpu")
    path = found.to_json()["paths"]["pallas"]
    assert path["status"] == "unsupported"
    assert "softmax is a kernel for NVIDIA GPUs" in path["reason"]
    assert "pallas: not compared" in str(found)


def test_refusals():
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match="functions is empty"):
        fusejax.compare({}, x, target="cpu")
    with pytest.raises(ValueError, match=r"a returns f32\[4,8\], and b f32\[4\]: compare"):
        fusejax.compare({"a": plain, "b": lambda x: x.sum(-1)}, x, target="cpu")
    with pytest.raises(ZeroDivisionError):
        fusejax.compare({"a": lambda x: 1 / 0}, x, target="cpu")
    with pytest.raises(UsageError, match="unknown"):
        fusejax.compare({"a": plain}, x, target="h201")


@pytest.mark.gpu
def test_on_this_machines_card():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 4096)), BF16)
    xla = lambda x: fusejax.softmax(x, implementation="xla")
    document = fusejax.compare({"xla": xla, "ours": fusejax.softmax}, x, target="device").to_json()
    for path in document["paths"].values():
        assert 0 < path["time_us"]["measured"] <= path["time_us"]["end_to_end"] * 1.5
    assert document["differences"]["ours"] < 0.01


def test_complex_results_and_equal_infinities_are_told_apart_and_alike():
    x = jnp.zeros(4)
    found = fusejax.compare(
        {"a": lambda x: (x + 1) * 1j, "b": lambda x: (x + 1) * 2j}, x, target="cpu"
    )
    assert found.differences == {"a": 0.0, "b": 1.0}
    found = fusejax.compare({"a": lambda x: 1 / x, "b": lambda x: 1 / x}, x, target="cpu")
    assert found.differences == {"a": 0.0, "b": 0.0}


def test_what_cannot_be_called_again_is_refused():
    donating = jax.jit(lambda x: x * 2, donate_argnums=0)
    with pytest.raises(ValueError, match="donates arguments"):
        fusejax.compare({"d": donating}, jnp.ones(4), target="cpu")
    with pytest.raises(ValueError, match="give a dict of functions by name"):
        fusejax.compare([jnp.sin], jnp.ones(4), target="cpu")
