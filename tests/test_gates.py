"""fusejax.testing, and budgets: what passes, what fails, and what is written where."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from fusejax import inspection, testing
from fusejax.errors import UsageError
from fusejax.gates import budget, held, record_file, records, text, verdict

DATA = pathlib.Path(__file__).parent / "data" / "jax-0.12.0.1"
QUANTITIES = {
    "launches": "launches",
    "bytes": "bytes read and written",
    "boundary_bytes": "bytes at boundaries",
}


def stored(case):
    """The budget of a stored program."""
    (module,) = inspection.inspect_paths([str(DATA / case)]).modules
    return budget.of(held.Held(case, "h100", "0.12.0.1", module))


def judged(recorded, now, is_strict=False):
    return verdict.failure("f", "t.fusion.json", recorded, now, is_strict=is_strict)


# Budgets


@pytest.mark.parametrize("case", sorted(path.name for path in DATA.iterdir()))
def test_a_budget_survives_its_file(case, tmp_path):
    now = stored(case)
    record_file.write(tmp_path / "r.json", {"test": {"check": now}})
    read = record_file.read(tmp_path / "r.json")["test"]["check"]
    assert read.to_json() == now.to_json()
    assert judged(read, now, is_strict=True) is None
    found = budget.compare(read, now)
    for matching in (found.kernels, found.boundaries):
        assert (matching.appeared, matching.went) == ((), ())
    assert list(text.difference(found)) == []


def test_a_kernel_takes_a_line_of_the_file_and_entries_are_sorted(tmp_path):
    now = stored("gelu_and_row_sum")
    record_file.write(tmp_path / "r.json", {"b": {"y": now, "x": now}, "a": {"x": now}})
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert sum('"emitter"' in line for line in lines) == 3 * len(now.kernels)
    assert [line.strip() for line in lines if re.match(r' {4,6}"\w": {', line)] == [
        '"a": {', '"x": {', '"b": {', '"x": {', '"y": {',
    ]  # fmt: skip
    names = {kernel.name for kernel in now.kernels}
    assert names
    assert not any(
        name in line for line in lines for name in names
    )  # XLA's next version has others
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("field", QUANTITIES)
def test_each_quantity_binds_on_one_side(field):
    recorded = stored("gelu_and_row_sum")
    value = getattr(recorded, field)
    worse = dataclasses.replace(recorded, **{field: value + 1})
    better = dataclasses.replace(recorded, **{field: value - 1})
    assert f"{QUANTITIES[field]} {value:,} -> {value + 1:,}" in judged(recorded, worse)
    assert judged(recorded, better) is None
    assert judged(recorded, recorded) is None
    tested = records.Tested("t", True, (records.Checked("f", better, recorded),))
    (line,) = records.tighter([tested])
    assert line == f"t, f: {QUANTITIES[field]} {value:,} -> {value - 1:,}"
    other = next(name for name in QUANTITIES if name != field)
    both = dataclasses.replace(better, **{other: getattr(recorded, other) + 1})
    message = judged(recorded, both)
    assert f"better: {QUANTITIES[field]} {value:,} -> {value - 1:,}" in message
    tested = records.Tested("t", True, (records.Checked("f", both, recorded),))
    assert list(records.tighter([tested])) == []


def test_a_failure_tells_which_boundary_appeared_and_why():
    message = judged(stored("softmax_16384"), stored("softmax_16385"))
    first, *rest = message.splitlines()
    assert "'f' on h100 is worse than its budget in t.fusion.json: launches 1 -> 5" in first
    assert sum(line.startswith("    + f32[2048") for line in rest) == 4
    assert sum("emitter_limit: rows of 16385 elements" in line for line in rest) == 4
    assert any(re.match(r"    ~ triton, 128.0 MiB -> reduction, .*py:\d+", line) for line in rest)
    back = budget.compare(stored("softmax_16385"), stored("softmax_16384"))
    assert sum(line.startswith("    - f32[2048") for line in text.difference(back)) == 4


def test_code_that_moved_is_not_told_as_new():
    now = stored("gelu_and_row_sum")
    assert not any(kernel.scopes for kernel in now.kernels)
    moved = dataclasses.replace(
        now,
        kernels=tuple(dataclasses.replace(k, source="new.py:1") for k in now.kernels),
        boundaries=tuple(dataclasses.replace(b, source="new.py:1") for b in now.boundaries),
    )
    assert list(text.difference(budget.compare(now, moved))) == []
    one, other = moved.kernels
    grown = dataclasses.replace(moved.boundaries[0], read_bytes=moved.boundaries[0].read_bytes + 8)
    twice = dataclasses.replace(moved, kernels=(one, other, other), boundaries=(grown,))
    assert list(text.difference(budget.compare(moved, twice))) == [
        "  boundaries that changed:",
        "    ~ f32[8192,8192], 536,870,912 -> 536,870,920 bytes, at new.py:1",
        f"        cost_model: {grown.reason.text}",
        "  kernels that appeared:",
        f"    + reduction, 384.0 MiB, at new.py:1 ({other.name})",
    ]


def test_long_lists_are_cut():
    now = stored("softmax_16385")
    many = dataclasses.replace(now, kernels=now.kernels * 4)
    assert list(text.kernels("kernels:", many.kernels))[-1] == "    and 8 more"
    kernel = dataclasses.replace(now.kernels[0], scopes=tuple("abcdef"))
    _, row = text.kernels("kernels:", [kernel])
    assert ", in a, b, c, d, 2 more, at " in row


def test_versions():
    then, now = stored("softmax_16384"), stored("softmax_16384")
    now = dataclasses.replace(now, jax="0.13.0")
    assert judged(then, now) is None
    strict = judged(then, now, is_strict=True)
    assert "recorded with JAX 0.12.0.1, this is JAX 0.13.0, and fusion_strict is on" in strict
    assert "the same now" in strict
    worse = dataclasses.replace(now, launches=2)
    assert "\n  recorded with JAX 0.12.0.1, this is JAX 0.13.0\n" in judged(then, worse)
    tested = records.Tested(
        "t", True, tuple(records.Checked("f", b, then) for b in (now, now, worse, then))
    )
    assert records.versions([tested]) == [
        "recorded with JAX 0.12.0.1, run with JAX 0.13.0: 2 the same, 1 worse"
    ]


def test_budgets_of_something_else_are_not_compared():
    now = stored("softmax_16384")
    for field, other in (("target", "b200"), ("scope", "mlp")):
        with pytest.raises(UsageError, match=f"is for {field} .*, the check for {other}: give"):
            judged(now, dataclasses.replace(now, **{field: other}))


def test_sources_do_not_depend_on_the_machine():
    root = pathlib.Path("/home/me/project")
    for source, kept in (
        ("/home/me/project/model/mlp.py:7", "model/mlp.py:7"),
        ("/home/me/project/.venv/lib/python3.12/site-packages/flax/linen/a.py:7",
         "flax/linen/a.py:7"),
        ("/elsewhere/model/mlp.py:7", "mlp.py:7"),
        (None, None),
    ):  # fmt: skip
        assert held.place(source, root) == kept


# Record files

GOOD = {"schema": record_file.SCHEMA, "budgets": {"test": {"check": stored("folded").to_json()}}}


def broken(**fields):
    return json.dumps(
        GOOD | {"budgets": {"test": {"f": GOOD["budgets"]["test"]["check"] | fields}}}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: Expecting value"),
        (json.dumps(GOOD, indent=1).replace('"budgets"', "<<<<<<< HEAD\n"), "line 3: Expecting"),
        ("[]", '"schema" is not "fusejax.budgets/1"'),
        ('{"schema": "fusejax.budgets/9"}', '"schema" is not'),
        (json.dumps(GOOD | {"budgets": [1]}), '"budgets" is [1], and no table'),
        (json.dumps(GOOD | {"budgets": {"test": 1}}), '"test" is 1, and no table'),
        (json.dumps(GOOD | {"budgets": {"t": {"f": 1}}}), "t, f: 1 is no table"),
        (broken(launches=-1), '"launches" is -1: expected a whole number'),
        (broken(launches=True), '"launches" is True'),
        (broken(bytes=1.5), '"bytes" is 1.5'),
        (broken(jax=None), '"jax" is None: expected text'),
        (broken(kernels=[{}]), '"count" is missing'),
        (broken(boundaries=[{"tensor": "f32[8,]"}]), "\"tensor\" is 'f32[8,]'"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "it is no text"),
        (None, "Is a directory"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "r.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        record_file.read(path)
    assert "\n" not in str(error.value)
    assert "mend it, or delete it and run pytest with --fusion-update" in str(error.value)


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path):
    now = stored("folded")
    file = tmp_path / "r.json"
    record_file.write(file, {})
    before = file.read_text()
    file.chmod(0o444)
    with pytest.raises(UsageError, match="read-only: make it writable"):
        record_file.write(file, {"test": {"check": now}})
    assert file.read_text() == before
    with pytest.raises(UsageError, match=r"cannot be written \(No such file"):
        record_file.write(tmp_path / "none" / "r.json", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        record_file.write(tmp_path / "folder", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "r.json"]
    file.chmod(0o640)
    record_file.write(file, {"test": {"check": now}})
    assert file.stat().st_mode & 0o777 == 0o640


def test_updates_touch_only_what_ran(tmp_path):
    file = tmp_path / "r.json"
    old, new = stored("softmax_16385"), stored("softmax_16384")
    record_file.write(file, {"ran": {"f": old, "gone": old}, "fails": {"f": old, "late": old},
                             "other": {"f": old}})  # fmt: skip
    better = records.Checked("f", new, old)
    ran = [
        records.Tested("ran", True, (better, records.Checked("g", new, None))),
        records.Tested("fails", False, (better,)),
    ]
    lines = records.update(file, ran)
    changed = "launches 5 -> 1; bytes read and written 272,195,584 -> 134,217,728; "
    assert [line.replace("bytes at boundaries 3,743,744 -> 0", "...") for line in lines] == [
        f"ran, f: {changed}...",
        "ran, g: new, 1 launch, 128.0 MiB read and written, no boundaries",
        "ran, gone: removed, no longer checked",
        f"fails, f: {changed}...",
    ]
    after = record_file.read(file)
    launches = {t: {c: b.launches for c, b in checks.items()} for t, checks in after.items()}
    assert launches == {
        "ran": {"f": 1, "g": 1}, "fails": {"f": 1, "late": 5}, "other": {"f": 5},
    }  # fmt: skip
    assert records.kept(file, ran) == ["other"]
    stamp = file.stat().st_mtime_ns
    assert records.update(file, ran) == []
    assert file.stat().st_mtime_ns == stamp
    newer = dataclasses.replace(new, jax="0.13.0")
    again = records.Tested("fails", False, (records.Checked("f", newer, new),))
    assert records.update(file, [again]) == ["fails, f: JAX 0.12.0.1 -> 0.13.0"]


# fusejax.testing.assert_fused


def softmax(x):
    with jax.named_scope("head"):
        return jax.nn.softmax(x)


def test_assert_fused(deviceless):
    card = deviceless("h100")
    testing.assert_fused(softmax, jax.ShapeDtypeStruct((2048, 16384), jnp.float32), target=card)
    long = jax.ShapeDtypeStruct((2048, 16385), jnp.float32)
    with pytest.raises(AssertionError) as error:
        testing.assert_fused(softmax, long, target="h100", max_bytes=540_647_423)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(f"softmax on h100, JAX {jax.__version__}")
    assert first.endswith(
        ": 5 launches, 4 over max_kernels=1; 540,647,424 bytes read and written, 1 over "
        "max_bytes=540,647,423; 3,743,744 bytes written and read again at boundaries, 3,743,744 "
        "over max_boundary_bytes=0"
    )
    (line, reason) = rest[1:3]
    assert line.startswith("    f32[2048,113], 1.8 MiB (904.0 KiB written, 904.0 KiB read again) ")
    assert re.search(r"in head, at (tests/)?test_gates.py:\d+$", line)
    assert reason.strip().startswith("emitter_limit: rows of 16385 elements")
    kernels = rest[rest.index("  kernels in launch order:") + 1 :]
    assert [line.split(",")[0].strip() for line in kernels] == ["reduction"] * 4 + ["loop"]


def two_stages(x):
    with jax.named_scope("product"):
        y = x @ x.T
    with jax.named_scope("sum"):
        return y.sum()


def test_assert_fused_of_a_scope():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    exact = {"max_kernels": 2, "max_boundary_bytes": 512, "max_bytes": None}
    testing.assert_fused(two_stages, x, target="cpu", **exact)
    testing.assert_fused(two_stages, x, target="cpu", scope="product", max_boundary_bytes=None)
    with pytest.raises(AssertionError, match=r"on cpu, scope sum, JAX .*: 1 launch, 1 over"):
        testing.assert_fused(two_stages, x, target="cpu", scope="sum", **exact | {"max_kernels": 0})
    with pytest.raises(UsageError, match="'mlp' is not in two_stages: give one of product, sum"):
        testing.assert_fused(two_stages, x, target="cpu", scope="mlp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_kernels": -1}, "max_kernels=-1: give a whole number"),
        ({"max_bytes": 1.0}, "max_bytes=1.0"),
        ({"max_boundary_bytes": True}, "max_boundary_bytes=True"),
        ({"target": "h900"}, "'h900' is unknown: give one of auto, cpu"),
        ({"target": None}, "target None is none: give one of auto, cpu"),
    ],
)
def test_assert_fused_of_mistakes(options, message):
    with pytest.raises(UsageError, match=message):
        testing.assert_fused(softmax, jax.ShapeDtypeStruct((8,), jnp.float32), **options)
