"""The ops that the comparison knows, one file each."""

from collections.abc import Callable

from fusejax.ops.bias_gelu import bias_gelu
from fusejax.ops.bias_gelu_colsum import bias_gelu_colsum
from fusejax.ops.bias_gelu_rowsum import bias_gelu_rowsum
from fusejax.ops.bias_gelu_transpose import bias_gelu_transpose
from fusejax.ops.gemm_bias_gelu import gemm_bias_gelu
from fusejax.ops.gemm_gelu_rowsum import gemm_gelu_rowsum
from fusejax.ops.masked_softmax import masked_softmax
from fusejax.ops.op import Chain, Op, Stage
from fusejax.ops.residual_ln import residual_ln
from fusejax.ops.residual_mlp import residual_mlp
from fusejax.ops.shared_matmul import shared_matmul
from fusejax.ops.shared_scale import shared_scale
from fusejax.ops.softmax import softmax

OPS: dict[str, Callable[..., Op]] = {
    build.__name__: build
    for build in (
        residual_ln,
        residual_mlp,
        bias_gelu,
        bias_gelu_rowsum,
        bias_gelu_colsum,
        bias_gelu_transpose,
        softmax,
        masked_softmax,
        shared_scale,
        shared_matmul,
        gemm_bias_gelu,
        gemm_gelu_rowsum,
    )
}
"""Builders by name. Those of GELU take `approximate`."""

__all__ = ["OPS", "Chain", "Op", "Stage"]
