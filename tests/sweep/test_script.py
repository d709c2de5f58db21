"""scripts/sweep.py and scripts/evidence.py as a user calls them."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from fusejax.errors import UsageError
from fusejax.sweep import files

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


def run(script, *flags, cwd=None):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *flags],
        capture_output=True, text=True, check=False, cwd=cwd,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory, deviceless):
    """A small sweep of products and rows, as a file."""
    del deviceless
    file = tmp_path_factory.mktemp("sweep") / "sweep.json"
    done = run(
        "sweep.py", "--ops=softmax,gemm_gelu_rowsum", "--shapes=64x256,64x512,64x256x128",
        "--target=h200", "--paths=split,xla,pallas_split", "--jobs=2", f"--json={file}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "Best: " in done.stdout
    return file


def test_a_sweep_is_read_and_drawn(swept, tmp_path):
    document = json.loads(swept.read_text())
    assert document["schema"] == "fusejax.sweep/1"
    shapes = [(cell["op"], cell["shape"]) for cell in document["cells"]]
    assert shapes == [
        ("softmax", [64, 256]),
        ("softmax", [64, 512]),
        ("gemm_gelu_rowsum", [64, 256, 128]),
    ]
    picture = tmp_path / "sweep.svg"
    done = run("sweep.py", f"--read={swept}", f"--against={swept}", f"--plot={picture}")
    assert done.returncode == 0, done.stderr
    count = sum(
        len(path["kernels"]) for cell in document["cells"] for path in cell["paths"].values()
    )
    assert f"the same for {count} of {count} kernels" in done.stdout
    assert "<svg" in picture.read_text()[:1000]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.svg"]


def test_evidence_is_made_and_what_is_missing_is_told(swept, tmp_path):
    cells = json.loads(swept.read_text())
    (product,) = [cell for cell in cells["cells"] if cell["op"] == "gemm_gelu_rowsum"]
    product |= {"shape": [8192, 8192, 512], "dtype": "bfloat16"}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(cells))
    done = run("evidence.py", "--studies=gemm_epilogues", f"--read={file}", f"--to={tmp_path}")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gemm_epilogues" / "README.md").read_text()
    assert "## gemm_gelu_rowsum, bfloat16 8192x8192x512, forward" in page
    assert "compiled, not run, for NVIDIA H200" in page
    assert "**Does splitting win?** " in page
    assert "(predicted). Splitting moves" in page
    assert "Not compared: gemm_bias_gelu, bfloat16 8192x8192x512: not in" in page
    assert {path.name for path in (tmp_path / "gemm_epilogues").iterdir()} == {
        "README.md", "report.json",
    }  # fmt: skip


def test_a_measured_page_is_not_replaced_by_a_predicted_one(swept, tmp_path):
    document = json.loads(swept.read_text())
    for cell in document["cells"]:
        cell["target"]["kind"] = "device"
    page = tmp_path / "ownership" / "report.json"
    page.parent.mkdir()
    page.write_text(json.dumps(document))
    flags = ["--studies=ownership", f"--to={tmp_path}", "--target=h200"]
    done = run("evidence.py", *flags)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "was measured" in done.stderr
    assert json.loads(page.read_text()) == document
    page.unlink()
    done = run("evidence.py", *flags, "--counters")
    assert done.returncode == 2
    assert "--counters needs a GPU" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("cells"), "cells is missing"),
        (lambda d: d.update(cells=None), "cells is no list"),
        (lambda d: d.update(cells=["a"]), "cells[0] is no object"),
        (lambda d: d.update(cells=[]), "no comparison"),
        (lambda d: d["cells"][0].pop("op"), "cells[0].op is missing"),
        (lambda d: d["cells"][1].update(shape=5), "cells[1].shape is no list"),
        (lambda d: d["cells"][0]["paths"]["xla"].pop("time_us"), "paths.xla.time_us is missing"),
        (
            lambda d: d["cells"][0]["paths"]["xla"]["kernels"][0].update(registers="many"),
            "paths.xla.kernels[0].registers is 'many'",
        ),
        (lambda d: d.update(cells=[{"failed": "x"}]), "cells[0].cell is missing"),
        (lambda d: d.update(schema="fusejax.compare/1"), "is not a file"),
    ],
)
@pytest.mark.parametrize("flag", ["--read", "--against"])
def test_a_damaged_sweep_is_told(swept, change, said, flag):
    document = json.loads(swept.read_text())
    change(document)
    file = swept.parent / "damaged.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=re.escape(said)):
        files.read(flag, [str(file)])


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("sweep.py", ["--ops=relu"], ["--ops", "'relu'", "softmax"]),
        ("sweep.py", ["--ops=softmax", "--widths=0"], ["--widths", "'0'"]),
        ("sweep.py", ["--ops=softmax", "--shapes=8x8x8"], ["--shapes", "--list"]),
        ("sweep.py", ["--ops=softmax", "--shapes=8xa"], ["--shapes", "'8xa'"]),
        ("sweep.py", ["--dtypes=int8"], ["--dtypes", "'int8'"]),
        ("sweep.py", ["--modes=sideways"], ["--modes", "'sideways'"]),
        ("sweep.py", ["--ops=softmax", "--widths="], ["--widths", "empty"]),
        ("sweep.py", ["--ops=softmax", "--plot="], ["--plot", ".svg"]),
        ("sweep.py", ["--read=no/such.json"], ["--read", "no/such.json"]),
        ("sweep.py", ["--ops=softmax", "--plot=picture.txt"], ["--plot", ".svg"]),
        ("evidence.py", ["--studies=none"], ["--studies", "'none'", "residual_chain"]),
        ("evidence.py", ["--to=no/such/folder"], ["--to", "no/such"]),
        ("calibrate.py", ["--file=no/such/folder.json"], ["no/such"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(script, flags, said, tmp_path):
    done = run(script, *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for words in said:
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []
