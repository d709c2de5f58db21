"""Ranges of the best path and errors of predictions, from documents made by hand."""

import pytest

from fusejax.sweep import agreement, cells, summary


def document(width, times, measured=None, predicted=None):
    return {
        "op": "softmax", "mode": "forward", "dtype": "float16", "shape": [64, width],
        "target": {"kind": "device" if measured else "deviceless", "description": "a card"},
        "copy_floor_us": None,
        "paths": {
            name: {
                "status": "ok", "reason": None, "attribution": "",
                "time_us": {
                    "predicted": time, "end_to_end": time if measured else None,
                    "measured": (measured or {}).get(name),
                    "predicted_kernels": (predicted or {}).get(name),
                },
            }
            for name, time in times.items()
        },
    }  # fmt: skip


def test_a_range_ends_where_another_path_is_clearly_best():
    found = summary.series(
        [
            document(1, {"xla": 10.0, "pallas": 20.0}),
            document(2, {"xla": 20.0, "pallas": 19.9}),  # as good as equal: xla keeps it
            document(3, {"xla": 30.0, "pallas": 20.0}),
            document(4, {"xla": 10.0, "pallas": 20.0}),
        ]
    )
    assert [(r.best, r.first[1], r.last[1]) for r in summary.ranges(found[0])] == [
        ("xla", 1, 2),
        ("pallas", 3, 3),
        ("xla", 4, 4),
    ]


def test_errors_are_shares_of_the_measured_time():
    documents = [
        document(w, {"xla": 1.0}, measured={"xla": 100.0}, predicted={"xla": 100.0 + error})
        for w, error in enumerate((0, -10, 20, 30, -50), 1)
    ]
    found = summary.accuracy(summary.predictions(documents), worst=2)
    assert (found.count, found.median) == (5, pytest.approx(0.2))
    assert found.percentile_90 == pytest.approx(0.42)
    assert [one.error for one in found.worst] == [pytest.approx(-0.5), pytest.approx(0.3)]


def test_what_was_not_measured_is_not_compared():
    assert summary.predictions([document(1, {"xla": 1.0}, predicted={"xla": 2.0})]) == []
    assert summary.accuracy([]) is None


def test_grid():
    found = cells.grid(["softmax"], [3, 512], 1024, ["float16", "float32"])
    assert [(c.shape, c.dtype) for c in found] == [
        ((341, 3), "float16"),
        ((2, 512), "float16"),
        ((341, 3), "float32"),
        ((2, 512), "float32"),
    ]
    products = cells.grid(["gemm_bias_gelu"], [3], 1024, ["float16"])
    assert [c.shape for c in products] == list(cells.PRODUCT_SHAPES)
    shaped = cells.grid(["gemm_bias_gelu", "softmax"], [3], 9, ["float16"], shapes=[(8, 16, 32)])
    assert [(c.op, c.shape) for c in shaped] == [("gemm_bias_gelu", (8, 16, 32))]


def test_cells_are_compared_and_failures_told(deviceless):
    del deviceless
    wanted = [
        cells.Cell("softmax", (64, 256), "float16", paths=("split", "xla")),
        cells.Cell("softmax", (1 << 20, 1 << 20), "float16", paths=("xla",)),
    ]
    good, bad = cells.run(wanted, "h200", 2, lambda doing: None)
    assert list(good["paths"]) == ["split", "xla"]
    assert "GiB" in bad["failed"]
    assert bad["cell"]["shape"] == (1 << 20, 1 << 20)


def resources(registers, occupancy=0.5, emitter="loop", **counted):
    kernel = {
        "name": "k", "emitter": emitter, "scopes": ["a"], "registers": registers, "spill_bytes": 0,
        "shared_bytes": 16, "threads": 128, "occupancy": occupancy, **counted,
    }  # fmt: skip
    found = document(512, {"xla": 1.0})
    found["paths"]["xla"]["kernels"] = [kernel]
    return [found]


def test_kernels_of_two_sweeps():
    same = agreement.of_sweeps(resources(32), resources(32))
    assert (same.kernels, same.differ) == (1, ())
    (line,) = agreement.of_sweeps(resources(32), resources(40, 0.25)).differ
    assert "registers 32 and 40, occupancy 0.5 and 0.25" in line
    other = agreement.of_sweeps(resources(32), resources(32, emitter="triton"))
    chosen = agreement.Chosen("softmax", ("loop",), ("triton",))
    assert (other.kernels, other.chosen) == (0, (chosen,))


def test_kernels_beside_those_that_a_card_chose_are_told_apart():
    (ours,), (theirs,) = resources(32), resources(40, emitter="triton")
    for found in (ours, theirs):
        kernels = found["paths"]["xla"]["kernels"]
        last = {**kernels[0], "name": "last", "emitter": "loop", "scopes": ["b"], "registers": 32}
        found["paths"]["xla"]["kernels"] = [*kernels, last]
    found = agreement.of_sweeps([ours], [theirs])
    assert (found.kernels, found.beside, found.beside_differ) == (0, 1, ())
    assert found.chosen == (agreement.Chosen("softmax", ("loop",), ("triton",)),)
    theirs["paths"]["xla"]["kernels"][1]["registers"] = 33
    assert agreement.of_sweeps([ours], [theirs]).beside_differ == (
        "softmax 64x512 float16 xla last: registers 32 and 33",
    )


def test_ptxas_and_counters():
    right = resources(32, measured_registers=32, measured_theoretical_occupancy=0.5)
    assert agreement.with_counters(right) == agreement.Agreement(1, ())
    wrong = resources(32, measured_registers=32, measured_theoretical_occupancy=0.75)
    assert "occupancy 0.5 and 0.75" in agreement.with_counters(wrong).differ[0]
    assert agreement.with_counters(resources(32)).kernels == 0
