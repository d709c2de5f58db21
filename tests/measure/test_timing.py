import jax
import jax.numpy as jnp
import pytest

from fusejax.compile import platform
from fusejax.errors import UsageError
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.measure import timing
from fusejax.measure.timing import DeviceTime, KernelTime

no_gpu_here = pytest.mark.skipif(platform.gpu_present(), reason="is about a machine without a GPU")


def kernel(name, emitter="loop", count=1):
    return Kernel(name, emitter, (), None, count, Traffic(0, 0))


def device_time(*functions):
    kernels = tuple(KernelTime(name, us) for name, us in functions)
    return DeviceTime(kernels, 0.0, 0.0, 0.0, 1)


def test_percentile():
    assert timing.percentile([3, 1, 2], 0.5) == 2
    assert timing.percentile([0, 10], 0.1) == pytest.approx(1)
    assert timing.percentile([7], 0.9) == 7


def test_every_variant_has_its_turn_once_a_round():
    turns = list(timing._turns(["a", "b", "c"], 6))
    rounds = [turns[first : first + 3] for first in range(0, len(turns), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {names[0] for names in rounds} == {"a", "b", "c"}
    assert {names[-1] for names in rounds} == {"a", "b", "c"}


def test_summary_of_calls():
    calls = [[("a", 1.0), ("b", 10.0)], [("a", 3.0), ("b", 30.0)], [("a", 2.0), ("b", 20.0)]]
    found = timing._summarise("x", calls)
    assert found.kernels == (KernelTime("a", 2.0), KernelTime("b", 20.0))
    assert (found.median_us, found.samples) == (22.0, 3)
    assert found.low_us == pytest.approx(13.2)
    assert found.high_us == pytest.approx(30.8)


def test_calls_that_differ_are_refused():
    with pytest.raises(UsageError, match="xla: its calls do not launch the same kernels"):
        timing._summarise("xla", [[("a", 1.0)], [("b", 1.0)]])


def test_joins_to_compiled_kernels():
    measured = device_time(("a_1", 1.0), ("b", 5.0), ("a_1", 2.0), ("b", 7.0), ("nvjet", 100.0))
    kernels = [
        kernel("copy.8", "copy"),
        kernel("a.1", count=2),
        kernel("b", count=2),
        kernel("compare", count=2),
        kernel("cublas-lt-matmul.1", "cublas"),
    ]
    assert timing.kernel_us(measured, kernels) == {
        "copy.8": None,
        "a.1": 1.5,
        "b": 6.0,
        "compare": None,
        "cublas-lt-matmul.1": 100.0,
    }


def test_end_to_end_on_any_machine():
    double, half = jax.jit(lambda x: x * 2), jax.jit(lambda x: x / 2)
    variants = {"one": double, "two": lambda x: half(double(x))}
    found = timing.end_to_end_times(variants, (jnp.ones(8),), rounds=3, calls=20)
    assert list(found) == ["one", "two"]
    assert all(0 < t.low_us <= t.median_us <= t.high_us and t.samples == 3 for t in found.values())


def test_slope_leaves_out_what_a_batch_costs_once(monkeypatch):
    def batch_us(function, arguments, calls):
        return {"slow": 300 + 80 * calls, "fast": 300 + 20 * calls}[function()]

    monkeypatch.setattr(timing, "_batch_us", batch_us)
    variants = {"slow": lambda: "slow", "fast": lambda: "fast"}
    found = timing.slope_times(variants, (), rounds=4, calls=(5, 25))
    assert found["slow"] == timing.CallSlope(80, 80, 80, 4, 300)
    assert found["fast"] == timing.CallSlope(20, 20, 20, 4, 300)


def test_slope_on_any_machine():
    x = jnp.ones((256, 256))
    found = timing.slope_times({"f": jax.jit(lambda x: x @ x)}, (x,), rounds=5, calls=(5, 100))
    assert found["f"].median_us > 0
    assert found["f"].samples == 5


@no_gpu_here
def test_device_times_need_a_gpu():
    with pytest.raises(UsageError, match="need a GPU"):
        timing.device_times({"f": jax.jit(lambda x: x + 1)}, (jnp.ones(8),))


@pytest.mark.gpu
def test_device_times_on_a_gpu():
    x = jnp.ones((4096, 4096), jnp.bfloat16)

    def two(x):
        return jax.lax.optimization_barrier(x * 2) + 1

    two_kernels = jax.jit(two).lower(x).compile(compiler_options=timing.GRAPHS_OFF)
    variants = {"one": jax.jit(lambda x: x * 2), "two": two_kernels}
    device = timing.device_times(variants, (x,), rounds=3, iterations=5)
    assert [len(device[name].kernels) for name in variants] == [1, 2]
    assert device["one"].median_us < device["two"].median_us
    assert device["one"].samples == 15
