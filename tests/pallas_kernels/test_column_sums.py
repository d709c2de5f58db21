import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import INTERPRET, assert_rounded, f64, gelu, row_kernels, sampled

from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.resources import kernel_resources, limits_of, mosaic, ptxas
from pallas_kernels import column_sums
from pallas_kernels.column_sums import bias_gelu_colsum, scale_sums
from pallas_kernels.plan import Cut

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Rows, width, dtype, dtype of the parameter, how the rows of `scale_sums` are cut.
CASES = [
    (131, 3, BF16, F32, Cut.LANE),  # two blocks, the second not full
    (5, 31, F16, BF16, Cut.LANE),
    (21, 256, BF16, F32, Cut.WARP),
    (3, 100, F32, F32, Cut.CTA),
    (7, 769, F16, F32, Cut.CTA),
    (3, 2560, F32, BF16, Cut.CTA),
    (2, 16385, BF16, F32, Cut.CTA),
]


def arguments(rows, width, dtype, parameter_dtype, seed=0):
    rng = np.random.default_rng((seed, rows, width))
    x = jnp.asarray(rng.normal(size=(rows, width)) * 1.5 + 0.25, dtype)
    return x, jnp.asarray(rng.normal(size=width), parameter_dtype)


def assert_sums(got, terms, axis):
    """`got` is the sum of float64 `terms`, accurate in f32."""
    want = terms.sum(axis)
    assert got.dtype == F32
    assert got.shape == want.shape
    error = np.abs(f64(got) - want) / (1e-6 * np.abs(terms).sum(axis) + 1e-30)
    assert error.max() <= 1, f"{error.max():.4g} of what f32 may cost"


def check_gelu(x, bias, found, *, approximate=True):
    y, sums = found
    z = f64(x) + f64(bias)
    want = gelu(z, approximate)
    assert y.dtype == x.dtype
    assert_rounded(y, want, scale=z, slack=4e-7 if y.dtype == F32 else 2e-6)
    assert_sums(sums, want, 0)


def check_scale(x, scale, found):
    of_rows, of_columns = found
    h = f64(x) * f64(scale)
    assert_sums(of_rows, h, 1)
    assert_sums(of_columns, h, 0)


@pytest.mark.parametrize(("rows", "width", "dtype", "parameter_dtype", "cut"), sampled(CASES))
def test_both(rows, width, dtype, parameter_dtype, cut):
    x, parameter = arguments(rows, width, dtype, parameter_dtype)
    assert column_sums.plan_scale_sums(rows, width, dtype).cut is cut
    approximate = width % 2 == 0
    run = jax.jit(functools.partial(bias_gelu_colsum, approximate=approximate, interpret=INTERPRET))
    check_gelu(x, parameter, run(x, parameter), approximate=approximate)
    run = jax.jit(functools.partial(scale_sums, interpret=INTERPRET))
    check_scale(x, parameter, run(x, parameter))


def test_the_checks_tell_wrong_from_right():
    x, bias = arguments(21, 256, BF16, F32)
    y, sums = bias_gelu_colsum(x, bias, interpret=INTERPRET)
    check_gelu(x, bias, (y, sums))
    with pytest.raises(AssertionError, match="of what f32 may cost"):
        assert_sums(sums, f64(y), 0)  # of what was stored
    with pytest.raises(AssertionError, match="of one rounding"):
        check_gelu(x, bias, (y, sums), approximate=False)
    of_rows, of_columns = scale_sums(x, bias, interpret=INTERPRET)
    check_scale(x, bias, (of_rows, of_columns))
    for wrong in (f64((x * bias.astype(BF16)).astype(BF16)), f64(x), f64(x)[:-1]):
        with pytest.raises(AssertionError, match="of what f32 may cost"):
            assert_sums(of_columns, wrong, 0)
    with pytest.raises(AssertionError, match="of what f32 may cost"):
        assert_sums(of_rows, f64(x[:, :-1]) * f64(bias[:-1]), 1)


def test_leading_axes_and_empty_arrays():
    x, parameter = arguments(6, 64, BF16, F32)
    rows, columns = scale_sums(x.reshape(2, 3, 64), parameter, interpret=INTERPRET)
    assert rows.shape == (2, 3)
    check_scale(x, parameter, (rows.reshape(6), columns))
    y, sums = bias_gelu_colsum(x.reshape(2, 3, 64), parameter, interpret=INTERPRET)
    assert y.shape == (2, 3, 64)
    check_gelu(x, parameter, (y.reshape(6, 64), sums))
    rows, columns = scale_sums(x[:0], parameter)
    assert (rows.shape, columns.shape) == ((0,), (64,))
    y, sums = bias_gelu_colsum(x[:0], parameter)
    assert (y.shape, sums.shape) == ((0, 64), (64,))
    assert not columns.any()
    assert not sums.any()


def test_vmap():
    x, parameter = arguments(6, 64, BF16, F32)
    examples = x.reshape(2, 3, 64)
    function = functools.partial(scale_sums, interpret=INTERPRET)
    rows, columns = jax.jit(jax.vmap(function, in_axes=(0, None)))(examples, parameter)
    for one in range(2):
        check_scale(examples[one], parameter, (rows[one], columns[one]))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("function", [bias_gelu_colsum, scale_sums])
def test_differentiation_is_refused(function, transform):
    x, parameter = arguments(2, 64, F32, F32)
    with pytest.raises(TypeError, match=f"{function.__name__} has no gradient"):
        transform(lambda parameter: function(x, parameter)[1].sum())(parameter)


def test_refusals():
    shape = jax.ShapeDtypeStruct
    wide = shape((2, 2**20), BF16), shape((2**20,), BF16)
    assert column_sums.unsupported_bias_gelu_colsum(*wide) is None
    assert "The last axis may be at most" in column_sums.unsupported_scale_sums(*wide)
    for x, parameter, words in (
        (shape((2, 8), jnp.int32), shape((8,), F32), "not int32"),
        (shape((2, 8), F32), shape((9,), F32), "must have the shape (8,)"),
        (shape((), F32), shape((1,), F32), "at least one axis"),
    ):
        assert words in column_sums.unsupported_bias_gelu_colsum(x, parameter)
        assert words in column_sums.unsupported_scale_sums(x, parameter)
    with pytest.raises(ValueError, match="scale must have the shape"):
        scale_sums(jnp.zeros((2, 8)), jnp.zeros(9))


def test_expected_bytes():
    assert column_sums.expected_bytes_bias_gelu_colsum(8, 64, BF16) == 4 * 8 * 64 + 6 * 64
    assert column_sums.expected_bytes_scale_sums(8, 64, BF16, F32) == (2 * 8 * 64 + 8 * 64 + 4 * 8)


@pytest.mark.parametrize("function", [bias_gelu_colsum, scale_sums])
@pytest.mark.parametrize("width", [1, 7, 256, 1000, 2049, 32768])
def test_lowers_to_one_kernel(function, width):
    given = jax.ShapeDtypeStruct((500, width), F16), jax.ShapeDtypeStruct((width,), F32)
    text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert row_kernels(text) == 1


@pytest.mark.thorough
@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("width", [256, 769, 1024, 4096, 8192, 65536])
@pytest.mark.parametrize(
    ("function", "plan"),
    [
        (bias_gelu_colsum, column_sums.plan_bias_gelu_colsum),
        (scale_sums, column_sums.plan_scale_sums),
    ],
)
def test_no_spills_and_ctas_that_all_run_at_once(function, plan, width, deviceless):
    target = deviceless("h200")
    rows = 2**26 // width
    given = jax.ShapeDtypeStruct((rows, width), BF16), jax.ShapeDtypeStruct((width,), F32)
    with mosaic.printed_ptx() as printed:
        program = aot.compile_program(function, given, target).program
    mosaic.remember(program.hlo, printed.texts)
    kernels = analyse(program).kernels
    name, *_ = [kernel.name for kernel in kernels if kernel.emitter == "mosaic_gpu"]
    found = kernel_resources(program, kernels, limits_of(target.description))[name]
    p = plan(rows, width, BF16)
    assert found.spill_bytes == 0
    assert found.grid[0] == p.ctas
    assert found.shared_bytes <= p.shared_bytes
    assert found.occupancy * 2048 / found.threads * 132 >= p.ctas


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 31, 128, 256, 769, 1024, 2560, 8192, 16385, 65536])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_on_the_card(width, dtype):
    rows = max(300, 2**21 // width) + 3 if width < 65536 else 67
    x, parameter = arguments(rows, width, dtype, F32)
    for check, function in ((check_gelu, bias_gelu_colsum), (check_scale, scale_sums)):
        run = jax.jit(function)
        first, second = run(x, parameter), run(x, parameter)
        check(x, parameter, first)
        for one, other in zip(first, second, strict=True):
            assert (np.asarray(one).view(np.uint8) == np.asarray(other).view(np.uint8)).all()
