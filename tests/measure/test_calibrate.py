"""The fits, the programs as they are compiled for a card, and a whole calibration of a card that
is a formula."""

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusejax import profile
from fusejax.compile import aot, platform, targets
from fusejax.errors import UsageError
from fusejax.hlo.analyse import analyse
from fusejax.measure import calibrate, timing
from fusejax.measure.calibration import (
    arithmetic,
    bandwidth,
    emitters,
    fit,
    launches,
    matmul,
    programs,
)
from fusejax.measure.calibration.plan import Plan
from fusejax.measure.calibration.programs import Built, Probe
from fusejax.measure.timing import CallSlope, DeviceTime, KernelTime
from fusejax.profile import OpCost, Point

SIZES = tuple(1 << shift for shift in (20, 22, 24, 26, 28, 30))
ELEMENTS = 1 << 14


def points(us):
    return [Point(size, one, one, one) for size, one in zip(SIZES, us, strict=True)]


def compiled(target, probe):
    """What the target's compiler makes of a probe, and its PTX."""
    found = aot.compile_program(probe.function, probe.arguments, target, probe.options)
    return Built(None, analyse(found.program).kernels), " ".join(found.program.ptx)


@pytest.mark.parametrize("fixed_us", [0.0, 2.0, 9.0])
@pytest.mark.parametrize("bytes_per_s", [9e11, 4e12])
def test_fit_of_a_line(fixed_us, bytes_per_s):
    us = [fixed_us + size / bytes_per_s * 1e6 for size in SIZES]
    found = fit.curve(points(us)[::-1])
    assert found.fixed_us == pytest.approx(fixed_us, abs=1e-6)
    assert found.bytes_per_s == pytest.approx(bytes_per_s)
    assert [point.bytes for point in found.points] == list(SIZES)


@pytest.mark.parametrize("seed", range(5))
def test_fit_of_noise_weighs_small_and_large_alike(seed):
    noise = np.random.default_rng(seed).normal(1, 0.02, len(SIZES))
    exact = np.array([2 + size / 4e12 * 1e6 for size in SIZES])
    found = fit.curve(points(exact * noise))
    assert found.fixed_us == pytest.approx(2, rel=0.06)
    assert found.bytes_per_s == pytest.approx(4e12, rel=0.06)


def test_fit_gives_no_negative_and_no_endless_rate():
    faster = fit.curve([Point(1000, 9.0, 9.0, 9.0), Point(2000, 3.0, 3.0, 3.0)])
    assert faster.fixed_us >= 0
    assert 0 < faster.bytes_per_s < float("inf")
    one = fit.curve([Point(4000, 2.0, 2.0, 2.0)])
    assert one.us(4000) == 2.0


@pytest.mark.parametrize("bad", [[], [Point(0, 1.0, 1.0, 1.0)], [Point(8, 0.0, 0.0, 0.0)]])
def test_fit_needs_points(bad):
    with pytest.raises(ValueError, match="point"):
        fit.curve(bad)


def test_per_step():
    # 48 steps more of 2^20 elements at 0.25 ps.
    assert fit.per_step_ps((24, 100.0), (72, 100 + 48 * 1.048576 * 0.25), 1 << 20) == (
        pytest.approx(0.25)
    )


def step(op="add:f32", helper=None, lengths=(10, 30)):
    return arithmetic.Step((op,) if isinstance(op, str) else op, helper, "f32", None, lengths)


def from_times(known, us, elements=1_000_000):
    told = []
    found = arithmetic.from_times(known, us, elements, told.append)
    return {(cost.op, cost.dtype): cost.ps for cost in found}, told


def test_costs_from_times():
    known = {
        "add": step(),
        "log": step("log:f32", "add:f32"),
        "negate": step("negate:f32", "add:f32"),
        "select": step(("compare:pred", "select:f32"), "add:f32"),
        "convert": step(("convert:f32>bf16", "convert:bf16>f32"), "add:f32"),
    }
    # With a million elements, 1 µs a step is 1 ps an element.
    us = {
        "add": (10.0, 30.0),  # 1 ps
        "log": (50.0, 150.0),  # 5 with the addition
        "negate": (9.0, 28.0),  # 0.95: noise
        "select": (30.0, 90.0),  # 3
        "convert": (20.0, 60.0),  # 2
    }
    costs, told = from_times(known, us)
    assert costs == pytest.approx({
        ("add", "f32"): 1.0,
        ("log", "f32"): 4.0,
        ("negate", "f32"): 0.0,
        ("compare", "pred"): 1.0,
        ("select", "f32"): 1.0,
        ("convert", "bf16"): 0.5,
    })  # fmt: skip
    assert told == []


def test_costs_that_memory_hides_are_left_out():
    known = {"add": step(), "log": step("log:f32", "add:f32")}
    costs, told = from_times(known, {"add": (20.0, 30.0), "log": (50.0, 150.0)})
    assert costs == {}
    assert "memory decides" in told[0]
    assert "its helper add:f32 was not measured" in told[1]


PTX = {
    "add": r"add\.rn\.b?f", "subtract": r"sub\.rn\.b?f", "multiply": r"mul\.rn\.b?f",
    "maximum": r"max\.NaN", "minimum": r"min\.NaN", "compare": "setp", "select": "selp",
    "exponential": r"ex2\.approx", "divide": r"div\.full|rcp", "rsqrt": r"rsqrt\.approx",
    "sqrt": r"sqrt\.approx", "floor": r"cvt\.rmi", "convert": r"cvt\.rn\.b?f16",
    "negate": r"sub\.rn|neg", "abs": r"abs\.f32",
}  # fmt: skip


PICKED = {
    "add:f32", "multiply:bf16", "maximum:f16", "compare:pred and select:f32", "exponential:bf16",
    "negate:f32", "rsqrt:f32", "tanh:f32", "convert:f32>bf16 and convert:bf16>f32",
}  # fmt: skip


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(one, marks=() if one.name in PICKED else pytest.mark.thorough, id=one.name)
        for one in arithmetic.steps()
    ],
)
def test_chains_survive_compilation(deviceless, known):
    short = dataclasses.replace(known, lengths=(2, 5))
    (few, few_ptx), (many, many_ptx) = (
        compiled(deviceless("h200"), arithmetic.probe(short, length, ELEMENTS))
        for length in short.lengths
    )
    assert arithmetic.spoilt(short, few, many, ELEMENTS) is None
    # LLVM must not have folded them either: the same instructions for each of the three more.
    for operation in (*short.ops, *filter(None, [short.helper])):
        pattern = PTX.get(operation.split(":")[0], r"fma\.rn")
        if operation == "add:f32" and "negate" in short.name:
            continue  # both are one subtraction
        more = len(re.findall(pattern, many_ptx)) - len(re.findall(pattern, few_ptx))
        assert more >= 3, (operation, pattern)
        assert more % 3 == 0, (operation, pattern)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x, y, z: jnp.abs(x), "abs:f32"),
        (lambda x, y, z: x * 1.0, "multiply:f32"),
        (lambda x, y, z: -x, "negate:f32"),
    ],
)
def test_folded_chains_are_found_out(deviceless, function, operation):
    folded = arithmetic.Step((operation,), None, "f32", function, (2, 4))
    few, many = (
        compiled(deviceless("h200"), arithmetic.probe(folded, length, ELEMENTS))[0]
        for length in folded.lengths
    )
    assert "XLA made" in arithmetic.spoilt(folded, few, many, ELEMENTS)


def test_operations_are_measured_once():
    known = arithmetic.steps()
    names = collections.Counter(op for one in known for op in one.ops if op != "compare:pred")
    assert set(names.values()) == {1}
    before = set()
    for one in known:  # helpers first
        assert one.helper is None or one.helper in before
        before |= set(one.ops)


@pytest.mark.parametrize("case", [*emitters.cases(Plan())], ids=lambda case: case.name)
def test_every_emitter_serves_its_program(deviceless, case):
    built, _ = compiled(deviceless("h200"), case.probe)
    assert built.kernels[built.main].emitter == case.emitter
    assert built.bytes == pytest.approx(Plan().emitter_bytes, rel=0.01)


@pytest.mark.parametrize("kind", ["copy", "read", "write", "triad"])
@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 30])
def test_kernels_move_what_they_are_to(deviceless, kind, nbytes):
    built, _ = compiled(deviceless("h200"), bandwidth.probe(kind, nbytes))
    (kernel,) = built.kernels
    assert built.bytes == pytest.approx(nbytes, rel=0.01)
    assert (kernel.traffic.read == 0) == (kind == "write") or kernel.traffic.read == 4
    assert kernel.emitter == ("reduction" if kind == "read" else "loop")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_products_are_by_cublas(deviceless, dtype):
    built, _ = compiled(deviceless("h200"), matmul.probe(256, 128, 512, dtype))
    assert [kernel.emitter for kernel in built.kernels] == ["cublas"]
    assert built.kernels[0].work.matmul_flops == 2 * 256 * 128 * 512


def test_a_chain_is_as_many_kernels(deviceless):
    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    for length in (1, 8):
        built, _ = compiled(deviceless("h200"), Probe(launches.chain(length), (shape,)))
        assert len(built.kernels) == length


def test_launches_that_do_not_belong_are_refused():
    two = Built(None, ("a", "b"))
    timed = DeviceTime(tuple(KernelTime("a", 1.0) for _ in range(3)), 3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="3 launches where 2"):
        programs.main_kernel_us(two, timed)


def test_programs_that_do_not_compile_are_told():
    told = []
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    probes = {
        "good": Probe(lambda x: x + 1, (shape,), {}),
        "bad": Probe(lambda x: x @ jnp.ones((3, 3)), (shape,), {}),
    }
    assert list(programs.build(probes, told.append)) == ["good"]
    assert list(programs.build(probes, told.append, at_once=False)) == ["good"]
    assert len(told) == 2
    assert all(line.startswith("bad: TypeError") and "\n" not in line for line in told)


def test_time_of_a_large_copy(monkeypatch):
    def slope_times(variants, arguments, *, rounds, calls):
        ((arrays,), us) = arguments, 0.0
        for copy, array in zip(variants["copy"](arrays), arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(copy), np.asarray(array))
            assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
            us += 2 * array.nbytes / 1e3
        return {"copy": CallSlope(us, us, us, rounds, 0.0)}

    monkeypatch.setattr(timing, "slope_times", slope_times)
    monkeypatch.setattr(bandwidth, "_DRIVER_COPIES_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "_LEAST_DRIVER_COPY", 1 << 18)
    for nbytes in (1 << 18, 1 << 20, 1 << 22):
        assert calibrate.copy_time_us(nbytes) == pytest.approx(nbytes / 1e3)


@pytest.mark.parametrize("nbytes", [1, 8, 5000, 1 << 20])
def test_time_of_a_small_copy(deviceless, monkeypatch, nbytes):
    card = Formula(deviceless("h200"))
    monkeypatch.setattr(programs, "build", card.build)
    monkeypatch.setattr(timing, "device_times", card.device_times)
    monkeypatch.setattr(bandwidth, "_DRIVER_COPIES_BYTES", 1 << 21)
    found = calibrate.copy_time_us(nbytes)
    assert found == pytest.approx(card.START + nbytes / card.BYTES_PER_US, abs=0.001)


@pytest.mark.parametrize("shape", [(), (7,), (3000, 1024)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_random(shape, dtype):
    (found,) = programs.random_values([jax.ShapeDtypeStruct(shape, dtype)])
    assert (found.shape, found.dtype) == (shape, dtype)
    if len(shape) == 2:
        values = np.asarray(found, np.float64)
        assert abs(values.mean()) < 0.01
        assert values.std() == pytest.approx(1, abs=0.01)
        assert len(np.unique(values[:, 0])) > 200


class Formula:
    """A card whose times are a formula, and which runs nothing.

    A kernel takes START µs, and then what is longer: its bytes or its arithmetic.
    """

    START, BYTES_PER_US, OP_PS, FLOP_PER_US = 2.0, 4e6, {"tanh:f32": 3.0}, 5e8
    OTHERS_PS = 0.2  # less than their bytes take, where there is one of them
    LAUNCH, IN_GRAPH, DISPATCH, BATCH, HOST = 0.75, 0.25, 3.0, 250.0, 45.0

    def __init__(self, target):
        self.target = target
        self.log = []

    def us(self, kernel):
        """Time of a kernel of its own."""
        arithmetic = sum(
            count * self.OP_PS.get(op, self.OTHERS_PS) / 1e6
            for op, count in kernel.work.operations.items()
        )
        flops = kernel.work.matmul_flops / self.FLOP_PER_US
        return self.START + max(kernel.traffic.total / self.BYTES_PER_US, arithmetic, flops)

    def build(self, probes, leave_out, at_once=True):
        """Stands for `programs.build`."""
        return {name: self._built(probe) for name, probe in probes.items()}

    def _built(self, probe):
        kernels = compiled(self.target, probe)[0].kernels
        gap = self.LAUNCH if "xla_gpu_enable_command_buffer" in probe.options else self.IN_GRAPH

        def run(*arguments):
            self.log.append((kernels, gap))
            return arguments[0]

        return Built(run, kernels)

    def _runs(self, function, arguments):
        self.log = []
        function(*arguments)
        return self.log

    def device_times(self, variants, arguments, *, rounds, iterations):
        """Stands for `timing.device_times`."""
        found = {}
        for name, function in variants.items():
            own = arguments[name] if isinstance(arguments, dict) else arguments
            runs = self._runs(function, own)
            timed = tuple(KernelTime(k.name, self.us(k)) for kernels, _ in runs for k in kernels)
            total = sum(kernel.median_us for kernel in timed)
            found[name] = DeviceTime(timed, total, total, total, rounds * iterations)
        return found

    def slope_times(self, variants, arguments, *, rounds, calls):
        """Stands for `timing.slope_times`."""
        found = {}
        for name, function in variants.items():
            own = arguments[name] if isinstance(arguments, dict) else arguments
            if name == "copy":
                us = sum(2 * array.nbytes for array in own[0]) / self.BYTES_PER_US
            else:
                us = 0.0
                for kernels, gap in self._runs(function, own):
                    device = sum(self.us(k) for k in kernels) + (len(kernels) - 1) * gap
                    us += max(self.HOST, device + self.DISPATCH)
            found[name] = CallSlope(us, us, us, rounds, self.BATCH)
        return found


def values_of_any_size(shapes):
    """Nothing is computed: large ones need not be made."""
    return tuple(
        jnp.ones(shape.shape if np.prod(shape.shape) < 1 << 20 else 1, shape.dtype)
        for shape in shapes
    )


@pytest.fixture(scope="module")
def measured(deviceless):
    """A whole calibration of the formula, at small sizes."""
    card = Formula(deviceless("h200"))
    picked = {"add:f32", "tanh:f32", "maximum:f32"}
    plan = Plan(
        memory_bytes=(1 << 18, 1 << 20, 1 << 22),
        l2_bytes=(1 << 18, 1 << 19),
        driver_copy_bytes=(1 << 18, 1 << 20),
        emitter_bytes=1 << 22,
        widths=(1024, 4096),
        matmuls=((256, 128, 512), (512, 512, 512)),
        program_bytes=1 << 28,
        link_bytes=1 << 26,
        links=(2, 4),
        tiny_links=(32, 40),
        chain_elements=1 << 22,
    )
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "usable_device", lambda: deviceless("h200"))
        patch.setattr(programs, "build", card.build)
        patch.setattr(timing, "device_times", card.device_times)
        patch.setattr(timing, "slope_times", card.slope_times)
        patch.setattr(bandwidth, "_DRIVER_COPIES_BYTES", 1 << 20)
        patch.setattr(bandwidth, "_CACHES", 0.1)
        patch.setattr(programs, "random_values", values_of_any_size)
        known = tuple(
            dataclasses.replace(step, lengths=(8, 24))
            for step in arithmetic.steps()
            if set(step.ops) <= picked
        )
        patch.setattr(arithmetic, "steps", lambda: known)
        found = calibrate.calibrate(plan, command="a test", tell=told.append)
    return found, told, plan


def test_calibration_finds_the_formula_of_memory(measured):
    found, _, plan = measured
    assert set(found.memory) == {"copy", "read", "write", "triad", "driver_copy"}
    assert set(found.l2) == {"copy", "read"}
    for kind, curve in {**found.memory, **found.l2}.items():
        assert curve.bytes_per_s == pytest.approx(4e12, rel=0.01), kind
        assert curve.fixed_us == pytest.approx(0 if kind == "driver_copy" else 2, abs=0.05), kind
    assert len(found.memory["triad"].points) == len(plan.memory_bytes)


def test_calibration_finds_the_formula_of_emitters(measured):
    found, _, plan = measured
    kinds = collections.Counter((speed.kind, speed.dtype) for speed in found.emitters)
    for dtype in ("bf16", "f32"):
        assert kinds["triton", dtype] == len(plan.widths)
        for kind in (
            "loop", "loop_write", "loop_two_inputs", "reduction", "reduction_columns", "transpose",
        ):  # fmt: skip
            assert kinds[kind, dtype] == 1
    for speed in found.emitters:
        assert speed.us >= 2 + speed.bytes / 4e6 - 1e-9
        assert speed.bytes == pytest.approx(plan.emitter_bytes, rel=0.1)


def test_calibration_finds_the_formula_of_arithmetic(measured):
    found, _, _ = measured
    costs = {(cost.op, cost.dtype): cost.ps for cost in found.arithmetic}
    assert costs == {
        ("add", "f32"): pytest.approx(0.2),
        ("maximum", "f32"): pytest.approx(0.2),
        ("tanh", "f32"): pytest.approx(3),
    }
    assert all(isinstance(cost, OpCost) for cost in found.arithmetic)


def test_calibration_finds_the_formula_of_products(measured):
    found, _, _ = measured
    assert [(one.m, one.n, one.k, one.dtype) for one in found.matmuls[:2]] == [
        (256, 128, 512, "bf16"), (256, 128, 512, "f16"),
    ]  # fmt: skip
    assert len(found.matmuls) == 6
    for one in found.matmuls:
        assert one.us >= 2 + 2 * one.m * one.n * one.k / 5e8 - 1e-9


def test_calibration_finds_the_formula_of_launches(measured):
    found, _, _ = measured
    assert found.launches.launch_us == pytest.approx(0.75)
    assert found.launches.launch_in_graph_us == pytest.approx(0.25)
    assert found.launches.dispatch_us == pytest.approx(3)
    assert found.launches.dispatch_by_profiler_us == pytest.approx(3)
    assert found.launches.batch_us == 250
    assert found.launches.host_dispatch_us == 45
    assert found.launches.tiny_kernel_us == pytest.approx(2.75, abs=0.01)
    assert found.launches.tiny_kernel_in_graph_us == pytest.approx(2.25, abs=0.01)


def test_calibration_says_what_it_was(measured):
    found, told, _ = measured
    assert found.card == "NVIDIA H200"
    assert found.command == "a test"
    assert found.l2_bytes == 62_914_560
    assert (found.jax, found.left_out) == (jax.__version__, ())
    assert told
    assert all("\n" not in line for line in told)


SCRIPT = """
import runpy, sys
from fusejax import profile
from fusejax.compile import targets
from fusejax.measure import calibrate
_, made, *flags = sys.argv
targets.usable_device = lambda: targets.deviceless("h200")
calibrate.calibrate = lambda plan, *, command, tell: profile.from_file(profile.pathlib.Path(made))
sys.argv = ["calibrate.py", *flags]
runpy.run_path("scripts/calibrate.py", run_name="__main__")
"""


def run_script(made, own, *flags):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, made, *flags],
        capture_output=True, text=True, check=False,
        env={**os.environ, "FUSEJAX_PROFILE_DIR": str(own)},
    )  # fmt: skip


def test_script_keeps_the_profile(measured, tmp_path):
    made, own = tmp_path / "made.json", tmp_path / "a" / "b"
    made.write_text(json.dumps(measured[0].to_json()))
    ran = run_script(made, own)
    assert ran.returncode == 0, ran.stderr
    assert profile.from_file(own / "nvidia_h200.json") == measured[0]
    assert str(own / "nvidia_h200.json") in ran.stdout
    assert "operation tanh" in ran.stdout
    file = tmp_path / "mine.json"
    ran = run_script(made, own, "--file", file, "--json", "-")
    assert json.loads(ran.stdout) == json.loads(file.read_text()) == json.loads(made.read_text())


@pytest.mark.parametrize("file", ["", "no/such/folder.json", "."])
def test_script_refuses_files_that_cannot_be_written(file, tmp_path):
    ran = run_script(tmp_path / "unused", tmp_path, "--file", file)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("calibrate.py: --file")
    assert ran.stderr.count("\n") == 1


@pytest.mark.skipif(platform.gpu_present(), reason="is about a machine without a GPU")
def test_needs_a_gpu(tmp_path):
    with pytest.raises(UsageError, match="needs a GPU"):
        calibrate.calibrate()
    file = tmp_path / "card.json"
    ran = subprocess.run(
        [sys.executable, "scripts/calibrate.py", "--file", file],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(r"calibrate\.py: needs a GPU .*\n", ran.stderr)
    assert not file.exists()


def test_help_has_an_example():
    ran = subprocess.run(
        [sys.executable, "scripts/calibrate.py", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "python scripts/calibrate.py --file h200.json" in ran.stdout
    assert all(flag in ran.stdout for flag in ("--file", "--json", "--rounds"))


@pytest.mark.gpu
def test_calibration_on_a_gpu():
    small = Plan(
        rounds=2,
        memory_bytes=(1 << 24, 1 << 28),
        driver_copy_bytes=(1 << 28,),
        emitter_bytes=1 << 27,
        widths=(4096,),
        matmuls=((2048, 2048, 2048),),
    )
    found = calibrate.calibrate(small)
    assert 1e11 < found.memory["driver_copy"].bytes_per_s < 2e13
    assert {speed.kind for speed in found.emitters} == {
        "loop", "loop_write", "loop_two_inputs", "reduction", "reduction_columns", "transpose",
        "triton",
    }  # fmt: skip
    assert 0 < found.op_ps("add", "f32") < found.op_ps("tanh", "f32") < 1e3
    assert 0 <= found.launches.launch_us < 20
    assert 0 <= found.launches.dispatch_us < 50
    assert found.left_out == ()
