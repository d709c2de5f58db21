"""Rows that are no multiple of 16 bytes: what a window shows of the rows beside must not matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import assert_columns_close, assert_rows_close, backward64, forward64
from references import (
    INTERPRET,
    assert_close,
    cross_entropy,
    f64,
    sampled,
    softmax,
    softmax_where,
)

from pallas_kernels import catalogue, norm_kernels, plan, registers
from pallas_kernels.cross_entropy import cross_entropy_kernel
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import Cut
from pallas_kernels.row_softmax import softmax_kernel
from pallas_kernels.tuned import Tuning

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LAUNCHES = catalogue.launches()
LATE_WIDTHS = [
    33, 34, 36, 63, 65, 100, 127, 249, 250, 257, 511, 513, 769, 1001, 1023, 1025, 2047, 2049, 4095,
    5001, 16383, 16385, 32767, 50257, 65535, 65537, 100001, 131071,
]  # fmt: skip


@pytest.fixture
def few_ctas(monkeypatch):
    """As many CTAs as latenesses, so that each takes several rows."""
    monkeypatch.setattr(plan, "SMS", 9)
    monkeypatch.setattr(plan, "SMS_OF_CLUSTERS", {1: 9, 2: 18, 4: 36, 8: 72})


def one_cta(width, warpgroups=1, parts=1):
    """One for each multiprocessor."""
    return Tuning(width, 1, warpgroups, ctas_per_sm=1, stages=2, parts=parts)


def windowed(launch, rows, width, dtype):
    """Its plan, or, where it has rows back to back, another that has a window for each."""
    p = launch.plan(rows, width, dtype)
    return launch.plan(rows, width, dtype, tuning=one_cta(width)) if p.cut is Cut.PACKED else p


def arrays(rows, width, dtype, count):
    rng = np.random.default_rng(width)
    return [jnp.asarray(rng.normal(size=(rows, width)) + 0.5, dtype) for _ in range(count)]


@pytest.mark.parametrize("op", LAUNCHES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_windows_hold_rows_however_late(op, dtype):
    launch, itemsize = LAUNCHES[op], jnp.dtype(dtype).itemsize
    for width in LATE_WIDTHS:
        if width * itemsize % 16 == 0 or (launch.reduces and width > 65536):
            continue
        p = windowed(launch, 1000, width, dtype)
        assert p.shifted
        lates = {p.late(row) for row in range(100)}
        assert len(lates) == p.period
        assert max(lates) + width <= p.window <= p.padded, p
        # Copies in end in the next row at most, with masks' 16 bytes more.
        assert p.window + 16 < min(lates) + 2 * width, p
        # Whoever has the last 16 bytes that every row has, has all that only some have.
        end = width // p.quantum * p.quantum
        assert (p.window - 1) // p.span == end // p.span, p


@pytest.mark.parametrize("op", [op for op, launch in LAUNCHES.items() if launch.parameters])
def test_all_rows_of_a_cta_are_equally_late_where_something_belongs_to_columns(op):
    for rows in (1, 7, 8, 9, 131, 1000, 65537):
        for width in LATE_WIDTHS:
            for dtype in (BF16, F32):
                p = windowed(LAUNCHES[op], rows, width, dtype)
                if p.cut is Cut.CTA:
                    walkers = p.ctas // p.parts
                    # If its next row is as late as its first, all are.
                    lates = [
                        {p.late(row) for row in range(cta, min(rows, 3 * walkers), walkers)}
                        for cta in range(walkers)
                    ]
                    assert all(len(found) == 1 for found in lates), p
                    assert p.steady


@pytest.mark.parametrize("ctas", [1, 5, 8, 13, 16, 40])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sums_of_rows_of_all_latenesses_are_added_column_by_column(ctas, dtype):
    p = LAUNCHES["layer_norm_backward"].plan(1000, 99, dtype, tuning=one_cta(99))
    p = dataclasses.replace(p, ctas=ctas * p.parts)
    rng = np.random.default_rng(ctas)
    of_cta = rng.normal(size=(ctas, p.width))
    partials = np.full((ctas, p.padded), np.nan)
    for cta in range(ctas):
        partials[cta, p.late(cta) : p.late(cta) + p.width] = of_cta[cta]
    given = jnp.asarray(partials.reshape(ctas, *registers.sums_shape(p)), F32)
    found = registers.column_sum(p, given)
    assert_close(found, of_cta.sum(0), ulps=16, floor=1.0)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "warpgroups", "parts"),
    sampled(
        [
            (3, 65, F16, 1, 1),
            (1, 33, BF16, 1, 1),
            (7, 37, F32, 1, 1),
            (19, 35, BF16, 1, 1),
            (20, 1001, BF16, 2, 1),
            (18, 1030, F16, 1, 2),
        ]
    ),
)
@pytest.mark.usefixtures("few_ctas")
def test_parameters_and_sums_keep_their_columns(rows, width, dtype, warpgroups, parts):
    x, dy = arrays(rows, width, dtype, 2)
    scale, bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, width)), F32)
    norm = Norm(centred=True)
    wish = one_cta(width, warpgroups, parts)
    p = norm_kernels.plan_forward(norm, rows, width, dtype, tuning=wish)
    assert (p.warpgroups, p.parts, p.shifted) == (warpgroups, parts, True)
    found = norm_kernels.forward_kernel(
        norm, x, None, scale, bias, saves=True, tuning=wish, interpret=INTERPRET
    )
    assert_rows_close(found.y, forward64(norm, x, scale, bias))
    back = norm_kernels.backward_kernel(
        norm,
        x,
        dy,
        None,
        found.statistics,
        scale,
        bias_dtype=F32,
        tuning=wish,
        interpret=INTERPRET,
    )
    dx, dscale, dbias = backward64(norm, x, dy, None, scale)
    assert_rows_close(back.dx, dx)
    assert_columns_close(back.dscale, dscale, rows)
    assert_columns_close(back.dbias, dbias, rows)


CUTS = [(35, BF16, 1, 1), (37, F32, 1, 1), (1001, F16, 2, 1), (1030, BF16, 1, 2)]


# Where it is simulated: each in the first cut, and each of the other cuts with one of them.
@pytest.mark.parametrize(
    ("op", "width", "dtype", "warpgroups", "parts"),
    [
        (op, *cut)
        for i, cut in enumerate(CUTS)
        for j, op in enumerate(("softmax", "cross_entropy", "residual_layer_norm"))
        if INTERPRET is None or i == 0 or (i + j) % 3 == 0
    ],
)
@pytest.mark.usefixtures("few_ctas")
def test_rows_of_nan_do_not_reach_the_rows_beside(op, width, dtype, warpgroups, parts):
    rows, options = 19, {"tuning": one_cta(width, warpgroups, parts), "interpret": INTERPRET}
    (x,) = arrays(rows, width, dtype, 1)
    bad = np.arange(rows) % 3 == 1
    x, clean = jnp.where(bad[:, None], jnp.nan, x), x[~bad]
    if op == "softmax":
        found = softmax_kernel(x, **options)
        assert_close(found[~bad], softmax(clean), ulps=8 if dtype == F32 else 0.51)
    elif op == "cross_entropy":
        labels = np.arange(rows) * 7 % width
        (found,) = cross_entropy_kernel(x, jnp.asarray(labels, jnp.int32), **options)
        want = cross_entropy(clean, labels[~bad], np.ones(len(clean)))[0]
        assert_close(found[~bad], want, ulps=8, floor=1.0)
    else:
        norm = Norm(centred=True, residual=True)
        found = norm_kernels.forward_kernel(norm, x, x, **options).y
        assert_rows_close(found[~bad], forward64(norm, clean + clean))
    assert np.isnan(f64(found[bad])).all()


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "warpgroups"),
    [(19, 35, BF16, 1), (2, 40, F16, 1), (10, 36, F32, 1), (19, 1003, BF16, 2), (9, 1032, F32, 2)],
)
@pytest.mark.usefixtures("few_ctas")
def test_masks_are_as_late_as_their_own_rows(rows, width, dtype, warpgroups):
    """Rows of bytes start elsewhere than rows of elements."""
    (x,) = arrays(rows, width, dtype, 1)
    mask = jnp.asarray(np.random.default_rng(2).random((rows, width)) < 0.5)
    y = softmax_kernel(x, mask, tuning=one_cta(width, warpgroups), interpret=INTERPRET)
    assert_close(y, softmax_where(x, mask), ulps=8 if dtype == F32 else 0.51)


@pytest.mark.parametrize(("rows", "width", "dtype"), [(8, 1003, BF16), (4, 1003, F32)])
def test_an_array_ends_at_a_multiple_of_16_bytes_before_the_window_does(rows, width, dtype):
    (x,) = arrays(rows, width, dtype, 1)
    p = LAUNCHES["softmax"].plan(rows, width, dtype, tuning=one_cta(width))
    assert p.late(rows - 1) + width < p.window
    assert rows * width % p.quantum == 0
    y = softmax_kernel(x, tuning=one_cta(width), interpret=INTERPRET)
    assert_close(y, softmax(x), ulps=8 if dtype == F32 else 0.51)


@pytest.mark.usefixtures("few_ctas")
def test_the_kernels_here_go_round():
    """One plan of the cases above, so that they keep taking several rows to a CTA."""
    p = norm_kernels.plan_forward(Norm(centred=True), 19, 35, BF16, tuning=one_cta(35))
    assert p.ctas == p.period == 8 < p.blocks


def test_few_rows_have_a_cta_each():
    launch = LAUNCHES["layer_norm"]
    assert [launch.plan(rows, 769, BF16).ctas for rows in (1, 3, 8, 13)] == [1, 3, 8, 13]
    assert jax.eval_shape(launch.function, *launch.arguments(13, 769, BF16)).y.shape == (13, 769)
