"""Every implementation against float64, forward and backward, on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_references import CASES, f64, jit, softmax

import fusejax

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
IMPLEMENTATIONS = (None, "xla", "split")


def calls(name, implementations=IMPLEMENTATIONS):
    """A function of arrays for each implementation."""
    public, options = getattr(fusejax, name), CASES[name].options
    return [functools.partial(public, implementation=asked, **options) for asked in implementations]


def values_and_gradients(name, arguments, implementations):
    """Per implementation the results, the cotangents and the gradients, from one program."""
    inexact = CASES[name].inexact()

    def of_inexact(function, arrays, *some):
        given = dict(zip(inexact, some, strict=True))
        return function(*(given.get(i, array) for i, array in enumerate(arrays)))

    @jit
    def run(*arrays):
        found = []
        for function in calls(name, implementations):
            results, pull = jax.vjp(
                functools.partial(of_inexact, function, arrays), *(arrays[i] for i in inexact)
            )
            cotangents = jax.tree.map(lambda y: jnp.cos(7 * y.astype(F32)).astype(y.dtype), results)
            found.append((results, cotangents, pull(cotangents)))
        return found

    return run(*arguments)


def assert_close(got, want, dtype, size=None):
    """Within a rounding to dtype, and some f32 ones of the size of what it is made of."""
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    size = np.abs(want).max() if size is None else size
    assert got.dtype == dtype
    assert got.shape == want.shape
    np.testing.assert_array_less(np.abs(f64(got) - want), eps * (0.6 * np.abs(want) + size) + 1e-30)


# Some of each file of kernels, where what is common to all is in question.
SOME = ("prenorm_layer_norm", "bias_gelu_rowsum", "softmax", "softmax_cross_entropy", "geglu")
VALUES = [
    *((name, F16 if name in SOME else BF16, (2, 3, 31), (None,)) for name in CASES),
    *((name, F32, (4, 33), IMPLEMENTATIONS) for name in CASES if "residual" not in name),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "implementations"), VALUES)
def test_values_and_gradients_are_those_of_float64(name, dtype, shape, implementations):
    case = CASES[name]
    arguments = case.arguments(np.random.default_rng(7), shape, dtype, F16)
    wanted = case.exact(arguments)
    for results, cotangents, gradients in values_and_gradients(name, arguments, implementations):
        results, cotangents = jax.tree.leaves(results), jax.tree.leaves(cotangents)
        dtypes = [dtype, F32] if name == "bias_gelu_rowsum" else [dtype] * 2
        dtypes = [F32] if name == "softmax_cross_entropy" else dtypes
        for got, want, of in zip(results, wanted, dtypes, strict=False):
            assert_close(got, want, of, size=0.05 * np.abs(want).max() if of != F32 else None)
            with pytest.raises(AssertionError):
                assert_close(got, want * (1 + 4 * float(jnp.finfo(of).eps) + 1e-5), of)
        assert len(results) == len(wanted)
        exact = case.gradients(arguments, [f64(c) for c in cotangents])
        inexact = [arguments[i] for i in case.inexact()]
        for got, want, argument in zip(gradients, exact, inexact, strict=True):
            assert_close(got, want, argument.dtype)


@pytest.mark.parametrize("name", SOME)
def test_float64_is_computed_in_float64(name):
    case = CASES[name]
    with jax.enable_x64(True):
        arguments = case.arguments(np.random.default_rng(3), (3, 10), jnp.float64, jnp.float64)
        chosen = fusejax.explain_choice(name, *arguments, platform="cuda", **case.options)
        assert (chosen.implementation, "float64" in chosen.reason) == ("xla", True)
        found = jit(lambda *arrays: [call(*arrays) for call in calls(name, (None, "split"))])
        for results in found(*arguments):
            for got, want in zip(jax.tree.leaves(results), case.exact(arguments), strict=True):
                assert got.dtype == np.float64
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["residual_rms_norm", "swiglu", "bias_gelu"])
def test_dtypes_that_kernels_do_not_mix_are_mixed(name):
    case = CASES[name]
    first, *rest = case.arguments(np.random.default_rng(5), (3, 8), F32)
    arguments = [first.astype(BF16), *rest[:-1], rest[-1].astype(jnp.float8_e4m3fn)]
    assert fusejax.explain_choice(name, *arguments, platform="cuda").implementation == "xla"
    got = jax.tree.leaves(getattr(fusejax, name)(*arguments, **case.options))[0]
    assert_close(got, case.exact(arguments)[0], BF16)


def test_masked_softmax_and_its_gradient_do_not_look_at_what_is_excluded():
    x = jnp.asarray([[0.0, 1.0, jnp.nan, 2.0], [1.0, -jnp.inf, jnp.inf, 3.0]])
    where = jnp.asarray([[True, True, False, True], [False] * 4])
    dy = jnp.asarray([[1.0, -2.0, jnp.nan, 0.5]] * 2)

    @jit
    def run(x, where, dy):
        found = []
        for asked in (*IMPLEMENTATIONS, ("pallas", "split")):
            y, pull = jax.vjp(
                lambda x, a=asked: fusejax.softmax(x, where=where, implementation=a), x
            )
            found.append((y, *pull(dy)))
        return found

    kept = np.array([0.0, 1.0, 2.0])
    want = softmax(kept)
    slope = want * (np.array([1, -2, 0.5]) - (want * [1, -2, 0.5]).sum())
    for y, dx in run(x, where, dy):
        np.testing.assert_allclose(y, [[want[0], want[1], 0, want[2]], [0] * 4], rtol=1e-6)
        np.testing.assert_allclose(dx, [[slope[0], slope[1], 0, slope[2]], [0] * 4], rtol=2e-6)


def test_numeric_cases():
    """Values to which the usual formulas do not come, and those by definition."""
    inf, nan = jnp.inf, jnp.nan
    offset = 1000 + jnp.arange(1024.0) % 7 - 3
    rows = jnp.asarray([[-inf] * 3, [0, 1, inf], [0, 1, nan], [0, 1, -inf]])

    @jit
    def run(x, rows, tail, ends):
        found = []
        for asked in IMPLEMENTATIONS:
            more = {"implementation": asked}
            gelu = lambda x, more=more: fusejax.bias_gelu(x, jnp.zeros(2), **more)
            rms = lambda x, more=more: fusejax.rms_norm(x, **more)
            found.append(
                (
                    fusejax.layer_norm(x, **more),
                    fusejax.layer_norm(jnp.full(9, 7.0), **more),
                    fusejax.softmax(rows, **more),
                    gelu(tail),
                    (gelu(ends), jax.grad(lambda x, gelu=gelu: gelu(x).sum())(ends)),
                    rms(jnp.full(8, 1e-3)),
                    jax.grad(lambda x, rms=rms: rms(x)[0])(jnp.zeros(8)),
                )
            )
        return found

    given = offset, rows, jnp.asarray([-3, -4], BF16), jnp.asarray([60, -60], F16)
    for y, constant, e, tail, ends, rms, slope in run(*given):
        want = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]
        np.testing.assert_allclose(y[:7], want, atol=1e-5)
        assert not constant.any()
        assert np.isnan(e[:3]).all()
        np.testing.assert_allclose(e[3], [0.26894143, 0.73105854, 0], rtol=1e-6)
        np.testing.assert_allclose(f64(tail), [-0.0036374, -7.0246e-5], rtol=2**-8)
        assert jax.tree.map(list, ends) == ([60, 0], [1, 0])
        np.testing.assert_allclose(rms, 0.70710678, rtol=1e-6)
        np.testing.assert_allclose(slope[0], 1000, rtol=1e-6)


@pytest.mark.parametrize("asked", IMPLEMENTATIONS)
def test_two_outputs_and_the_rounded_sum(asked):
    x, r = jnp.asarray([1.0, 2, 3, 4]), jnp.asarray([0.5, -0.5, 0.5, -0.5])
    ones, zeros = jnp.ones(4), jnp.zeros(4)

    @jit
    def run(x, r, cotangents):
        (y, s), pull = jax.vjp(
            lambda x, r: fusejax.prenorm_rms_norm(x, r, ones, implementation=asked), x, r
        )
        return y, s, jax.vmap(pull)(cotangents)

    first = jnp.asarray([1.0, 0, 0, 0])
    dy, ds = jnp.stack([ones, zeros, ones, first]), jnp.stack([zeros, ones, ones, zeros])
    y, s, (dx, dr) = run(x, r, (dy, ds))
    np.testing.assert_allclose(s, [1.5, 1.5, 3.5, 3.5])
    np.testing.assert_allclose(y, [0.557086, 0.557086, 1.299867, 1.299867], atol=1e-6)
    one = np.array([0.179292, 0.179292, -0.076839, -0.076839])
    want = [one, np.ones(4), one + 1, [0.342576, -0.028815, -0.067235, -0.067235]]
    np.testing.assert_allclose(dx, want, atol=1e-6)
    np.testing.assert_array_equal(dx, dr)

    @jit
    def of_rounded(x, r):
        return (
            *fusejax.prenorm_rms_norm(x, r, implementation=asked),
            fusejax.residual_rms_norm(x, r, implementation=asked),
        )

    y, s, alone = of_rounded(jnp.asarray([256, 1], BF16), jnp.asarray([1, 1], BF16))
    assert list(s) == [256, 2]
    np.testing.assert_allclose(f64(y), [1.4141704, 0.01104821], rtol=2**-8)
    np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, (0, 8)) for name in CASES), *((name, (3, 0)) for name in SOME)]
)
def test_nothing_gives_nothing(name, shape):
    case = CASES[name]
    of = {"a": jnp.zeros(shape), "w": jnp.ones(shape[1:]), "i": jnp.zeros(shape[:1], jnp.int32)}
    arguments = [of[letter] for letter in case.shapes]

    @jit
    def run(*arrays):
        found = []
        for function in calls(name, (None,)):
            total = lambda *a, f=function: sum(v.sum() for v in jax.tree.leaves(f(*a)))
            found.append((function(*arrays), jax.grad(total, case.inexact())(*arrays)))
        return found

    for results, gradients in run(*arguments):
        first = jax.tree.leaves(results)[0]
        assert first.shape == (shape[:1] if "i" in case.shapes else shape)
        for gradient, i in zip(gradients, case.inexact(), strict=True):
            np.testing.assert_array_equal(gradient, jnp.zeros_like(arguments[i]))


@pytest.mark.parametrize("asked", ["xla", "split"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_a_sum_of_two_dtypes_is_rounded_to_its_subnormals(asked, dtype):
    step = float(jnp.finfo(dtype).smallest_subnormal)
    x = jnp.zeros((1, 4), dtype)
    residual = jnp.asarray([[0.2, 0.6, 1.4, -2.7]], jnp.float32) * step
    y, h = jax.jit(lambda x, r: fusejax.prenorm_rms_norm(x, r, epsilon=0.0, implementation=asked))(
        x, residual
    )
    np.testing.assert_array_equal(np.asarray(h, float), [[0, step, step, -3 * step]])
    wanted = np.array([[0, 1, 1, -3]]) / np.sqrt(11 / 4)
    np.testing.assert_allclose(np.asarray(y, float), wanted, rtol=float(jnp.finfo(dtype).eps))
    slope = jax.grad(lambda r: fusejax.prenorm_rms_norm(x, r, epsilon=1e-3)[1].sum().astype(float))
    np.testing.assert_array_equal(slope(residual), np.ones((1, 4)))


def test_numpy_labels_beyond_32_bits_do_not_come_round():
    labels = np.array([2**32, 2**32 + 1, -(2**32), 1], np.int64)
    loss = fusejax.softmax_cross_entropy(jnp.ones((4, 8)), labels)
    np.testing.assert_allclose(loss, [np.nan, np.nan, np.nan, np.log(8)], rtol=1e-6)


@pytest.mark.parametrize("value", [np.array([["a"]]), np.array([[None]]), np.zeros(2, "M8[s]")])
def test_arrays_of_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match="x must be an array of numbers, not of"):
        fusejax.softmax(value)
    with pytest.raises(ValueError, match="epsilon must be a finite number"):
        fusejax.layer_norm(jnp.ones((2, 4)), epsilon=10**400)
