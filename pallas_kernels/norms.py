"""LayerNorm and RMSNorm along the last axis, alone and of a residual sum, with their gradients.

    h = x + residual                                    # rounded to the dtype of x; else h = x
    d = h - h.mean(-1, keepdims=True)                   # in f32; RMSNorm: d = h
    y = d * rsqrt((d * d).mean(-1, keepdims=True) + epsilon) * (scale + scale_offset) + bias

| function | returns | arrays moved forward | under differentiation | backward |
|---|---|---|---|---|
| `layer_norm`, `rms_norm` | y | 2 | 2 | 3 |
| `residual_layer_norm`, `residual_rms_norm` | y | 3 | 4 | 3 |
| `prenorm_layer_norm`, `prenorm_rms_norm` | y and h | 4 | 4 | 4 |

Each is one launch forward and one backward, to which a small reduction of the parameters' partial
gradients comes; see `norm_kernels`. Under differentiation the residual norms write h, so that
backward reads one array where it would read two. Statistics are two-pass and centred, in f32, and y
is rounded once. Only the first derivative is defined.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import arrays, number
from pallas_kernels.batching import over_rows
from pallas_kernels.norm_kernels import Backward, Forward, Norm, backward_kernel, forward_kernel
from pallas_kernels.plan import unsupported_parameter, unsupported_rows


def unsupported(
    x: Any,
    residual: Any = None,
    scale: Any = None,
    bias: Any = None,
    *,
    returns_sum: bool = False,
) -> str | None:
    """Why the kernels refuse these arguments, forward or backward, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      x: the array.
      residual: what is added to it, or None.
      scale: of the columns, or None.
      bias: of the columns, or None.
      returns_sum: whether the sum is an output too: backward then reads one more array.
    """
    if reason := unsupported_rows(x, 2 + returns_sum):
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
    interpret: Any = None,
) -> jax.Array:
    """LayerNorm along the last axis; see the module for the formula.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype; or None.
      bias: [width], likewise; or None.
      epsilon: added to the variance.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    return _run(
        Norm(True, epsilon=number("epsilon", epsilon, least=0)), x, None, scale, bias, interpret
    )[0]


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    interpret: Any = None,
) -> jax.Array:
    """RMSNorm along the last axis; see the module for the formula.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      scale: [width], float16, bfloat16 or float32, not necessarily x's dtype; None is a factor of
        1, whatever the `scale_offset`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
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
    return _run(norm, x, None, scale, None, interpret)[0]


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    interpret: Any = None,
) -> jax.Array:
    """LayerNorm of the rounded sum x + residual, along the last axis.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(True, residual=True, epsilon=number("epsilon", epsilon, least=0))
    return _run(norm, x, residual, scale, bias, interpret)[0]


def residual_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    interpret: Any = None,
) -> jax.Array:
    """RMSNorm of the rounded sum x + residual, along the last axis.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
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
    return _run(norm, x, residual, scale, None, interpret)[0]


def prenorm_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """LayerNorm of the rounded sum x + residual, and that sum.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y and x + residual, each with the shape and dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    norm = Norm(True, residual=True, returns_sum=True, epsilon=number("epsilon", epsilon, least=0))
    return _run(norm, x, residual, scale, bias, interpret)


def prenorm_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of the rounded sum x + residual, and that sum.

    Args:
      x: [..., width], float16, bfloat16 or float32.
      residual: the shape and dtype of x.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
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
    return _run(norm, x, residual, scale, None, interpret)


def _run(norm: Norm, x, residual, scale, bias, interpret: Any) -> Any:
    """(y, h), where h is None unless the norm returns it."""
    parameters = {"scale": scale, "bias": bias}
    if norm.residual:
        x, residual, scale, bias = arrays(x=x, residual=residual, optional=parameters)
    else:
        x, scale, bias = arrays(x=x, optional=parameters)
    if reason := unsupported(x, residual, scale, bias, returns_sum=norm.returns_sum):
        raise ValueError(reason)
    if x.size == 0:
        return jnp.zeros_like(x), jnp.zeros_like(x) if norm.returns_sum else None
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    flat = x.reshape(shape), None if residual is None else residual.reshape(shape)
    return jax.tree.map(
        lambda found: found.reshape(x.shape), _norm(norm, interpret, *flat, scale, bias)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(norm: Norm, interpret: Any, x, residual, scale, bias):
    found = _forward(norm, interpret, x, residual, scale, bias, saves=False)
    return found.y, found.h


def _norm_forward(norm: Norm, interpret: Any, x, residual, scale, bias):
    writes = dataclasses.replace(norm, returns_sum=norm.residual)
    found = _forward(writes, interpret, x, residual, scale, bias, saves=True)
    h = x if found.h is None else found.h
    return (found.y, h if norm.returns_sum else None), (h, found.statistics, scale, bias)


def _norm_backward(norm: Norm, interpret: Any, saved, cotangents):
    h, statistics, scale, bias = saved
    dy, ds = cotangents
    found = _backward(norm, interpret, h, dy, ds, statistics, scale, bias)
    return (
        found.dx,
        found.dx if norm.residual else None,
        None if found.dscale is None else found.dscale.astype(scale.dtype),
        None if found.dbias is None else found.dbias.astype(bias.dtype),
    )


_norm.defvjp(_norm_forward, _norm_backward)


def _forward(norm: Norm, interpret: Any, x, residual, scale, bias, *, saves: bool) -> Forward:
    def launch(per_row, shared):
        return forward_kernel(norm, *per_row, *shared, saves=saves, interpret=interpret), ()

    return over_rows(launch, (x, residual), (scale, bias), sums=False)[0]


def _backward(norm: Norm, interpret: Any, h, dy, ds, statistics, scale, bias) -> Backward:
    bias_dtype = None if bias is None else bias.dtype

    def launch(per_row, scale):
        h, dy, ds, statistics = per_row
        dx, *sums = backward_kernel(
            norm, h, dy, ds, statistics, scale, bias_dtype=bias_dtype, interpret=interpret
        )
        return dx, sums

    sums = scale is not None or bias is not None
    dx, (dscale, dbias) = over_rows(launch, (h, dy, ds, statistics), scale, sums=sums)
    return Backward(dx, dscale, dbias)
