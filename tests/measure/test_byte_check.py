"""Modelled bytes beside counted ones, and the script that counts them."""

import contextlib
import importlib.util
import json
import pathlib
import pickle
import types

import jax
import jax.numpy as jnp
import pytest

from fusejax.errors import UsageError
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.measure import counters
from fusejax.measure.byte_check import Row, Run, rows, why_off
from fusejax.measure.counters import Counted

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "check_bytes.py"
MARK = Counted("mark", 12, 12)
MB = 1_000_000


def kernel(name, read, written=0, *, emitter="loop", count=1, is_bound=False):
    return Kernel(name, emitter, (), None, count, Traffic(read, written, is_bound))


def row(modelled, counted, emitter="loop"):
    return Row("f", "k", emitter, modelled, Traffic(counted, 0))


def test_a_row_for_every_launch():
    runs = (
        Run("f", (kernel("loop_add_fusion.1", 100, 50, is_bound=True),), is_begun=True),
        Run("never begun", failure="no memory"),
        Run("broken off", (kernel("loop_add_fusion", 7),), failure="no memory", is_begun=True),
        Run("g", (kernel("body_fusion", 4, count=2),), is_begun=True),
    )
    launches = [
        Counted("before the first mark", 1, 1),
        MARK, Counted("loop_add_fusion_1", 101, 40),
        MARK, Counted("loop_add_fusion", 7, 0),
        MARK, Counted("body_fusion", 4, 0), Counted("body_fusion", 5, 0), Counted("other", 6, 0),
    ]  # fmt: skip
    one, first, second, other = rows(runs, launches, "mark")
    assert one == Row("f", "loop_add_fusion.1", "loop", Traffic(100, 50, True), Traffic(101, 40))
    assert [r.counted.read for r in (first, second)] == [4, 5]
    assert (other.kernel, other.modelled) == ("other", None)
    document = json.loads(json.dumps(one.to_json()))
    assert (document["modelled_read"], document["is_bound"], document["why_off"]) == (
        100, True, None,
    )  # fmt: skip
    assert other.to_json()["modelled_read"] is None
    with pytest.raises(UsageError, match="counted 2 runs and 3 were begun"):
        rows(runs, launches[:4], "mark")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (row(None, 5), "cannot be told"),
        (row(Traffic(100 * MB, 0), 101 * MB), None),
        (row(Traffic(100 * MB, 0), 99 * MB), None),
        (row(Traffic(100 * MB, 0, True), 101 * MB), None),
        (row(Traffic(100 * MB, 0, True), 60 * MB), "upper bound"),
        (row(Traffic(100 * MB, 0, True), 160 * MB), "not explained"),
        (row(Traffic(100 * MB, 0), 60 * MB), "not explained"),
        (row(Traffic(MB, 0), MB + MB // 2), "less than 1 MB"),
        (row(Traffic(0, 0), MB // 2), "less than 1 MB"),
        (row(Traffic(100 * MB, 0), 160 * MB, "cublas"), "read again"),
        (row(Traffic(100 * MB, 0), 60 * MB, "cublas"), "not explained"),
    ],
)
def test_why_reads_are_off(found, reason):
    why = why_off(found)
    assert why is None if reason is None else reason in why


def test_how_far_reads_are_off():
    assert row(Traffic(100, 0), 110).off == pytest.approx(0.1)
    assert row(Traffic(0, 0), 110).off is None
    assert row(None, 110).off is None


@pytest.fixture
def script():
    from absl import flags

    spec = importlib.util.spec_from_file_location("check_bytes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    known = set(flags.FLAGS)
    spec.loader.exec_module(module)
    flags.FLAGS.mark_as_parsed()
    yield module
    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)


def no_shape(x):
    raise ValueError("no such shape\nand more")


X = (jax.ShapeDtypeStruct((8,), jnp.float32),)
FUNCTIONS = {"fine": (jnp.sin, X), "cannot be traced": (no_shape, X), "fine too": (jnp.cos, X)}


def test_one_function_does_not_take_the_others_with_it(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(counters, "counted", contextlib.nullcontext)
    told = tmp_path / "told"
    script._run_suite(told, FUNCTIONS)
    runs = {run.function: run for run in pickle.loads(told.read_bytes())}
    assert [name for name, run in runs.items() if run.failure is None] == ["fine", "fine too"]
    assert runs["fine"].is_begun
    assert runs["fine"].kernels
    assert runs["cannot be traced"] == Run("cannot be traced", failure="ValueError: no such shape")
    assert capsys.readouterr().out.splitlines()[2] == "counting fine too (3 of 3)"


def test_a_run_that_fails_where_it_is_counted(script, tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "counted", contextlib.nullcontext)
    calls = []

    def fail_the_second_time(x):
        calls.append(x)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return x

    class Compiled:
        def as_text(self):
            return "ENTRY e { p = f32[8] parameter(0) ROOT n = f32[8] negate(p) }"

        __call__ = staticmethod(fail_the_second_time)

    monkeypatch.setattr(script, "compile_all", lambda functions: {"f": Compiled()})
    script._run_suite(tmp_path / "told", {"f": (jnp.sin, X)})
    (run,) = pickle.loads((tmp_path / "told").read_bytes())
    assert (run.failure, run.is_begun) == ("MemoryError: out of memory", True)


def test_no_function_is_begun_when_the_time_is_up(script, tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "counted", contextlib.nullcontext)
    times = iter((0.0, 1.0, 700.0))
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(script, "time", clock)
    script._run_suite(tmp_path / "told", {"in time": (jnp.sin, X), "late": (jnp.cos, X)})
    early, late = pickle.loads((tmp_path / "told").read_bytes())
    assert (early.failure, late.is_begun) == (None, False)
    assert late.failure == "--timeout_s 600 was over before it began"


def test_the_function_at_which_the_counted_run_ended_is_named(script, tmp_path):
    told = tmp_path / "told"
    assert script._blame(told) == ""
    runs = (
        Run("a", is_begun=True),
        Run("b", failure="no memory"),
        Run("c", failure=script._UNTOLD),
        Run("d", failure=script._UNTOLD),
    )
    told.write_bytes(pickle.dumps(runs))
    assert script._blame(told) == (
        "; b failed (no memory); it ended in 'c': leave that out by way of --only"
    )


def test_prints_bounds_reasons_and_what_was_not_counted(script, capsys):
    from rich.console import Console

    found = (
        Row("f", "gather_fusion", "loop", Traffic(100 * MB, MB, True), Traffic(60 * MB, MB)),
        Row("f", "exact", "loop", Traffic(100 * MB, MB), Traffic(100 * MB, MB)),
        Row("f", "small", "loop", Traffic(1, 1), Traffic(9, 9)),
        Row("f", "?", None, None, Traffic(60 * MB, MB)),
    )
    script._print(found, {"g": "MemoryError: no"}, Console(width=100))
    out = capsys.readouterr().out
    assert "<=100.0" in out
    assert "-40.0%" in out
    assert out.count("upper bound") == 1
    assert "f, exact" not in out
    assert "small" not in out
    assert "4 launches; 1 of them could not be told apart." in out
    assert "Not counted: g: MemoryError: no" in out
