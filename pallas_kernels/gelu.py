"""bias + GELU in one pass, alone and with the f32 sum of each row, and their gradients.

XLA fuses the first well; the second it splits into two kernels with an f32 [rows, width] between
them, because its cost model will not compute the GELU twice for two consumers. Bytes per element
at 16 bits: 2 read + 4 written + 4 read + 2 written = 12 before, 2 read + 2 written = 4 here.

The gradients read x and dy and write dx, 6 bytes per element: x + bias is computed again, and the
bias's gradient is summed in registers from the same f32 values that dx is rounded from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import formulas
from pallas_kernels.arguments import flag, mode_of, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.gelu_math import (
    gelu_erf,
    gelu_erf_and_slope,
    gelu_tanh,
    gelu_tanh_and_slope,
)
from pallas_kernels.launches import RowOperation
from pallas_kernels.plan import Plan, plan_rows, unsupported_parameter, unsupported_rows
from pallas_kernels.row_values import Later
from pallas_kernels.rows import Result, run_rows
from pallas_kernels.tuned import Tuning


def plan(
    rows: int, width: int, dtype: Any, *, row_sums: bool = False, tuning: Tuning | None = None
) -> Plan:
    """The launch of `bias_gelu`, or of `bias_gelu_rowsum`, on [rows, width] of `dtype`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=1,
        held=2,
        op="bias_gelu_rowsum" if row_sums else "bias_gelu",
        reduces=row_sums,
        by_column=True,
        tuning=tuning,
    )


def plan_backward(
    rows: int, width: int, dtype: Any, *, row_sums: bool = False, tuning: Tuning | None = None
) -> Plan:
    """The launch of the gradient of `bias_gelu`, or of `bias_gelu_rowsum`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=2,
        held=5,
        op="bias_gelu_rowsum_backward" if row_sums else "bias_gelu_backward",
        reduces=False,
        by_column=True,
        sums=1,
        tuning=tuning,
    )


def expected_bytes(
    rows: int, width: int, dtype: Any, bias_dtype: Any = None, *, row_sums: bool = False
) -> int:
    """The bytes that the kernel must move: x and the bias read, y (and the f32 sums) written."""
    itemsize, bias_itemsize = _itemsizes(dtype, bias_dtype)
    return 2 * rows * width * itemsize + width * bias_itemsize + (4 * rows if row_sums else 0)


def expected_bytes_backward(
    rows: int, width: int, dtype: Any, bias_dtype: Any = None, *, row_sums: bool = False
) -> int:
    """The same of the gradient: x, dy, the bias (and dsums) read, dx and dbias written."""
    itemsize, bias_itemsize = _itemsizes(dtype, bias_dtype)
    return 3 * rows * width * itemsize + 2 * width * bias_itemsize + (4 * rows if row_sums else 0)


def _itemsizes(dtype: Any, bias_dtype: Any) -> tuple[int, int]:
    bias_dtype = dtype if bias_dtype is None else bias_dtype
    return jnp.dtype(dtype).itemsize, jnp.dtype(bias_dtype).itemsize


def unsupported(x: Any, bias: Any, *, row_sums: bool = False, split: bool = False) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the first argument.
      bias: the second.
      row_sums: whether of `bias_gelu_rowsum`, whose rows are limited, or of `bias_gelu`.
      split: whether devices may share the rows, so that x can have more elements than a kernel.
    """
    reason = unsupported_rows(x, reduces=row_sums, split=split)
    return reason or unsupported_parameter("bias", bias, x.shape[-1])


def bias_gelu(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """gelu(x + bias), computed in f32 and rounded once; differentiable in reverse.

    The same as `jax.nn.gelu(x.astype(f32) + bias.astype(f32), approximate).astype(x.dtype)`,
    and accurate relative to the result in the negative tail, where that one is not.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      bias: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    x, bias = present(x=x, bias=bias)
    options = _Options(flag("approximate", approximate), row_sums=False)
    if reason := unsupported(x, bias, split=True):
        raise ValueError(reason)
    return _bias_gelu(options, mode_of(fallback, interpret), *placed([x], [bias]))[0]


def bias_gelu_rowsum(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    fallback: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """gelu(x + bias) as `bias_gelu` gives it, and the sum of each row before rounding.

    Args:
      x: [..., width], float16, bfloat16 or float32; width at most `plan.most_width`.
      bias: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y with the shape and dtype of x, and f32 sums of the unrounded GELU, of x.shape[:-1].

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    x, bias = present(x=x, bias=bias)
    options = _Options(flag("approximate", approximate), row_sums=True)
    if reason := unsupported(x, bias, row_sums=True, split=True):
        raise ValueError(reason)
    y, sums = _bias_gelu(options, mode_of(fallback, interpret), *placed([x], [bias]))
    return y, sums


@dataclasses.dataclass(frozen=True)
class _Options:
    approximate: bool
    row_sums: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bias_gelu(options, mode, x, bias):
    return _launched(options, mode, x, bias)


def _launched(options, mode, x, bias):
    operation = RowOperation(
        "bias_gelu_rowsum" if options.row_sums else "bias_gelu",
        _forward_kernel,
        _forward_formula,
        options,
        by_column=not options.row_sums,
    )
    return over_rows(operation, mode, x, bias)[0]


def _bias_gelu_forward(options, mode, x, bias):
    return _launched(options, mode, x, bias), (x, bias)


def _bias_gelu_backward(options, mode, saved, cotangents):
    x, bias = saved
    operation = RowOperation(
        "bias_gelu_rowsum_backward" if options.row_sums else "bias_gelu_backward",
        _backward_kernel,
        _backward_formula,
        options,
        by_column=True,
    )
    dx, dbias = over_rows(operation, mode, (x, *cotangents), bias)
    return dx, dbias.astype(bias.dtype)


_bias_gelu.defvjp(_bias_gelu_forward, _bias_gelu_backward)


def _forward_kernel(options, x, bias, *, interpret):
    keywords = {"approximate": options.approximate, "interpret": interpret}
    if options.row_sums:
        return bias_gelu_rowsum_kernel(x, bias, **keywords), ()
    return (bias_gelu_kernel(x, bias, **keywords),), ()


def _forward_formula(options, x, bias, *, across):
    if options.row_sums:
        found = formulas.bias_gelu_rowsum(x, bias, approximate=options.approximate, across=across)
        return found, ()
    return (formulas.bias_gelu(x, bias, approximate=options.approximate),), ()


def _backward_kernel(options, per_row, bias, *, interpret):
    x, *cotangents = per_row
    kernel = bias_gelu_rowsum_backward_kernel if options.row_sums else bias_gelu_backward_kernel
    return kernel(x, bias, *cotangents, approximate=options.approximate, interpret=interpret)


def _backward_formula(options, per_row, bias, *, across):
    del across
    x, *cotangents = per_row
    return formulas.bias_gelu_backward(x, bias, *cotangents, approximate=options.approximate)


def bias_gelu_kernel(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """The launch behind `bias_gelu`: x [rows, width], bias [width] to y [rows, width]."""
    rows, width = x.shape
    found = run_rows(
        functools.partial(_forward, gelu_tanh if approximate else gelu_erf, False),
        plan(rows, width, x.dtype, tuning=tuning),
        [x],
        [bias],
        name="bias_gelu",
        cost=_cost(x, approximate, expected_bytes(rows, width, x.dtype, bias.dtype)),
        interpret=interpret,
    )
    return found.outputs[0]


def bias_gelu_rowsum_kernel(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind `bias_gelu_rowsum`: y [rows, width] and f32 sums [rows]."""
    rows, width = x.shape
    moved = expected_bytes(rows, width, x.dtype, bias.dtype, row_sums=True)
    found = run_rows(
        functools.partial(_forward, gelu_tanh if approximate else gelu_erf, True),
        plan(rows, width, x.dtype, row_sums=True, tuning=tuning),
        [x],
        [bias],
        name="bias_gelu_rowsum",
        later=Later(1),
        row_values=1,
        cost=_cost(x, approximate, moved),
        interpret=interpret,
    )
    return found.outputs[0], found.row_values[0]


def _forward(gelu, row_sums, blocks, parameters, row_inputs, row):
    del row_inputs
    (x,), (bias,) = blocks, parameters
    y = gelu(x.astype(jnp.float32) + bias.astype(jnp.float32))
    return Result((y,), partials=(row.part_total(row.only(y)),) if row_sums else ())


def bias_gelu_backward_kernel(
    x: jax.Array,
    bias: jax.Array,
    dy: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind the gradient of `bias_gelu`.

        dx = dy * gelu'(x + bias)
        dbias = sum(dx, 0)          # of the f32 values, before dx is rounded

    Args:
      x: [rows, width].
      bias: [width].
      dy: the shape and dtype of x.
      approximate: the tanh form; False is the erf form.
      interpret: as in `bias_gelu`.
      tuning: instead of the measured choice.

    Returns:
      dx, of the shape and dtype of x, and dbias, f32 [width].
    """
    rows, width = x.shape
    found = run_rows(
        functools.partial(_backward, approximate),
        plan_backward(rows, width, x.dtype, tuning=tuning),
        [x, dy],
        [bias],
        name="bias_gelu_backward",
        column_sums=1,
        cost=_cost(x, approximate, expected_bytes_backward(rows, width, x.dtype, bias.dtype)),
        interpret=interpret,
    )
    return found.outputs[0], found.column_sums[0]


def bias_gelu_rowsum_backward_kernel(
    x: jax.Array,
    bias: jax.Array,
    dy: jax.Array,
    dsums: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind the gradient of `bias_gelu_rowsum`.

        dx = (dy + dsums[:, None]) * gelu'(x + bias)
        dbias = sum(dx, 0)          # of the f32 values, before dx is rounded

    Arguments and results are those of `bias_gelu_backward_kernel`, and dsums is f32 [rows].
    """
    rows, width = x.shape
    moved = expected_bytes_backward(rows, width, x.dtype, bias.dtype, row_sums=True)
    found = run_rows(
        functools.partial(_backward, approximate),
        plan_backward(rows, width, x.dtype, row_sums=True, tuning=tuning),
        [x, dy],
        [bias],
        [dsums],
        name="bias_gelu_rowsum_backward",
        column_sums=1,
        cost=_cost(x, approximate, moved),
        interpret=interpret,
    )
    return found.outputs[0], found.column_sums[0]


def _backward(approximate, blocks, parameters, row_inputs, row):
    x, dy = (block.astype(jnp.float32) for block in blocks)
    (bias,) = parameters
    for dsums in row_inputs:
        dy = dy + row.spread(dsums)
    and_slope = gelu_tanh_and_slope if approximate else gelu_erf_and_slope
    _, slope = and_slope(x + bias.astype(jnp.float32))
    dx = dy * slope
    return Result((dx,), column_values=(dx,))


def _cost(x: jax.Array, approximate: bool, moved: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=(12 if approximate else 24) * x.size,
        transcendentals=2 * x.size,
        bytes_accessed=moved,
    )
