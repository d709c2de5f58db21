"""What is said of kernels that hold too much, or take another time than predicted."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from fusejax import over_fused, rates, residual
from fusejax.comparison import PathResult, Timing
from fusejax.compile import targets
from fusejax.hlo.analysis import Kernel, Traffic, Work
from fusejax.ops import OPS
from fusejax.predict import path_cost

BF16 = np.dtype(ml_dtypes.bfloat16)
MB = 10**6
TARGET = targets.deviceless("h200")


def path(
    *, used=None, share=1.0, read=268 * MB, written=134 * MB, emitter="triton",
    scopes=("bias", "gelu"),
):  # fmt: skip
    work = Work({}, 0, dtype="bf16", width=8192, elements=1 << 26)
    kernel = Kernel("fusion.1", emitter, scopes, None, 1, Traffic(read, written), None, work)
    cost = path_cost([kernel], 1, rates.of(TARGET))
    us = cost.kernels_us * share
    return PathResult(
        "xla", (kernel,), (), 1, cost, 0, 0, 0,
        resources={"fusion.1": used or {}}, timing=Timing(us, us, us, us, (us,)),
    )  # fmt: skip


def said(**given):
    return residual.attributed(path(**given), TARGET).attribution


def test_nothing_is_said_near_the_prediction():
    assert said(share=1.05) == said(share=0.95) == ""


@pytest.mark.parametrize(
    ("used", "words"),
    [
        ({"spill_bytes": 40, "registers": 255}, "spills 40 B"),
        ({"occupancy": 0.125, "occupancy_limiter": "registers"}, "occupancy 12%"),
        ({"measured_occupancy": 0.9, "measured_issue": 0.8, "occupancy": 0.1}, "80% of the issue"),
        ({"measured_bytes": {"read": 600 * MB, "written": 0}}, "2.2x its operands"),
        ({"grid": [64, 1, 1]}, "its 64 blocks leave 68 of 132 multiprocessors idle"),
        ({"grid": [132, 1, 1]}, "TB/s, no spills"),
        ({}, "TB/s, no spills"),
    ],
)
def test_a_slow_kernel_has_a_cause(used, words):
    assert words in said(used=used, share=1.5)


def test_a_fast_kernel_has_one_too():
    assert "fit into L2" in said(read=10 * MB, written=10 * MB, share=0.5)
    fewer = {"measured_bytes": {"read": 100 * MB, "written": 134 * MB}}
    assert "reads 100 of 268 MB" in said(used=fewer, share=0.5)
    assert "faster than the kernels" in said(share=0.5)


def test_what_was_not_measured_has_no_cause():
    unmeasured = dataclasses.replace(path(share=2), timing=None)
    assert residual.attributed(unmeasured, TARGET).attribution == ""


def flags(name="bias_gelu_rowsum", **given):
    op = OPS[name]()
    shapes = op.argument_shapes((64, 128), BF16)
    return over_fused.with_flags(path(**given), op, shapes).warnings


def test_a_kernel_that_spills_is_flagged_with_the_split_that_costs_least():
    (flag,) = flags(used={"spill_bytes": 8, "registers": 255})
    assert "spills 8 B a thread at 255 registers: possibly over-fused" in flag
    assert "behind stage bias" in flag
    assert "bf16[64,128] (16.0 KiB written" in flag


def test_of_several_splits_the_smallest_tensor_counts():
    used = {"spill_bytes": 8, "registers": 255}
    (flag,) = flags("softmax", used=used, scopes=("row_max", "exp", "row_sum", "divide"))
    assert "behind stage row_max" in flag
    assert "f32[64,1]" in flag


@pytest.mark.parametrize(
    ("used", "emitter", "count"),
    [
        ({"occupancy": 0.125, "occupancy_limiter": "registers", "registers": 150}, "triton", 1),
        ({"occupancy": 0.125, "occupancy_limiter": "registers", "registers": 150}, "mosaic_gpu", 0),
        ({"occupancy": 0.5, "occupancy_limiter": "registers", "registers": 64}, "triton", 0),
        ({"occupancy": 0.125, "occupancy_limiter": "shared_memory", "registers": 9}, "triton", 0),
        ({"spill_bytes": 0}, "triton", 0),
    ],
)
def test_few_warps_are_flagged_where_registers_are_why(used, emitter, count):
    assert len(flags(used=used, emitter=emitter)) == count
