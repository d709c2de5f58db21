"""Softmax over the last axis.

    e = exp(x - max(x, -1))
    y = e / sum(e, -1)

The maximum and the sum are float32. Must move: x read once, y written once: 4BH bytes for a 16-bit
[B, H].
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import row_softmax


def _row_max(x: Any) -> Any:
    return x.max(-1, keepdims=True).astype(jnp.float32)


def _exp(x: Any, maximum: Any) -> Any:
    return jnp.exp(x.astype(jnp.float32) - maximum).astype(x.dtype)


def _row_sum(e: Any) -> Any:
    return e.astype(jnp.float32).sum(-1, keepdims=True)


def _divide(e: Any, total: Any) -> Any:
    return (e.astype(jnp.float32) / total).astype(e.dtype)


def _reference(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
    del dtype
    e = np.exp(x - x.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True),)


def _reference_gradient(
    arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
) -> tuple[np.ndarray, ...]:
    (y,) = _reference(arguments[0], dtype)
    (dy,) = cotangents
    return (y * (dy - (dy * y).sum(-1, keepdims=True)),)


def softmax() -> Op:
    """The op; see the module's docstring."""
    return Op(
        name="softmax",
        formula="exp(x - max(x, -1)) / sum(exp(x - max(x, -1)), -1)",
        dimensions={"x": ("rows", "width")},
        chain=Chain(
            arguments=("x",),
            stages=(
                Stage("row_max", _row_max, ("x",), ("maximum",)),
                Stage("exp", _exp, ("x", "maximum"), ("e",)),
                Stage("row_sum", _row_sum, ("e",), ("total",)),
                Stage("divide", _divide, ("e", "total"), ("y",)),
            ),
            results=("y",),
        ),
        split_after=("row_max", "exp", "row_sum"),
        reference=_reference,
        reference_gradient=_reference_gradient,
        kernel=row_softmax.softmax,
        kernel_refusal=row_softmax.unsupported,
    )
