"""Predicted times against sums made by hand, at rates that are easy to calculate with."""

import dataclasses

import pytest

from fusejax import predict, profile, rates
from fusejax.compile import targets
from fusejax.hlo.analysis import Kernel, Traffic, Work

MB = 10**6
CACHE = 100 * MB
LEFT = 45 * MB  # of what is written, still in the cache when the kernel ends


def curve(tb_per_s, fixed_us=2.0):
    point = profile.Point(1 << 28, (1 << 28) / tb_per_s / 1e6, 0, 0)
    return profile.Curve((point,), fixed_us, tb_per_s * 1e12)


def emitter(kind, dtype, width, tb_per_s):
    return profile.EmitterSpeed(kind, kind.split("_")[0], dtype, width, 10**9, 1e3 / tb_per_s, 0, 0)


PROFILE = profile.Profile(
    card="a card", jax="0", jaxlib="0", cuda=None, driver=None, date="", command="",
    l2_bytes=CACHE,
    memory={
        "copy": curve(3.0), "driver_copy": curve(4.0), "triad": curve(4.0), "read": curve(4.0),
    },
    l2={},
    emitters=(
        emitter("loop_write", "bf16", 8192, 2.0),  # 1 ps for each element
        emitter("reduction", "f32", 1024, 2.0),
        emitter("reduction_columns", "f32", 1024, 1.0),
        emitter("triton", "bf16", 1024, 4.0),
        emitter("triton", "bf16", 16384, 2.0),
    ),
    arithmetic=(
        profile.OpCost("tanh", "f32", 1.0, 0, 0, 0, 0),
        profile.OpCost("convert", "bf16", 0.5, 0, 0, 0, 0),
    ),
    matmuls=(
        profile.MatmulTime(1000, 1000, 1000, "bf16", 20.0, 0, 0),  # 1e14 FLOP/s
        profile.MatmulTime(1000, 1000, 1000, "f32", 40.0, 0, 0),
    ),
    launches=profile.Launches(1.5, 0, 7.0, 0, 0, 0, 0, 0),
)  # fmt: skip
RATES = rates.Rates(PROFILE)


def kernel(emitter, read, written, count=1, **work):
    known = {"operations": {}, "matmul_flops": 0, "dtype": "f32", "width": 1024} | work
    return Kernel("k", emitter, (), None, count, Traffic(read, written), None, Work(**known))


def one(k, rate=RATES):
    return predict.path_cost([k], 1, rate)


def test_a_kernel_that_only_moves_data():
    cost = one(kernel("mosaic_gpu", 200 * MB, 200 * MB))
    assert cost.traffic_us == pytest.approx(100)
    assert cost.kernels_us == pytest.approx(102)
    assert cost.total_us == pytest.approx(103.5)


def test_terms_add_up_over_kernels_and_programs():
    k = kernel("mosaic_gpu", 200 * MB, 200 * MB)
    cost = predict.path_cost([k, k, dataclasses.replace(k, count=3)], 4, RATES)
    assert cost.kernels_us == pytest.approx(5 * 102)
    assert cost.launch_us == pytest.approx(5 * 1.5)
    assert cost.dispatch_us == pytest.approx(3 * 7)
    assert (cost - cost).total_us == 0


@pytest.mark.parametrize(
    ("columns", "read", "us"), [(False, 400, 200.0), (True, 400, 400.0), (False, 200, 100.0)]
)
def test_a_reduction_has_the_speed_of_its_kind(columns, read, us):
    cost = one(kernel("reduction", read * MB, 0, sums_columns=columns))
    assert cost.kernels_us == pytest.approx(us + 2)
    assert cost.traffic_us == pytest.approx(read / 4)


@pytest.mark.parametrize(("width", "us"), [(1024, 50.0), (3000, 50.0), (6000, 100.0)])
def test_the_nearest_measured_width_counts(width, us):
    cost = one(kernel("triton", 200 * MB, 0, dtype="bf16", width=width))
    assert cost.kernels_us == pytest.approx(us + 2)


def test_a_loop_takes_a_time_per_element_and_arithmetic_on_top():
    few_bytes = kernel("loop", 40 * MB, 40 * MB, elements=100 * MB)
    assert one(few_bytes).kernels_us == pytest.approx(100 + 2)
    work = {"tanh:f32": 70 * MB, "convert:f32>bf16": 10 * MB, "unheard:f32": MB}
    busy = kernel("loop", 40 * MB, 40 * MB, elements=100 * MB, operations=work)
    assert one(busy).kernels_us == pytest.approx((100**2 + 75**2) ** 0.5 + 2)
    assert one(busy).compute_us == pytest.approx(25)
    many_bytes = kernel("loop", 400 * MB, 400 * MB, elements=100 * MB, operations=work)
    assert one(many_bytes).kernels_us == pytest.approx(200 + 2)


def test_a_product_hides_its_bytes():
    product = kernel("cublas", 10 * MB, 10 * MB, matmul_flops=5 * 10**9, matmul_dtype="bf16")
    assert one(product).kernels_us == pytest.approx(50 + 2)
    wide = kernel("cublas", 10 * MB, 10 * MB, matmul_flops=5 * 10**9, matmul_dtype="f32")
    assert one(wide).kernels_us == pytest.approx(100 + 2)


def test_what_is_left_in_the_cache_is_the_next_kernels():
    writer = kernel("mosaic_gpu", 0, 200 * MB)
    reader = kernel("mosaic_gpu", 200 * MB, 0)
    first, second = predict.kernel_costs([writer, reader], RATES)
    assert first.kernels_us == pytest.approx((200 - 45) / 4 + 2)
    assert second.kernels_us == pytest.approx((200 + 45) / 4 + 2)
    small = predict.kernel_costs([kernel("mosaic_gpu", 0, 4 * MB), reader], RATES)
    assert small[1].kernels_us == pytest.approx((200 + 4) / 4 + 2)


def test_a_faster_card_is_scaled():
    twice = rates.Rates(PROFILE, memory=2.0, arithmetic=4.0)
    k = kernel("mosaic_gpu", 200 * MB, 200 * MB)
    assert one(k, twice).kernels_us == pytest.approx(50 + 2)
    product = kernel("cublas", 0, 0, matmul_flops=5 * 10**9, matmul_dtype="bf16")
    assert one(product, twice).kernels_us == pytest.approx(50 / 4 + 2)


def test_which_rates_a_target_has():
    assert rates.of(targets.cpu()) is None
    own, other = (rates.of(targets.deviceless(name)) for name in ("h200", "a100"))
    assert own.source.startswith("measured on NVIDIA H200, 20")
    assert "scaled" in other.source
    assert other.copy_bytes_per_s / own.copy_bytes_per_s == pytest.approx(2.039 / 4.814, rel=1e-3)
    assert 0.7 < own.copy_bytes_per_s / 4.814e12 < 0.95
