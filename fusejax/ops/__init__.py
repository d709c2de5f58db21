"""The ops that the comparison knows, one file each."""

from collections.abc import Callable

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.bias_gelu_rowsum import bias_gelu_rowsum
from fusejax.ops.op import Chain, Op, Stage
from fusejax.ops.residual_ln import residual_ln
from fusejax.ops.softmax import softmax

OPS: dict[str, Callable[..., Op]] = {
    build.__name__: build for build in (residual_ln, bias_gelu, bias_gelu_rowsum, softmax)
}
"""Builders by name. Those of GELU take `approximate`."""

__all__ = ["OPS", "Chain", "Op", "Stage"]
