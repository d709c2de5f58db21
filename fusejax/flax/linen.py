"""Flax linen layers on the functional ops of fusejax; each takes the place of Flax's own.

    from fusejax.flax import linen as fnn

    h = fnn.LayerNorm(dtype=jnp.bfloat16)(x)                  # nn.LayerNorm, ...
    h, x = fnn.PrenormRMSNorm(dtype=jnp.bfloat16)(h, x)       # x += h; h = nn.RMSNorm()(x)
    h = fnn.DenseBiasGelu(4 * width)(h)                       # nn.gelu(nn.Dense(4 * width)(h))

| layer | is | parameters |
|---|---|---|
| `LayerNorm`, `RMSNorm` | Flax's | scale, bias; scale |
| `ResidualLayerNorm`, `ResidualRMSNorm` | the norm of x + residual | those of the norm |
| `PrenormLayerNorm`, `PrenormRMSNorm` | the same, and x + residual | those of the norm |
| `DenseBiasGelu` | Flax's `Dense`, then GELU | kernel, bias |
| `SwiGLU` | silu(gate_proj(x)) * up_proj(x), both Flax's `Dense` | gate_proj, up_proj |
| `Softmax` | `jax.nn.softmax` | none |

Constructor arguments, defaults, parameters, their initialisation and metadata are those of the Flax
class that a layer derives from, so checkpoints of either load into the other, and the dtype of the
result is the one that Flax's layer would give. linen names a module that has no name after its
class: where `DenseBiasGelu` takes the place of a `Dense`, name it "Dense_0", or as the checkpoint
has it.

`implementation`, keyword-only, is that of the functional ops: None chooses, a name or several in
order insist. Kernels are chosen where inputs and result have one dtype, such as bfloat16 under
`dtype=jnp.bfloat16`, whatever that of the parameters; casts of activations are left to XLA's
fusions.

Whatever the ops do not know (a mask, `axis_name`, other axes, `force_float32_reductions=False`,
integers, complex numbers) is computed by Flax's own code. Where the ops are at work, numbers differ
from Flax's by rounding, and where Flax's are poor: the variance is that of the centred row whatever
`use_fast_variance` says (Flax's default is 0.09 off where the mean is 1000 and the deviation 2);
GELU, SwiGLU and softmax are computed in float32 and rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen import dtypes
from flax.linen.linear import PromoteDtypeFn, default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike

import fusejax
from fusejax.flax import dispatch
from fusejax.flax.dispatch import Axes, Implementation, Norm
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
]

_LAYER_NORM = Norm(
    nn.LayerNorm,
    ("scale", "bias"),
    fusejax.layer_norm,
    fusejax.residual_layer_norm,
    fusejax.prenorm_layer_norm,
)
_RMS_NORM = Norm(
    nn.RMSNorm,
    ("scale",),
    fusejax.rms_norm,
    fusejax.residual_rms_norm,
    fusejax.prenorm_rms_norm,
)


class _Implemented(nn.Module):
    """A module that computes with the functional ops.

    Attributes:
      implementation: passed on to them.
    """

    implementation: Implementation = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names(self.implementation)  # also where Flax computes, a wrong name is told
        if not isinstance(self.implementation, str | None):
            self.implementation = tuple(self.implementation)  # modules are hashed
        super().__post_init__()


class LayerNorm(_Implemented, nn.LayerNorm):
    """`flax.linen.LayerNorm`."""

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """As Flax's."""
        return _norm(self, _LAYER_NORM, x, None, mask)


class RMSNorm(_Implemented, nn.RMSNorm):
    """`flax.linen.RMSNorm`."""

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """As Flax's."""
        return _norm(self, _RMS_NORM, x, None, mask)


class ResidualLayerNorm(_Implemented, nn.LayerNorm):
    """`flax.linen.LayerNorm` of x + residual."""

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """LayerNorm of the sum, which is rounded to the dtype that `x + residual` has."""
        return _norm(self, _LAYER_NORM, x, residual, mask)


class ResidualRMSNorm(_Implemented, nn.RMSNorm):
    """`flax.linen.RMSNorm` of x + residual."""

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """RMSNorm of the sum, which is rounded to the dtype that `x + residual` has."""
        return _norm(self, _RMS_NORM, x, residual, mask)


class PrenormLayerNorm(_Implemented, nn.LayerNorm):
    """`flax.linen.LayerNorm` of x + residual, and that sum: the next residual."""

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """LayerNorm of the sum, and the sum, in the dtype that `x + residual` has."""
        return _norm(self, _LAYER_NORM, x, residual, mask, returns_sum=True)


class PrenormRMSNorm(_Implemented, nn.RMSNorm):
    """`flax.linen.RMSNorm` of x + residual, and that sum: the next residual."""

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: Any, residual: Any, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """RMSNorm of the sum, and the sum, in the dtype that `x + residual` has."""
        return _norm(self, _RMS_NORM, x, residual, mask, returns_sum=True)


class DenseBiasGelu(_Implemented, nn.Dense):
    """`flax.linen.Dense`, then GELU; bias and GELU are one kernel behind the matrix product.

    Attributes:
      approximate: GELU's tanh form, as in `jax.nn.gelu`; False is the erf form.
    """

    approximate: bool = dataclasses.field(default=True, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Any) -> jax.Array:
        """gelu(inputs @ kernel + bias) along the last axis."""
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        inputs, kernel, bias = promoted
        product = self.dot_general or jax.lax.dot_general
        if self.dot_general_cls is not None:
            product = self.dot_general_cls()
        contracted = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = product(inputs, kernel, contracted, precision=self.precision)
        return dispatch.bias_gelu(y, bias, self.approximate, self.implementation)


class SwiGLU(_Implemented):
    """silu(gate_proj(x)) * up_proj(x), the first half of Llama's MLP.

    The projections are `flax.linen.Dense` layers of those names; the gated product is one kernel
    behind the two matrix products.

    Attributes:
      features: the number of output features.
      use_bias: whether the projections have a bias. Llama's have none.
      dtype: as in `flax.linen.Dense`, like all that follow.
    """

    features: int  # type: ignore[misc]
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    promote_dtype: PromoteDtypeFn = dtypes.promote_dtype
    dot_general: DotGeneralT | None = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, inputs: Any) -> jax.Array:
        """The gated product, [..., features]."""
        projection = functools.partial(
            nn.Dense,
            self.features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            promote_dtype=self.promote_dtype,
            dot_general=self.dot_general,
            dot_general_cls=self.dot_general_cls,
        )
        gate = projection(name="gate_proj")(inputs)
        up = projection(name="up_proj")(inputs)
        return dispatch.swiglu(gate, up, self.implementation)


class Softmax(_Implemented):
    """`jax.nn.softmax`.

    Attributes:
      axis: along which axis, or axes; None is all of them. The ops know the last one.
    """

    axis: Axes = -1

    def __call__(self, x: Any, *, where: Any = None) -> jax.Array:
        """Softmax of x; what `where` excludes counts for nothing and gets 0."""
        return dispatch.softmax(x, self.axis, where, self.implementation)


def _norm(
    layer: Any, norm: Norm, x: Any, residual: Any, mask: Any, *, returns_sum: bool = False
) -> Any:
    """y, or y and the sum: what every norm layer returns."""
    inputs = [jnp.asarray(array) for array in (x, residual) if array is not None]
    shape = jnp.broadcast_shapes(*(array.shape for array in inputs))
    used = [name for name in norm.parameters if getattr(layer, f"use_{name}")]
    involved = [array.dtype for array in inputs] + [_dtype(layer, name) for name in used]
    if layer.dtype is not None:
        involved.append(layer.dtype)
    if not dispatch.known(*involved) or not dispatch.takes_ops(layer, shape, mask):
        h = dispatch.add(*inputs) if len(inputs) > 1 else inputs[0]
        # Flax's method without its wrapper: interceptors, captured intermediates and named scopes
        # are to see one call of this layer, not two.
        y = inspect.unwrap(norm.flax.__call__)(layer, h, mask=mask)
        return (y, h) if returns_sum else y
    parameters = [
        layer.param(name, getattr(layer, f"{name}_init"), shape[-1:], layer.param_dtype)
        if name in used
        else None
        for name in norm.parameters
    ]
    result = dtypes.canonicalize_dtype(*inputs, *parameters, dtype=layer.dtype)
    result = jax.dtypes.canonicalize_dtype(result)
    return dispatch.normalize(
        norm,
        *inputs,
        parameters=parameters,
        returns_sum=returns_sum,
        # Flax takes the statistics of x as it comes, and rounds y only.
        computed_in=jnp.promote_types(jnp.result_type(*inputs), result),
        result=result,
        epsilon=layer.epsilon,
        implementation=layer.implementation,
    )


def _dtype(layer: Any, name: str) -> Any:
    """The dtype of a parameter: that of what is stored, or of what `layer.param` will make."""
    stored: Any = layer.get_variable("params", name)
    return layer.param_dtype if stored is None else meta.unbox(stored).dtype
