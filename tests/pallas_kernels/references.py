"""The operations in float64 numpy, independent of the kernels and of JAX's own versions."""

import math

import jax.numpy as jnp
import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def f64(array):
    return np.asarray(array).astype(np.float64)


def layer_norm(h, scale, bias, epsilon=1e-6):
    h = f64(h)
    d = h - h.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon) * f64(scale) + f64(bias)


def gelu(z, approximate):
    z = f64(z)
    if approximate:
        with np.errstate(over="ignore"):
            return z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z * 0.5 * _erfc(-z / math.sqrt(2))


def softmax(x):
    x = f64(x)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def assert_close(got, want, *, ulps, floor=0.0):
    """Fails unless every |got - want| is within `ulps` * eps * max(|want|, floor).

    `floor` 0 stands for the smallest normal number of the dtype: below it, spacing is absolute.
    Half of eps is what one rounding of the exact value may cost.
    """
    info = jnp.finfo(got.dtype)
    assert got.shape == want.shape
    assert np.isfinite(f64(got)).all()
    error = np.abs(f64(got) - want) / np.maximum(np.abs(want), max(floor, float(info.tiny)))
    worst = error.max() / float(info.eps)
    assert worst <= ulps, f"{worst:.4g} eps at {np.unravel_index(error.argmax(), error.shape)}"
