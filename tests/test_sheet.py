"""The traffic sheet against bytes counted by hand."""

import numpy as np
import pytest

from fusejax import paths
from fusejax.ops import OPS
from fusejax.sheet import traffic_sheet

B, H = 8192, 4096
TENSOR = 2 * B * H


def sheet_of(name, dtype=np.float16, mode="forward"):
    op = OPS[name]()
    chain = paths.eager_chain(op, mode)
    shape = (B, H) if len(op.axes) == 2 else (B, H, 256)
    return traffic_sheet(chain, paths.argument_shapes(op, mode, shape, dtype))


def test_residual_ln():
    sheet = sheet_of("residual_ln")
    assert dict(sheet.inputs) == {"x": TENSOR, "residual": TENSOR, "scale": 2 * H, "bias": 2 * H}
    assert dict(sheet.outputs) == {"y": TENSOR}
    assert sheet.minimum_bytes == 3 * TENSOR + 4 * H
    # Two boundaries, each stored once and loaded once: 4BH bytes of a 16-bit [B, H].
    assert [(h.value, h.stored_bytes + h.loaded_bytes) for h in sheet.handovers] == [
        ("h", 4 * B * H),
        ("n", 4 * B * H),
    ]
    assert (sheet.saved_bytes, sheet.saved_launches) == (8 * B * H, 2)


def test_an_output_costs_only_its_reread():
    sheet = sheet_of("bias_gelu_rowsum")
    by_name = {h.value: h for h in sheet.handovers}
    assert (by_name["y"].stored_bytes, by_name["y"].loaded_bytes) == (0, TENSOR)
    assert (by_name["z"].stored_bytes, by_name["z"].loaded_bytes) == (TENSOR, TENSOR)
    assert dict(sheet.outputs) == {"y": TENSOR, "sums": 4 * B}
    assert sheet.saved_bytes == 3 * TENSOR


def test_softmax_counts_second_loads():
    sheet = sheet_of("softmax")
    assert sheet.reread_bytes == TENSOR  # x, by row_max and by exp
    assert {h.value: h.consumers for h in sheet.handovers} == {
        "maximum": ("exp",),
        "e": ("row_sum", "divide"),
        "total": ("divide",),
    }
    assert sheet.minimum_bytes == 2 * TENSOR


def test_float32_doubles_the_bytes():
    assert sheet_of("bias_gelu", np.float32).saved_bytes == 2 * sheet_of("bias_gelu").saved_bytes


@pytest.mark.parametrize("name", OPS)
def test_backward_reads_the_cotangents(name):
    op = OPS[name]()
    sheet = sheet_of(name, mode="backward")
    cotangents = {f"d_{result}" for result in op.chain.results}
    assert cotangents <= dict(sheet.inputs).keys()
    assert len(sheet.outputs) == len(op.chain.arguments) - len(op.chain.constants)
