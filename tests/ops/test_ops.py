"""Every path of every op against its float64 reference, and the references against differences."""

import jax
import ml_dtypes
import numpy as np
import pytest

from fusejax import accuracy, paths
from fusejax.ops import OPS
from fusejax.ops.gelu import gelu64, gelu64_slope

BUILDS = {
    **OPS,
    "bias_gelu_erf": lambda: OPS["bias_gelu"](approximate=False),
    "bias_gelu_rowsum_erf": lambda: OPS["bias_gelu_rowsum"](approximate=False),
    "gemm_bias_gelu_erf": lambda: OPS["gemm_bias_gelu"](approximate=False),
}
# Stages round to the dtype between them and XLA may keep float32 there: a few units in the last
# place of the largest value, more where a gradient is itself made of rounded pieces.
FORWARD = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6}
BACKWARD = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 2e-5}
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def shaped(op, rows, width):
    """A shape of the op: what is beside rows and width is odd and not the same."""
    return (rows, width) if len(op.axes) == 2 else (rows, width, width // 2 + 1)


def run(path, values):
    return path.run([jax.jit(stage.function) for stage in path.chain.stages], values)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("forward", "float16"),
        ("forward", "float32"),
        ("backward", "bfloat16"),
        ("backward", "float32"),
    ],
)
@pytest.mark.parametrize("name", BUILDS)
def test_paths_agree_with_float64(name, mode, dtype):
    op = BUILDS[name]()
    tolerance = (FORWARD if mode == "forward" else BACKWARD)[dtype]
    # What depends on the shape shows in one dtype.
    shapes = [(1, 1), (3, 31), (2, 1151)] if dtype == "float32" else [(6, 256)]
    for seed, shape in enumerate(shapes):
        shapes = paths.argument_shapes(op, mode, shaped(op, *shape), DTYPES[dtype])
        values = accuracy.random_values(shapes, seed)
        expected = accuracy.reference(op, mode, values)
        for path_name in paths.of(op):
            if path_name in paths.PALLAS or (path_name == "recompute" and mode == "backward"):
                continue
            got = run(paths.build(op, path_name, mode), values)
            error = accuracy.compare(got, expected, rows=shape[0], where="cpu")
            # One element per row: LayerNorm's is exactly the bias, softmax's exactly 1, and their
            # gradients cancel to nothing, so there is no scale to be relative to.
            worst = error.max_abs if shape[1] == 1 else error.max_rel
            assert worst < 4 * tolerance if shape[1] == 1 else worst < tolerance, (path_name, shape)


@pytest.mark.parametrize("mode", paths.MODES)
@pytest.mark.parametrize("name", BUILDS)
def test_a_wrong_result_is_seen(name, mode):
    op = BUILDS[name]()
    shapes = paths.argument_shapes(op, mode, shaped(op, 6, 256), np.float32)
    values = accuracy.random_values(shapes, 0)
    expected = accuracy.reference(op, mode, values)
    wrong = [right * 1.001 for right in expected]
    assert accuracy.compare(wrong, expected, rows=6, where="cpu").max_rel > BACKWARD["float32"]
    lost = [np.where(np.arange(right.size).reshape(right.shape) == 0, np.nan, right)
            for right in expected]  # fmt: skip
    assert accuracy.compare(lost, expected, rows=6, where="cpu").max_rel == np.inf


@pytest.mark.parametrize("name", BUILDS)
def test_reference_gradient_is_the_slope_of_the_reference(name):
    op = BUILDS[name]()
    shapes = op.argument_shapes(shaped(op, 3, 5), np.float64)
    generator = np.random.default_rng(1)
    arguments = [generator.standard_normal(shape.shape) for shape in shapes]
    variable = [
        position
        for position, name in enumerate(op.chain.arguments)
        if name not in op.chain.constants
    ]
    for position in set(range(len(arguments))) - set(variable):
        arguments[position] = arguments[position] < 1
    results = op.reference(*arguments, np.float64)
    cotangents = [generator.standard_normal(result.shape) for result in results]
    gradients = op.reference_gradient(tuple(arguments), tuple(cotangents), np.float64)
    for position, gradient in zip(variable, gradients, strict=True):
        direction = generator.standard_normal(arguments[position].shape)

        def along(step, position=position, direction=direction):
            moved = list(arguments)
            moved[position] = moved[position] + step * direction
            outputs = op.reference(*moved, np.float64)
            return sum((c * y).sum() for c, y in zip(cotangents, outputs, strict=True))

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("z", "approximate", "value", "slope"),
    [
        (-3.0, True, -0.0036374, None),
        (-4.0, True, -7.0246e-5, -3.3512e-4),
        (-4.0, False, -1.26685e-4, -5.0365e-4),
        (3.0, True, 2.9963626, 1.0115842),
        (3.0, False, 2.9959503, 1.0119456),
        (60.0, True, 60.0, 1.0),
        (-60.0, True, 0.0, 0.0),
    ],
)
def test_gelu_reference_at_its_ends(z, approximate, value, slope):
    np.testing.assert_allclose(gelu64(np.float64(z), approximate=approximate), value, rtol=2e-5)
    if slope is not None:
        got = gelu64_slope(np.float64(z), approximate=approximate)
        np.testing.assert_allclose(got, slope, rtol=2e-5)


def test_layer_norm_is_taken_of_the_rounded_sum():
    bf16 = DTYPES["bfloat16"]
    op = OPS["residual_ln"]()
    # 256 + 1 rounds to 256 in bfloat16, so the sum is [256, 2] and not [257, 2].
    x, residual = np.array([[256.0, 1.0]]), np.array([[1.0, 1.0]])
    scale, bias = np.ones(2), np.zeros(2)
    (rounded,) = op.reference(x, residual, scale, bias, bf16)
    (exact,) = op.reference(np.array([[256.0, 2.0]]), 0 * residual, scale, bias, np.float64)
    np.testing.assert_array_equal(rounded, exact)


def test_offset_rows_keep_their_digits():
    op = OPS["residual_ln"]()
    x = (1000 + np.arange(1024) % 7 - 3).astype(np.float32)[None]
    values = [x, np.zeros_like(x), np.ones(1024, np.float32), np.zeros(1024, np.float32)]
    right = [-1.4966497, -0.9969531, -0.4972566, 0.0024399, 0.5021365, 1.0018330, 1.5015295]
    for path_name in ("eager", "split", "xla"):
        (y,) = run(paths.build(op, path_name, "forward"), values)
        np.testing.assert_allclose(y[0, :7], right, atol=1e-5)
    fast = (x - x.mean()) / np.sqrt((x * x).mean() - x.mean() ** 2 + 1e-6)
    assert np.abs(fast[0, :7] - right).max() > 1e-5


@pytest.mark.parametrize("name", BUILDS)
def test_names_of_values_and_stages_are_unique(name):
    chain = BUILDS[name]().chain
    values = [*chain.arguments, *(output for stage in chain.stages for output in stage.outputs)]
    assert len(set(values)) == len(values)
    assert len({stage.name for stage in chain.stages}) == len(chain.stages)


@pytest.mark.parametrize("path_name", ["eager", "split", "xla"])
def test_what_a_mask_shuts_out_counts_for_nothing(path_name):
    op = OPS["masked_softmax"]()
    inf, nan = np.inf, np.nan
    x = np.array([[0, nan, 1, inf], [nan, inf, -inf, 1], [0, 1, 2, 3]], np.float32)
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    (y,) = run(paths.build(op, path_name, "forward"), [x, mask])
    right = [[0.26894143, 0, 0.7310586, 0], [0] * 4, [0.0320586, 0.0871443, 0.2368828, 0.6439143]]
    np.testing.assert_allclose(y, right, atol=1e-6)
    dy = np.array([[1, nan, -1, inf], [nan] * 4, [1, 0, 0, 0]], np.float32)
    (dx,) = run(paths.build(op, path_name, "backward"), [x, mask, dy])
    assert np.isfinite(np.asarray(dx)[[0, 2]][:, [0, 2]]).all()


def test_softmax_of_extreme_rows():
    op = OPS["softmax"]()
    inf, nan = np.inf, np.nan
    x = np.array([[-inf] * 4, [0, 1, 2, -inf], [0, nan, 1, 2], [0, inf, 1, 2]], np.float32)
    for path_name in ("eager", "split", "xla"):
        (y,) = run(paths.build(op, path_name, "forward"), [x])
        np.testing.assert_allclose(y[1], [0.0900306, 0.2447285, 0.6652410, 0], atol=1e-6)
        assert np.isnan(np.asarray(y)[[0, 2, 3]]).all()
