import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import INTERPRET, assert_rounded, f64, gelu, sampled

from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.resources import kernel_resources, limits_of, mosaic, ptxas
from pallas_kernels import gemm
from pallas_kernels.gemm_kernels import Epilogue, Sums, gemm_kernel
from pallas_kernels.gemm_plan import GemmTuning, gemm_plan
from pallas_kernels.tiles import grouped

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TOGETHER = GemmTuning(128, 256, stages=3)
TALL = GemmTuning(256, 128, stages=3, group=2)
ONE_STORE = GemmTuning(128, 64, stages=2)  # for each tile and consumer
PAIRS = GemmTuning(128, 128, stages=3, cluster=2)
TURNS = GemmTuning(128, 128, stages=3, turns=True)
LOW_TURNS = GemmTuning(64, 256, stages=2, turns=True)
PAIRS_IN_TURNS = GemmTuning(64, 128, stages=3, cluster=2, turns=True)
DEEP = GemmTuning(128, 128, tile_k=128, stages=2)
# The epilogues of the three public functions.
WITH_BIAS = Epilogue(bias=True)
OF_GELU = Epilogue(sums=Sums.OF_GELU)
OF_PRODUCT = Epilogue(sums=Sums.OF_PRODUCT)
# What f32 accumulation may cost, relative to the sum of the terms' sizes.
ACCUMULATED = 2e-6


def operands(m, n, k, dtype=BF16, bias_dtype=F32, seed=0):
    rng = np.random.default_rng((seed, m, n, k))
    x = jnp.asarray(rng.normal(size=(m, k)), dtype)
    weight = jnp.asarray(rng.normal(size=(k, n)) / np.sqrt(k), dtype)
    return x, weight, jnp.asarray(rng.normal(size=n), bias_dtype)


def reference(epilogue, x, weight, bias):
    """y, the sums, and the size of the terms of h, in float64."""
    h, size = f64(x) @ f64(weight), np.abs(f64(x)) @ np.abs(f64(weight))
    if epilogue.bias:
        h, size = h + f64(bias), size + np.abs(f64(bias))
    y = gelu(h, epilogue.approximate)
    return y, (h if epilogue.sums is Sums.OF_PRODUCT else y).sum(-1), size


def assert_sums(got, want, size):
    """`size`: of the terms of all that is summed."""
    assert got.dtype == F32
    assert got.shape == want.shape
    error = np.abs(f64(got) - want) / (ACCUMULATED * size.sum(-1))
    assert error.max() <= 1, f"{error.max():.4g} of what accumulation may cost"


def check(epilogue, x, weight, bias, tuning=None, rows=slice(None)):
    given = (x, weight, bias) if epilogue.bias else (x, weight)
    run = jax.jit(functools.partial(gemm_kernel, epilogue, tuning=tuning, interpret=INTERPRET))
    y, *sums = run(*given)
    want, want_sums, size = reference(epilogue, x[rows], weight, bias)
    assert y.dtype == x.dtype
    assert_rounded(y[rows], want, scale=size, slack=ACCUMULATED)
    assert len(sums) == (epilogue.sums is not Sums.NOTHING)
    for got in sums:
        assert_sums(got[rows], want_sums, size)
    return y, *sums


# One tile; parts of tiles at every edge; more and fewer terms than the ring has room for.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("epilogue", "m", "n", "k", "tuning"),
    sampled(
        [
            (WITH_BIAS, 128, 256, 64, TOGETHER),
            (WITH_BIAS, 136, 320, 256, TOGETHER),
            (OF_GELU, 264, 192, 320, TALL),
            (OF_PRODUCT, 8, 64, 128, ONE_STORE),
            (OF_GELU, 392, 192, 192, PAIRS),
            (WITH_BIAS, 264, 320, 128, PAIRS),
            (WITH_BIAS, 200, 192, 128, TURNS),
            (OF_PRODUCT, 136, 320, 256, LOW_TURNS),
            (OF_GELU, 200, 192, 192, PAIRS_IN_TURNS),
            (OF_PRODUCT, 72, 128, 192, DEEP),
        ]
    ),
)
def test_every_way_to_share_the_work(epilogue, m, n, k, tuning):
    check(epilogue, *operands(m, n, k), tuning)


# Both GELUs, both dtypes and each with both; a bias in its dtype and in another.
@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "approximate"),
    sampled([(F16, F16, True), (BF16, BF16, False), (F16, F32, False), (BF16, F32, True)]),
)
def test_public_functions(dtype, bias_dtype, approximate):
    x, weight, bias = operands(72, 192, 128, dtype, bias_dtype)
    options = {"approximate": approximate, "interpret": INTERPRET}
    y = gemm.gemm_bias_gelu(x, weight, bias, **options)
    want, _, size = reference(Epilogue(True, approximate), x, weight, bias)
    assert_rounded(y, want, scale=size, slack=ACCUMULATED)
    for function, sums in (
        (gemm.gemm_gelu_rowsum, Sums.OF_GELU),
        (gemm.gemm_shared, Sums.OF_PRODUCT),
    ):
        y, found = function(x, weight, **options)
        epilogue = Epilogue(approximate=approximate, sums=sums)
        want, want_sums, size = reference(epilogue, x, weight, bias)
        assert_rounded(y, want, scale=size, slack=ACCUMULATED)
        assert_sums(found, want_sums, size)


def test_the_checks_tell_wrong_from_right():
    x, weight, bias = operands(64, 128, 128)
    y, sums = gemm.gemm_gelu_rowsum(x, weight, interpret=INTERPRET)
    want, want_sums, size = reference(OF_GELU, x, weight, bias)
    assert_sums(sums, want_sums, size)
    wrong_y = (
        gelu(f64(x) @ f64(weight), approximate=False),
        f64(x) @ f64(weight),
        gelu(f64((f64(x) @ f64(weight)).astype(BF16)), approximate=True),  # rounded twice
        reference(WITH_BIAS, x, weight, bias)[0],
    )
    for wrong in wrong_y:
        with pytest.raises(AssertionError, match="of one rounding"):
            assert_rounded(y, wrong, scale=size, slack=ACCUMULATED)
    wrong_sums = (
        f64(y).sum(-1),  # of what was stored
        reference(OF_PRODUCT, x, weight, bias)[1],
        want[:, :-1].sum(-1),
    )
    for wrong in wrong_sums:
        with pytest.raises(AssertionError, match="accumulation"):
            assert_sums(sums, wrong, size)


def test_vmap_and_jit():
    x, weight, _ = operands(24, 64, 64)
    other = operands(24, 64, 64, seed=1)[1]
    function = functools.partial(gemm.gemm_shared, interpret=INTERPRET)
    rows = x.reshape(3, 8, 64)
    y, sums = jax.jit(jax.vmap(function, in_axes=(0, None)))(rows, weight)
    want, want_sums = function(x, weight)
    assert (f64(y).reshape(24, 64) == f64(want)).all()
    assert (f64(sums).reshape(24) == f64(want_sums)).all()
    y, sums = jax.vmap(function, in_axes=(None, 0))(x, jnp.stack([weight, other]))
    want, want_sums = function(x, other)
    assert (f64(y[1]) == f64(want)).all()
    assert (f64(sums[1]) == f64(want_sums)).all()


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_differentiation_is_refused(transform):
    x, weight, bias = operands(8, 64, 64)
    for name, loss in (
        ("gemm_bias_gelu", lambda bias: gemm.gemm_bias_gelu(x, weight, bias).sum().astype(F32)),
        ("gemm_gelu_rowsum", lambda bias: gemm.gemm_gelu_rowsum(x * bias, weight)[1].sum()),
        ("gemm_shared", lambda bias: gemm.gemm_shared(x, weight * bias)[1].sum()),
    ):
        with pytest.raises(TypeError, match=f"{name} has no gradient"):
            transform(loss)(bias.astype(BF16))


def test_refusals():
    shape = jax.ShapeDtypeStruct
    x, weight = shape((64, 128), BF16), shape((128, 192), BF16)
    assert gemm.unsupported(x, weight, shape((192,), F16)) is None
    for arguments, words in (
        ((shape((64, 128), F32), weight), "float16 or bfloat16, not float32"),
        ((x, shape((128, 192), F16)), "weight must have the dtype of x, bfloat16, not float16"),
        ((x, shape((64, 192), BF16)), "(M, K) and (K, N), not (64, 128) and (64, 192)"),
        ((shape((2, 64, 128), BF16), weight), "(M, K) and (K, N)"),
        ((shape((60, 128), BF16), weight), "M must be a multiple of 8"),
        ((shape((0, 128), BF16), weight), "none of them 0"),
        ((x, shape((128, 96), BF16)), "and they are 64, 96 and 128"),
        ((shape((2**20, 128), BF16), shape((128, 2**12), BF16)), "2**31-1 elements"),
        ((x, weight, shape((128,), F32)), "bias must have the shape (192,), not (128,)"),
        ((x, weight, shape((192,), jnp.int8)), "bias must be float16, bfloat16 or float32"),
    ):
        assert words in gemm.unsupported(*arguments)
    with pytest.raises(ValueError, match="M must be a multiple of 8"):
        gemm.gemm_shared(jnp.zeros((60, 128), BF16), jnp.zeros((128, 192), BF16))
    with pytest.raises(ValueError, match="interpret must be None, True"):
        gemm.gemm_shared(jnp.zeros((8, 64), BF16), jnp.zeros((64, 64), BF16), interpret="yes")


def test_expected_bytes():
    assert gemm.expected_bytes(8, 64, 128, BF16) == 2 * (8 * 128 + 128 * 64 + 8 * 64)
    more = gemm.expected_bytes(8, 64, 128, BF16, F32, row_sums=True)
    assert more == gemm.expected_bytes(8, 64, 128, BF16) + 4 * 64 + 4 * 8


@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 32, 8), (7, 5, 3), (1, 9, 8)])
def test_every_tile_is_walked_once_and_neighbours_share(rows, columns, group):
    row, column = (np.asarray(a) for a in grouped(np.arange(rows * columns), rows, columns, group))
    assert sorted(zip(row, column, strict=True)) == list(np.ndindex(rows, columns))
    for start in range(0, rows * columns, group * columns):
        band = slice(start, start + group * columns)
        assert np.ptp(row[band]) < group
        assert (np.diff(column[band]) >= 0).all()


@pytest.mark.parametrize("tuning", [None, TOGETHER, TALL, PAIRS, TURNS, PAIRS_IN_TURNS])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(8192, 8192, 8192), (8, 64, 64), (65536, 1024, 1024), (8200, 8256, 512)]
)
def test_plans_cover_the_result_and_fit(m, n, k, tuning):
    p = gemm_plan(m, n, k, BF16, tuning=tuning)
    assert m <= p.tiles_m * p.tile_m < m + p.cluster * p.tile_m
    assert n <= p.tiles_n * p.tile_n < n + p.tile_n
    assert k == p.blocks_k * p.tile_k
    assert p.ctas % p.cluster == 0
    assert p.walkers <= p.steps
    assert p.ctas == 132 or p.walkers == p.steps
    assert p.shared_bytes <= 232448


def test_small_results_are_cut_smaller():
    large, small = gemm_plan(8192, 8192, 8192, BF16), gemm_plan(1024, 1024, 8192, BF16)
    assert large.tile_m * large.tile_n == 128 * 256
    assert small.tile_m * small.tile_n < 128 * 256
    assert small.ctas > 32  # that tiles of 128 x 256 would keep busy


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (GemmTuning(64, 256), "tile_m must be a multiple of 128"),
        (GemmTuning(96, 128, turns=True), "tile_m must be a multiple of 64"),
        (GemmTuning(128, 96), "tile_n must be a multiple of 64"),
        (GemmTuning(128, 320), "at most 256"),
        (GemmTuning(128, 128, tile_k=32), "tile_k must be a multiple of 64"),
        (GemmTuning(256, 256), "more than 128 accumulators"),
        (GemmTuning(128, 256, turns=True), "more than 128 accumulators"),
        (GemmTuning(128, 256, stages=5), "bytes of shared memory"),
        (GemmTuning(128, 128, stages=1), "2 stages or more"),
        (GemmTuning(128, 128, cluster=4), "clusters of 1 or 2"),
    ],
)
def test_impossible_tunings(tuning, words):
    with pytest.raises(ValueError, match=words):
        gemm_plan(8192, 8192, 8192, BF16, tuning=tuning)


def shapes(epilogue, m, n, k, dtype=BF16):
    shape = jax.ShapeDtypeStruct
    bias = (shape((n,), F32),) if epilogue.bias else ()
    return shape((m, k), dtype), shape((k, n), dtype), *bias


@pytest.mark.parametrize("epilogue", [WITH_BIAS, OF_GELU, OF_PRODUCT])
@pytest.mark.parametrize("x64", [False, True])
def test_lowers_to_one_kernel(epilogue, x64):
    function = functools.partial(gemm_kernel, epilogue)
    with jax.enable_x64(x64):
        given = shapes(epilogue, 8200, 4160, 192, F16)
        lowered = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.thorough
@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize(
    ("epilogue", "tuning"),
    [
        (WITH_BIAS, None),
        (Epilogue(bias=True, approximate=False), None),
        (OF_GELU, None),
        (OF_PRODUCT, None),
        (WITH_BIAS, GemmTuning(256, 128, cluster=2)),
        (OF_GELU, GemmTuning(128, 128, stages=6, turns=True)),
        (OF_GELU, GemmTuning(64, 256, turns=True, cluster=2)),
    ],
)
def test_no_spills_and_the_planned_launch(epilogue, tuning, deviceless):
    target = deviceless("h200")
    p = gemm_plan(8192, 8192, 8192, BF16, tuning=tuning)
    function = functools.partial(gemm_kernel, epilogue, tuning=tuning)
    with mosaic.printed_ptx() as printed:
        given = shapes(epilogue, 8192, 8192, 8192)
        program = aot.compile_program(function, given, target).program
    mosaic.remember(program.hlo, printed.texts)
    kernels = analyse(program).kernels
    (name,) = [kernel.name for kernel in kernels if kernel.emitter == "mosaic_gpu"]
    found = kernel_resources(program, kernels, limits_of(target.description))[name]
    assert found.spill_bytes == 0
    assert found.registers == 168  # a third of the register file each, until they are shared out
    assert found.threads == 3 * 128
    assert found.grid[0] == p.ctas
    assert found.shared_bytes <= p.shared_bytes


# Sizes at which the ring goes round, CTAs walk over several tiles and clusters take turns.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "tuning",
    [
        None,
        GemmTuning(128, 256),
        GemmTuning(256, 128, cluster=2),
        ONE_STORE,
        PAIRS,
        GemmTuning(128, 128, stages=6, turns=True),
        LOW_TURNS,
        PAIRS_IN_TURNS,
        DEEP,
    ],
)
@pytest.mark.parametrize("epilogue", [WITH_BIAS, OF_GELU, OF_PRODUCT])
@pytest.mark.parametrize(("m", "n", "k"), [(4104, 2112, 1088), (2048, 4096, 64), (8, 8192, 512)])
def test_on_the_card(m, n, k, epilogue, tuning):
    given = operands(m, n, k)
    rows = np.unique(np.r_[0:8, np.random.default_rng(1).integers(0, m, 300), m - 8 : m])
    first = check(epilogue, *given, tuning, rows)
    for one, other in zip(first, check(epilogue, *given, tuning, rows), strict=True):
        assert (np.asarray(one).view(np.uint8) == np.asarray(other).view(np.uint8)).all()
