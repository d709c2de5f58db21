"""Softmax over those elements of the last axis that a mask lets through.

    e = where(mask, exp(x - max(x, -1, where=mask)), 0)
    y = e / sum(e, -1)

What the mask shuts out counts for nothing, whatever is there: its y is 0, also in a row that is
shut out as a whole, and so is its gradient. No finite stand-in for -inf is added to x. The maximum
and the sum are float32. Must move: x and the mask read once, y written once: 4BH + BH bytes for a
16-bit [B, H].
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.op import Chain, Op, Stage
from pallas_kernels import row_softmax


def _row_max(x: Any, mask: Any) -> Any:
    maximum = x.max(-1, keepdims=True, initial=-jnp.inf, where=mask).astype(jnp.float32)
    return jnp.where(mask.any(-1, keepdims=True), maximum, 0.0)


def _exp(x: Any, mask: Any, maximum: Any) -> Any:
    # What is shut out must not reach exp: its gradient there could be 0 * inf.
    difference = jnp.where(mask, x.astype(jnp.float32) - maximum, -jnp.inf)
    return jnp.exp(difference).astype(x.dtype)


def _row_sum(e: Any) -> Any:
    return e.astype(jnp.float32).sum(-1, keepdims=True)


def _divide(e: Any, mask: Any, total: Any) -> Any:
    safe = jnp.where(mask.any(-1, keepdims=True), total, 1.0)
    return jnp.where(mask, e.astype(jnp.float32) / safe, 0.0).astype(e.dtype)


def _reference(x: np.ndarray, mask: np.ndarray, dtype: Any) -> tuple[np.ndarray, ...]:
    del dtype
    mask = mask.astype(bool)
    maximum = np.where(mask, x, -np.inf).max(-1, keepdims=True)
    maximum = np.where(mask.any(-1, keepdims=True), maximum, 0.0)
    e = np.where(mask, np.exp(np.where(mask, x - maximum, 0.0)), 0.0)
    total = np.where(mask.any(-1, keepdims=True), e.sum(-1, keepdims=True), 1.0)
    return (e / total,)


def _reference_gradient(
    arguments: tuple[np.ndarray, ...], cotangents: tuple[np.ndarray, ...], dtype: Any
) -> tuple[np.ndarray, ...]:
    x, mask = arguments
    (y,) = _reference(x, mask, dtype)
    dy = np.where(mask.astype(bool), cotangents[0], 0.0)
    return (y * (dy - (dy * y).sum(-1, keepdims=True)),)


def _kernel(x: Any, mask: Any, *, interpret: Any = None) -> Any:
    return row_softmax.softmax(x, where=mask, interpret=interpret)


def masked_softmax() -> Op:
    """The op; see the module's docstring."""
    return Op(
        name="masked_softmax",
        formula="softmax(x, where=mask)",
        dimensions={"x": ("rows", "width"), "mask": ("rows", "width")},
        chain=Chain(
            arguments=("x", "mask"),
            stages=(
                Stage("row_max", _row_max, ("x", "mask"), ("maximum",)),
                Stage("exp", _exp, ("x", "mask", "maximum"), ("e",)),
                Stage("row_sum", _row_sum, ("e",), ("total",)),
                Stage("divide", _divide, ("e", "mask", "total"), ("y",)),
            ),
            results=("y",),
            constants=("mask",),
        ),
        split_after=("row_max", "exp", "row_sum"),
        reference=_reference,
        reference_gradient=_reference_gradient,
        kernel=_kernel,
        kernel_refusal=row_softmax.unsupported,
    )
