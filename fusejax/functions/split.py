"""The functions in stages that compilation keeps apart, each in its named scope.

The values are those of `pallas_kernels.formulas`, unrounded between stages; every stage is a kernel
of its own, and what one hands to the next goes through memory. To see what fusing is worth, and to
tell which stage a result comes from. Differentiated by JAX, any number of times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fusejax.stages import stage
from pallas_kernels import formulas
from pallas_kernels.norm_kernels import Norm


def norm(norm: Norm, x: Any, residual: Any = None, scale: Any = None, bias: Any = None) -> Any:
    """The sum, its statistics, and what is made of both: y, and with `returns_sum` the sum too."""
    given = [a for a in (x, residual, scale, bias) if a is not None]
    wide = _wide(*given)

    @stage("add")
    def add(x, residual):
        return (x.astype(wide) + residual.astype(wide)).astype(x.dtype)

    @stage("statistics")
    def statistics(h):
        return formulas.norm(norm, h.astype(wide), saves=True).statistics

    h = x if residual is None else add(x, residual)
    *means, reciprocal = (value[..., None] for value in statistics(h))
    with jax.named_scope("normalize"):
        y = h.astype(wide)
        for mean in means:
            y = y - mean
        y = y * reciprocal
        if scale is not None:
            y = y * (scale.astype(wide) + norm.scale_offset)
        if bias is not None:
            y = y + bias.astype(wide)
        y = y.astype(h.dtype)
    return (y, h) if norm.returns_sum else y


def bias_gelu(x: jax.Array, bias: jax.Array, *, approximate: bool) -> jax.Array:
    """x + bias, and its GELU."""
    z = _add_bias(x, bias)
    with jax.named_scope("gelu"):
        return formulas.gelu(z, approximate).astype(x.dtype)


def bias_gelu_rowsum(
    x: jax.Array, bias: jax.Array, *, approximate: bool
) -> tuple[jax.Array, jax.Array]:
    """x + bias, its GELU, and that rounded and summed."""

    @stage("gelu")
    def gelu(z):
        return formulas.gelu(z, approximate)

    y = gelu(_add_bias(x, bias))
    with jax.named_scope("rowsum"):
        return y.astype(x.dtype), y.sum(-1)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The SiLU of the gate, and its product with up."""

    @stage("silu")
    def silu(gate):
        return formulas.silu(gate.astype(_wide(gate, up)))

    return _gated(silu(gate), gate, up)


def geglu(gate: jax.Array, up: jax.Array, *, approximate: bool) -> jax.Array:
    """The GELU of the gate, and its product with up."""

    @stage("gelu")
    def gelu(gate):
        return formulas.gelu(gate.astype(_wide(gate, up)), approximate)

    return _gated(gelu(gate), gate, up)


def softmax(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Each row's maximum, the exponentials, their sum, and the quotients."""
    _, e, total = _exponentials(x, where)

    with jax.named_scope("divide"):
        if where is None:
            return (e / total).astype(x.dtype)
        # A row of which nothing is kept has the sum 0.
        return jnp.where(where, e / jnp.where(total == 0.0, 1.0, total), 0.0).astype(x.dtype)


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Each row's maximum, the exponentials, their sum, the label's logit, and the loss."""
    maximum, _, total = _exponentials(logits, None)
    across = formulas.Across(logits.shape[-1])
    label = formulas.as_int32(labels)[..., None]

    @stage("pick")
    def pick(logits):
        z = logits.astype(maximum.dtype)
        return across.total(jnp.where(across.columns(z) == label, z, 0.0))

    picked = pick(logits)
    with jax.named_scope("loss"):
        loss = jnp.log(total) + (maximum - picked)
        # Added, not selected: the gradient of a row without a label is that of its log-sum-exp.
        loss = loss + jnp.where((label >= 0) & (label < across.width), 0.0, jnp.nan)
        return loss[..., 0]


def _exponentials(x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum of each row, exp(x - maximum), and the sum of that."""
    wide, across = _wide(x), formulas.Across(x.shape[-1])

    @stage("maximum")
    def maximum(x):
        return across.maximum(x if where is None else jnp.where(where, x, -jnp.inf)).astype(wide)

    @stage("exponential")
    def exponential(x, maximum):
        z = x.astype(wide) - maximum
        if where is None:
            return jnp.exp(z)
        # Excluded elements take no part in what can be inf or NaN, nor do their gradients.
        return jnp.where(where, jnp.exp(jnp.where(where, z, 0.0)), 0.0)

    @stage("total")
    def total(e):
        return across.total(e)

    largest = maximum(x)
    e = exponential(x, largest)
    return largest, e, total(e)


def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    wide = _wide(x, bias)
    return stage("bias")(lambda x, bias: x.astype(wide) + bias.astype(wide))(x, bias)


def _gated(activated: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    with jax.named_scope("multiply"):
        return (activated * up.astype(activated.dtype)).astype(gate.dtype)


def _wide(*arrays: jax.Array) -> Any:
    """The dtype of computation."""
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32
