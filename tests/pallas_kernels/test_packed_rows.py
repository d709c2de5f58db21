"""Blocks of narrow rows that lie back to back: every row where it is, and the end of the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import (
    assert_columns_close,
    assert_rows_close,
    backward64,
    forward64,
    lowered,
)
from references import (
    INTERPRET,
    assert_close,
    cross_entropy,
    f64,
    gelu,
    softmax,
    softmax_where,
)

from pallas_kernels import catalogue, column_sums, norm_kernels, plan, registers, row_softmax
from pallas_kernels.cross_entropy import cross_entropy_kernel
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import COPY_BYTES, LANES, WARP, WARPS, Cut
from pallas_kernels.tuned import Tuning

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LAUNCHES = catalogue.launches()
WIDTHS = [*range(33, 300), 511, 513, 769, 770, 771, 772, 1000, 1001, 1004, 1025, 1300, 1500]


def wish(width, rows_per_block=8, run=0):
    return Tuning(width, rows_per_block, warpgroups=1, ctas_per_sm=1, stages=2, run=run)


@pytest.fixture
def few_ctas(monkeypatch):
    """So few that each takes several blocks."""
    monkeypatch.setattr(plan, "SMS", 2)


def arrays(rows, width, dtype, count):
    rng = np.random.default_rng(width)
    return [jnp.asarray(rng.normal(size=(rows, width)) + 0.5, dtype) for _ in range(count)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_row_has_its_place(masked, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    for width in WIDTHS:
        p = row_softmax.plan(4096, width, dtype, masked=masked, tuning=wish(width, 4))
        if width % 64 == 0:
            assert p.cut is Cut.WARP
            continue
        assert (p.cut, p.turns * WARPS) == (Cut.PACKED, p.rows_per_block)
        for size in (itemsize, 1) if masked else (itemsize,):
            assert p.rows_per_block * p.width * size % COPY_BYTES == 0, p
            assert p.slot * size % LANES == 0, p  # where copies with a tensor map may begin
        assert p.slot >= p.rows_per_block * width, p
        # A warp's rows are equally late, and what it loads of each begins at a whole vector.
        lates = [p.late_in_warp(warp) for warp in range(WARPS)]
        starts = np.arange(p.rows_per_block).reshape(-1, WARPS) * width
        assert ((starts - lates) % p.vector == 0).all(), p
        assert max(lates) == p.most_late_in_warp, p
        assert max(lates) + width <= p.span == p.groups * WARP * p.vector, p
        assert p.vector * itemsize <= COPY_BYTES, p


def test_what_asks_for_rows_back_to_back():
    assert row_softmax.plan(64, 769, BF16, tuning=wish(769, 4)).rows_per_block == 8
    assert row_softmax.plan(64, 770, BF16, tuning=wish(770, 4)).rows_per_block == 4
    assert row_softmax.plan(64, 769, F32, tuning=wish(769, 2)).rows_per_block == 4
    assert row_softmax.plan(64, 769, BF16, masked=True, tuning=wish(769)).rows_per_block == 16
    assert row_softmax.plan(64, 769, BF16, tuning=wish(769, 1)).cut is Cut.CTA
    assert row_softmax.plan(7, 769, BF16, tuning=wish(769)).cut is Cut.CTA  # fewer than a block
    assert row_softmax.plan(4096, 8191, BF16, tuning=wish(8191)).cut is Cut.CTA  # no room for two
    assert plan.default_tuning(769, 2, 1).rows_per_block > 1
    assert plan.default_tuning(768, 2, 1).rows_per_block == 1


@pytest.mark.parametrize(("width", "dtype"), [(35, BF16), (37, F32), (769, BF16)])
def test_sums_of_warps_are_added_column_by_column(width, dtype):
    p = LAUNCHES["layer_norm_backward"].plan(4096, width, dtype, tuning=wish(width))
    rng = np.random.default_rng(width)
    of_warp = rng.normal(size=(5, WARPS, width))
    partials = np.full((5, WARPS, p.span), np.nan)
    for warp in range(WARPS):
        late = p.late_in_warp(warp)
        partials[:, warp, late : late + width] = of_warp[:, warp]
    found = registers.column_sum(p, jnp.asarray(partials.reshape(5, *registers.sums_shape(p)), F32))
    assert_close(found, of_warp.sum((0, 1)), ulps=16, floor=1.0)


# Rows: whole blocks, and with one row, or seven, too many. What is beside a row is NaN where this
# is simulated.
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "run"), [(33, 35, BF16, 0), (55, 42, F16, 2), (16, 769, BF16, 1)]
)
@pytest.mark.usefixtures("few_ctas")
def test_softmax(rows, width, dtype, run):
    options = {"tuning": wish(width, run=run), "interpret": INTERPRET}
    p = row_softmax.plan(rows, width, dtype, tuning=options["tuning"])
    assert (p.cut, p.run) == (Cut.PACKED, run)
    (x,) = arrays(rows, width, dtype, 1)
    assert_close(row_softmax.softmax_kernel(x, **options), softmax(x), ulps=0.51)


@pytest.mark.usefixtures("few_ctas")
def test_masks():
    (x,) = arrays(37, 35, BF16, 1)
    mask = jnp.asarray(np.random.default_rng(2).random(x.shape) < 0.5)
    y = row_softmax.softmax_kernel(x, mask, tuning=wish(35), interpret=INTERPRET)
    assert_close(y, softmax_where(x, mask), ulps=0.51)


@pytest.mark.parametrize(("rows", "width", "dtype"), [(23, 37, BF16), (13, 101, F32)])
@pytest.mark.usefixtures("few_ctas")
def test_parameters_row_values_and_sums(rows, width, dtype):
    x, dy = arrays(rows, width, dtype, 2)
    scale, bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, width)), F32)
    norm, options = Norm(centred=True), {"tuning": wish(width), "interpret": INTERPRET}
    found = norm_kernels.forward_kernel(norm, x, None, scale, bias, saves=True, **options)
    assert_rows_close(found.y, forward64(norm, x, scale, bias))
    given = (norm, x, dy, None, found.statistics, scale)
    back = norm_kernels.backward_kernel(*given, bias_dtype=F32, **options)
    dx, dscale, dbias = backward64(norm, x, dy, None, scale)
    assert_rows_close(back.dx, dx)
    assert_columns_close(back.dscale, dscale, rows)
    assert_columns_close(back.dbias, dbias, rows)


@pytest.mark.usefixtures("few_ctas")
def test_missing_rows_are_in_no_sum():
    """Their GELU is that of the bias, and not 0."""
    (x,) = arrays(17, 33, BF16, 1)
    bias = jnp.linspace(-1.0, 1.0, 33, dtype=F32)
    options = {"tuning": wish(33), "interpret": INTERPRET}
    y, sums = column_sums.bias_gelu_colsum_kernel(x, bias, **options)
    want = gelu(f64(x) + f64(bias), True)
    assert_close(y, want, ulps=0.51)
    assert_columns_close(sums, want.sum(0), 17)


@pytest.mark.usefixtures("few_ctas")
def test_cross_entropy():
    (x,) = arrays(21, 50, F16, 1)
    labels = np.arange(21) * 7 % 50
    options = {"tuning": wish(50), "interpret": INTERPRET}
    (found,) = cross_entropy_kernel(x, jnp.asarray(labels, jnp.int32), **options)
    assert_close(found, cross_entropy(x, labels, np.ones(21))[0], ulps=8, floor=1.0)


@pytest.mark.usefixtures("few_ctas")
def test_rows_of_nan_do_not_reach_the_rows_beside():
    rows, bad = 19, np.arange(19) % 3 == 1
    (x,) = arrays(rows, 35, BF16, 1)
    x, clean = jnp.where(bad[:, None], jnp.nan, x), x[~bad]
    found = row_softmax.softmax_kernel(x, tuning=wish(35), interpret=INTERPRET)
    assert_close(found[~bad], softmax(clean), ulps=0.51)
    assert np.isnan(f64(found[bad])).all()


# Every launch with rows to the end of a block, or not, in a vector of one, two or four elements.
CASES = [(769, 87267, BF16), (33, 41, F16), (100, 64, F32), (1001, 4001, BF16)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "width", "rows", "dtype"),
    [(op, *CASES[number % len(CASES)]) for number, op in enumerate(LAUNCHES)],
)
def test_lowers(op, width, rows, dtype):
    launch = LAUNCHES[op]
    assert launch.plan(rows, width, dtype, tuning=wish(width)).cut is Cut.PACKED

    def run(*given):
        return launch.function(*given, tuning=wish(width))

    assert lowered(run, *launch.arguments(rows, width, dtype)) == 1


@pytest.mark.thorough
def test_masks_lower():
    x = jax.ShapeDtypeStruct((41, 99), BF16)
    mask = jax.ShapeDtypeStruct((41, 99), bool)
    assert lowered(lambda *given: row_softmax.softmax_kernel(*given, tuning=wish(99)), x, mask) == 1
