"""Softmax cross entropy and its gradient: simulated against float64, and lowered with no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import INTERPRET, assert_rounded, cross_entropy, f64, sampled, softmax

from pallas_kernels import cross_entropy as module
from pallas_kernels import formulas
from pallas_kernels.plan import Cut
from pallas_kernels.tuned import Tuning

pytestmark = pytest.mark.thorough

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

# A row per lane; in a CTA, as ranges of the flat array; in a CTA; over warpgroups.
CASES = [
    (3, 130, BF16),
    (6, 1, F32),
    (100, 5, F16),
    (256, 21, F32),
    (769, 3, BF16),
    (1024, 3, F32),
    (2560, 3, F16),
    (8192, 2, BF16),
]


def random(seed, shape, dtype, scale=3.0, mean=0.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale + mean, dtype)


def random_labels(seed, rows, width, dtype=jnp.int32):
    labels = np.random.default_rng(seed).integers(0, width, rows)
    labels[0], labels[-1] = width - 1, 0
    return jnp.asarray(labels, dtype)


def kernel(logits, labels):
    return module.softmax_cross_entropy(logits, labels, interpret=INTERPRET)


def check(logits, labels, losses, dlosses, dlogits):
    want_losses, want_gradient = cross_entropy(logits, labels, dlosses)
    assert losses.dtype == F32
    # to the size of the terms log(sum) and max - logits[label]
    spread = f64(logits).max(-1) - f64(logits).min(-1) + np.log(logits.shape[-1])
    assert (np.abs(f64(losses) - want_losses) <= 3e-7 * spread).all()
    assert dlogits.dtype == logits.dtype
    scale = np.abs(f64(dlosses))[:, None] * softmax(logits) * (1 + spread)[:, None]
    scale[np.arange(len(labels)), labels] += np.abs(f64(dlosses))
    # The simulation, as the card, has no subnormal numbers.
    if logits.dtype == F32:
        scale += float(jnp.finfo(F32).tiny) / 4e-7 * np.maximum(1, np.abs(f64(dlosses)))[:, None]
    assert_rounded(dlogits, want_gradient, scale=scale)


@pytest.mark.parametrize(("width", "rows", "dtype"), sampled(CASES))
def test_loss_and_gradient(width, rows, dtype):
    logits, labels = random(0, (rows, width), dtype), random_labels(1, rows, width)
    dlosses = random(2, (rows,), F32, 1.0)
    losses, pull = jax.vjp(lambda logits: kernel(logits, labels), logits)
    check(logits, labels, losses, dlosses, pull(dlosses)[0])
    if width == 256:  # the pass without a gradient
        assert (f64(kernel(logits, labels)) == f64(losses)).all()


@pytest.mark.parametrize(("scale", "mean"), [(20.0, 0.0), (0.05, 0.0), (1.0, 1000.0)])
def test_sizes_of_logits(scale, mean):
    logits, labels = random(0, (8, 256), F32, scale, mean), random_labels(1, 8, 256)
    dlosses = random(2, (8,), F32, 1.0)
    losses, pull = jax.vjp(lambda logits: kernel(logits, labels), logits)
    check(logits, labels, losses, dlosses, pull(dlosses)[0])
    # What the check is for: the log of the sum, rounded, must not pass it far from zero.
    if mean:
        total = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        with pytest.raises(AssertionError):
            check(logits, labels, total - picked, dlosses, pull(dlosses)[0])
        mine = jax.nn.one_hot(labels, 256)
        rough = (jnp.exp(logits - total[:, None]) - mine) * dlosses[:, None]
        with pytest.raises(AssertionError):
            check(logits, labels, losses, dlosses, rough)


def test_losses_that_are_nearly_zero():
    logits = jnp.zeros((4, 256), F32).at[:, 3].set(jnp.asarray([10.0, 14.0, 20.0, 200.0]))
    losses = f64(kernel(logits + 500, jnp.full(4, 3)))
    want, _ = cross_entropy(logits, np.full(4, 3), np.ones(4))
    np.testing.assert_allclose(losses, want, atol=2e-6)  # the sum of 1 and 255 of 5e-5
    assert (losses >= 0).all()


PER_WARP = Tuning(256, rows_per_block=4, warpgroups=1, ctas_per_sm=2, stages=2)


def run_per_warp(logits, labels, dlosses, interpret=None):
    options = {"interpret": interpret, "tuning": PER_WARP}
    losses, *saved = module.cross_entropy_kernel(logits, labels, saves=True, **options)
    dlogits = module.cross_entropy_backward_kernel(logits, labels, *saved, dlosses, **options)
    return losses, dlogits


def test_a_row_per_warp():
    logits, labels = random(0, (21, 256), F16), random_labels(1, 21, 256)
    dlosses = random(2, (21,), F32, 1.0)
    for p in (module.plan, module.plan_backward):
        assert p(21, 256, F16, tuning=PER_WARP).cut is Cut.WARP
    losses, dlogits = run_per_warp(logits, labels, dlosses, True)
    check(logits, labels, losses, dlosses, dlogits)
    assert lowered(run_per_warp, logits, labels, dlosses) == 2


def test_a_row_over_several_ctas():
    width = 16385
    logits, labels = random(0, (2, width), BF16), jnp.asarray([width - 1, 9000])
    tuning = Tuning(width, 1, 3, 1, 2, parts=2)
    assert module.plan(2, width, BF16, tuning=tuning).cluster
    assert not module.plan_backward(2, width, BF16).cluster
    assert module.plan_backward(2, width, BF16).parts > 1
    losses, maximum, total = module.cross_entropy_kernel(
        logits, labels, saves=True, interpret=INTERPRET, tuning=tuning
    )
    dlosses = jnp.asarray([1.0, -0.25])
    dlogits = module.cross_entropy_backward_kernel(
        logits, labels, maximum, total, dlosses, interpret=INTERPRET
    )
    check(logits, labels, losses, dlosses, dlogits)


@pytest.mark.parametrize("width", [6, 100])
def test_labels_out_of_range(width):
    logits = random(0, (6, width), F32)
    # also a column that padding has, and one that wraps to a right one
    labels = jnp.asarray([-1, width, 2**31 - 1, -width, width - 1, -100])
    losses, pull = jax.vjp(lambda logits: kernel(logits, labels), logits)
    np.testing.assert_array_equal(np.isnan(losses), [True, True, True, True, False, True])
    dlosses = jnp.asarray([1.0, 2.0, 1.0, 0.0, 1.0, 0.0])
    dlogits = f64(pull(dlosses)[0])
    for row in (0, 1, 2):
        want = softmax(logits)[row] * float(dlosses[row])
        np.testing.assert_allclose(dlogits[row], want, rtol=5e-6, atol=1e-30)
    assert (dlogits[[3, 5]] == 0).all()

    def dropped(logits):
        return jnp.where(labels >= 0, kernel(logits, labels), 0.0)[4:].sum()

    gradient = f64(jax.grad(dropped)(logits))
    assert np.isfinite(gradient).all()
    assert (gradient[5] == 0).all()
    assert (gradient[4] != 0).any()


@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_dtypes_of_labels(dtype):
    logits = random(0, (3, 256), F32)
    want = f64(kernel(logits, jnp.asarray([0, 5, 7])))
    with jax.enable_x64(True):
        labels = jnp.asarray([0, 5, 7], dtype)
        losses, pull = jax.vjp(kernel, logits, labels)
        assert losses.dtype == F32
        assert (f64(losses) == want).all()
        dlogits, dlabels = pull(losses)
        assert dlogits.dtype == F32
        assert dlabels.dtype == jax.dtypes.float0
        assert dlabels.shape == labels.shape
        if dtype == "uint64":  # not column 0, 5, 7
            assert np.isnan(kernel(logits, labels + 2**32)).all()


@pytest.mark.parametrize(
    "dtype", ["int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_labels_keep_their_value_or_stay_out_of_range(dtype):
    with jax.enable_x64(True):
        info = jnp.iinfo(dtype)
        given = [0, 5, int(info.min), int(info.max)]
        if info.bits == 64:
            given += [2**32, 2**32 + 5]
        found = formulas.as_int32(jnp.asarray(np.asarray(given, dtype)))
        assert found.dtype == jnp.int32
        for label, value in zip(given, found, strict=True):
            assert int(value) == label or not (0 <= label < 2**31 or 0 <= value < 2**31 - 1)


@pytest.mark.parametrize("width", [6, 256])
def test_rows_that_are_not_finite(width):
    x = np.random.default_rng(0).normal(size=(6, width))
    x[1], x[2, 3], x[3, 2], x[4, 1] = -np.inf, np.nan, np.inf, -np.inf
    x[5, 4:] = -np.inf
    x[5, :4] = [0, 1, 2, -np.inf]
    labels = jnp.asarray([0, 0, 0, 0, 1, 1])
    losses, pull = jax.vjp(lambda x: kernel(x, labels), jnp.asarray(x, F32))
    dlogits = f64(pull(jnp.ones(6))[0])
    assert np.isnan(losses[1:4]).all()
    assert np.isnan(dlogits[1:4]).all()
    assert np.isfinite(losses[0])
    assert losses[4] == np.inf
    np.testing.assert_allclose(losses[5], -np.log(0.2447285), rtol=1e-6)
    assert np.isfinite(dlogits[[0, 4, 5]]).all()
    want = [0.0900306, 0.2447285 - 1, 0.6652410, 0]
    np.testing.assert_allclose(dlogits[5, :4], want, atol=1e-7)


def test_leading_axes_and_layouts():
    logits, labels = random(0, (2, 3, 6), F16), random_labels(1, 6, 6).reshape(2, 3)
    flat, flat_labels = logits.reshape(6, 6), labels.reshape(6)
    losses, pull = jax.vjp(lambda logits: kernel(logits, labels), logits)
    dlogits = pull(jnp.ones((2, 3)))[0]
    assert losses.shape == (2, 3)
    assert (f64(losses).reshape(6) == f64(kernel(flat, flat_labels))).all()
    summed = jax.grad(lambda logits: kernel(logits, flat_labels).sum())(flat)
    assert (f64(dlogits).reshape(6, 6) == f64(summed)).all()
    assert kernel(logits[0, 0], labels[0, 0]) == losses[0, 0]
    turned = kernel(flat.T, flat_labels)
    assert (f64(turned) == f64(kernel(np.array(flat.T), np.asarray(flat_labels)))).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 3, 5)])
def test_empty_arrays(shape):
    logits, labels = jnp.zeros(shape, BF16), jnp.zeros(shape[:-1], jnp.int32)

    def both(logits, labels):
        losses, pull = jax.vjp(lambda x: module.softmax_cross_entropy(x, labels), logits)
        return losses, pull(losses)[0]

    for losses, dlogits in (both(logits, labels), jax.jit(both)(logits, labels)):
        assert losses.shape == shape[:-1]
        assert losses.dtype == F32
        assert np.isnan(losses).all()  # of rows, if any: no label is in range
        assert dlogits.shape == shape
        assert dlogits.dtype == BF16
    assert jax.vmap(module.softmax_cross_entropy)(logits, labels).shape == shape[:-1]


def test_transformations():
    logits, labels = random(0, (2, 3, 6), F32), random_labels(1, 6, 6).reshape(2, 3)

    def loss(logits, labels):
        return (kernel(logits, labels) * jnp.arange(3.0)).sum()

    flat = logits.reshape(6, 6), labels.reshape(6)
    losses, want = cross_entropy(*flat, np.tile(np.arange(3.0), 2))
    for grad in (
        jax.jit(jax.vmap(jax.grad(loss))),
        jax.grad(lambda logits, labels: jax.vmap(loss)(logits, labels).sum()),
    ):
        np.testing.assert_allclose(grad(logits, labels).reshape(6, 6), want, atol=1e-6)
    shared = jax.vmap(kernel, in_axes=(0, None))(logits, labels[0])
    np.testing.assert_allclose(shared[0], losses[:3], rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (((2, 64), F32), ((2,), F32), "labels must be integers, not float32"),
        (((2, 64), F32), ((2,), bool), "labels must be integers, not bool"),
        (((2, 64), F32), ((2, 1), np.int32), "must have the shape (2,)"),
        (((2, 64), F32), ((2, 64), np.int32), "must have the shape (2,)"),
        (((2, 64), np.int8), ((2,), np.int32), "dtype"),
        (((1, 262145), BF16), ((1,), np.int32), "at most 262144"),
        (((), F32), ((), np.int32), "at least one axis"),
    ],
)
def test_refusals(logits, labels, words):
    logits, labels = jnp.zeros(*logits), jnp.zeros(*labels)
    assert words in (reason := module.unsupported(logits, labels))
    assert reason.endswith(".")
    with pytest.raises(ValueError) as raised:
        module.softmax_cross_entropy(logits, labels)
    assert str(raised.value) == reason


def test_expected_bytes():
    assert module.expected_bytes(8, 100, BF16) == 8 * 100 * 2 + 8 * 8
    assert module.expected_bytes(8, 100, F32, saves=True) == 8 * 100 * 4 + 8 * 16
    assert module.expected_bytes_backward(8, 100, BF16) == 8 * 100 * 4 + 8 * 16


def lowered(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("mosaic_gpu_v2")


def gradient(logits, labels, dlosses):
    return jax.vjp(lambda x: module.softmax_cross_entropy(x, labels), logits)[1](dlosses)


def shapes(rows, width, dtype=BF16, labels=jnp.int32):
    rows = (rows,) if isinstance(rows, int) else rows
    return (
        jax.ShapeDtypeStruct((*rows, width), dtype),
        jax.ShapeDtypeStruct(rows, labels),
        jax.ShapeDtypeStruct(rows, F32),
    )


WIDTHS = [2, 769, 50257, 262144]


@pytest.mark.parametrize("width", WIDTHS)
def test_lowers_to_one_kernel_and_one_for_the_gradient(width):
    logits, labels, dlosses = shapes(300, width, F32 if width in (6, 769, 262144) else BF16)
    if width in (6, 100, 256, 50257):
        assert lowered(module.softmax_cross_entropy, logits, labels) == 1
    assert lowered(gradient, logits, labels, dlosses) == 2


@pytest.mark.parametrize("rows", [1, 3, 65537])
def test_any_row_count_lowers(rows):
    assert lowered(gradient, *shapes(rows, 384, F16)) == 2


def test_lowers_in_x64_mode_and_under_vmap():
    for width in (5, 100, 256, 8192):
        with jax.enable_x64(True):
            assert lowered(gradient, *shapes(64, width, labels=jnp.int64)) == 2
        assert lowered(jax.vmap(gradient), *shapes((3, 64), width)) == 2


def test_lowers_under_checkpoint():
    logits, labels, _ = shapes(64, 256, F32)
    again = jax.checkpoint(module.softmax_cross_entropy)
    assert lowered(jax.grad(lambda x, labels: (again(x, labels) ** 2).sum()), logits, labels) == 3


def test_exports():
    logits, labels, dlosses = shapes(8, 256)
    exported = jax.export.export(
        jax.jit(gradient),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(logits, labels, dlosses)
    assert exported.out_avals[0].shape == logits.shape
