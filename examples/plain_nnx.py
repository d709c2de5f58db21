"""The layers of `fusejax.flax.nnx` as one writes them with Flax alone: XLA decides what is fused.

Names and parameters are the same. A model takes this module or `fusejax.flax.nnx`.
"""

from flax import nnx
from flax.nnx import LayerNorm, RMSNorm

__all__ = [
    "DenseBiasGelu", "LayerNorm", "PrenormLayerNorm", "PrenormRMSNorm", "RMSNorm",
    "ResidualLayerNorm", "ResidualRMSNorm", "Softmax", "SwiGLU",
]  # fmt: skip


class ResidualLayerNorm(nnx.LayerNorm):
    """LayerNorm(x + residual)."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        return super().__call__(x + residual)


class ResidualRMSNorm(nnx.RMSNorm):
    """RMSNorm(x + residual)."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        return super().__call__(x + residual)


class PrenormLayerNorm(nnx.LayerNorm):
    """LayerNorm(x + residual), and x + residual."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        total = x + residual
        return super().__call__(total), total


class PrenormRMSNorm(nnx.RMSNorm):
    """RMSNorm(x + residual), and x + residual."""

    def __call__(self, x, residual):
        """Of two arrays [..., features]."""
        total = x + residual
        return super().__call__(total), total


class DenseBiasGelu(nnx.Linear):
    """GELU(x W + b), by tanh."""

    def __call__(self, x):
        """Of [..., features]."""
        return nnx.gelu(super().__call__(x))


class Softmax(nnx.Module):
    """Softmax along the last axis; 0 where `where` is False."""

    def __call__(self, x, *, where=None):
        """Of [..., width]."""
        return nnx.softmax(x, where=where)


class SwiGLU(nnx.Module):
    """SiLU(x W) * (x V)."""

    def __init__(self, in_features, out_features, **options):
        self.gate_proj = nnx.Linear(in_features, out_features, use_bias=False, **options)
        self.up_proj = nnx.Linear(in_features, out_features, use_bias=False, **options)

    def __call__(self, x):
        """Of [..., in_features]."""
        return nnx.silu(self.gate_proj(x)) * self.up_proj(x)
