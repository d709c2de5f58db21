"""Ops and functions over several cards at once."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fusejax import across_targets
from fusejax.across_targets import Work, compare_targets
from fusejax.compare_fn import compare_fn
from fusejax.compare_ops import compare_op
from fusejax.errors import UsageError
from fusejax.ops import OPS
from fusejax.report.document import comparison_json
from fusejax.report.targets_console import print_targets


@pytest.fixture(scope="module")
def document(deviceless):
    deviceless("a100")
    told = []
    # 16-bit tensors of this size in and out are more than an A100 has, and less than a B200.
    work = Work(
        ops=("softmax", "gemm_bias_gelu"), shape=(12_000_000, 2048, 64), names=("xla", "pallas"),
        xla_options={"xla_gpu_autotune_level": "1"},
    )  # fmt: skip
    found = compare_targets(work, ("b200", "a100"), told.append)
    assert len(told) == 4
    assert told[-1].endswith("(4 of 4)")
    return json.loads(json.dumps(found, allow_nan=False))


def test_every_card_has_its_comparisons(document):
    assert document["schema"] == "fusejax.targets/1"
    assert list(document["comparisons"]) == ["b200", "a100"]
    b200 = document["comparisons"]["b200"]
    assert list(b200) == ["softmax", "gemm_bias_gelu"]
    assert b200["softmax"]["schema"] == "fusejax.compare/1"
    assert b200["softmax"]["shape"] == [12_000_000, 2048]
    assert b200["softmax"]["xla_options"] == {"xla_gpu_autotune_level": "1"}
    assert b200["softmax"]["paths"]["xla"]["status"] == "ok"
    a100 = document["comparisons"]["a100"]["gemm_bias_gelu"]["paths"]
    assert (a100["xla"]["status"], a100["pallas"]["status"]) == ("ok", "unsupported")
    assert document["refused"]["b200"] == {}


def test_what_does_not_fit_on_a_card_is_refused_there(document):
    refused = document["refused"]["a100"]["softmax"]
    assert "NVIDIA A100" in refused
    assert "GiB" in refused
    assert "softmax" not in document["comparisons"]["a100"]


def test_the_table_has_a_column_for_every_card(document):
    file = io.StringIO()
    print_targets(document, Console(file=file, width=100))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 100
    header = next(line for line in lines if line.startswith("path"))
    assert header.split() == ["path", "b200", "a100"]
    rows = [line.split() for line in lines if line.startswith("  ")]
    assert [row[0] for row in rows] == ["xla", "pallas", "xla", "pallas"]
    assert rows[0][1:3] == ["1", "1.00x"]
    assert rows[0][-1] == rows[1][-1] == "-"  # the A100 has no room for it
    assert rows[0][3].endswith("*")
    told = " ".join(lines)
    assert "softmax on a100: --shape 12000000,2048: inputs and outputs take" in told
    assert "pallas on b200, a100: The arrays may have at most" in told
    assert "XLA options of every path: xla_gpu_autotune_level=1" in told


@pytest.mark.parametrize(("op", "shape"), [("softmax", (64, 256)), ("shared_matmul", (64,) * 3)])
def test_a_brief_comparison_says_the_same(op, shape, deviceless):
    op, target, known = OPS[op](), deviceless("h100"), {}
    names = ("eager", "xla")
    full = compare_op(op, shape, np.float16, target, names=names)
    for _ in range(2):
        brief = compare_op(op, shape, np.float16, target, names=names, is_brief=True, known=known)
        # The stages and the program, each compiled once.
        assert len(known) == len(op.chain.stages) + 1
        for name, path in full.paths.items():
            same = brief.paths[name]
            assert same.kernels == path.kernels
            assert same.boundaries == path.boundaries
            assert same.predicted_us == path.predicted_us
            assert (same.resources, same.error) == ({}, None)
            assert path.resources
            assert path.error is not None


def test_layers_that_differ_in_their_names_alone_are_compiled_once(deviceless):
    def layers(x, y):
        for layer in range(3):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.tanh(x).sum(-1, keepdims=True) + x
        # Programs that differ in more than the name of the scope, which is that of an operation.
        with jax.named_scope("add"):
            x = x + y
        with jax.named_scope("mul"):
            return x * y

    known, x = {}, jax.ShapeDtypeStruct((64, 128), jnp.float32)
    found = compare_fn(
        "layers", layers, (x, x), deviceless("h100"), names=("eager",), is_brief=True, known=known
    ).paths["eager"]
    assert len(known) == 3
    assert found.programs == 5
    names = [f"layer_{layer}" for layer in range(3)]
    for name in (*names, "add", "mul"):
        own = [kernel for kernel in found.kernels if kernel.name.startswith(f"{name}/")]
        assert own
        assert all(kernel.scopes == (name,) for kernel in own)
    assert [kernel.work.operations for kernel in found.kernels[-2:]] == [
        {"add:f32": x.size}, {"multiply:f32": x.size},
    ]  # fmt: skip


def test_functions_go_by_name(tmp_path, monkeypatch, deviceless):
    deviceless("h100")
    (tmp_path / "noisy.py").write_text(
        "import jax\nprint('[not a line of ours]')\n"
        "def f(x):\n with jax.named_scope('a'): return x + 1\n"
    )
    monkeypatch.chdir(tmp_path)
    work = Work(fn="noisy:f", arguments="f16[8,8]", names=("xla",))
    found = compare_targets(work, ("h100",))["comparisons"]["h100"]["noisy:f"]
    assert found["paths"]["xla"]["launches"] == 1


def test_a_mistake_is_that_of_the_whole(deviceless):
    deviceless("h100")
    with pytest.raises(UsageError, match="--xla-option 'nope=1'"):
        compare_targets(Work(ops=("softmax",), shape=(8, 8), xla_options={"nope": "1"}), ("h100",))
    for text, said in (("a100,h300", "'h300' is no card"), ("a100,a100", "twice"), ("", "no card")):
        with pytest.raises(UsageError, match=said):
            across_targets.cards(text)


def test_a_card_more_than_fits_in_a_line(deviceless):
    found = compare_op(
        OPS["softmax"](), (8, 32), np.float16, deviceless("h100"), names=("xla",), is_brief=True
    )
    names = [f"card{number}" for number in range(5)]
    document = {
        "comparisons": {name: {"softmax": comparison_json(found)} for name in names},
        "refused": {name: {} for name in names},
    }
    file = io.StringIO()
    print_targets(document, Console(file=file, width=100))
    assert file.getvalue().count("1  1.00x") == 5
    assert max(map(len, file.getvalue().splitlines())) <= 100
