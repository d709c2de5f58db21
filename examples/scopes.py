"""A function with named scopes, to try `scripts/compare.py --fn` and `split_at_scopes` on.

    python scripts/compare.py --fn examples/scopes.py:gelu_statistics \\
        --args 'bf16[8192,8192], bf16[8192]' --target h200
"""

import jax
import jax.numpy as jnp


def gelu_statistics(x, bias):
    """y = GELU(x + bias) in the dtype of x; the sum and the largest of each of its rows, in f32."""
    with jax.named_scope("gelu"):
        y = jax.nn.gelu((x + bias).astype(jnp.float32)).astype(x.dtype)
    with jax.named_scope("statistics"):
        wide = y.astype(jnp.float32)
        return y, wide.sum(-1), wide.max(-1)
