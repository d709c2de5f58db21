"""GELU in float32 for the stages and in float64 for the references.

approximate:  z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z**3)))
exact:        z / 2 * (1 + erf(z / sqrt(2)))
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from fusejax.ops.op import Stage

_A = math.sqrt(2 / math.pi)
_B = 0.044715


def gelu32(z: Any, *, approximate: bool) -> Any:
    """GELU in float32, whatever z's dtype; XLA's own formulas are coarse in 16 bits."""
    return jax.nn.gelu(z.astype(jnp.float32), approximate=approximate)


def gelu_stage(source: str, result: str, *, approximate: bool) -> Stage:
    """The stage "gelu": in float32, rounded to the dtype of what it takes."""

    def gelu(z: Any) -> Any:
        return gelu32(z, approximate=approximate).astype(z.dtype)

    return Stage("gelu", gelu, (source,), (result,))


def gelu64(z: np.ndarray, *, approximate: bool) -> np.ndarray:
    """GELU in float64."""
    return z * _gate(z, approximate=approximate)


def gelu64_slope(z: np.ndarray, *, approximate: bool) -> np.ndarray:
    """Derivative of GELU in float64."""
    gate = _gate(z, approximate=approximate)
    if approximate:
        return gate + z * gate * (1 - gate) * 2 * _A * (1 + 3 * _B * z * z)
    return gate + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _gate(z: np.ndarray, *, approximate: bool) -> np.ndarray:
    if approximate:
        # 1 + tanh(u) = 2 / (1 + exp(-2u)) keeps its digits where tanh(u) is close to -1.
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-2 * _A * (z + _B * z**3)))
    return 0.5 * scipy.special.erfc(-z / math.sqrt(2))
