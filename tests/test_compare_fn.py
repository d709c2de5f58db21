"""`compare.py --fn`: any function by name, its named scopes apart, split and fused."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusejax import float64_run, user_function
from fusejax.compare_fn import compare_fn
from fusejax.comparison import Refusal
from fusejax.compile import targets
from fusejax.errors import UsageError
from fusejax.report.document import comparison_json

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "compare.py"
F16, F32 = jnp.float16, jnp.float32
TENSOR = 2 * 4096 * 4096

MODEL = """\
import functools
import jax
import jax.numpy as jnp

def block(x, bias):
    with jax.named_scope("gelu"):
        y = jax.nn.gelu(x + bias)
    with jax.named_scope("rowsum"):
        return y, y.astype(jnp.float32).sum(-1)

def wrong(x, bias):
    return x @ bias

@functools.partial(jax.jit, static_argnums=2)
def scaled(params, tokens, power):
    with jax.named_scope("embed"):
        h = params["table"][tokens]
    with jax.named_scope("norm"):
        return h / (jnp.abs(h) ** power).sum(-1, keepdims=True), tokens

three = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A module `my_model` in the current directory, by both of its names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(x, bias):
    with jax.named_scope("gelu"):
        y = jax.nn.gelu(x + bias)
    with jax.named_scope("rowsum"):
        return y, y.astype(F32).sum(-1)


def shape(sizes, dtype=F16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("f16[8,16]", (shape((8, 16)),)),
        ("f16[8,16],f32[]", (shape((8, 16)), shape((), F32))),
        (" bf16[8], float32[ ] ,\n", (shape((8,), jnp.bfloat16), shape((), F32))),
        ("pred[2], s32[3], u8[4], f8e4m3fn[5]", (
            shape((2,), bool), shape((3,), np.int32), shape((4,), np.uint8),
            shape((5,), jnp.float8_e4m3fn),
        )),
        ("{'w': f32[8,8], 'b': (f32[8], [f32[]])}, 3, True, None, 'gelu', -0.5", (
            {"w": shape((8, 8), F32), "b": (shape((8,), F32), [shape((), F32)])},
            3, True, None, "gelu", -0.5,
        )),
        ("[{'w': f32[8]}] * 2", ([{"w": shape((8,), F32)}, {"w": shape((8,), F32)}],)),
    ],
)  # fmt: skip
def test_arguments_are_read(text, expected):
    assert user_function.read_arguments(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f16[8", "cannot be read"),
        ("f17[8]", "'f17' is no dtype: give one of pred, s8"),
        ("f16[x]", "not whole numbers"),
        ("f16[-1]", "not whole numbers"),
        ("f16", "'f16' is no argument"),
        ("f16[8] * 2", "'f16[8] * 2' is no argument"),
        ("f16[8]; f16[8]", "cannot be read"),
        ("open('x')", "is no argument"),
        ("f64[8]", "JAX_ENABLE_X64"),
    ],
)
def test_arguments_that_cannot_be_read_are_told(text, said):
    with pytest.raises(UsageError, match="--args") as raised:
        user_function.read_arguments(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_functions_are_found_by_module_and_by_file(model):
    (model / "package").mkdir()
    (model / "package" / "deep.py").write_text("class Deep:\n    @staticmethod\n    def call(x): 1")
    assert user_function.load("my_model:block").__name__ == "block"
    assert user_function.load("my_model.py:block").__name__ == "block"
    assert user_function.load("package/deep.py:Deep.call").__name__ == "call"
    assert user_function.load("package.deep:Deep.call").__name__ == "call"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_model", "give MODULE:NAME"),
        ("my_modle:block", "there is no module 'my_modle'"),
        ("my_modle.py:block", "there is no file 'my_modle.py'"),
        ("my_model:blok", "my_model has no 'blok': give one of block"),
        ("my_model:zzz", "give one of block, scaled, wrong"),
        ("my_model:three", "is of type int, which cannot be called"),
        ("lacking:f", r"importing lacking fails (lacking.py:1): ModuleNotFoundError: No module"),
        ("lacking.py:f", r"importing lacking fails (lacking.py:1): ModuleNotFoundError: No module"),
        ("torn:f", "importing torn fails (torn.py:2): SyntaxError"),
        ("ending:f", "importing ending fails (ending.py:1): the module ends the process"),
    ],
)
def test_functions_that_are_not_there_are_told_in_one_line(name, said, model):
    (model / "lacking.py").write_text("import no_such_thing\n")
    (model / "torn.py").write_text("import jax\ndef f(x:\n")
    (model / "ending.py").write_text("raise SystemExit(1)\n")
    with pytest.raises(UsageError, match="--fn") as raised:
        user_function.load(name)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("block", "f16[8,8]", "does not fit block(x, bias): missing a required argument: 'bias'"),
        ("wrong", "f16[8,8], f16[3]", "(my_model.py:12): TypeError: dot_general requires"),
    ],
)
def test_what_cannot_be_traced_is_told_with_its_line(name, text, said, model):
    function = user_function.load(f"my_model:{name}")
    arguments = user_function.read_arguments(text)
    with pytest.raises(UsageError) as raised:
        user_function.check_call(f"my_model:{name}", function, text, arguments)
    assert said in str(raised.value)
    user_function.check_call("f", lambda x: x + 1, "", (shape((8,)),))


@pytest.fixture(scope="module")
def on_a_card(deviceless):
    return compare_fn(
        "model:block", block, (shape((4096, 4096)), shape((4096,))), deviceless("h200")
    )


def test_scopes_are_stages(on_a_card):
    minimum = 2 * TENSOR + 2 * 4096 + 4 * 4096
    assert on_a_card.minimum_bytes == minimum
    assert list(on_a_card.paths) == ["eager", "split", "xla"]
    eager, split, xla = on_a_card.paths.values()
    assert (eager.programs, split.programs, xla.programs) == (2, 1, 1)
    assert (eager.launches, split.launches, xla.launches) == (2, 2, 1)
    # y is a result, so that handing it over costs its second read.
    assert eager.traffic.total == split.traffic.total == minimum + TENSOR
    assert xla.traffic.total == minimum
    assert [b.reason.kind for b in eager.boundaries] == ["dispatch"]
    assert [b.reason.kind for b in split.boundaries] == ["barrier"]
    assert on_a_card.sheet.saved_bytes == TENSOR
    assert on_a_card.verdict.fastest == "xla"


def test_the_document_of_a_function(on_a_card):
    document = json.loads(json.dumps(comparison_json(on_a_card), allow_nan=False))
    assert document["schema"] == "fusejax.compare/1"
    assert document["op"] == "model:block"
    assert (document["shape"], document["dtype"]) == ([], "")
    assert document["formula"] == "(f16[4096,4096], f16[4096]) -> f16[4096,4096], f32[4096]"
    for path in document["paths"].values():
        assert path["status"] == "ok"
        assert path["error"] is None
        assert path["time_us"]["predicted"] > 0
        assert path["time_us"]["measured"] is None
    assert any("nothing was run" in note for note in document["notes"])


def test_chosen_scopes_alone_are_cut_at(deviceless):
    def three(x):
        for name in ("a", "b", "c"):
            with jax.named_scope(name):
                x = jnp.tanh(x)
        return x

    arguments, target = (shape((512, 512)),), deviceless("h100")
    found = compare_fn("three", three, arguments, target, scopes=("a",), is_brief=True)
    assert (found.paths["split"].launches, found.paths["eager"].launches) == (2, 2)
    found = compare_fn("three", three, arguments, target, is_brief=True)
    assert (found.paths["split"].launches, found.paths["eager"].launches) == (3, 3)
    with pytest.raises(UsageError, match="--scopes: three has no scope 'd': give one of a, b, c"):
        compare_fn("three", three, arguments, target, scopes=("a", "d"))


def test_without_scopes_there_is_nothing_to_cut():
    found = compare_fn("tanh", jnp.tanh, (shape((8, 8)),), targets.cpu())
    for name in ("eager", "split"):
        assert isinstance(found.paths[name], Refusal)
        assert "tanh has no named scopes" in found.paths[name].reason
    assert found.paths["xla"].timing.end_to_end_us > 0
    assert found.sheet is None
    assert found.verdict.fastest == "xla"


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_paths_are_timed_and_held_against_float64(mode, model):
    function = user_function.load("my_model:scaled")
    text = "{'table': f32[64,128], 'unused': f32[2]}, s32[8], 2"
    arguments = user_function.read_arguments(text)
    found = compare_fn("my_model:scaled", function, arguments, targets.cpu(), mode=mode)
    for path in found.paths.values():
        assert path.timing.end_to_end_us > 0
        # Every path rounds, so that an error of 0 would mean that nothing was compared.
        assert 0 < path.error.max_rel < 1e-5
        assert path.error.where == "cpu"
    assert found.verdict.basis == "measured"
    assert found.notes == ()


def test_the_gradient_is_that_of_every_floating_argument(deviceless):
    arguments = (shape((256, 512)), shape((512,)))
    found = compare_fn(
        "block", block, arguments, deviceless("h200"), mode="backward", is_brief=True
    )
    # x, bias and both cotangents come in, two gradients go out.
    tensor = 2 * 256 * 512
    assert found.minimum_bytes == 3 * tensor + 2 * 2 * 512 + 4 * 256
    assert found.paths["split"].launches > found.paths["xla"].launches
    with pytest.raises(UsageError, match="no floating-point argument"):
        compare_fn("f", lambda x: x + 1, (shape((8,), np.int32),), targets.cpu(), mode="backward")
    with pytest.raises(UsageError, match="no floating-point result"):
        compare_fn("f", lambda x: x > 1, (shape((8,)),), targets.cpu(), mode="backward")


def test_a_result_that_is_off_shows():
    values = [np.linspace(-1, 1, 64, dtype=np.float32)]
    right = float64_run.of(lambda x: (jnp.sin(x), x > 0), values)
    assert right.note == ""
    got = (np.sin(values[0]) * np.float32(1.01), values[0] > 0)
    assert float64_run.error(got, right, where="cpu").max_rel == pytest.approx(0.01, rel=1e-3)
    got = (np.sin(values[0]), values[0] < 0)
    assert float64_run.error(got, right, where="cpu").max_rel == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: (jax.random.normal(jax.random.key(0), x.shape) + x,), "random numbers"),
        (lambda x: (jax.lax.add(x, jnp.ones(4, F32)),), "fails"),
    ],
)
def test_there_are_no_errors_without_a_run_in_float64(function, said):
    right = float64_run.of(function, [np.ones(4, np.float32)])
    assert right.results is None
    assert said in right.note
    assert float64_run.error([np.ones(4)], right, where="cpu") is None


def test_a_run_that_is_not_all_float64_says_so():
    right = float64_run.of(lambda x: (x.astype(jnp.bfloat16) + 1,), [np.ones(4, np.float32)])
    assert right.results[0].dtype == np.float64
    assert "where the function itself computes in bfloat16" in right.note


def run(*flags):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False
    )


def test_script(model):
    (model / "report.json").write_text("old")
    flags = ("--fn=my_model.py:block", "--target=cpu", "--json=report.json")
    done = run(*flags, "--args=f16[64,128], f16[7]")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "my_model.py:7" in done.stderr
    assert done.stdout == ""
    assert (model / "report.json").read_text() == "old"
    done = run(*flags, "--args=f16[64,128], f16[128]")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "my_model.py:block  (f16[64,128], f16[128]) -> " in done.stdout
    document = json.loads((model / "report.json").read_text())
    assert document["op"] == "my_model.py:block"
    assert all(path["time_us"]["measured"] > 0 for path in document["paths"].values())


@pytest.mark.gpu
def test_on_this_machines_card():
    arguments = (shape((4096, 4096)), shape((4096,)))
    found = compare_fn("block", block, arguments, targets.device())
    for path in found.paths.values():
        assert 0 < path.timing.device_us <= path.timing.end_to_end_us * 1.5
        assert 0 < path.error.max_rel < 2e-2
        assert path.error.where == "device"
    assert found.floor_us > 0
