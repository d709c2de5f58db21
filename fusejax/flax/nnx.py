"""Flax nnx layers on the functional ops of fusejax; each takes the place of Flax's own.

    from fusejax.flax import nnx as fnnx

    norm = fnnx.LayerNorm(width, dtype=jnp.bfloat16, rngs=rngs)   # flax.nnx.LayerNorm
    prenorm = fnnx.PrenormRMSNorm(width, rngs=rngs)
    h, x = prenorm(h, x)                                          # x += h; h = nnx.RMSNorm(...)(x)
    dense = fnnx.DenseBiasGelu(width, 4 * width, rngs=rngs)       # nnx.gelu(nnx.Linear(...)(h))

| layer | is | parameters |
|---|---|---|
| `LayerNorm`, `RMSNorm` | Flax's | scale, bias; scale |
| `ResidualLayerNorm`, `ResidualRMSNorm` | the norm of x + residual | those of the norm |
| `PrenormLayerNorm`, `PrenormRMSNorm` | the same, and x + residual | those of the norm |
| `DenseBiasGelu` | Flax's `Linear`, then GELU | kernel, bias |
| `SwiGLU` | silu(gate_proj(x)) * up_proj(x), both Flax's `Linear` | gate_proj, up_proj |
| `Softmax` | `jax.nn.softmax` | none |

What `fusejax.flax.linen` says of parameters, dtypes, `implementation`, Flax's own path and numbers
holds here too, with nnx's layers in the place of linen's: those cast x and the parameters to
`dtype` before they compute. Norms with a `promote_dtype` of their own are computed by Flax.

nnx names no scopes, so that nothing in a compiled program tells which module it belongs to;
`named_scopes(model)` is the model with a scope for every module, named as linen would.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

import fusejax
from fusejax.flax import dispatch
from fusejax.flax.dispatch import Axes, Implementation, Norm
from fusejax.flax.scopes import named_scopes
from fusejax.functions.choice import names

__all__ = [
    "DenseBiasGelu",
    "LayerNorm",
    "PrenormLayerNorm",
    "PrenormRMSNorm",
    "RMSNorm",
    "ResidualLayerNorm",
    "ResidualRMSNorm",
    "Softmax",
    "SwiGLU",
    "named_scopes",
]

_LAYER_NORM = Norm(
    nnx.LayerNorm,
    ("scale", "bias"),
    fusejax.layer_norm,
    fusejax.residual_layer_norm,
    fusejax.prenorm_layer_norm,
)
_RMS_NORM = Norm(
    nnx.RMSNorm,
    ("scale",),
    fusejax.rms_norm,
    fusejax.residual_rms_norm,
    fusejax.prenorm_rms_norm,
)


class _Implemented(nnx.Module):
    """A module that computes with the functional ops.

    Args:
      implementation: passed on to them.
    """

    def __init__(self, *args: Any, implementation: Implementation = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        names(implementation)  # also where Flax computes, a wrong name is told
        if implementation is not None and not isinstance(implementation, str):
            implementation = tuple(implementation)  # it is hashed with the module's structure
        self.implementation = implementation


class LayerNorm(_Implemented, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`."""

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """As Flax's."""
        return _norm(self, _LAYER_NORM, x, None, mask)


class RMSNorm(_Implemented, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`."""

    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        """As Flax's."""
        return _norm(self, _RMS_NORM, x, None, mask)


class ResidualLayerNorm(_Implemented, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` of x + residual."""

    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """LayerNorm of the sum, which is rounded to the dtype that `x + residual` has."""
        return _norm(self, _LAYER_NORM, x, residual, mask)


class ResidualRMSNorm(_Implemented, nnx.RMSNorm):
    """`flax.nnx.RMSNorm` of x + residual."""

    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """RMSNorm of the sum, which is rounded to the dtype that `x + residual` has."""
        return _norm(self, _RMS_NORM, x, residual, mask)


class PrenormLayerNorm(_Implemented, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` of x + residual, and that sum: the next residual."""

    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """LayerNorm of the sum, and the sum, in the dtype that `x + residual` has."""
        return _norm(self, _LAYER_NORM, x, residual, mask, returns_sum=True)


class PrenormRMSNorm(_Implemented, nnx.RMSNorm):
    """`flax.nnx.RMSNorm` of x + residual, and that sum: the next residual."""

    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """RMSNorm of the sum, and the sum, in the dtype that `x + residual` has."""
        return _norm(self, _RMS_NORM, x, residual, mask, returns_sum=True)


class DenseBiasGelu(_Implemented, nnx.Linear):
    """`flax.nnx.Linear`, then GELU; bias and GELU are one kernel behind the matrix product.

    Args:
      approximate: GELU's tanh form, as in `jax.nn.gelu`; False is the erf form.
    """

    def __init__(self, *args: Any, approximate: bool = True, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.approximate = approximate

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """gelu(inputs @ kernel + bias) along the last axis."""
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], bias), dtype=self.dtype
        )
        options = {"precision": self.precision, "out_sharding": out_sharding}
        if self.preferred_element_type is not None:
            options["preferred_element_type"] = self.preferred_element_type
        contracted = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = self.dot_general(inputs, kernel, contracted, **options)
        return dispatch.bias_gelu(y, bias, self.approximate, self.implementation)


class SwiGLU(_Implemented):
    """silu(gate_proj(x)) * up_proj(x), the first half of Llama's MLP.

    The projections are `flax.nnx.Linear` layers of those names; the gated product is one kernel
    behind the two matrix products.

    Args:
      in_features: the number of input features.
      out_features: the number of output features.
      use_bias: whether the projections have a bias. Llama's have none.
      implementation: passed on to the functional op.
      rngs: for the parameters, those of gate_proj first.
      **options: of both projections, as in `flax.nnx.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(implementation=implementation)
        options |= {"use_bias": use_bias, "rngs": rngs}
        self.gate_proj = nnx.Linear(in_features, out_features, **options)
        self.up_proj = nnx.Linear(in_features, out_features, **options)

    def __call__(self, inputs: Any) -> jax.Array:
        """The gated product, [..., out_features]."""
        return dispatch.swiglu(self.gate_proj(inputs), self.up_proj(inputs), self.implementation)


class Softmax(_Implemented):
    """`jax.nn.softmax`.

    Args:
      axis: along which axis, or axes; None is all of them. The ops know the last one.
      implementation: passed on to the functional op.
    """

    def __init__(self, axis: Axes = -1, *, implementation: Implementation = None):
        super().__init__(implementation=implementation)
        self.axis = axis

    def __call__(self, x: Any, *, where: Any = None) -> jax.Array:
        """Softmax of x; what `where` excludes counts for nothing and gets 0."""
        return dispatch.softmax(x, self.axis, where, self.implementation)


def _norm(
    layer: Any, norm: Norm, x: Any, residual: Any, mask: Any, *, returns_sum: bool = False
) -> Any:
    """y, or y and the sum: what every norm layer returns."""
    inputs = [jnp.asarray(array) for array in (x, residual) if array is not None]
    shape = jnp.broadcast_shapes(*(array.shape for array in inputs))
    variables = [getattr(layer, name) for name in norm.parameters]
    parameters = [None if variable is None else variable[...] for variable in variables]
    present = [parameter for parameter in parameters if parameter is not None]
    involved = [array.dtype for array in inputs + present]
    if layer.dtype is not None:
        involved.append(layer.dtype)
    if (
        layer.promote_dtype is not dtypes.promote_dtype
        or any(parameter.shape != shape[-1:] for parameter in present)
        or not dispatch.known(*involved)
        or not dispatch.takes_ops(layer, shape, mask)
    ):
        h = dispatch.add(*inputs) if len(inputs) > 1 else inputs[0]
        y = norm.flax.__call__(layer, h, mask=mask)
        return (y, h) if returns_sum else y
    dtype = dtypes.canonicalize_dtype(*inputs, *parameters, dtype=layer.dtype)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return dispatch.normalize(
        norm,
        *inputs,
        parameters=dtypes.promote_dtype(tuple(parameters), dtype=dtype),
        returns_sum=returns_sum,
        computed_in=dtype,
        result=dtype,
        epsilon=layer.epsilon,
        implementation=layer.implementation,
    )
