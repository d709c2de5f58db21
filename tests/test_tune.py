"""Tuning without a card: which plans are tried, how a choice is kept, and what is said."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest
from absl import flags

from pallas_kernels import catalogue, tuned
from pallas_kernels.tuned import Tuning

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"
OPS = ("softmax", "layer_norm_backward", "prenorm_layer_norm", "swiglu")
WIDTHS = (64, 512, 769, 1024, 4096, 16385, 131072)
CARD = "NVIDIA H200"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tune_script", SCRIPTS / "tune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = set(flags.FLAGS)
    spec.loader.exec_module(module)
    yield module
    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)


def launches_of(script, op, width, most=12):
    """The candidates, their launches, and the launch in use."""
    launch, rows = catalogue.launches()[op], max(1, 2**26 // width)
    found = script.candidates(launch, rows, width, "bfloat16", most)
    plans = [launch.plan(rows, width, "bfloat16", tuning=tuning) for tuning in found]
    return found, plans, launch.plan(rows, width, "bfloat16")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_candidates_are_different_launches_and_the_one_in_use_is_the_first(script, op, width):
    found, plans, used = launches_of(script, op, width)
    assert 1 < len(found) <= 12
    assert len(set(plans)) == len(plans)
    assert plans[0] == used
    assert len(launches_of(script, op, width, most=1)[0]) == 1
    launch = catalogue.launches()[op]
    assert {tuning.width for tuning in found} == {
        width if launch.reduces else min(width, launch.part)
    }


def test_the_one_in_use_is_that_of_the_file(script, monkeypatch):
    usual = launches_of(script, "softmax", 4096)[0][0]
    other = Tuning(4096, 1, 1, 1, 1)
    monkeypatch.setattr(tuned, "lookup", lambda *_: other)
    found, plans, used = launches_of(script, "softmax", 4096)
    assert found[0] == other != usual
    assert plans[0] == used
    monkeypatch.setattr(tuned, "lookup", lambda *_: None)
    found, plans, used = launches_of(script, "softmax", 4096)
    assert other not in found
    assert plans[0] == used


def entry(width, **more):
    return {"width": width, "rows_per_block": 1, "warpgroups": 1, "ctas_per_sm": 6, "stages": 3,
            "parts": 1, "run": 0, **more}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tuned.json"
    kept = {"softmax": {"16": [entry(512), entry(2048)], "32": [entry(1024)]}, "swiglu": {"16": []}}
    path.write_text(json.dumps({"cards": {CARD: kept, "another": {"softmax": {"16": []}}}}))
    return path


def keep(script, file, width, card=CARD, stages=4):
    script.keep(file, card, "softmax", "bfloat16", Tuning(width, 1, 1, 6, stages), 12.345)
    return json.loads(file.read_text())["cards"]


@pytest.mark.parametrize(
    ("width", "widths"),
    [(256, [256, 512, 2048]), (512, [512, 2048]), (1024, [512, 1024, 2048]), (2048, [512, 2048]),
     (4096, [512, 2048, 4096])],
)  # fmt: skip
def test_a_choice_takes_the_place_of_that_for_its_width_only(script, file, width, widths):
    before = json.loads(file.read_text())["cards"]
    after = keep(script, file, width)
    entries = after[CARD]["softmax"]["16"]
    assert [one["width"] for one in entries] == widths
    assert [one for one in entries if one["width"] == width] == [entry(width, stages=4, us=12.3)]
    for one in before[CARD]["softmax"]["16"]:
        assert (one in entries) == (one["width"] != width)
    assert after[CARD]["softmax"]["32"] == before[CARD]["softmax"]["32"]
    assert after[CARD]["swiglu"] == before[CARD]["swiglu"]
    assert after["another"] == before["another"]
    assert f'     {{"width": {width}, ' in file.read_text()  # a line of its own


def test_a_card_and_a_file_that_are_new(script, file, tmp_path):
    before = json.loads(file.read_text())["cards"]
    after = keep(script, file, 512, card="new")
    assert after.pop("new") == {"softmax": {"16": [entry(512, stages=4, us=12.3)]}}
    assert after == before
    assert list(keep(script, tmp_path / "none.json", 512)) == [CARD]


def test_what_is_kept_is_written_aside_and_renamed(script, file, monkeypatch):
    before = file.read_text()
    seen = []

    def replace(aside, target):
        seen.append((aside.parent, target, file.read_text()))
        json.loads(aside.read_text())
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "replace", replace)
        with pytest.raises(OSError, match="no"):
            keep(script, file, 512)
    assert seen == [(file.parent, file, before)]
    assert file.read_text() == before
    keep(script, file, 512)
    assert file.read_text() != before


def test_several_at_a_time_lose_nothing(script, tmp_path, monkeypatch):
    numbers = iter(range(1000))  # as if every thread were a process
    monkeypatch.setattr(script.os, "getpid", lambda: next(numbers))
    file = tmp_path / "tuned.json"
    threads = [
        threading.Thread(target=keep, args=(script, file, 64 * number)) for number in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = json.loads(file.read_text())["cards"][CARD]["softmax"]["16"]
    assert [one["width"] for one in entries] == [64 * number for number in range(1, 9)]
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("name", ["tune.py", "check_bytes.py", "peers.py"])
def test_a_machine_without_a_gpu_is_told_in_one_line(name):
    found = subprocess.run(
        [sys.executable, str(SCRIPTS / name)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"{name}: needs a GPU that JAX can use: ")
    assert "--target" not in line
