"""What every row kernel computes, in plain JAX: forward, and backward from what forward saves.

For platforms without the kernels, for rows that are split over devices, and for derivatives beyond
the first. Everything inside is f32, or float64 where an argument is; results have the dtypes of the
kernels'. Leading axes are any. The forward functions take the arguments of the kernels' public
functions and can be differentiated any number of times, in both modes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm_kernels import Backward, Forward, Norm

# Beyond it, in f32 and in float64, the GELU of both forms is z or 0.
GELU_END = 40.0


@dataclasses.dataclass(frozen=True)
class Across:
    """What is known of a row as a whole, all of which is here, or equal parts on several devices.

    Attributes:
      width: elements of a whole row.
      axes: mesh axes over which rows are split, the slowest first.
    """

    width: int
    axes: tuple[str, ...] = ()

    def total(self, block: jax.Array) -> jax.Array:
        """Sums of rows, [..., columns here] to [..., 1]."""
        here = block.sum(-1, keepdims=True)
        return lax.psum(here, self.axes) if self.axes else here

    def mean(self, block: jax.Array) -> jax.Array:
        """Means of rows, likewise."""
        return self.total(block) / self.width

    def maximum(self, block: jax.Array) -> jax.Array:
        """The largest elements of rows, likewise, -inf of none; without a derivative."""
        here = lax.stop_gradient(block).max(-1, keepdims=True, initial=-jnp.inf)
        return lax.pmax(here, self.axes) if self.axes else here

    def columns(self, block: jax.Array) -> jax.Array:
        """The column of every element of [..., columns here], int32."""
        here = lax.broadcasted_iota(jnp.int32, block.shape, block.ndim - 1)
        return here + lax.axis_index(self.axes) * block.shape[-1] if self.axes else here


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
) -> jax.Array:
    """`pallas_kernels.layer_norm`."""
    return norm(Norm(True, epsilon=epsilon), x, None, scale, bias).y


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """`pallas_kernels.rms_norm`."""
    return norm(Norm(False, epsilon=epsilon, scale_offset=scale_offset), x, None, scale).y


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
) -> jax.Array:
    """`pallas_kernels.residual_layer_norm`."""
    return prenorm_layer_norm(x, residual, scale, bias, epsilon=epsilon)[0]


def residual_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """`pallas_kernels.residual_rms_norm`."""
    return prenorm_rms_norm(x, residual, scale, epsilon=epsilon, scale_offset=scale_offset)[0]


def prenorm_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.prenorm_layer_norm`."""
    found = norm(Norm(True, True, True, epsilon), x, residual, scale, bias)
    return found.y, _present(found.h)


def prenorm_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.prenorm_rms_norm`."""
    found = norm(Norm(False, True, True, epsilon, scale_offset), x, residual, scale)
    return found.y, _present(found.h)


def bias_gelu(x: jax.Array, bias: jax.Array, *, approximate: bool = True) -> jax.Array:
    """`pallas_kernels.bias_gelu`."""
    return gelu(_wide(x, bias) + _wide(bias, x), approximate).astype(x.dtype)


def bias_gelu_rowsum(
    x: jax.Array, bias: jax.Array, *, approximate: bool = True, across: Across | None = None
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.bias_gelu_rowsum`; the sums of float64 rows are float64."""
    y = gelu(_wide(x, bias) + _wide(bias, x), approximate)
    return y.astype(x.dtype), _values(_across(x, across).total(y))


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`pallas_kernels.swiglu`."""
    return (silu(_wide(gate, up)) * _wide(up, gate)).astype(gate.dtype)


def geglu(gate: jax.Array, up: jax.Array, *, approximate: bool = True) -> jax.Array:
    """`pallas_kernels.geglu`."""
    return (gelu(_wide(gate, up), approximate) * _wide(up, gate)).astype(gate.dtype)


def softmax(
    x: jax.Array, *, where: jax.Array | None = None, across: Across | None = None
) -> jax.Array:
    """`pallas_kernels.softmax`."""
    across = _across(x, across)
    z = _wide(x)
    if where is None:
        e = jnp.exp(z - across.maximum(z))
        return (e / across.total(e)).astype(x.dtype)
    maximum = across.maximum(jnp.where(where, z, -jnp.inf))
    # Excluded elements take no part in what can be inf or NaN, so that neither do their gradients.
    e = jnp.where(where, jnp.exp(jnp.where(where, z - maximum, 0.0)), 0.0)
    total = across.total(e)  # 0 only where nothing is kept: the maximum adds 1
    y = e / jnp.where(total == 0.0, 1.0, total)
    return jnp.where(where, y, 0.0).astype(x.dtype)


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`pallas_kernels.softmax_cross_entropy`; the losses of float64 logits are float64."""
    return cross_entropy(logits, labels)[0]


def norm(
    norm: Norm,
    x: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    saves: bool = False,
    across: Across | None = None,
) -> Forward:
    """`norm_kernels.forward_kernel`, of x [..., width]."""
    across = _across(x, across)
    given = [a for a in (x, residual, scale, bias) if a is not None]
    h = _wide(x, *given) if residual is None else _rounded_sum(x, residual, *given)
    d, statistics = h, []
    if norm.centred:
        # As in the kernels: an f32 mean is off by a few ulp of itself, which shows in f32 rows.
        for _ in range(norm.statistics(x.dtype) - 1):
            statistics.append(across.mean(d))
            d = d - statistics[-1]
    reciprocal = lax.rsqrt(across.mean(d * d) + norm.epsilon)
    y = d * reciprocal
    if scale is not None:
        y = y * _factor(norm, scale, *given)
    if bias is not None:
        y = y + _wide(bias, *given)
    return Forward(
        y.astype(x.dtype),
        h.astype(x.dtype) if norm.returns_sum else None,
        tuple(map(_values, (*statistics, reciprocal))) if saves else (),
    )


def norm_backward(
    norm: Norm,
    h: jax.Array,
    dy: jax.Array,
    ds: jax.Array | None,
    statistics: Any,
    scale: jax.Array | None = None,
    *,
    has_bias: bool = False,
    across: Across | None = None,
) -> Backward:
    """`norm_kernels.backward_kernel`, of h [..., width]; sums are over the rows that are here."""
    across = _across(h, across)
    *means, reciprocal = (value[..., None] for value in statistics)
    n, w = _wide(h), _wide(dy)
    dbias = _column_sums(w) if has_bias else None
    for mean in means:
        n = n - mean
    n = n * reciprocal
    dscale = None
    if scale is not None:
        dscale = _column_sums(w * n)
        w = w * _factor(norm, scale)
    dx = w - n * across.mean(w * n)
    if norm.centred:
        dx = dx - across.mean(w)
    dx = dx * reciprocal
    if ds is not None:
        dx = dx + _wide(ds)
    return Backward(dx.astype(h.dtype), dscale, dbias)


def bias_gelu_backward(
    x: jax.Array,
    bias: jax.Array,
    dy: jax.Array,
    dsums: jax.Array | None = None,
    *,
    approximate: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """`gelu.bias_gelu_backward_kernel`, of x [..., width]; with `dsums`, of the one with sums."""
    dy = _wide(dy)
    if dsums is not None:
        dy = dy + dsums[..., None]
    _, pull = jax.vjp(lambda z: gelu(z, approximate), _wide(x) + _wide(bias))
    (dx,) = pull(dy)
    return dx.astype(x.dtype), _column_sums(dx)


def gated_backward(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`gated.swiglu_backward_kernel` of `swiglu`, and the same of `geglu`, of [..., width]."""
    _, pull = jax.vjp(function, _wide(gate), _wide(up))
    dgate, dup = pull(_wide(dy))
    return dgate.astype(gate.dtype), dup.astype(gate.dtype)


def softmax_backward(
    y: jax.Array, dy: jax.Array, *, masked: bool = False, across: Across | None = None
) -> jax.Array:
    """`row_softmax.softmax_backward_kernel`, of y [..., width]."""
    across = _across(y, across)
    wide, dy = _wide(y), _wide(dy)
    if masked:
        dy = jnp.where(wide != 0.0, dy, 0.0)
    dx = wide * (dy - across.total(wide * dy))
    # What is excluded stays 0 also where the sum is not finite.
    return (jnp.where(wide != 0.0, dx, 0.0) if masked else dx).astype(y.dtype)


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, across: Across | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`cross_entropy.cross_entropy_kernel`, of [..., width]: losses, maxima and sums."""
    across = _across(logits, across)
    z, label = _wide(logits), as_int32(labels)[..., None]
    maximum = across.maximum(z)
    total = across.total(jnp.exp(z - maximum))
    picked = across.total(jnp.where(across.columns(z) == label, z, 0.0))
    # Not log(total) + maximum first: rounded to the size of the maximum, a small loss is lost.
    loss = jnp.log(total) + (maximum - picked)
    # Added, not selected: the gradient of a row without a label is that of log(sum(exp(z))).
    loss = loss + jnp.where((label >= 0) & (label < across.width), 0.0, jnp.nan)
    return _values(loss), _values(maximum), _values(total)


def cross_entropy_backward(
    logits: jax.Array,
    labels: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    dloss: jax.Array,
    *,
    across: Across | None = None,
) -> jax.Array:
    """`cross_entropy.cross_entropy_backward_kernel`, of [..., width]."""
    z, label = _wide(logits), as_int32(labels)[..., None]
    y = jnp.exp(z - maximum[..., None]) / total[..., None]
    mine = _across(logits, across).columns(z) == label
    return (jnp.where(mine, y - 1.0, y) * dloss[..., None]).astype(logits.dtype)


def bias_gelu_colsum(
    x: jax.Array, bias: jax.Array, *, approximate: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`column_sums.bias_gelu_colsum_kernel`, of x [..., width]."""
    y = gelu(_wide(x) + _wide(bias), approximate)
    return y.astype(x.dtype), _column_sums(y)


def scale_sums(
    x: jax.Array, scale: jax.Array, *, across: Across | None = None
) -> tuple[jax.Array, jax.Array]:
    """`column_sums.scale_sums_kernel`, of x [..., width]."""
    h = _wide(x) * _wide(scale)
    return _values(_across(x, across).total(h)), _column_sums(h)


def gelu(z: jax.Array, approximate: bool) -> jax.Array:
    """GELU of f32 or float64, accurate relative to the result as far as its own exponential is.

    The usual z / 2 * (1 + tanh(u)) and z / 2 * (1 + erf(z / sqrt(2))) cancel in the negative tail.
    """
    a = jnp.clip(z, -GELU_END, GELU_END)  # keeps inf * 0 out of derivatives
    if approximate:
        return z * lax.logistic(math.sqrt(8 / math.pi) * (a + 0.044715 * a * a * a))
    return z * (0.5 * lax.erfc(-math.sqrt(0.5) * a))


def silu(z: jax.Array) -> jax.Array:
    """z * sigmoid(z)."""
    return z * lax.logistic(z)


def as_int32(labels: jax.Array) -> jax.Array:
    """Labels as int32, out of range where they were."""
    if jnp.iinfo(labels.dtype).bits > 32 or labels.dtype == jnp.uint32:
        most = jnp.iinfo(jnp.int32).max
        labels = jnp.where((labels >= 0) & (labels <= most), labels, most)
    return labels.astype(jnp.int32)


def _across(x: jax.Array, across: Across | None) -> Across:
    return Across(x.shape[-1]) if across is None else across


def _wide(array: jax.Array, *others: jax.Array) -> jax.Array:
    """The array in the precision of computation, which is that of all of them together."""
    exact = any(other.dtype == jnp.float64 for other in (array, *others))
    return array.astype(jnp.float64 if exact else jnp.float32)


def _rounded_sum(x: jax.Array, residual: jax.Array, *given: jax.Array) -> jax.Array:
    """x + residual, rounded to their dtype, in the precision of computation.

    XLA drops a conversion to 16 bits and back, here it must not.
    """
    total = _wide(x, *given) + _wide(residual, *given)
    return rounded(total, x.dtype, has_its_subnormals=x.dtype == residual.dtype)


def rounded(value: jax.Array, dtype: Any, *, has_its_subnormals: bool = False) -> jax.Array:
    """`value.astype(dtype).astype(value.dtype)`, which XLA would drop for 16 bits, differentiable.

    Args:
      value: in the precision of computation.
      dtype: of floating-point numbers.
      has_its_subnormals: whether what is as small as subnormals of `dtype` is one of them already.
    """
    info = jnp.finfo(dtype)
    if info.bits > 16:
        return value.astype(dtype).astype(value.dtype)
    # With f32's exponents: reduce_precision flushes f16's subnormals.
    found = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=info.nmant)
    if info.nexp >= 8:
        return found
    if not has_its_subnormals:
        step = float(info.smallest_subnormal)
        nearest = lax.stop_gradient(jnp.round(value / step) * step - value) + value
        found = jnp.where(jnp.abs(value) < float(info.tiny), nearest, found)
    infinite = jnp.where(found > 0.0, jnp.inf, -jnp.inf)
    return jnp.where(jnp.abs(found) > float(info.max), infinite, found)


def _factor(norm: Norm, scale: jax.Array, *given: jax.Array) -> jax.Array:
    wide = _wide(scale, *given)
    return wide + norm.scale_offset if norm.scale_offset else wide


def _values(column: jax.Array) -> jax.Array:
    """Row values [...], of [..., 1]."""
    return column[..., 0]


def _column_sums(block: jax.Array) -> jax.Array:
    return block.sum(tuple(range(block.ndim - 1)))


def _present(array: jax.Array | None) -> jax.Array:
    assert array is not None
    return array
