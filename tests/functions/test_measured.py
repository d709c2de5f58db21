"""The table of measurements: what it says of which rows, and how it is made."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from fusejax.functions import measured
from fusejax.functions.measured import Measured
from fusejax.measure.peers.cells import Cell

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "choices.py"
CARD = "NVIDIA H200"
LARGE, SMALL = 2**26, 2**20


def table(*entries, bits="16"):
    names = ("elements", "width", "pallas_us", "xla_us")
    found = [dict(zip(names, entry, strict=True)) for entry in entries]
    return {CARD: {"softmax": {bits: found}}}


def found(width, elements=LARGE, bits=16, card=CARD, function="softmax", of=None):
    result = measured.lookup(card, function, bits, elements, width, table=of)
    return result and (result.elements, result.width)


def test_a_measurement_speaks_for_what_is_like_it():
    of = table((LARGE, 1024, 1, 2), (LARGE, 2048, 1, 2), (LARGE, 769, 1, 2), (SMALL, 1024, 1, 2))
    assert [found(w, of=of) for w in (1024, 1032, 2048, 520)] == [
        (LARGE, 1024),
        (LARGE, 2048),
        (LARGE, 2048),
        (LARGE, 1024),
    ]
    # Too short, too long, and rows that are no multiple of 16 bytes.
    assert [found(w, of=of) for w in (512, 4096, 1025, 384, 385, 769)] == [
        None,
        None,
        None,
        None,
        (LARGE, 769),
        (LARGE, 769),
    ]
    # The nearest size of arrays, by the ratio; of rows that were measured at that size or not.
    assert found(1024, SMALL // 4, of=of) == (SMALL, 1024)
    assert found(1024, 2**22, of=of) == (SMALL, 1024)
    assert found(1024, 2**24, of=of) == (LARGE, 1024)
    assert found(2048, SMALL, of=of) == (LARGE, 2048)
    assert found(1024, 0, of=of) == (SMALL, 1024)
    for other in ({"bits": 32}, {"card": "NVIDIA B200"}, {"function": "swiglu"}):
        assert found(1024, of=of, **other) is None


def test_rows_of_32_bits_are_alike_by_their_bytes():
    of = table((LARGE, 1024, 1, 2), bits="32")
    assert found(1020, bits=32, of=of) == (LARGE, 1024)
    assert found(1020, bits=16, of=table((LARGE, 1024, 1, 2))) is None


def test_forward_and_backward_may_come_from_two_runs():
    us = {"ours": 3.0, "XLA": 4.0}
    forward, backward = document(("swiglu", 512, us)), document(("swiglu_backward", 512, us))
    assert measured.from_peers(forward, backward) == measured.from_peers(
        document(("swiglu", 512, us), ("swiglu_backward", 512, us))
    )
    assert (
        measured.from_peers(forward, document(("swiglu_backward", 512, us), elements=SMALL)) == {}
    )


@pytest.mark.parametrize("broken", [{"elements": "many"}, {"elements": 0}, {"width": 0}])
def test_what_are_no_numbers_is_refused(broken):
    us = {"ours": 3.0, "XLA": 4.0}
    width = broken.get("width", 512)
    made = document(
        ("swiglu", width, us), ("swiglu_backward", width, us), elements=broken.get("elements", 8)
    )
    with pytest.raises(ValueError, match="expected a number above 0"):
        measured.from_peers(made)
    nan = document(("swiglu", 8, {**us, "ours": float("nan")}), ("swiglu_backward", 8, us))
    with pytest.raises(ValueError, match="expected a number above 0, not nan"):
        measured.from_peers(nan)


def test_xla_is_preferred_by_more_than_the_margin():
    assert Measured(1, 1, 103.1, 100).prefers_xla
    assert not Measured(1, 1, 102.9, 100).prefers_xla
    assert not Measured(1, 1, 90, 100).prefers_xla


def document(*cells, dtype="bfloat16", elements=LARGE):
    cells = [Cell(op, width, 1, us=us).to_json() for op, width, us in cells]
    return {
        "schema": "fusejax.peers/1", "card": CARD, "dtype": dtype, "elements": elements,
        "cells": cells,
    }  # fmt: skip


def test_forward_and_backward_are_added():
    both = lambda ours, xla: {"ours": ours, "XLA": xla, "quack": 1.0}
    made = measured.from_peers(
        document(
            ("cross_entropy", 1024, both(10, 20)),
            ("cross_entropy_backward", 1024, both(1.25, 2.5)),
            ("residual_layer_norm", 256, both(5, 6)),
            ("layer_norm_backward", 256, both(7, 8)),
            ("prenorm_rms_norm", 256, both(5, 6)),  # of which nobody measured the gradient
            ("rms_norm_backward", 256, both(5, 6)),
            ("swiglu", 512, both(3, 4)),
            ("swiglu_backward", 512, {"ours": 3}),
            ("softmax", 512, both(3, 4)),
            ("softmax_backward", 1024, both(3, 4)),
        )
    )
    assert made == {
        CARD: {
            "softmax_cross_entropy": {
                "16": [{"elements": LARGE, "width": 1024, "pallas_us": 11.2, "xla_us": 22.5}]
            },
            "residual_layer_norm": {
                "16": [{"elements": LARGE, "width": 256, "pallas_us": 12, "xla_us": 14}]
            },
        }
    }
    assert measured.from_peers(document(("swiglu", 512, both(3, 4)))) == {}
    with pytest.raises(ValueError, match=r"expected the schema fusejax\.peers/1, not 'other'"):
        measured.from_peers({"schema": "other"})


def test_the_new_word_counts():
    old = table((LARGE, 1024, 1, 2), (LARGE, 256, 1, 2))
    new = table((SMALL, 512, 1, 2), (LARGE, 1024, 3, 2))
    assert measured.merged(old, new) == table(
        (SMALL, 512, 1, 2), (LARGE, 256, 1, 2), (LARGE, 1024, 3, 2)
    )
    assert old == table((LARGE, 1024, 1, 2), (LARGE, 256, 1, 2))
    assert measured.told(new) == [
        "NVIDIA H200: softmax, 16 bits: XLA at 1 of 2 sizes (elements/width 67108864/1024)"
    ]


def test_the_table_that_ships_is_one():
    for functions in measured.read(measured.FILE).values():
        for sizes in functions.values():
            for bits, entries in sizes.items():
                assert bits in ("16", "32")
                assert all(measured.Measured(**entry).xla_us > 0 for entry in entries)
    assert importlib.util.find_spec("fusejax.functions.measured").origin.startswith(
        str(measured.FILE.parent)
    )


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_the_script_adds_to_a_table(tmp_path):
    both = {"ours": 30.0, "XLA": 10.0}
    cells = [("softmax", 1024, both), ("softmax_backward", 1024, both)]
    for name, elements in (("large", LARGE), ("small", SMALL)):
        (tmp_path / name).write_text(json.dumps(document(*cells, elements=elements)))
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"cards": table((LARGE, 1024, 1, 2), (LARGE, 256, 1, 2))}))
    done = run(tmp_path / "large", tmp_path / "small", "--file", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "softmax, 16 bits: XLA at 2 of 2 sizes" in done.stdout
    assert measured.read(file) == table(
        (SMALL, 1024, 60, 20), (LARGE, 256, 1, 2), (LARGE, 1024, 60, 20)
    )
    assert len(file.read_text().splitlines()) < 20
    assert {path.name for path in tmp_path.iterdir()} == {"large", "small", "table.json"}


def test_the_script_refuses_in_one_line(tmp_path):
    (tmp_path / "other").write_text('{"schema": "fusejax.peers/1"}')
    (tmp_path / "text").write_text("no JSON")
    for arguments, message in (
        ([], "PEERS is missing"),
        ([tmp_path / "none"], "cannot be read (No such file or directory)"),
        ([tmp_path / "other"], "is not what scripts/peers.py --json writes"),
        ([tmp_path / "text"], "is not what scripts/peers.py --json writes"),
    ):
        done = run(*arguments, "--file", tmp_path / "table.json")
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "table.json").exists()
    us = {"ours": 30.0, "XLA": 10.0}
    good = tmp_path / "good"
    good.write_text(json.dumps(document(("softmax", 8, us), ("softmax_backward", 8, us))))
    for damaged in ("x{", '{"cards": 3}', "[]"):
        (tmp_path / "table.json").write_text(damaged)
        done = run(good, "--file", tmp_path / "table.json")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "is no table of this script's" in done.stderr
        assert (tmp_path / "table.json").read_text() == damaged
    assert "--file '-' is no table" in run(good, "--file", "-").stderr
