"""The launches of LayerNorm and RMSNorm: forward over one or two arrays, and backward.

XLA takes two kernels for "add, then norm" (10 bytes per element at 16 bits where 6 must move) and
three or more for the gradients: one for dx, and the sums along columns by themselves, which read h
and dy again. Here both directions are one kernel, so that every array moves once; bytes per element
at 16 bits:

| launch | read | written |
|---|---|---|
| `layer_norm`, `rms_norm` | x: 2 | y: 2 |
| `residual_*` | x, residual: 4 | y: 2 |
| `prenorm_*`, and `residual_*` under differentiation | x, residual: 4 | y, h: 4 |
| `*_backward` | h, dy: 4 | dx: 2 |
| `prenorm_*_backward` | h, dy, ds: 6 | dx: 2 |

Forward leaves the statistics of each row for backward, so that this needs one exchange between
warps instead of three.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.plan import Plan, plan_rows
from pallas_kernels.rows import Result, Row, run_rows
from pallas_kernels.tuned import Tuning


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which norm, everything about it that is known while it is traced.

    Attributes:
      centred: LayerNorm, which takes the mean off; else RMSNorm.
      residual: whether a second array is added first.
      returns_sum: whether that sum is an output too.
      epsilon: added to the mean square.
      scale_offset: added to the scale.
    """

    centred: bool
    residual: bool = False
    returns_sum: bool = False
    epsilon: float = 1e-6
    scale_offset: float = 0.0

    @property
    def name(self) -> str:
        """Of the forward kernel, also in the file of measured choices."""
        before = "prenorm_" if self.returns_sum else "residual_" if self.residual else ""
        return before + ("layer_norm" if self.centred else "rms_norm")

    @property
    def backward_name(self) -> str:
        """Of the backward kernel, which does not care where h came from."""
        before = "prenorm_" if self.returns_sum else ""
        return before + ("layer_norm" if self.centred else "rms_norm") + "_backward"

    @property
    def streams(self) -> int:
        """Arrays that the forward kernel reads."""
        return 1 + self.residual

    @property
    def backward_streams(self) -> int:
        """Arrays that the backward kernel reads: h, dy and, with the sum an output, ds."""
        return 2 + self.returns_sum

    def statistics(self, dtype: Any) -> int:
        """Numbers that forward leaves of each row for backward.

        LayerNorm: the mean, for float32 rows what it is off by, and 1 / deviation. RMSNorm: the
        last of them.
        """
        return (1 + _exact(dtype) if self.centred else 0) + 1


class Forward(NamedTuple):
    """What the forward kernel returns.

    Attributes:
      y: [rows, width], the dtype of x.
      h: x + residual, likewise; None unless it was asked for.
      statistics: f32 [rows] each, see `Norm.statistics`; empty unless they were asked for.
    """

    y: jax.Array
    h: jax.Array | None
    statistics: tuple[jax.Array, ...]


class Backward(NamedTuple):
    """What the backward kernel returns.

    Attributes:
      dx: [rows, width], the dtype of h.
      dscale: f32 [width], or None without a scale.
      dbias: f32 [width], or None without a bias.
    """

    dx: jax.Array
    dscale: jax.Array | None
    dbias: jax.Array | None


def plan_forward(
    norm: Norm,
    rows: int,
    width: int,
    dtype: Any,
    *,
    parameters: int = 2,
    tuning: Tuning | None = None,
) -> Plan:
    """The launch of `forward_kernel` on [rows, width] of `dtype` with scale and bias, or fewer."""
    held = norm.streams + parameters + norm.returns_sum  # the sum beside what is left of it
    return plan_rows(
        rows,
        width,
        dtype,
        streams=norm.streams,
        held=held,
        op=norm.name,
        by_column=parameters > 0,
        tuning=tuning,
    )


def plan_backward(
    norm: Norm,
    rows: int,
    width: int,
    dtype: Any,
    *,
    has_scale: bool = True,
    has_bias: bool = True,
    tuning: Tuning | None = None,
) -> Plan:
    """The launch of `backward_kernel` on [rows, width] of `dtype`."""
    streams = norm.backward_streams
    held = streams + 3 * has_scale + 2 * has_bias
    return plan_rows(
        rows,
        width,
        dtype,
        streams=streams,
        held=held,
        op=norm.backward_name,
        by_column=has_scale or has_bias,
        sums=has_scale + has_bias,
        tuning=tuning,
    )


def expected_bytes(
    norm: Norm,
    rows: int,
    width: int,
    dtype: Any,
    parameter_dtypes: Sequence[Any] = (),
    *,
    saves: bool = False,
) -> int:
    """The bytes that `forward_kernel` must move.

    x, residual and the parameters are read, y, h and the statistics written.

    Args:
      norm: which.
      rows: of x.
      width: of x.
      dtype: of x.
      parameter_dtypes: of scale and bias, as far as there are such.
      saves: whether statistics are written.
    """
    arrays = norm.streams + 1 + norm.returns_sum
    return (
        arrays * rows * width * jnp.dtype(dtype).itemsize
        + _vectors(width, parameter_dtypes)
        + (4 * rows * norm.statistics(dtype) if saves else 0)
    )


def expected_bytes_backward(
    norm: Norm,
    rows: int,
    width: int,
    dtype: Any,
    *,
    scale_dtype: Any = None,
    bias_dtype: Any = None,
) -> int:
    """The bytes that `backward_kernel` must move.

    h, dy, ds, scale and statistics are read, dx and the gradients of the parameters written, these
    in the dtypes of the parameters. The partial sums of the CTAs come on top.

    Args:
      norm: which.
      rows: of h.
      width: of h.
      dtype: of h.
      scale_dtype: of the scale; None where there is none.
      bias_dtype: of the bias; None where there is none.
    """
    parameters = [scale_dtype, scale_dtype, bias_dtype]  # the bias itself is not read
    return (
        (norm.backward_streams + 1) * rows * width * jnp.dtype(dtype).itemsize
        + _vectors(width, [given for given in parameters if given is not None])
        + 4 * rows * norm.statistics(dtype)
    )


def forward_kernel(
    norm: Norm,
    x: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    saves: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Forward:
    """y = norm(h) * (scale + scale_offset) + bias in one launch, where h = x + residual.

    Args:
      norm: which; h is an output where its `returns_sum` says so.
      x: [rows, width], float16, bfloat16 or float32; not empty.
      residual: likewise, where the norm has one.
      scale: [width], or None for a factor of 1, whatever the `scale_offset`.
      bias: [width], or None.
      saves: whether statistics are returned too.
      tuning: instead of the measured choice.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.
    """
    rows, width = x.shape
    parameters = [given for given in (scale, bias) if given is not None]
    dtypes = [given.dtype for given in parameters]
    found = run_rows(
        functools.partial(_forward, norm, width, scale is not None, saves, bool(interpret)),
        plan_forward(norm, rows, width, x.dtype, parameters=len(parameters), tuning=tuning),
        [x] if residual is None else [x, residual],
        parameters,
        name=norm.name,
        exchanges=(1,) * norm.statistics(x.dtype),  # one for each of them
        outputs=1 + norm.returns_sum,
        row_values=norm.statistics(x.dtype) if saves else 0,
        cost=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=rows,
            bytes_accessed=expected_bytes(norm, rows, width, x.dtype, dtypes, saves=saves),
        ),
        interpret=interpret,
    )
    h = found.outputs[1] if norm.returns_sum else None
    return Forward(found.outputs[0], h, found.row_values)


def backward_kernel(
    norm: Norm,
    h: jax.Array,
    dy: jax.Array,
    ds: jax.Array | None,
    statistics: Sequence[jax.Array],
    scale: jax.Array | None = None,
    *,
    bias_dtype: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Backward:
    """The gradients of `forward_kernel` in one launch.

        n = (h - mean) / deviation              # without the mean for RMSNorm
        w = dy * (scale + scale_offset)
        dx = (w - w.mean(-1) - n * (w * n).mean(-1)) / deviation + ds    # w.mean: LayerNorm only
        dscale = (dy * n).sum(0)
        dbias = dy.sum(0)

    Args:
      norm: which.
      h: [rows, width], the sum of x and residual, or x alone; not empty.
      dy: the cotangent of y, like h.
      ds: the cotangent of the sum, where the norm returns it, like h; else None.
      statistics: of `Forward`.
      scale: [width], or None.
      bias_dtype: of the bias, which is not read; None where there is none.
      tuning: instead of the measured choice.
      interpret: None compiles; True or `plgpu.InterpretGPUParams()` simulates on the CPU.
    """
    rows, width = h.shape
    has_scale, has_bias = scale is not None, bias_dtype is not None
    found = run_rows(
        functools.partial(_backward, norm, width, has_bias),
        plan_backward(
            norm, rows, width, h.dtype, has_scale=has_scale, has_bias=has_bias, tuning=tuning
        ),
        [h, dy] if ds is None else [h, dy, ds],
        [] if scale is None else [scale],
        statistics,
        name=norm.backward_name,
        exchanges=(1 + norm.centred,),
        column_sums=has_scale + has_bias,
        cost=pl.CostEstimate(
            flops=14 * h.size,
            transcendentals=0,
            bytes_accessed=expected_bytes_backward(
                norm,
                rows,
                width,
                h.dtype,
                scale_dtype=None if scale is None else scale.dtype,
                bias_dtype=bias_dtype,
            ),
        ),
        interpret=interpret,
    )
    sums = list(found.column_sums)
    dscale = sums.pop(0) if has_scale else None
    return Backward(found.outputs[0], dscale, sums.pop(0) if has_bias else None)


def _exact(dtype: Any) -> bool:
    """Whether rows of `dtype` show the error of an f32 mean.

    It is off by a few ulp of itself, which shows in f32 rows far from zero: what is left of the sum
    corrects it. 16-bit rows have rounded it away.
    """
    return jnp.dtype(dtype) == jnp.float32


def _vectors(width: int, dtypes: Sequence[Any]) -> int:
    return width * sum(jnp.dtype(dtype).itemsize for dtype in dtypes)


def _factor(norm: Norm, scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    return scale + norm.scale_offset if norm.scale_offset else scale


def _mean(total: jax.Array, width: int) -> jax.Array:
    """total / width, so that the mean of a constant row is that constant.

    The card's fast division is off by up to two ulp. What is left of the total, which a fused
    multiply-add gives exactly, corrects it.
    """
    quotient = total / width
    return quotient + (total - quotient * width) * (1.0 / width)


def _forward(
    norm: Norm,
    width: int,
    has_scale: bool,
    saves: bool,
    simulated: bool,
    blocks: list[jax.Array],
    parameters: list[jax.Array],
    row_inputs: list[jax.Array],
    row: Row,
) -> Result:
    del row_inputs
    queue = list(parameters)
    stored = blocks[0]
    if norm.residual:
        stored = stored + blocks[1]
        if simulated:  # XLA, which runs the simulation, would keep the f32 sum unrounded
            stored = lax.optimization_barrier(stored)
    stored = row.only(stored)
    d = stored.astype(jnp.float32)
    statistics = []
    if norm.centred:
        for _ in range(1 + _exact(stored.dtype)):
            (total,) = row.totals(d)
            mean = _mean(total, width)
            d = row.only(d - row.spread(mean))
            statistics.append(mean)
    (squares,) = row.totals(d * d)
    reciprocal = lax.rsqrt(squares / width + norm.epsilon)
    statistics.append(reciprocal)
    y = d * row.spread(reciprocal)
    if has_scale:
        y = y * _factor(norm, queue.pop(0))
    if queue:
        y = y + queue.pop(0).astype(jnp.float32)
    outputs = (y, stored) if norm.returns_sum else (y,)
    return Result(outputs, tuple(statistics) if saves else ())


def _backward(
    norm: Norm,
    width: int,
    has_bias: bool,
    blocks: list[jax.Array],
    parameters: list[jax.Array],
    row_inputs: list[jax.Array],
    row: Row,
) -> Result:
    *means, reciprocal = row_inputs

    def normalised(h: jax.Array) -> jax.Array:
        n = h.astype(jnp.float32)
        for mean in means:
            n = n - row.spread(mean)
        return n * row.spread(reciprocal)

    def weighted(dy: jax.Array, parameters: list[jax.Array]) -> jax.Array:
        dy = dy.astype(jnp.float32)
        return dy * _factor(norm, parameters[0]) if parameters else dy

    h, dy = (row.only(block) for block in blocks[:2])
    n, w = normalised(h), weighted(dy, parameters)
    found = row.totals(w, w * n) if norm.centred else row.totals(w * n)
    (h, dy, *ds), parameters = row.again()
    n, w, dy = normalised(h), weighted(dy, parameters), dy.astype(jnp.float32)
    dx = w - n * row.spread(found[-1] / width)
    if norm.centred:
        dx = dx - row.spread(found[0] / width)
    dx = dx * row.spread(reciprocal)
    if ds:
        dx = dx + ds[0].astype(jnp.float32)
    sums = [dy * n] if parameters else []
    if has_bias:
        sums.append(dy)
    return Result((dx,), (), tuple(sums))
