"""What only a card can show: the same kernels as without it, right results, times in order."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest

from fusejax import paths
from fusejax.compare_ops import compare_op
from fusejax.compile import aot, targets
from fusejax.hlo.analyse import analyse
from fusejax.ops import OPS

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
# Products are tuned on the card, and so are some sums, so that their kernels are not foretold.
ROW_OPS = ("residual_ln", "bias_gelu", "bias_gelu_rowsum", "softmax")


def unnumbered(name):
    """XLA counts what it names, and does not always come to the same number."""
    return re.sub(r"\.\d+$", "", name)


def analysed(op, name, mode, target):
    path = paths.build(op, name, mode)
    shapes = path.chain.shapes(paths.argument_shapes(op, mode, (8192, 8192), BF16))
    found = []
    for stage in path.chain.stages:
        arguments = tuple(shapes[value] for value in stage.inputs)
        analysis = analyse(aot.compile_program(stage.function, arguments, target).program)
        found.append(
            (
                [(unnumbered(k.name), k.emitter, k.count, k.scopes, k.traffic)
                 for k in analysis.kernels],
                [(unnumbered(b.producer), [*map(unnumbered, b.consumers)], b.dtype, b.shape,
                  b.reason.kind) for b in analysis.boundaries],
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("mode", paths.MODES)
@pytest.mark.parametrize("path", ["eager", "split", "xla", "pallas"])
@pytest.mark.parametrize("name", ROW_OPS)
def test_the_card_gets_the_kernels_that_were_foretold(name, path, mode, deviceless):
    op = OPS[name]()
    card = targets.device()
    if card.title != "NVIDIA H200":
        pytest.skip(f"the pinned description is of an H200, and this is a {card.title}")
    if paths.refusal(op, path, mode, (8192, 8192), BF16, card):
        pytest.skip("this path has no such kernel")
    assert analysed(op, path, mode, card) == analysed(op, path, mode, deviceless("h200"))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16, np.dtype(np.float32)])
@pytest.mark.parametrize("name", ROW_OPS)
def test_every_path_is_right_and_timed(name, dtype):
    found = compare_op(OPS[name](), (4096, 2048), dtype, targets.device())
    ulp = float(jax.numpy.finfo(dtype).eps)
    for path in found.served():
        assert path.error.where == "device"
        assert path.error.max_rel < 4 * ulp, path.name
        assert path.timing.low_us <= path.timing.device_us <= path.timing.high_us
        assert path.timing.end_to_end_us > 0
        assert path.timing.kernel_us is not None
        assert sum(path.timing.kernel_us) == pytest.approx(path.timing.device_us, rel=0.1)
    assert found.verdict.basis == "measured"
    assert found.floor_us > 0


def test_backward_is_right():
    found = compare_op(
        OPS["residual_ln"](), (1024, 512), np.float32, targets.device(), mode="backward"
    )
    for path in found.served():
        assert path.error.max_rel < 1e-5, path.name


def test_splitting_beats_xlas_own_fusion_of_bias_gelu_rowsum():
    found = compare_op(OPS["bias_gelu_rowsum"](), (8192, 8192), BF16, targets.device())
    us = {path.name: path.timing.end_to_end_us for path in found.served()}
    assert us["pallas"] < us["split"] < us["xla"]
    assert "Splitting wins" in found.verdict.summary
