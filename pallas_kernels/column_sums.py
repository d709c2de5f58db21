"""Sums over rows in the pass that makes what is summed: with bias + GELU, and with sums of rows.

XLA hands a reduction over rows to a kernel of its own, which reads back what another has just
written. Here every CTA keeps the sums of its own rows in registers, from the same f32 values that
outputs are rounded from, and writes them once; a small launch adds them up, always in the same
order. Bytes per element at 16 bits: 2 read + 2 written for `bias_gelu_colsum`, 2 read for
`scale_sums`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import formulas
from pallas_kernels.arguments import flag, mode_of, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.forward_only import forward_only
from pallas_kernels.gelu_math import gelu_erf, gelu_tanh
from pallas_kernels.launches import Mode, RowOperation
from pallas_kernels.plan import Plan, plan_rows, unsupported_parameter, unsupported_rows
from pallas_kernels.row_values import Later
from pallas_kernels.rows import Result, run_rows
from pallas_kernels.tuned import Tuning


def plan_bias_gelu_colsum(
    rows: int, width: int, dtype: Any, *, tuning: Tuning | None = None
) -> Plan:
    """The launch of `bias_gelu_colsum` on [rows, width] of `dtype`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=1,
        held=4,
        op="bias_gelu_colsum",
        reduces=False,
        by_column=True,
        sums=True,
        tuning=tuning,
    )


def plan_scale_sums(rows: int, width: int, dtype: Any, *, tuning: Tuning | None = None) -> Plan:
    """The launch of `scale_sums` on [rows, width] of `dtype`."""
    return plan_rows(
        rows,
        width,
        dtype,
        streams=1,
        held=5,
        op="scale_sums",
        by_column=True,
        sums=True,
        tuning=tuning,
    )


def expected_bytes_bias_gelu_colsum(
    rows: int, width: int, dtype: Any, bias_dtype: Any = None
) -> int:
    """The bytes that must move: x and the bias read, y and the f32 sums written."""
    return 2 * rows * width * jnp.dtype(dtype).itemsize + _parameter(width, dtype, bias_dtype)


def expected_bytes_scale_sums(rows: int, width: int, dtype: Any, scale_dtype: Any = None) -> int:
    """The bytes that must move: x and the scale read, the f32 sums of both kinds written."""
    of_x = rows * width * jnp.dtype(dtype).itemsize
    return of_x + _parameter(width, dtype, scale_dtype) + 4 * rows


def _parameter(width: int, dtype: Any, parameter_dtype: Any) -> int:
    """Bytes of a parameter, and of the sums of as many columns."""
    parameter_dtype = dtype if parameter_dtype is None else parameter_dtype
    return width * (jnp.dtype(parameter_dtype).itemsize + 4)


def unsupported_bias_gelu_colsum(x: Any, bias: Any, *, split: bool = False) -> str | None:
    """Why `bias_gelu_colsum` refuses these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the first argument.
      bias: the second.
      split: whether devices may share the rows, so that x can have more elements than a kernel.
    """
    reason = unsupported_rows(x, reduces=False, split=split)
    return reason or unsupported_parameter("bias", bias, x.shape[-1])


def unsupported_scale_sums(x: Any, scale: Any, *, split: bool = False) -> str | None:
    """Why `scale_sums` refuses these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the first argument.
      scale: the second.
      split: whether devices may share the rows, so that x can have more elements than a kernel.
    """
    return unsupported_rows(x, split=split) or unsupported_parameter("scale", scale, x.shape[-1])


def bias_gelu_colsum(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    fallback: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """gelu(x + bias), and the sum of each column of it before rounding.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      bias: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y with the shape and dtype of x, and f32 sums [width] of the unrounded GELU over all rows.

    Raises:
      ValueError: with the sentence of `unsupported_bias_gelu_colsum`.
      TypeError: the call is differentiated.
    """
    x, bias = present(x=x, bias=bias)
    approximate = flag("approximate", approximate)
    if reason := unsupported_bias_gelu_colsum(x, bias, split=True):
        raise ValueError(reason)
    operation = RowOperation(
        "bias_gelu_colsum", _colsum_kernel, _colsum_formula, approximate, by_column=True
    )
    return _launched(operation, mode_of(fallback, interpret), x, bias)


def _colsum_kernel(approximate, x, bias, *, interpret):
    return bias_gelu_colsum_kernel(x, bias, approximate=approximate, interpret=interpret)


def _colsum_formula(approximate, x, bias, *, across):
    del across
    return formulas.bias_gelu_colsum(x, bias, approximate=approximate)


def scale_sums(
    x: jax.Array, scale: jax.Array, *, fallback: bool = False, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Sums of each row and of each column of h = x * scale, which is not stored.

    Args:
      x: [..., width], float16, bfloat16 or float32; width at most `plan.most_width`.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      f32 sums of x.shape[:-1], and f32 sums [width] over all rows, of the unrounded h.

    Raises:
      ValueError: with the sentence of `unsupported_scale_sums`.
      TypeError: the call is differentiated.
    """
    x, scale = present(x=x, scale=scale)
    if reason := unsupported_scale_sums(x, scale, split=True):
        raise ValueError(reason)
    operation = RowOperation("scale_sums", _sums_kernel, _sums_formula)
    return _launched(operation, mode_of(fallback, interpret), x, scale)


def _sums_kernel(options, x, scale, *, interpret):
    del options
    return scale_sums_kernel(x, scale, interpret=interpret)


def _sums_formula(options, x, scale, *, across):
    del options
    return formulas.scale_sums(x, scale, across=across)


def _launched(operation: RowOperation, mode: Mode, x, parameter):
    call = functools.partial(over_rows, operation, mode)
    return forward_only(operation.name, call)(*placed([x], [parameter]))


def bias_gelu_colsum_kernel(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind `bias_gelu_colsum`: y [rows, width] and f32 sums [width]."""
    rows, width = x.shape
    gelu = gelu_tanh if approximate else gelu_erf

    def transform(blocks, parameters, row_inputs, row):
        del row_inputs, row
        (block,), (bias,) = blocks, parameters
        y = gelu(block.astype(jnp.float32) + bias.astype(jnp.float32))
        return Result((y,), column_values=(y,))

    found = run_rows(
        transform,
        plan_bias_gelu_colsum(rows, width, x.dtype, tuning=tuning),
        [x],
        [bias],
        name="bias_gelu_colsum",
        column_sums=1,
        cost=pl.CostEstimate(
            flops=(13 if approximate else 25) * x.size,
            transcendentals=2 * x.size,
            bytes_accessed=expected_bytes_bias_gelu_colsum(rows, width, x.dtype, bias.dtype),
        ),
        interpret=interpret,
    )
    return found.outputs[0], found.column_sums[0]


def scale_sums_kernel(
    x: jax.Array, scale: jax.Array, *, interpret: Any = None, tuning: Tuning | None = None
) -> tuple[jax.Array, jax.Array]:
    """The launch behind `scale_sums`: f32 sums [rows] and f32 sums [width]."""
    rows, width = x.shape

    def transform(blocks, parameters, row_inputs, row):
        del row_inputs
        (block,), (scale,) = blocks, parameters
        h = block.astype(jnp.float32) * scale.astype(jnp.float32)
        return Result(column_values=(h,), partials=(row.part_total(row.only(h)),))

    found = run_rows(
        transform,
        plan_scale_sums(rows, width, x.dtype, tuning=tuning),
        [x],
        [scale],
        name="scale_sums",
        later=Later(1),
        outputs=0,
        row_values=1,
        column_sums=1,
        cost=pl.CostEstimate(
            flops=3 * x.size,
            transcendentals=0,
            bytes_accessed=expected_bytes_scale_sums(rows, width, x.dtype, scale.dtype),
        ),
        interpret=interpret,
    )
    return found.row_values[0], found.column_sums[0]
