"""LayerNorm and RMSNorm along the last axis, alone and of a residual sum, with their gradients.

    h = x + residual                                    # rounded to the dtype of x; else h = x
    d = h - h.mean(-1, keepdims=True)                   # in f32; RMSNorm: d = h
    y = d * rsqrt((d * d).mean(-1, keepdims=True) + epsilon) * (scale + scale_offset) + bias

| function | returns | arrays moved forward | under differentiation | backward |
|---|---|---|---|---|
| `layer_norm`, `rms_norm` | y | 2 | 2 | 3 |
| `residual_layer_norm`, `residual_rms_norm` | y | 3 | 4 | 3 |
| `prenorm_layer_norm`, `prenorm_rms_norm` | y and h | 4 | 4 | 4 |

Each is one launch forward and one backward, to which a small one for the parameters' partial
gradients comes; see `norm_kernels`. Under differentiation the residual norms write h, so that
backward reads one array where it would read two. Statistics are two-pass and centred, in f32, and y
is rounded once. Only the first derivative is defined.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels import formulas
from pallas_kernels.arguments import mode_of, number, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.launches import Mode, RowOperation
from pallas_kernels.norm_kernels import Forward, Norm, backward_kernel, forward_kernel
from pallas_kernels.plan import unsupported_parameter, unsupported_rows


def unsupported(
    x: Any,
    residual: Any = None,
    scale: Any = None,
    bias: Any = None,
    *,
    returns_sum: bool = False,
    split: bool = False,
) -> str | None:
    """Why the kernels refuse these arguments, forward or backward, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the array.
      residual: what is added to it, or None.
      scale: of the columns, or None.
      bias: of the columns, or None.
      returns_sum: whether the sum is an output too: backward then reads one more array.
      split: whether devices may share the rows, so that x can have more elements than a kernel.
    """
    if reason := unsupported_rows(x, 2 + returns_sum, split=split):
        return reason
    if residual is not None and (
        tuple(x.shape) != tuple(residual.shape) or x.dtype != residual.dtype
    ):
        return (
            f"x and residual must be alike, not {tuple(x.shape)} {x.dtype} and "
            f"{tuple(residual.shape)} {residual.dtype}."
        )
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None and (
            reason := unsupported_parameter(name, parameter, x.shape[-1])
        ):
            return reason
    return None


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """LayerNorm along the last axis; see the module for the formula.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype; or None.
      bias: [width], likewise; or None.
      epsilon: added to the variance.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(True, epsilon=number("epsilon", epsilon, least=0))
    return _run(norm, mode_of(fallback, interpret), x, None, scale, bias)[0]


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """RMSNorm along the last axis; see the module for the formula.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype; None is a factor of
        1, whatever the `scale_offset`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(
        False,
        epsilon=number("epsilon", epsilon, least=0),
        scale_offset=number("scale_offset", scale_offset),
    )
    return _run(norm, mode_of(fallback, interpret), x, None, scale, None)[0]


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """LayerNorm of the rounded sum x + residual, along the last axis.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(True, residual=True, epsilon=number("epsilon", epsilon, least=0))
    return _run(norm, mode_of(fallback, interpret), x, residual, scale, bias)[0]


def residual_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """RMSNorm of the rounded sum x + residual, along the last axis.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(
        False,
        residual=True,
        epsilon=number("epsilon", epsilon, least=0),
        scale_offset=number("scale_offset", scale_offset),
    )
    return _run(norm, mode_of(fallback, interpret), x, residual, scale, None)[0]


def prenorm_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    fallback: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """LayerNorm of the rounded sum x + residual, and that sum.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y and x + residual, each with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(True, residual=True, returns_sum=True, epsilon=number("epsilon", epsilon, least=0))
    return _run(norm, mode_of(fallback, interpret), x, residual, scale, bias)


def prenorm_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    fallback: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of the rounded sum x + residual, and that sum.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y and x + residual, each with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(
        False,
        residual=True,
        returns_sum=True,
        epsilon=number("epsilon", epsilon, least=0),
        scale_offset=number("scale_offset", scale_offset),
    )
    return _run(norm, mode_of(fallback, interpret), x, residual, scale, None)


def _run(norm: Norm, mode: Mode, x, residual, scale, bias) -> Any:
    """(y, h), where h is None unless the norm returns it."""
    parameters = {"scale": scale, "bias": bias}
    if norm.residual:
        x, residual, scale, bias = present(x=x, residual=residual, optional=parameters)
    else:
        x, scale, bias = present(x=x, optional=parameters)
    if reason := unsupported(x, residual, scale, bias, returns_sum=norm.returns_sum, split=True):
        raise ValueError(reason)
    return _norm(norm, mode, *placed((x, residual), (scale, bias)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(norm: Norm, mode: Mode, x, residual, scale, bias):
    found = _forward(norm, mode, x, residual, scale, bias, saves=False)
    return found.y, found.h


def _norm_forward(norm: Norm, mode: Mode, x, residual, scale, bias):
    writes = dataclasses.replace(norm, returns_sum=norm.residual)
    found = _forward(writes, mode, x, residual, scale, bias, saves=True)
    h = x if found.h is None else found.h
    return (found.y, h if norm.returns_sum else None), (h, found.statistics, scale, bias)


def _norm_backward(norm: Norm, mode: Mode, saved, cotangents):
    h, statistics, scale, bias = saved
    dy, ds = cotangents
    operation = RowOperation(
        norm.backward_name,
        _backward_kernel,
        _backward_formula,
        (norm, None if bias is None else bias.dtype),
    )
    dx, (dscale, dbias) = over_rows(operation, mode, (h, dy, ds, statistics), scale)
    return (
        dx,
        dx if norm.residual else None,
        None if dscale is None else dscale.astype(scale.dtype),
        None if dbias is None else dbias.astype(bias.dtype),
    )


_norm.defvjp(_norm_forward, _norm_backward)


def _forward(norm: Norm, mode: Mode, x, residual, scale, bias, *, saves: bool) -> Forward:
    operation = RowOperation(norm.name, _forward_kernel, _forward_formula, (norm, saves))
    return over_rows(operation, mode, (x, residual), (scale, bias))[0]


def _forward_kernel(options, per_row, shared, *, interpret):
    norm, saves = options
    return forward_kernel(norm, *per_row, *shared, saves=saves, interpret=interpret), ()


def _forward_formula(options, per_row, shared, *, across):
    norm, saves = options
    return formulas.norm(norm, *per_row, *shared, saves=saves, across=across), ()


def _backward_kernel(options, per_row, scale, *, interpret):
    norm, bias_dtype = options
    h, dy, ds, statistics = per_row
    dx, *sums = backward_kernel(
        norm, h, dy, ds, statistics, scale, bias_dtype=bias_dtype, interpret=interpret
    )
    return dx, tuple(sums)


def _backward_formula(options, per_row, scale, *, across):
    norm, bias_dtype = options
    h, dy, ds, statistics = per_row
    dx, *sums = formulas.norm_backward(
        norm, h, dy, ds, statistics, scale, has_bias=bias_dtype is not None, across=across
    )
    return dx, tuple(sums)
