"""CTAs that take a run of neighbouring blocks and end: every row, also of a short last run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import catalogue, cross_entropy, gelu, norm_kernels, plan, row_softmax, tuned
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import Cut
from pallas_kernels.tuned import Tuning
from tests.pallas_kernels import references
from tests.pallas_kernels.references import INTERPRET

BF16 = jnp.bfloat16
LAUNCHES = catalogue.launches()


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), BF16)


def close(found, wanted):
    wanted = np.asarray(wanted, np.float64)
    error = np.abs(np.asarray(found, np.float64) - wanted)
    assert (error <= 2.0**-8 * np.abs(wanted) + 2e-3 * np.abs(wanted).max()).all(), error.max()


@pytest.mark.parametrize(
    ("rows", "width", "run", "stages", "rows_per_block", "parts", "cut"),
    [
        (11, 256, 3, 2, 1, 1, Cut.CTA),
        (22, 256, 2, 2, 4, 1, Cut.WARP),
        (5, 512, 4, 3, 1, 2, Cut.CTA),
    ],
)
def test_softmax(rows, width, run, stages, rows_per_block, parts, cut):
    wish = Tuning(width, rows_per_block, 1, 1, stages, parts, run)
    p = row_softmax.plan(rows, width, BF16, tuning=wish)
    assert (p.run, p.cut, p.parts, p.cluster) == (run, cut, parts, parts > 1)
    assert p.walkers == -(-p.blocks // run)
    x = random(rows, width)
    close(
        row_softmax.softmax_kernel(x, tuning=wish, interpret=INTERPRET),
        references.softmax(x),
    )


def test_parameters_row_values_and_parts():
    wish = Tuning(256, 1, 1, 1, 2, 1, run=3)
    x, residual = random(7, 256), random(7, 256, seed=1)
    scale, bias = jnp.asarray(np.random.default_rng(2).normal(size=(2, 256)), jnp.float32)
    norm = Norm(centred=True, residual=True)
    assert norm_kernels.plan_forward(norm, 7, 256, BF16, tuning=wish).run == 3
    y = norm_kernels.forward_kernel(
        norm, x, residual, scale, bias, tuning=wish, interpret=INTERPRET
    ).y
    close(y, references.layer_norm(x + residual, scale, bias))
    loss = cross_entropy.cross_entropy_kernel(
        x, jnp.arange(7, dtype=jnp.int32), tuning=wish, interpret=INTERPRET
    )[0]
    wide = np.asarray(x, np.float64)
    close(loss, np.log(np.exp(wide).sum(-1)) - wide[np.arange(7), np.arange(7)])
    wide_x, wide_bias = random(5, 4096, seed=3), random(4096, seed=4)
    assert gelu.plan(5, 4096, BF16, row_sums=False, tuning=wish).parts > 1
    y = gelu.bias_gelu_kernel(wide_x, wide_bias, tuning=wish, interpret=INTERPRET)
    close(y, references.gelu(references.f64(wide_x) + references.f64(wide_bias), True))


@pytest.mark.parametrize("op", LAUNCHES)
def test_who_has_runs(op):
    wish = Tuning(1024, 1, 1, 4, 2, 1, run=4)
    sums = op.endswith("_backward") and "norm" in op
    for width in (1024, 4096, 1001):
        p = LAUNCHES[op].plan(1000, width, BF16, tuning=wish)
        summed = p.shifted or sums or op in ("bias_gelu_backward", "bias_gelu_rowsum_backward",
                                             "bias_gelu_colsum", "scale_sums")  # fmt: skip
        assert p.run == (0 if summed else 4)
        assert p.walkers == (250 if p.run else min(p.walkers, 1000))
    assert LAUNCHES[op].plan(1000, 16, BF16, tuning=wish).run == 0


def test_measured_runs_are_for_many_rows(monkeypatch):
    monkeypatch.setattr(tuned, "lookup", lambda *_: Tuning(1024, 1, 1, 4, 2, 1, run=4))
    least = plan.TURNS * 4 * plan.SMS
    assert row_softmax.plan(least, 1024, BF16).run == 4
    few = row_softmax.plan(least - 1, 1024, BF16)
    assert (few.run, few.ctas) == (0, 4 * plan.SMS)


def measured_runs():
    return [
        (op, choice.width, dtype)
        for op in LAUNCHES
        for dtype in ("bfloat16", "float32")
        for choice in tuned.choices(op, jnp.dtype(dtype).itemsize, tuned.USUAL_CARD)
        if choice.run
    ]


def many_rows(wish):
    return max(1, wish.rows_per_block) * plan.TURNS * wish.run * plan.SMS + 5


def measured(op, width, dtype):
    choices = tuned.choices(op, jnp.dtype(dtype).itemsize, tuned.USUAL_CARD)
    (wish,) = (choice for choice in choices if choice.width == width)
    return wish


@pytest.mark.parametrize(("op", "width", "dtype"), measured_runs())
def test_measured_runs_are_taken(op, width, dtype):
    wish = measured(op, width, dtype)
    assert LAUNCHES[op].plan(many_rows(wish), width, dtype, tuning=wish).run == wish.run


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "width", "dtype"), measured_runs())
def test_the_same_bits_as_by_ctas_that_stay(op, width, dtype):
    launch, wish = LAUNCHES[op], measured(op, width, dtype)
    rows = many_rows(wish)
    used = launch.plan(rows, width, dtype, tuning=wish)
    if tuned.lookup(op, width, jnp.dtype(dtype).itemsize) == wish:  # on the card that it is for
        assert launch.plan(rows, width, dtype) == used
    keys = jax.random.split(jax.random.key(width), 9)
    values = [
        jax.random.randint(key, shape.shape, 0, width, shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.integer)
        else jax.random.uniform(key, shape.shape, shape.dtype, 0.5, 1.5)
        for key, shape in zip(keys, launch.arguments(rows, width, dtype), strict=False)
    ]
    stays = dataclasses.replace(wish, run=0)
    found = jax.jit(lambda *given: launch.function(*given, tuning=wish))(*values)
    wanted = jax.jit(lambda *given: launch.function(*given, tuning=stays))(*values)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert bool(jnp.array_equal(one, other))
