import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import INTERPRET, assert_rounded, f64, gelu, sampled

from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.resources import kernel_resources, limits_of, mosaic, ptxas
from pallas_kernels import transposed
from pallas_kernels.transposed import (
    TransposeTuning,
    bias_gelu_transpose,
    bias_gelu_transpose_kernel,
    plan,
)

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SMALL = TransposeTuning(64, 64, 3, 4, group=2)
WIDE = TransposeTuning(64, 128, 1, 4)
LARGE = TransposeTuning(128, 128, 2, 1)


def arguments(m, n, dtype, bias_dtype, seed=0):
    rng = np.random.default_rng((seed, m, n))
    x = jnp.asarray(rng.normal(size=(m, n)) * 1.5, dtype)
    return x, jnp.asarray(rng.normal(size=n), bias_dtype)


def assert_values(y, x, bias, *, approximate=True):
    z = f64(x) + f64(bias)
    slack = 4e-7 if y.dtype == F32 else 2e-6
    assert_rounded(y, gelu(z, approximate).T, scale=z.T, slack=slack)


@pytest.mark.parametrize(
    ("m", "n", "dtype", "bias_dtype", "approximate", "tuning"),
    sampled(
        [
            (64, 64, BF16, BF16, True, None),
            (192, 64, F16, F32, False, None),  # tiles that hang over one edge or another
            (64, 320, BF16, F32, True, WIDE),
            (192, 192, F16, F16, True, LARGE),
            (32, 96, F32, F32, True, None),
            (160, 64, F32, BF16, False, SMALL),
        ]
    ),
)
def test_values(m, n, dtype, bias_dtype, approximate, tuning):
    x, bias = arguments(m, n, dtype, bias_dtype)
    y = bias_gelu_transpose_kernel(
        x, bias, approximate=approximate, tuning=tuning, interpret=INTERPRET
    )
    assert (y.dtype, y.shape) == (dtype, (n, m))
    assert_values(y, x, bias, approximate=approximate)


def test_the_check_tells_wrong_from_right():
    x, bias = arguments(64, 64, BF16, F32)
    y = bias_gelu_transpose(x, bias, interpret=INTERPRET)
    assert_values(y, x, bias)
    for wrong in ((x.T, bias), (x, 0 * bias), (x + bias.astype(BF16), 0 * bias)):
        with pytest.raises(AssertionError, match="of one rounding"):
            assert_values(y, *wrong)
    with pytest.raises(AssertionError, match="of one rounding"):
        assert_values(y, x, bias, approximate=False)


def test_vmap():
    x, bias = arguments(128, 64, BF16, F32)
    examples = x.reshape(2, 64, 64)
    function = functools.partial(bias_gelu_transpose, interpret=INTERPRET)
    y = jax.jit(jax.vmap(function, in_axes=(0, None)))(examples, bias)
    for one in range(2):
        assert (f64(y[one]) == f64(function(examples[one], bias))).all()


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_differentiation_is_refused(transform):
    x, bias = arguments(64, 64, F32, F32)
    with pytest.raises(TypeError, match="bias_gelu_transpose has no gradient"):
        transform(lambda bias: bias_gelu_transpose(x, bias).sum())(bias)


def test_refusals():
    shape = jax.ShapeDtypeStruct
    bias = shape((64,), F32)
    assert transposed.unsupported(shape((128, 64), BF16), bias) is None
    assert transposed.unsupported(shape((32, 64), F32), bias) is None
    for x, parameter, words in (
        (shape((128, 64), jnp.int32), bias, "not int32"),
        (shape((2, 128, 64), BF16), bias, "two axes"),
        (shape((32, 64), BF16), bias, "multiples of 64 for bfloat16"),
        (shape((64, 48), F32), bias, "multiples of 32 for float32"),
        (shape((0, 64), F32), bias, "none of them 0"),
        (shape((2**20, 2**12), BF16), bias, "2**31-1 elements"),
        (shape((128, 64), BF16), shape((128,), F32), "bias must have the shape (64,)"),
        (shape((128, 64), BF16), shape((64,), jnp.int8), "bias must be float16"),
    ):
        assert words in transposed.unsupported(x, parameter)
    with pytest.raises(ValueError, match="multiples of 64"):
        bias_gelu_transpose(jnp.zeros((32, 64), BF16), jnp.zeros(64))


def test_expected_bytes():
    assert transposed.expected_bytes(128, 64, BF16) == 4 * 128 * 64 + 2 * 64
    assert transposed.expected_bytes(128, 64, F32, BF16) == 8 * 128 * 64 + 2 * 64


@pytest.mark.parametrize("tuning", [None, SMALL, LARGE])
@pytest.mark.parametrize(("m", "n"), [(8192, 8192), (64, 64), (64, 65536), (192, 320)])
def test_plans_cover_the_array_and_fit(m, n, tuning):
    p = plan(m, n, BF16, tuning=tuning)
    assert m <= p.tiles_m * p.tile_m < m + p.tile_m
    assert n <= p.tiles_n * p.tile_n < n + p.tile_n
    assert p.ctas <= p.tiles
    ctas_per_sm = -(-p.ctas // 132)
    assert ctas_per_sm * (p.shared_bytes + 1024) <= 233472


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (TransposeTuning(96, 64, 2, 1), "tile_m must be a multiple of 64"),
        (TransposeTuning(64, 512, 2, 1), "tile_n must be a multiple of 64 from 64 to 256"),
        (TransposeTuning(256, 256, 2, 1), "525312 bytes of shared memory at most"),
        (TransposeTuning(64, 64, 0, 1), "stages, ctas_per_sm and group must be 1 or more"),
    ],
)
def test_impossible_tunings(tuning, words):
    with pytest.raises(ValueError, match=words):
        plan(8192, 8192, BF16, tuning=tuning)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("x64", [False, True])
def test_lowers_to_one_kernel(dtype, x64):
    with jax.enable_x64(x64):
        given = jax.ShapeDtypeStruct((320, 192), dtype), jax.ShapeDtypeStruct((192,), F32)
        traced = jax.jit(bias_gelu_transpose).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.thorough
@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("approximate", [True, False])
def test_no_spills_and_the_planned_launch(dtype, approximate, deviceless):
    target = deviceless("h200")
    given = jax.ShapeDtypeStruct((8192, 8192), dtype), jax.ShapeDtypeStruct((8192,), F32)
    function = functools.partial(bias_gelu_transpose, approximate=approximate)
    with mosaic.printed_ptx() as printed:
        program = aot.compile_program(function, given, target).program
    mosaic.remember(program.hlo, printed.texts)
    kernels = analyse(program).kernels
    (kernel,) = kernels
    found = kernel_resources(program, kernels, limits_of(target.description))[kernel.name]
    p = plan(8192, 8192, dtype)
    assert found.spill_bytes == 0
    assert found.registers <= 128
    assert (found.threads, found.grid[0]) == (128, p.ctas)
    assert found.shared_bytes <= p.shared_bytes
    assert found.occupancy * 2048 / 128 * 132 >= p.ctas


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("tuning", [None, SMALL, WIDE])
@pytest.mark.parametrize(("m", "n"), [(4160, 2112), (64, 65536), (32768, 128)])
def test_on_the_card(m, n, dtype, tuning):
    x, bias = arguments(m, n, dtype, F32)
    run = jax.jit(functools.partial(bias_gelu_transpose_kernel, tuning=tuning))
    first, second = run(x, bias), run(x, bias)
    assert_values(first, x, bias)
    assert (np.asarray(first).view(np.uint8) == np.asarray(second).view(np.uint8)).all()
