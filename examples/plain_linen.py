"""The layers of `fusejax.flax.linen` as one writes them with Flax alone: XLA decides what is fused.

Names and parameters are the same. A model takes this module or `fusejax.flax.linen`.
"""

from typing import Any

from flax import linen as nn
from flax.linen import LayerNorm, RMSNorm

__all__ = [
    "DenseBiasGelu", "LayerNorm", "PrenormLayerNorm", "PrenormRMSNorm", "RMSNorm",
    "ResidualLayerNorm", "ResidualRMSNorm", "Softmax", "SwiGLU",
]  # fmt: skip


class ResidualLayerNorm(nn.LayerNorm):
    """LayerNorm(x + residual)."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        return super().__call__(x + residual)


class ResidualRMSNorm(nn.RMSNorm):
    """RMSNorm(x + residual)."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        return super().__call__(x + residual)


class PrenormLayerNorm(nn.LayerNorm):
    """LayerNorm(x + residual), and x + residual."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        total = x + residual
        return super().__call__(total), total


class PrenormRMSNorm(nn.RMSNorm):
    """RMSNorm(x + residual), and x + residual."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        total = x + residual
        return super().__call__(total), total


class DenseBiasGelu(nn.Dense):
    """GELU(x W + b), by tanh."""

    def __call__(self, x):
        """Of [..., features]."""
        return nn.gelu(super().__call__(x))


class Softmax(nn.Module):
    """Softmax along the last axis; 0 where `where` is False."""

    def __call__(self, x, *, where=None):
        """Of [..., width]."""
        return nn.softmax(x, where=where)


class SwiGLU(nn.Module):
    """SiLU(x W) * (x V)."""

    features: int
    dtype: Any = None
    param_dtype: Any = "float32"

    @nn.compact
    def __call__(self, x):
        """Of [..., features]."""
        options = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype}
        gate = nn.Dense(self.features, name="gate_proj", **options)(x)
        return nn.silu(gate) * nn.Dense(self.features, name="up_proj", **options)(x)
