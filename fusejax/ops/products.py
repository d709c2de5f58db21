"""What the ops that begin with a matrix product share.

The product is accumulated in float32 and rounded once to the arguments' dtype.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fusejax.ops.op import Stage

AXES = ("rows", "width", "depth")
DIMENSIONS = {"x": ("rows", "depth"), "weight": ("depth", "width")}


def _matmul(x: Any, weight: Any) -> Any:
    return jnp.matmul(x, weight)


MATMUL = Stage("matmul", _matmul, ("x", "weight"), ("h",))


def product_gradient(
    x: np.ndarray, weight: np.ndarray, dh: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x and weight, given that of x @ weight."""
    return dh @ weight.T, x.T @ dh
