"""The comparison end to end, compiled for cards that are not there."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from fusejax import paths, verdict
from fusejax.compare_ops import compare_op
from fusejax.comparison import PathResult, Refusal
from fusejax.ops import OPS
from fusejax.ops.op import Stage
from fusejax.report.document import comparison_json

BF16 = np.dtype(ml_dtypes.bfloat16)
SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "compare.py"
TENSOR16 = 8192 * 8192 * 2


@pytest.fixture(scope="module")
def rowsum(deviceless):
    return compare_op(OPS["bias_gelu_rowsum"](), (8192, 8192), BF16, deviceless("h200"))


def test_bias_gelu_rowsum_launches_and_bytes(rowsum):
    paths = rowsum.paths
    assert {name: path.launches for name, path in paths.items()} == {
        "eager": 3,
        "split": 2,
        "recompute": 2,
        "xla": 2,
        "pallas": 1,
    }
    minimum = 2 * TENSOR16 + 2 * 8192 + 4 * 8192
    assert rowsum.minimum_bytes == minimum
    assert abs(paths["pallas"].traffic.total / minimum - 1) < 1e-3
    assert paths["split"].traffic.total == minimum + TENSOR16
    # x and the bias are read a second time.
    assert paths["recompute"].traffic.total == minimum + TENSOR16 + 2 * 8192
    assert paths["xla"].traffic.total == minimum + 2 * 2 * TENSOR16
    assert paths["eager"].traffic.total == minimum + 3 * TENSOR16


def test_xla_writes_a_wide_tensor_and_the_cost_model_is_why(rowsum):
    (boundary,) = rowsum.paths["xla"].boundaries
    assert (boundary.dtype, boundary.shape) == ("f32", (8192, 8192))
    assert boundary.written_bytes == boundary.read_bytes == 268_435_456
    assert boundary.reason.kind == "cost_model"
    assert boundary.reason.us_fused > boundary.reason.us_unfused
    assert any("wider" in warning for warning in rowsum.paths["xla"].warnings)


def test_split_hands_over_the_16_bit_tensor(rowsum):
    (boundary,) = rowsum.paths["split"].boundaries
    assert (boundary.dtype, boundary.shape) == ("bf16", (8192, 8192))
    assert boundary.reason.kind == "barrier"
    # It is a result too, so it is written in any case: the re-read is what it costs.
    assert (boundary.written_bytes, boundary.read_bytes) == (0, TENSOR16)


def test_verdict_says_that_splitting_wins(rowsum):
    verdict = rowsum.verdict
    assert (verdict.fastest, verdict.basis) == ("pallas", "predicted")
    assert "Splitting wins over XLA's own fusion" in verdict.summary
    assert "f32[8192,8192]" in verdict.summary
    step = next(step for step in verdict.steps if (step.origin, step.to) == ("recompute", "xla"))
    assert step.removed_bytes == 2 * 8192 - 3 * TENSOR16
    assert step.predicted_gain_us < 0
    assert "MB at" in step.explanation
    assert "arithmetic beyond the bytes" in step.explanation
    assert step.measured_gain_us is None


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("residual_ln", {"eager": 3, "split": 3, "xla": 1, "pallas": 1}),
        ("bias_gelu", {"eager": 2, "split": 2, "xla": 1, "pallas": 1}),
        ("softmax", {"eager": 4, "split": 4, "xla": 1, "pallas": 1}),
    ],
)
def test_launches_at_8192(name, launches, deviceless):
    comparison = compare_op(
        OPS[name](), (8192, 8192), np.float16, deviceless("h200"), is_brief=True
    )
    assert {path: found.launches for path, found in comparison.paths.items()} == launches
    for path in ("xla", "pallas"):
        assert comparison.paths[path].boundaries == ()
        assert comparison.paths[path].traffic.total == comparison.minimum_bytes
    assert {b.reason.kind for b in comparison.paths["split"].boundaries} == {"barrier"}
    assert {b.reason.kind for b in comparison.paths["eager"].boundaries} == {"dispatch"}
    assert "Fusing wins over splitting" in comparison.verdict.summary


@pytest.mark.parametrize("name", OPS)
def test_every_boundary_of_the_split_path_survives(name, deviceless):
    op = OPS[name]()
    dtype, shape = ((np.float32, (512, 1024)), (BF16, (300, 640)))[len(name) % 2]
    shape = shape if len(op.axes) == 2 else (*shape, 256)
    target = deviceless("h100")
    split = compare_op(op, shape, dtype, target, names=("split",), is_brief=True).paths["split"]
    assert not [warning for warning in split.warnings if "did not survive" in warning]
    assert split.launches >= len(op.split_after) + 1
    barriers = [b for b in split.boundaries if b.reason.kind == "barrier"]
    assert len(barriers) >= len(op.split_after)


def test_a_boundary_that_does_not_survive_is_told(deviceless):
    op = OPS["bias_gelu"]()
    # XLA drops a boundary behind a stage that only hands an argument on.
    idle = Stage("bias", lambda x, bias: x, ("x", "bias"), ("z",))
    op = dataclasses.replace(
        op, chain=dataclasses.replace(op.chain, stages=(idle, *op.chain.stages[1:]))
    )
    split = compare_op(op, (64, 128), BF16, deviceless("h200"), names=("split",)).paths["split"]
    assert any("behind stage bias (z) did not survive" in warning for warning in split.warnings)


# The others' gradients are held against float64 on the CPU (tests/ops).
@pytest.mark.parametrize("name", ["bias_gelu_rowsum", "shared_matmul"])
def test_backward_compares_what_there_is(name, deviceless):
    op = OPS[name]()
    shape = (512, 1024) if len(op.axes) == 2 else (512, 1024, 256)
    found = compare_op(op, shape, np.float16, deviceless("h200"), mode="backward")
    refused = {name for name, path in found.paths.items() if isinstance(path, Refusal)}
    assert refused == ({"recompute"} if op.recomputed else set()) | (
        set() if "backward" in op.kernel_modes else {"pallas"}
    )
    for path in found.served():
        assert path.error.max_rel < 2e-2
        assert path.traffic.total >= found.minimum_bytes * 0.99
    assert found.paths["eager"].launches >= found.sheet.launches
    if "pallas" not in refused:
        pallas = [k for k in found.paths["pallas"].kernels if k.emitter == "mosaic_gpu"]
        assert len(pallas) <= 2  # what the gradient saves, and the gradient


@pytest.mark.parametrize(
    ("shape", "dtype", "card", "said"),
    [
        ((64, 300_000), np.float16, "h200", "300000"),
        ((64, 200_000), np.float32, "h200", "200000"),
        ((64, 1024), np.float16, "a100", "compute capability"),
    ],
)
def test_a_path_that_cannot_serve_is_a_row_with_its_reason(shape, dtype, card, said, deviceless):
    found = compare_op(OPS["softmax"](), shape, dtype, deviceless(card), names=("xla", "pallas"))
    assert said in found.paths["pallas"].reason
    assert isinstance(found.paths["xla"], PathResult)
    assert found.verdict.fastest == "xla"


@pytest.mark.parametrize(("card", "is_served"), [("h200", True), ("b200", False), ("a100", False)])
def test_the_products_kernels_are_for_hopper(card, is_served, deviceless):
    target = deviceless(card)
    shape = (64, 256, 128)
    reason = paths.refusal(OPS["gemm_bias_gelu"](), "pallas", "forward", shape, BF16, target)
    assert (reason is None) is is_served
    assert is_served or "Hopper" in reason
    # What stands behind the library's product is not.
    split = paths.refusal(OPS["gemm_bias_gelu"](), "pallas_split", "forward", shape, BF16, target)
    assert (split is None) is (card != "a100")


def test_errors_are_small_and_say_where_they_come_from(rowsum):
    for name, path in rowsum.paths.items():
        assert path.error.where == ("simulation" if name == "pallas" else "cpu")
        assert 0 < path.error.max_rel < 1e-2


def test_document_follows_the_schema(rowsum):
    document = json.loads(json.dumps(comparison_json(rowsum), allow_nan=False))
    assert document["schema"] == "fusejax.compare/1"
    assert document["shape"] == [8192, 8192]
    assert document["target"]["kind"] == "deviceless"
    for path in document["paths"].values():
        assert path["status"] == "ok"
        assert path["bytes"]["modelled"]["total"] == sum(
            kernel["bytes"]["total"] * kernel["count"] for kernel in path["kernels"]
        )
        assert path["bytes"]["measured"] is None
        assert path["time_us"]["predicted"] > 0
        assert path["time_us"]["measured"] is None
        assert path["compile_s"]["cold"] > 0
        assert path["error"]["reference"] == "float64"
        for kernel in path["kernels"]:
            assert {"name", "emitter", "scopes", "count", "registers", "occupancy"} <= kernel.keys()
    assert [c["from"] for c in document["verdict"]["comparisons"]] == [
        "eager", "split", "recompute", "xla",
    ]  # fmt: skip


def test_a_refused_path_is_in_the_document(deviceless):
    found = compare_op(OPS["softmax"](), (8, 31), np.float32, deviceless("a100"), names=("pallas",))
    document = comparison_json(found)
    assert document["paths"]["pallas"]["status"] == "unsupported"
    assert "Hopper" in document["paths"]["pallas"]["reason"]
    assert document["verdict"] is None


def run(*flags, cwd=None):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_script_on_the_cpu(tmp_path):
    file = tmp_path / "report.json"
    done = run(
        "--op=softmax", "--shape=64,256", "--target=cpu", "--dtype=float32", f"--json={file}"
    )
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    document = json.loads(file.read_text())
    pallas = document["paths"]["pallas"]
    assert pallas["status"] == "unsupported"
    assert pallas["error"]["where"] == "simulation"
    assert pallas["error"]["max_rel"] < 1e-5
    assert pallas["time_us"]["measured"] is None
    assert document["paths"]["xla"]["time_us"]["measured"] > 0
    assert document["paths"]["xla"]["time_us"]["predicted"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_script_without_a_device(deviceless):
    done = run("--op=residual_ln", "--target=h200")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "predicted" in done.stdout
    for noise in ("cuInit", "cuDNN", "Traceback", "WARNING"):
        assert noise not in done.stderr + done.stdout


MISTAKES = [
    (["--op=relu"], ["--op", "'relu'", "residual_ln"]),
    ([], ["--op", "missing", "residual_ln"]),
    (["--op=softmax", "--paths=xla,cuda"], ["--paths", "'cuda'", "pallas"]),
    (["--op=softmax", "--target=h300"], ["--target", "'h300'", "h200"]),
    (["--op=softmax", "--dtype=int8"], ["--dtype", "'int8'", "bfloat16"]),
    (["--op=softmax", "--mode=sideways"], ["--mode", "'sideways'", "backward"]),
    (["--op=softmax", "--shape=8"], ["--shape", "'8'", "8192,8192"]),
    (["--op=softmax", "--shape=8,8,8"], ["--shape", "'8,8,8'", "8192,8192"]),
    (["--op=gemm_bias_gelu", "--shape=8,8"], ["--shape", "'8,8'", "rows, width and depth"]),
    (["--op=softmax", "--shape=0,8"], ["--shape", "'0,8'", "8192,8192"]),
    (["--op=softmax", "--shape=8,-4"], ["--shape", "'8,-4'", "8192,8192"]),
    (["--op=softmax", "--shape=8,x"], ["--shape", "'8,x'", "8192,8192"]),
    (["--op=softmax", "--shape="], ["--shape", "''", "8192,8192"]),
    (["--op=softmax", "--target=no/such.txtpb"], ["--target", "no/such.txtpb"]),
    (["--op=softmax", "--json=no/such/folder.json"], ["--json", "no/such/folder.json"]),
    (["--op=softmax", "--noapproximate"], ["--approximate", "softmax"]),
    (["--op=softmax", "--target=cpu", "--counters"], ["--counters", "device"]),
    (["--op=softmax", "--no-such-flag"], ["no-such-flag"]),
    (["softmax"], ["softmax"]),
]

# Starting Python and importing JAX is nearly all that a mistake costs: done once for all of them.
EVERY_MISTAKE = """
import io, json, os, pathlib, runpy, sys, warnings
import jax, rich.console, fusejax.compare_ops, fusejax.compile.targets
warnings.simplefilter("ignore")  # that JAX has threads, which nothing here needs
script, folder = sys.argv[1:]
for number, flags in enumerate(json.load(sys.stdin)):
    place = pathlib.Path(folder, str(number))
    (place / "work").mkdir(parents=True)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (place / "code").write_text(str(code))
        continue
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_CREAT | os.O_WRONLY), stream)
    os.chdir(place / "work")
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """A folder for each mistake: what the script printed, its exit code, and where it ran."""
    folder = tmp_path_factory.mktemp("mistakes")
    subprocess.run(
        [sys.executable, "-c", EVERY_MISTAKE, str(SCRIPT), str(folder)],
        input=json.dumps([flags for flags, _ in MISTAKES]), text=True, check=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: " ".join(MISTAKES[n][0]))
def test_a_mistake_is_one_line_and_exit_code_2(number, refused):
    place, said = refused / str(number), MISTAKES[number][1]
    errors = (place / "err").read_text()
    assert (place / "code").read_text() == "2", errors
    assert (place / "out").read_text() == ""
    assert len(errors.splitlines()) == 1, errors
    for words in said:
        assert words in errors
    assert list((place / "work").iterdir()) == []


def test_help_teaches_and_list_lists():
    helped = run("--help")
    assert helped.returncode == 0
    assert "scripts/compare.py --op residual_ln" in helped.stdout
    assert "--shape" in helped.stdout
    listed = run("--list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in OPS)


def test_measured_times_overrule_predicted_ones(rowsum):
    from fusejax.comparison import Timing
    from fusejax.verdict import judge

    us = {"eager": 300.0, "split": 150.0, "recompute": 170.0, "xla": 210.0, "pallas": 400.0}
    timed = [
        dataclasses.replace(path, timing=Timing(us[name], us[name], us[name], us[name]))
        for name, path in rowsum.paths.items()
    ]
    verdict = judge(timed, rowsum.target)
    assert (verdict.fastest, verdict.basis) == ("split", "measured")
    last = verdict.steps[-1]
    assert last.measured_gain_us == -190.0
    assert "the prediction is the opposite" in last.explanation
    assert "pallas's kernels take" in verdict.summary
    assert "xla's kernels take" not in verdict.summary


def test_the_boundary_that_is_named_is_one_that_the_other_path_lacks(rowsum):
    split = rowsum.paths["split"]
    (one,) = split.boundaries
    small = dataclasses.replace(one, shape=(8,), written_bytes=16, read_bytes=16)
    both = dataclasses.replace(split, boundaries=(one, small))
    twice = dataclasses.replace(split, boundaries=(one, one, small))
    assert verdict._costliest_new(both, split) == small
    assert verdict._costliest_new(twice, both) == one
    assert verdict._costliest_new(split, twice) is None
