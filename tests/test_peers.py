"""Our kernels beside their peers: targets, tables, verdict, and the script without a card."""

import dataclasses
import fcntl
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from fusejax.compile import targets
from fusejax.errors import UsageError
from fusejax.measure import timing
from fusejax.measure.peers import cells, copies, formulas, libraries, on_jax, on_torch
from fusejax.measure.peers.cells import Cell, Settings
from pallas_kernels import catalogue, cross_entropy, gated, gelu, norms, row_softmax

SMALL = Settings(elements=2048)
SMALL_F32 = Settings(elements=2048, dtype="float32")
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "peers.py"
PUBLIC: dict[str, Callable[..., Any]] = {
    "layer_norm": norms.layer_norm,
    "rms_norm": norms.rms_norm,
    "residual_layer_norm": norms.residual_layer_norm,
    "prenorm_rms_norm": norms.prenorm_rms_norm,
    "bias_gelu_rowsum": gelu.bias_gelu_rowsum,
    "softmax": row_softmax.softmax,
    "cross_entropy": cross_entropy.softmax_cross_entropy,
    "swiglu": gated.swiglu,
    "bias_gelu": gelu.bias_gelu,
}


@pytest.mark.parametrize(
    ("op", "width", "share"),
    [
        ("softmax", 256, 0.90), ("softmax", 1023, 0.90), ("softmax", 1024, 0.95),
        ("softmax", 2048, 0.97), ("swiglu", 16384, 0.97), ("swiglu", 16385, 0.95),
        ("softmax_backward", 769, None), ("softmax_backward", 1024, 0.85),
        ("swiglu_backward", 16384, 0.85), ("swiglu_backward", 16385, 0.75),
    ],
)  # fmt: skip
def test_targets(op, width, share):
    assert cells.target(op, width) == share


def cell(op="softmax", width=4096, floor=97.0, ours=100.0, **others):
    return Cell(op, width, 8, floor, {"ours": ours, **others})


def test_shares_are_held_against_targets_on_both_sides():
    assert cell().share == 0.97
    assert not cell().is_below
    assert cell(ours=100.1).is_below
    assert not cell(op="softmax_backward", width=512, ours=1000.0).is_below  # no target
    assert not Cell("softmax", 4096, 8, None, {"ours": 100.0}).is_below  # no floor
    assert Cell("softmax", 4096, 8, 97.0, {"XLA": 1.0}).share is None


def test_who_is_faster():
    assert cell(XLA=100.0, Liger=120.0).faster == {}
    assert cell(XLA=99.9, Liger=120.0, quack=80.0).faster == {"XLA": 99.9, "quack": 80.0}
    assert Cell("softmax", 4096, 8, 97.0, {"XLA": 1.0}).faster == {}


def test_the_verdict_lists_what_is_below_and_what_is_faster():
    good = [cell(XLA=120.0), cell(op="swiglu", width=1024, XLA=101.0)]
    assert cells.verdict(good) == [
        "2 of 2 cells reach their target.",
        "Nobody is faster than ours in any of 2 cells.",
    ]
    bad = [
        cell(width=8192, ours=100.01, XLA=110.0),
        cell(width=16384, ours=200.0, XLA=110.0, quack=90.0),
        cell(op="softmax_backward", width=512, ours=100.0, Liger=60.0),
    ]
    assert cells.verdict([*good, *bad]) == [
        "2 of 4 cells reach their target.",
        "Below it (share of the copy's speed < target):",
        "  softmax: 8192 0.969 < 0.97; 16384 0.485 < 0.97",
        "Somebody is faster than ours in 2 of 5 cells (µs):",
        "  softmax: 16384 XLA 110.0, quack 90.0 (ours 200.0)",
        "  softmax_backward: 512 Liger 60.0 (ours 100.0)",
    ]


def test_the_verdict_of_ours_alone_and_of_nothing():
    assert cells.verdict([cell()])[-1] == "Nobody else was measured beside ours."
    nothing = [Cell("softmax", 4096, 8, failures={"ours": "ValueError: no"})]
    assert cells.verdict(nothing)[0] == "No cell that has a target was measured."
    assert cells.failures([*nothing, dataclasses.replace(nothing[0], width=8192)]) == [
        "softmax, ours, at 4096, 8192: ValueError: no"
    ]


def test_tables_leave_out_empty_columns():
    shown = [
        cell(width=1024, quack=70.04),
        Cell("softmax", 2048, 8, 97.0, {"XLA": 1.0}, failures={"ours": "no"}),
    ]
    headings, rows = cells.table(shown, ("XLA", "torch.compile", "Liger", "quack"))
    assert headings == ["width", "floor", "ours", "share", "XLA", "quack"]
    assert rows == [
        ["1024", "97.0", "100.0", "0.970", "", "70.0"],
        ["2048", "97.0", "", "", "1.0", ""],
    ]


def given(**values):
    """Sets flags."""
    for name, value in values.items():
        setattr(flags.FLAGS, name, value)


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("peers_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers_script", module)
    known = set(flags.FLAGS)
    spec.loader.exec_module(module)
    flags.FLAGS.mark_as_parsed()
    given(elements=2048)
    yield module
    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)


def random(shapes, width):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.integers(0, width, s.shape), s.dtype)
        if jnp.issubdtype(s.dtype, jnp.integer)
        else jnp.asarray(rng.normal(size=s.shape), s.dtype)
        for s in shapes
    ]


def floats_of(function, arguments):
    """The function of its float arguments only, and those."""
    labels = [a for a in arguments if jnp.issubdtype(a.dtype, jnp.integer)]
    floats = [a for a in arguments if not jnp.issubdtype(a.dtype, jnp.integer)]
    return (lambda *given: function(given[0], *labels, *given[1:])), floats


def assert_alike(got, want, tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), **tolerance
        )


@pytest.mark.parametrize("op", cells.OPS)
def test_xla_computes_what_our_kernels_do(op):
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    width = 256
    arguments = random(formulas.argument_shapes(op, width, SMALL_F32), width)
    ours = PUBLIC[op.removesuffix("_backward")]
    simulated, floats = floats_of(lambda *given: ours(*given, interpret=True), arguments)
    launch = catalogue.launches()[op]
    variants = on_jax.lowerings(op, launch, width, SMALL_F32)
    if op in cells.FORWARD:
        got = variants["XLA"]().compile()(*arguments)
        assert_alike(got, simulated(*floats), tolerance)
        return
    result, gradients = jax.vjp(simulated, *floats)
    (dy,) = random([result], width)
    want = gradients(dy)
    forward = variants["forward"]().compile()
    y, saved = forward(*arguments)
    assert_alike(y, result, tolerance)
    assert_alike(variants["saved"]().compile()(saved, dy), want, tolerance)
    assert_alike(variants["computed again"]().compile()(dy, *arguments), want, tolerance)


@pytest.mark.parametrize("op", cells.OPS)
def test_what_is_timed_returns_the_same_arrays(op):
    launch = catalogue.launches()[op]
    shapes = formulas.argument_shapes(op, 256, SMALL)
    ours = jax.eval_shape(
        lambda *arguments: launch.function(*arguments), *launch.arguments(8, 256, jnp.bfloat16)
    )
    if op in cells.FORWARD:
        assert launch.arguments(8, 256, jnp.bfloat16) == shapes
        xla = jax.eval_shape(formulas.formulas()[op], *shapes)
    else:
        result, gradients = jax.eval_shape(formulas.with_saved(op), *shapes)
        xla = jax.eval_shape(lambda function, dy: function(dy), gradients, result)
    found = [[(a.shape, a.dtype) for a in jax.tree.leaves(tree)] for tree in (ours, xla)]
    assert found[0] == found[1]


def test_copies_copy():
    x = jax.random.normal(jax.random.key(0), (2 * 8192,), jnp.bfloat16)
    plans = copies.copy_plans(x.size, x.dtype)
    assert len(plans) == len(copies.COPIES)
    for plan in plans.values():
        assert plan.rows * plan.width == x.size
    for plan in list(plans.values())[:: len(plans) - 1]:
        rows = x.reshape(plan.rows, plan.width)
        assert (copies.copied(rows, plan, interpret=True) == rows).all()


def plain(op):
    """Our launch with XLA in the place of the kernel, which this machine cannot run."""
    launch = catalogue.launches()[op]

    def call(streams, numbers, parameters, *, tuning):
        return sum(jnp.sum(a.astype(jnp.float32)) for a in (*streams, *numbers, *parameters))

    return dataclasses.replace(launch, call=call)


def assert_turn():
    """This process has the card's turn: nobody else could take it now."""
    lock = pathlib.Path(tempfile.gettempdir(), "fusejax-card.lock")
    with lock.open() as held, pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def card(script, monkeypatch, tmp_path):
    """As if there were one, on which everything takes a known time."""

    def device_times(variants, arguments, **_):
        assert_turn()
        us = {"ours": 10.0, "XLA": 9.0, "saved": 30.0, "computed again": 20.0, "copy": 8.0}
        return {
            name: timing.DeviceTime(
                (timing.KernelTime("k", us.get(name, 50.0)),), us.get(name, 50.0), 1.0, 99.0, 4
            )
            for name in variants
        }

    known = {op: plain(op) for op in cells.OPS}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # turns are taken there
    monkeypatch.setattr(catalogue, "launches", lambda: known)
    monkeypatch.setattr(targets, "usable_device", targets.cpu)
    monkeypatch.setattr(timing, "device_times", device_times)
    monkeypatch.setattr(libraries, "installed", dict)
    return known


def test_a_whole_run(script, card, tmp_path, capsys):
    file = tmp_path / "peers.json"
    given(ops=["softmax", "swiglu_backward", "cross_entropy_backward"])
    given(widths=["512", "1024"])
    given(json=str(file))
    script.main()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "Not installed, or not without PyTorch: torch.compile, Liger, quack." in out
    assert "Somebody is faster than ours in 2 of 6 cells" in out
    document = json.loads(file.read_text())
    assert document["schema"] == "fusejax.peers/1"
    found = {(one["op"], one["width"]): one for one in document["cells"]}
    assert len(found) == 6
    softmax = found["softmax", 1024]
    copied = document["copy"]["bytes"]
    assert softmax["floor_us"] == pytest.approx(8.0 * 2 * 2048 * 2 / copied)
    assert softmax["us"] == {"ours": 10.0, "XLA": 9.0}
    backward = found["swiglu_backward", 512]
    assert backward["us"] == {"ours": 10.0, "XLA": 20.0}
    assert backward["details"]["xla_from"] == {"saved": 30.0, "computed again": 20.0}
    assert backward["floor_us"] == pytest.approx(8.0 * 5 * 2048 * 2 / copied)
    assert not backward["failures"]


def test_what_fails_is_a_named_blank(script, card, capsys):
    def call(*given, **_):
        raise ValueError("does not fit\nat all")

    card["softmax"] = dataclasses.replace(card["softmax"], call=call)
    given(ops=["softmax", "bias_gelu"], widths=["1024"])
    script.main()
    out = capsys.readouterr().out
    assert "No time: softmax, ours, at 1024: ValueError: does not fit\n" in out
    assert "bias_gelu, ours" not in out


def test_ours_alone(script, card, capsys):
    given(ops=["softmax_backward"], widths=["1024"])
    given(only_ours=True)
    script.main()
    out = capsys.readouterr().out
    assert "Nobody else was measured beside ours." in out
    assert "Not installed" not in out


def test_the_time_limit(script, card, monkeypatch, capsys):
    measured = []
    whole = on_jax.jax_cell
    clock = [0.0]

    def jax_cell(op, *more):
        measured.append(op)
        clock[0] += 60
        return whole(op, *more)

    monkeypatch.setattr(on_jax, "jax_cell", jax_cell)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    given(ops=["softmax", "swiglu"], widths=["512", "1024"])
    given(time_limit_s=100.0)
    script.main()
    assert measured == ["softmax", "softmax"]
    assert "The time was up: not begun were swiglu 512, 1024." in " ".join(
        capsys.readouterr().out.split()
    )
    given(time_limit_s=0.0)
    with pytest.raises(UsageError, match="nothing was measured"):
        script.main()


def child(script, monkeypatch, tmp_path, body):
    fake = tmp_path / "child.py"
    fake.write_text(
        f"import json, sys, time\nto = sys.argv[sys.argv.index('--torch_to') + 1]\n{body}"
    )
    monkeypatch.setattr(script, "__file__", str(fake))


ROWS = """
rows = [{"op": "softmax", "width": 1024, "us": {"torch.compile": 7.5}, "failures": {"quack": "no"}},
        {"op": "swiglu", "width": 1024, "us": {"torch.compile": 70}, "failures": {}}]
json.dump({"rows": rows, "copy_us": 66.0, "ended": None, "at": "swiglu, 1024"}, open(to, "w"))
print("PyTorch: at it", flush=True)
"""


def test_pytorch_is_timed_in_a_process_of_its_own(script, card, monkeypatch, tmp_path, capsys):
    child(script, monkeypatch, tmp_path, ROWS)
    versions = {"torch.compile": "2.11", "quack": "0.6"}
    monkeypatch.setattr(libraries, "installed", lambda: versions)
    given(ops=["softmax", "bias_gelu"], widths=["1024"])
    script.main()
    out = capsys.readouterr().out
    assert "torch.compile 2.11, quack 0.6" in " ".join(out.split())
    assert "softmax: 1024 XLA 9.0, torch.compile 7.5 (ours 10.0)" in out
    assert "No time: softmax, quack, at 1024: no" in out
    assert "PyTorch's own copy" in out
    assert "Not installed, or not without PyTorch: Liger." in out


def test_what_pytorch_measured_before_it_ended_is_kept(script, monkeypatch, tmp_path):
    child(script, monkeypatch, tmp_path, f"{ROWS}\nsys.exit('no memory')")
    told: list[str] = []
    document, ended = script.run_torch(["softmax"], [1024], 100.0, told.append, SMALL)
    assert told == ["PyTorch: at it"]
    assert len(document["rows"]) == 2
    assert ended == "it ended at swiglu, 1024 with exit code 1: no memory"
    child(script, monkeypatch, tmp_path, "sys.exit('no CUDA')")
    assert script.run_torch(["softmax"], [1024], float("inf"), told.append, SMALL) == (
        {}, "it ended with exit code 1: no CUDA",
    )  # fmt: skip
    assert script.run_torch(["softmax"], [1024], 0.0, told.append, SMALL)[0] == {}


def test_pytorch_that_hangs_is_ended(script, monkeypatch, tmp_path):
    child(script, monkeypatch, tmp_path, f"{ROWS}\ntime.sleep(100)")
    monkeypatch.setattr(script, "_GRACE_S", 1)
    document, ended = script.run_torch(["softmax"], [1024], 1.0, lambda _: None, SMALL)
    assert len(document["rows"]) == 2
    assert "exit code -9" in ended


def test_the_pytorch_side_benchmarks_in_its_turn(monkeypatch, tmp_path, capsys):
    modules = {name: types.ModuleType(name) for name in (
        "torch", "torch._functorch", "torch._functorch.config", "triton", "triton.testing",
    )}  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)

    def do_bench(function, return_mode):
        assert_turn()
        assert return_mode == "median"
        return function()

    def library_us(name, op, width, bench, settings):
        assert settings == SMALL
        if op == "swiglu":
            raise ValueError("no\nat all")
        return None if name == "Liger" else bench(lambda: 1.0 * width)

    modules["triton.testing"].do_bench = do_bench  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(libraries, "installed", lambda: {"torch.compile": "2", "Liger": "1"})
    monkeypatch.setattr(on_torch, "copy_us", lambda bench, settings: bench(lambda: 3.0))
    monkeypatch.setattr(on_torch, "library_us", library_us)
    file = tmp_path / "told"
    ops = ["softmax", "swiglu"]
    on_torch.measure(str(file), ops, [1024], float("inf"), SMALL)
    failures = dict.fromkeys(("torch.compile", "Liger"), "ValueError: no")
    assert json.loads(file.read_text()) == {
        "rows": [
            {"op": "softmax", "width": 1024, "us": {"torch.compile": 1024.0}, "failures": {}},
            {"op": "swiglu", "width": 1024, "us": {}, "failures": failures},
        ],
        "copy_us": 3.0, "ended": None, "at": "swiglu, 1024",
    }  # fmt: skip
    assert capsys.readouterr().out == "PyTorch: softmax, 1024\nPyTorch: swiglu, 1024\n"
    assert modules["torch._functorch.config"].donated_buffer is False
    on_torch.measure(str(file), ops, [1024, 2048], 0.0, SMALL)
    told = json.loads(file.read_text())
    assert told["rows"] == []
    assert told["ended"] == "the time was up: not begun were softmax 1024, 2048; swiglu 1024, 2048"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ops", "relu"], "--ops 'relu' is unknown: give some of residual_layer_norm"),
        (["--widths", "12,x"], "--widths '12,x': give whole numbers above 0"),
        (["--widths", "0"], "--widths '0'"),
        (["--widths="], "--widths ''"),
        (["--ops="], "--ops is empty"),
        (["--peer_widths", "77"], "--peer_widths '77' is unknown"),
        (["--ops", "softmax", "--peer_ops", "swiglu"], "--peer_ops 'swiglu' is unknown"),
        (["--json", "no/such/file"], "--json 'no/such/file'"),
        (["--dtype", "int8"], "int8"),
        (["--elements", "0"], "elements"),
        (["softmax"], "unexpected argument 'softmax'"),
    ],
)
def test_mistakes_are_one_line(arguments, said):
    found = run(*arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert said in found.stderr


def test_help_has_an_example_and_a_machine_without_a_gpu_is_told():
    found = run("--help")
    assert found.returncode == 0
    assert "python scripts/peers.py --json peers.json" in found.stdout
    if jax.devices()[0].platform != "gpu":
        found = run("--ops", "softmax")
        assert found.returncode == 2
        (line,) = found.stderr.splitlines()
        assert "peers.py: needs a GPU that JAX can use" in line


ON_CPU = dataclasses.replace(SMALL_F32, torch_device="cpu")
torch_ops = pytest.mark.parametrize("op", cells.OPS)


@torch_ops
def test_pytorch_computes_what_xla_does(op):
    torch = pytest.importorskip("torch")
    width = 64
    arguments, dy = on_torch.random_arguments(op, width, ON_CPU)
    arrays = [jnp.asarray(a.numpy().astype(np.int32) if a.dtype == torch.int64 else a.numpy())
             for a in arguments]  # fmt: skip
    formula = formulas.formulas()[op.removesuffix("_backward")]
    if op in cells.FORWARD:
        got = libraries.formulas()[op](*arguments)
        assert_alike([jnp.asarray(a.numpy()) for a in (got if isinstance(got, tuple) else (got,))],
                     jax.tree.leaves(formula(*arrays)), {"rtol": 1e-4, "atol": 1e-5})  # fmt: skip
        return
    function, floats = floats_of(formula, arrays)
    want = jax.vjp(function, *floats)[1](jnp.asarray(dy.numpy()))
    gradients = on_torch.gradients_of(
        libraries.formulas()[op.removesuffix("_backward")], arguments, dy
    )
    for _ in range(2):  # as often as one likes
        got = [jnp.asarray(a.numpy()) for a in gradients()]
        assert_alike(got, list(want), {"rtol": 1e-4, "atol": 1e-5})


@torch_ops
def test_a_wrong_result_is_not_timed(op, monkeypatch):
    pytest.importorskip("torch")
    right = libraries.formulas()[op.removesuffix("_backward")]
    bench = lambda function: (function(), 0.005)[1]
    on_cpu = dataclasses.replace(ON_CPU, dtype="bfloat16")
    monkeypatch.setattr(libraries, "function", lambda name, op: right)
    assert on_torch.library_us("Liger", op, 64, bench, on_cpu) == 5.0

    def wrong(*arguments):
        result = right(*arguments)
        return (1.1 * result[0], *result[1:]) if isinstance(result, tuple) else 1.1 * result

    monkeypatch.setattr(libraries, "function", lambda name, op: wrong)
    with pytest.raises(ValueError, match="its result is off by"):
        on_torch.library_us("Liger", op, 64, bench, on_cpu)
    monkeypatch.setattr(libraries, "function", lambda name, op: None)
    assert on_torch.library_us("Liger", op, 64, bench, on_cpu) is None
