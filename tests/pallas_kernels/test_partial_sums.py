"""What the CTAs of a row kernel leave, added up in one launch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from references import INTERPRET, row_kernels, totals

from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.resources import kernel_resources, limits_of, ptxas
from pallas_kernels import catalogue, partial_sums
from pallas_kernels.partial_sums import IN_FLIGHT, SumsPlan, add_up, plan_sums
from pallas_kernels.plan import Cut
from pallas_kernels.registers import column_sum, sums_shape
from pallas_kernels.tuned import Tuning

BF16, F32 = jnp.bfloat16, jnp.float32
LAUNCHES = catalogue.launches()
SIMULATED = plgpu.InterpretGPUParams() if INTERPRET else None


def partials(sums, count, columns, seed=0):
    values = np.random.default_rng(seed).normal(size=(sums, count, columns)) + 0.5
    return jnp.asarray(values, F32)


def check(p, given, found):
    """Against float64, by what f32 costs: a rounding for each addition that a partial sum is in."""
    exact = np.asarray(given, np.float64)[..., : p.width]
    roundings = -(-p.count // p.step) + 6 + 4 * p.warpgroups
    slack = roundings * 2.0**-24 * np.abs(exact).sum(1)
    assert len(found) == p.sums
    for one, want, most in zip(found, exact.sum(1), slack, strict=True):
        assert (one.dtype, one.shape) == (F32, (p.width,))
        assert (np.abs(np.asarray(one, np.float64) - want) <= most).all()


CASES = [
    # Warps have columns of their own; the last CTA's are moved up.
    (SumsPlan(2, 5, 520, rows=1, warpgroups=1), 520),
    # The last partial sums are moved up, to where some have been added.
    (SumsPlan(1, 11, 260, rows=4, warpgroups=1), 384),
    # Lanes along partial sums, several warpgroups, one step more than are in flight.
    (SumsPlan(2, 64 * (IN_FLIGHT + 2) + 3, 24, rows=32, warpgroups=2), 32),
]


@pytest.mark.parametrize(("p", "columns"), CASES)
def test_against_float64(p, columns):
    given = partials(p.sums, p.count, columns)
    run = jax.jit(lambda given: add_up(p, given, name="totals", interpret=SIMULATED))
    found = run(given)
    check(p, given, found)
    for one, again in zip(found, run(given), strict=True):
        np.testing.assert_array_equal(one, again)


def test_what_is_added_twice_or_left_out_shows():
    p = SumsPlan(1, 11, 128, rows=4, warpgroups=1)
    given = partials(1, 11, 128)
    for wrong in (given[:, :10], given[:, 1:], jnp.concatenate([given, given[:, :1]], 1)):
        with pytest.raises(AssertionError):
            check(p, given, (wrong[0].sum(0),))
    check(p, given, (given[0].sum(0),))


@pytest.mark.parametrize("sums", [1, 2])
def test_plans(sums):
    for count in (4, 5, 15, 33, 66, 132, 924, 3696, 20000):
        for width in (8, 24, 64, 100, 256, 1000, 2560, 8192, 131072, 2**20):
            p = plan_sums(sums, count, width)
            if p is None:
                assert count * width < 1024
                continue
            where = f"{p}"
            assert p.columns <= width, where
            # Nothing starts before the first partial sum, or reads an odd part of a vector.
            assert p.step <= count, where
            assert width % 4 == p.columns % 4 == 0, where
            assert p.columns * p.rows == 512, where
            assert p.ctas * p.columns >= width, where
            assert 128 * p.warpgroups <= 1024, where
            if p.rows == 1:
                assert p.warpgroups == 1, where
            loads = -(-count // p.step)
            if p.warpgroups < 8 and 2 * p.step <= count and p.rows > 1:
                assert loads <= IN_FLIGHT, where


def test_few_columns_have_narrow_ctas_and_many_wide_ones():
    assert [plan_sums(2, 132, width).columns for width in (256, 8192, 131072)] == [8, 64, 512]
    # None of them is left with a long walk.
    assert plan_sums(2, 3168, 256).warpgroups == 4


@pytest.mark.parametrize(("count", "width"), [(1, 1024), (3, 1024), (132, 6), (132, 4), (132, 769)])
def test_what_xla_adds_up(count, width):
    assert plan_sums(1, count, width) is None


@pytest.mark.parametrize(
    ("op", "rows", "width", "launches"),
    [
        ("bias_gelu_backward", 300, 16, 0),  # a row per lane
        ("layer_norm_backward", 300, 256, 1),
        ("bias_gelu_backward", 300, 769, 1),  # late rows
        ("layer_norm_backward", 33, 65536, 1),
        ("rms_norm_backward", 4, 256, 0),  # one CTA
    ],
)
def test_launches(op, rows, width, launches):
    launch = LAUNCHES[op]
    run = jax.jit(launch.function).trace(*launch.arguments(rows, width, BF16))
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert (row_kernels(text), totals(text)) == (1, launches)
    assert ("stablehlo.reduce" in text) == (not launches)


@pytest.mark.parametrize(
    ("op", "width", "rows_per_block", "cut", "walkers", "columns"),
    [
        ("layer_norm_backward", 1000, 1, Cut.CTA, 5, 1),
        ("rms_norm_backward", 256, 4, Cut.WARP, 5, 1),
        ("rms_norm_backward", 769, 8, Cut.PACKED, 5, 4),  # sums of four warps, each at its place
        ("layer_norm_backward", 1001, 1, Cut.CTA, 32, 8),  # of rows that are late by 0 to 7
    ],
)
def test_the_sums_of_row_kernels_are_those_that_xla_adds_up(
    op, width, rows_per_block, cut, walkers, columns, monkeypatch
):
    wish = Tuning(width, rows_per_block, 1, 1, 2)
    p = LAUNCHES[op].plan(4000, width, BF16, tuning=wish)
    p = dataclasses.replace(p, ctas=walkers * p.parts)
    assert (p.cut, p.walkers) == (cut, walkers)
    given = np.random.default_rng(0).normal(size=(2, p.walkers, *sums_shape(p)))
    given = jnp.asarray(given, F32)
    seen = []

    def simulated(found, partials, *, name):
        seen.append((name, partials.shape))
        return add_up(found, partials, name=name, interpret=SIMULATED)

    monkeypatch.setattr(partial_sums, "add_up", simulated)
    totals = jax.jit(functools.partial(partial_sums.totals, p, name=op))(given)
    count = given[0].size // (columns * p.padded)
    assert seen == [(f"{op}_totals", (2, count, columns * p.padded))]
    for found, of_one in zip(totals, given, strict=True):
        np.testing.assert_allclose(found, column_sum(p, of_one), rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize(
    ("sums", "count", "width"),
    [(2, 3168, 256), (2, 924, 1024), (2, 132, 8192), (2, 15, 131072), (1, 20000, 128)],
)
def test_no_spills(sums, count, width, deviceless):
    p, target = plan_sums(sums, count, width), deviceless("h200")
    given = [jax.ShapeDtypeStruct((sums, count, width), F32)]
    program = aot.compile_program(lambda x: add_up(p, x, name="totals"), given, target).program
    (kernel,) = analyse(program).kernels
    found = kernel_resources(program, [kernel], limits_of(target.description))[kernel.name]
    assert found.spill_bytes == 0
    assert (found.threads, found.grid[0]) == (128 * p.warpgroups, p.sums * p.ctas)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1000, 1024])
def test_nothing_is_launched_besides(width, deviceless):
    """Results are not cut out of something longer."""
    launch = LAUNCHES["layer_norm_backward"]
    given = launch.arguments(2**16, width, BF16)
    program = aot.compile_program(launch.function, given, deviceless("h200")).program
    emitters = [kernel.emitter for kernel in analyse(program).kernels]
    assert emitters[-2:] == ["mosaic_gpu", "mosaic_gpu"]
    assert len(emitters) == 2 + (width == 1000)  # the scale is padded to whole pieces


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("count", [4, 7, 15, 33, 99, 132, 924, 3169])
def test_on_the_card(sums, count):
    for width in (8, 100, 256, 1000, 1024, 8192, 12288, 65536):
        p = plan_sums(sums, count, width)
        if p is not None and sums * count * width <= 2**26:
            given = partials(sums, count, width)
            run = jax.jit(lambda given, p=p: add_up(p, given, name="totals"))
            found = run(given)
            check(p, given, found)
            for one, again in zip(found, run(given), strict=True):
                np.testing.assert_array_equal(one, again)
