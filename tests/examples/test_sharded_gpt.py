"""Data parallel training of the examples' GPT: what each device does, and what they exchange."""

import json
import os
import pathlib
import subprocess
import sys

import models
import numpy as np
import pytest


@pytest.fixture(scope="module")
def steps():
    script = pathlib.Path(__file__).with_name("sharded_steps.py")
    examples = pathlib.Path(models.__file__).parent
    done = subprocess.run(
        [sys.executable, str(script), str(examples)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_eight_devices_compute_what_one_does(steps):
    one, eight = (steps["cpu"][count] for count in ("1", "8"))
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(eight["norms"], one["norms"], rtol=1e-4)
    assert one["collectives"] == []


def test_gradients_are_summed_once_and_nothing_else_moves(steps):
    found = steps["cpu"]["8"]
    assert {opcode for opcode, _ in found["collectives"]} == {"all-reduce"}
    # Every parameter's gradient, and the loss.
    assert sum(size for _, size in found["collectives"]) == found["parameter_bytes"] + 4


def test_the_step_of_eight_h200s(steps):
    if "h200s" not in steps:
        pytest.skip("cannot compile without a device")
    found = steps["h200s"]
    assert {opcode for opcode, _ in found["collectives"]} == {"all-reduce"}
    # Some gradients are summed in bfloat16, before they are cast.
    sent = sum(size for _, size in found["collectives"])
    assert found["parameter_bytes"] / 2 <= sent <= found["parameter_bytes"] + 4
    kernels = [kernel for kernel in found["kernels"] if kernel["emitter"] == "mosaic_gpu"]
    # Two norms and one at the end, GELU and cross entropy, each forward and backward; and behind
    # all but the last, the sums for the gradients of parameters.
    assert len(kernels) == 14
    # The gradient of GELU moves less than one array of all 8 sequences of 64 tokens would be.
    assert max(kernel["bytes"] for kernel in kernels) < 8 * 64 * 1024 * 2


def test_boundaries_are_told_by_module(steps):
    if "h200s" not in steps:
        pytest.skip("cannot compile without a device")
    scopes = [" ".join(boundary["scopes"]) for boundary in steps["h200s"]["boundaries"]]
    for module in ("block_0/mlp/up", "block_0/attention/qkv", "block_0/mlp_norm", "GPT/norm"):
        assert any(module in names for names in scopes), module
