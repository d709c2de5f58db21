"""LayerNorm and RMSNorm along the last axis, alone and of a residual sum.

    h = x + residual                                    # rounded to the dtype of x; else h = x
    d = h - h.mean(-1, keepdims=True)                   # RMSNorm: d = h
    y = d * rsqrt((d * d).mean(-1, keepdims=True) + epsilon) * (scale + scale_offset) + bias

Computed in f32, with two-pass, centred statistics, and rounded once; in float64 where an argument
is. `x` is [..., width] of any floating-point dtype, `residual` has its shape, `scale` and `bias`
are [width], of any floating-point dtype, or None, which is no factor and no term. Results have the
shape and dtype of x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from fusejax.functions import split
from fusejax.functions.arguments import alike, column, rows
from fusejax.functions.call import call
from fusejax.functions.choice import Asked
from fusejax.functions.function import Function
from pallas_kernels import formulas
from pallas_kernels import norms as kernels
from pallas_kernels.arguments import number
from pallas_kernels.norm_kernels import Norm


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    implementation: Asked = None,
) -> jax.Array:
    """LayerNorm along the last axis.

        d = x - x.mean(-1, keepdims=True)
        y = d * rsqrt((d * d).mean(-1, keepdims=True) + epsilon) * scale + bias

    Args:
      x: [..., width], of any floating-point dtype.
      scale: [width], of any floating-point dtype; or None.
      bias: [width], likewise; or None.
      epsilon: added to the variance.
      implementation: None chooses, see `fusejax.explain_choice`; or "pallas", "xla", "split", or
        several of them, of which the first is taken that can run. Where there may be kernels (None,
        "pallas"), only reverse mode is defined, any number of times; `jax.jvp` takes the others.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: a shape, dtype or option makes no sense, or what is asked for cannot run.
    """
    return call(LAYER_NORM, (x, scale, bias), {"epsilon": epsilon}, implementation)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Asked = None,
) -> jax.Array:
    """RMSNorm along the last axis.

        y = x * rsqrt((x * x).mean(-1, keepdims=True) + epsilon) * (scale + scale_offset)

    Args:
      x: [..., width], of any floating-point dtype.
      scale: [width], of any floating-point dtype; None is a factor of 1, whatever the
        `scale_offset`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      implementation: as in `layer_norm`.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: as in `layer_norm`.
    """
    options = {"epsilon": epsilon, "scale_offset": scale_offset}
    return call(RMS_NORM, (x, scale), options, implementation)


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    implementation: Asked = None,
) -> jax.Array:
    """LayerNorm of the rounded sum, `layer_norm((x + residual).astype(x.dtype), scale, bias)`.

    Args:
      x: [..., width], of any floating-point dtype.
      residual: the shape of x, of any floating-point dtype.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      implementation: as in `layer_norm`.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: as in `layer_norm`.
    """
    arrays = (x, residual, scale, bias)
    return call(RESIDUAL_LAYER_NORM, arrays, {"epsilon": epsilon}, implementation)


def residual_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Asked = None,
) -> jax.Array:
    """RMSNorm of the rounded sum, `rms_norm((x + residual).astype(x.dtype), scale)`.

    Args:
      x: [..., width], of any floating-point dtype.
      residual: the shape of x, of any floating-point dtype.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      implementation: as in `layer_norm`.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: as in `layer_norm`.
    """
    options = {"epsilon": epsilon, "scale_offset": scale_offset}
    return call(RESIDUAL_RMS_NORM, (x, residual, scale), options, implementation)


def prenorm_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    implementation: Asked = None,
) -> tuple[jax.Array, jax.Array]:
    """`residual_layer_norm`, and the rounded sum it is of.

    Args:
      x: [..., width], of any floating-point dtype.
      residual: the shape of x, of any floating-point dtype.
      scale: as in `layer_norm`.
      bias: as in `layer_norm`.
      epsilon: added to the variance.
      implementation: as in `layer_norm`.

    Returns:
      y and x + residual, each with the shape and dtype of x.

    Raises:
      ValueError: as in `layer_norm`.
    """
    arrays = (x, residual, scale, bias)
    return call(PRENORM_LAYER_NORM, arrays, {"epsilon": epsilon}, implementation)


def prenorm_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Asked = None,
) -> tuple[jax.Array, jax.Array]:
    """`residual_rms_norm`, and the rounded sum it is of.

    Args:
      x: [..., width], of any floating-point dtype.
      residual: the shape of x, of any floating-point dtype.
      scale: as in `rms_norm`.
      epsilon: added to the mean square.
      scale_offset: added to the scale, in f32.
      implementation: as in `layer_norm`.

    Returns:
      y and x + residual, each with the shape and dtype of x.

    Raises:
      ValueError: as in `layer_norm`.
    """
    options = {"epsilon": epsilon, "scale_offset": scale_offset}
    return call(PRENORM_RMS_NORM, (x, residual, scale), options, implementation)


def _function(
    public: Callable[..., Any],
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    *,
    centred: bool,
    residual: bool = False,
    returns_sum: bool = False,
) -> Function:
    def by_name(arrays: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, arrays, strict=True))

    def check(*arrays: Any) -> None:
        given = by_name(arrays)
        if residual:
            alike("x", given["x"], "residual", given["residual"])
        rows("x", given["x"])
        for name in parameters:
            column(name, given[name], given["x"].shape[-1])

    def unsupported(*arrays: Any, split: bool) -> str | None:
        return kernels.unsupported(**by_name(arrays), returns_sum=returns_sum, split=split)

    def in_stages(*arrays: Any, **options: Any) -> Any:
        norm = Norm(centred, residual, returns_sum, **options)
        return split.norm(norm, **by_name(arrays))

    parameters = ("scale", "bias") if centred else ("scale",)
    names = ("x", *(("residual",) if residual else ()), *parameters)
    options: dict[str, Any] = {"epsilon": functools.partial(number, least=0)}
    return Function(
        public.__name__,
        names,
        check,
        unsupported,
        kernel,
        xla,
        in_stages,
        optional=parameters,
        options=options if centred else {**options, "scale_offset": number},
    )


LAYER_NORM = _function(layer_norm, kernels.layer_norm, formulas.layer_norm, centred=True)
RMS_NORM = _function(rms_norm, kernels.rms_norm, formulas.rms_norm, centred=False)
RESIDUAL_LAYER_NORM = _function(
    residual_layer_norm,
    kernels.residual_layer_norm,
    formulas.residual_layer_norm,
    centred=True,
    residual=True,
)
RESIDUAL_RMS_NORM = _function(
    residual_rms_norm,
    kernels.residual_rms_norm,
    formulas.residual_rms_norm,
    centred=False,
    residual=True,
)
PRENORM_LAYER_NORM = _function(
    prenorm_layer_norm,
    kernels.prenorm_layer_norm,
    formulas.prenorm_layer_norm,
    centred=True,
    residual=True,
    returns_sum=True,
)
PRENORM_RMS_NORM = _function(
    prenorm_rms_norm,
    kernels.prenorm_rms_norm,
    formulas.prenorm_rms_norm,
    centred=False,
    residual=True,
    returns_sum=True,
)
