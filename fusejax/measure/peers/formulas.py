"""The plain jnp form of every operation, and what JAX saves for its backward."""

import functools
from collections.abc import Callable
from typing import Any

from fusejax.measure.peers.cells import OPS, Settings

EPSILON = 1e-6


def formulas() -> dict[str, Callable[..., Any]]:
    """The plain jnp form of every operation; arguments as in `cells.Arguments`."""
    import jax
    import jax.numpy as jnp

    def layer_norm(x, scale, bias):
        wide = x.astype(jnp.float32)
        d = wide - wide.mean(-1, keepdims=True)
        y = d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + EPSILON) * scale + bias
        return y.astype(x.dtype)

    def rms_norm(x, scale):
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON) * scale
        return y.astype(x.dtype)

    def cross_entropy(logits, labels):
        wide = logits.astype(jnp.float32)
        picked = jnp.take_along_axis(wide, labels[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(wide, axis=-1) - picked

    def gelu(x, bias):
        return jax.nn.gelu(x.astype(jnp.float32) + bias, approximate=True)

    def bias_gelu_rowsum(x, bias):
        y = gelu(x, bias)
        return y.astype(x.dtype), y.sum(-1)

    def prenorm_rms_norm(x, residual, scale):
        h = x + residual
        return rms_norm(h, scale), h

    def swiglu(gate, up):
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "residual_layer_norm": lambda x, residual, *more: layer_norm(x + residual, *more),
        "prenorm_rms_norm": prenorm_rms_norm,
        "bias_gelu_rowsum": bias_gelu_rowsum,
        "softmax": functools.partial(jax.nn.softmax, axis=-1),
        "cross_entropy": cross_entropy,
        "swiglu": swiglu,
        "bias_gelu": lambda x, bias: gelu(x, bias).astype(x.dtype),
    }


def argument_shapes(op: str, width: int, settings: Settings) -> tuple[Any, ...]:
    """Shapes of the arguments of an operation's formula, or of that whose gradient it is."""
    import jax
    import jax.numpy as jnp

    takes, rows = OPS[op], settings.rows_of(width)
    return (
        *[jax.ShapeDtypeStruct((rows, width), jnp.dtype(settings.dtype))] * takes.arrays,
        *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * takes.labels,
        *[jax.ShapeDtypeStruct((width,), jnp.float32)] * takes.parameters,
    )


def with_saved(op: str) -> Callable[..., Any]:
    """From the arguments to the results of a formula and the function that gives the gradients.

    That function is a tree of arrays: what JAX saves for backward.
    """
    import jax
    import jax.numpy as jnp

    formula = formulas()[op.removesuffix("_backward")]

    def run(*arguments):
        kept = [not jnp.issubdtype(a.dtype, jnp.integer) for a in arguments]

        def of_floats(*floats):
            queue = list(floats)
            return formula(
                *(queue.pop(0) if k else a for k, a in zip(kept, arguments, strict=True))
            )

        return jax.vjp(of_floats, *(a for k, a in zip(kept, arguments, strict=True) if k))

    return run
