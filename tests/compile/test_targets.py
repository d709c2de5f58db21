"""Targets: the pinned descriptions, the choice of one, and clear refusals."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fusejax
from fusejax.compile import aot, platform, targets
from fusejax.compile.cards import CARDS, describe
from fusejax.errors import UsageError


def bias_gelu_rowsum(x, bias):
    y = jax.nn.gelu((x + bias).astype(jnp.float32), approximate=True)
    return y.astype(x.dtype), y.sum(-1)


ARGUMENTS = (
    jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16),
    jax.ShapeDtypeStruct((8192,), jnp.bfloat16),
)


@pytest.mark.parametrize("name", CARDS)
def test_description_carries_the_figures(name):
    target = targets.deviceless(name)
    card = CARDS[name]
    assert target.figure("core_count") == card.cores
    assert target.figure("memory_bandwidth") == card.memory_bandwidth
    assert target.figure("l2_cache_size") == card.l2_bytes
    assert target.figure("major") == card.capability[0]
    assert target.figure("no_such_field") is None


@pytest.mark.parametrize("name", CARDS)
def test_every_card_compiles(name, deviceless):
    compilation = aot.compile_program(bias_gelu_rowsum, ARGUMENTS, deviceless(name))
    program = compilation.program
    assert program.name == "jit_bias_gelu_rowsum"
    assert "ENTRY" in program.hlo
    assert "ENTRY" in program.unoptimised
    assert "update_priority" in program.decisions
    assert "kCustomKernel" in program.launch_order
    assert program.ptx
    assert compilation.cold_s > 0
    assert compilation.executable_bytes > 1000


def test_the_description_decides_the_cost_model(deviceless):
    def estimates(name):
        program = aot.compile_program(bias_gelu_rowsum, ARGUMENTS, deviceless(name)).program
        last = re.findall(
            r"reduce_sum\S*\"\s+us_fused: (\S+)\s+us_unfused: (\S+)", program.decisions
        )
        return tuple(float(us) for us in last[-1])

    # What XLA's cost model says on this card's own description.
    assert estimates("h100") == pytest.approx((1050.92, 726.15), abs=0.5)
    assert estimates("b200")[1] < estimates("h200")[1] < estimates("h100")[1]


def test_a_description_file_is_the_same_target(tmp_path, deviceless):
    file = tmp_path / "card.txtpb"
    file.write_text(describe(CARDS["h100"]))
    target, _ = targets.resolve(str(file))
    assert (target.kind, target.title) == ("deviceless", CARDS["h100"].name)
    assert target.bandwidth_bytes_per_s == CARDS["h100"].memory_bandwidth
    mine = aot.compile_program(bias_gelu_rowsum, ARGUMENTS, target).program
    pinned = aot.compile_program(bias_gelu_rowsum, ARGUMENTS, deviceless("h100")).program
    assert mine.launch_order == pinned.launch_order


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("h300", None, "unknown"),
        ("missing.txtpb", None, "cannot be read"),
        ("empty.txtpb", b"", "not a GPU target description"),
        ("binary.txtpb", b"\xff\x00\xfe", "cannot be read"),
        ("other.txtpb", b"platform_name: 'CUDA'", "not a GPU target description"),
    ],
)
def test_bad_targets_are_named(name, content, said, tmp_path):
    path = name if content is None and "." not in name else str(tmp_path / name)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(name)) as error:
        targets.resolve(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_description_that_xla_refuses_is_named(tmp_path, deviceless):
    file = tmp_path / "odd.txtpb"
    text = describe(CARDS["h100"])
    file.write_text(text.replace("gpu_device_info {", "gpu_device_info {\n  no_such_field: 7"))
    target, _ = targets.resolve(str(file))
    with pytest.raises(UsageError, match=re.escape("odd.txtpb")):
        aot.compile_program(bias_gelu_rowsum, ARGUMENTS, target)


def test_no_device_here_is_said():
    if platform.gpu_present():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match="no NVIDIA GPU"):
        targets.resolve("device")


def test_auto_without_the_extra_takes_the_cpu(monkeypatch):
    monkeypatch.setattr(platform, "gpu_present", lambda: False)
    monkeypatch.setattr(platform, "missing_compiler", lambda: "the extra 'aot' is not installed")
    target, notice = targets.resolve("auto")
    assert target.kind == "cpu"
    assert "aot" in notice
    assert "\n" not in notice
    with pytest.raises(UsageError, match="aot"):
        targets.resolve("h200")


def test_auto_with_the_extra_takes_the_h200(monkeypatch, deviceless):
    monkeypatch.setattr(platform, "gpu_present", lambda: False)
    target, notice = targets.resolve("auto")
    assert (target.name, target.kind, notice) == ("h200", "deviceless", None)


SILENT = """
import jax, jax.numpy as jnp
from fusejax.compile import aot, targets
target, _ = targets.resolve("h200")
aot.compile_program(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),), target)
"""


@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_compiling_writes_nothing_to_the_screen(platforms, deviceless):
    if platform.gpu_present():
        pytest.skip("a process that may use the GPU logs what the driver says")
    done = subprocess.run(
        [sys.executable, "-c", SILENT],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": platforms, "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.gpu
def test_the_pinned_h200_is_this_one():
    target = targets.device()
    if target.title != "NVIDIA H200":
        pytest.skip(f"this machine has a {target.title}")
    pinned = targets.deviceless("h200")
    for field in (
        "core_count", "memory_bandwidth", "l2_cache_size", "fpus_per_core", "major",
        "shared_memory_per_core", "shared_memory_per_block_optin", "registers_per_core_limit",
    ):  # fmt: skip
        assert target.figure(field) == pinned.figure(field), field


@pytest.mark.parametrize("arguments", [(), (jnp.ones(4),)])
def test_without_arrays_that_are_used_it_is_compiled_for_the_target_too(arguments, deviceless):
    weights = jnp.ones((8, 128))
    found = fusejax.inspect(
        lambda *_: jax.nn.softmax(weights * 2), *arguments, target=deviceless("h200")
    )
    assert found.modules[0].analysis.backend == "gpu"
