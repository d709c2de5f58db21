"""The operations in float64 numpy, independent of the kernels and of JAX's own versions."""

import math

import jax.numpy as jnp
import numpy as np

from fusejax.compile.platform import gpu_present

# The same tests simulate the kernels where there is no card, and run them where there is one.
INTERPRET = None if gpu_present() else True


def sampled(cases):
    """All of them on a card; every third where each is simulated, which takes seconds."""
    return cases if INTERPRET is None else cases[::3]


def row_kernels(text):
    """Kernels of a lowered program, without those that add up what others left."""
    return text.count("mosaic_gpu_v2") - totals(text)


def totals(text):
    """Launches that add up partial sums."""
    return text.count("_totals_mosaic_gpu")


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


def gelu_slope(z, approximate):
    z = f64(z)
    if approximate:
        with np.errstate(over="ignore"):
            inner = math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)
            below, above = 1 / (1 + np.exp(-inner)), 1 / (1 + np.exp(inner))
        return below + z * below * above * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * z * z)
    return 0.5 * _erfc(-z / math.sqrt(2)) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def silu(z):
    z = f64(z)
    with np.errstate(over="ignore"):
        return z / (1 + np.exp(-z))


def silu_slope(z):
    z = f64(z)
    with np.errstate(over="ignore"):
        return (1 + z / (1 + np.exp(z))) / (1 + np.exp(-z))


def softmax(x):
    x = f64(x)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_where(x, where):
    """0 where excluded, also in rows of which nothing is left."""
    x, where = np.where(where, f64(x), -np.inf), np.broadcast_to(where, x.shape)
    maximum = np.where(where.any(-1, keepdims=True), x.max(-1, keepdims=True), 0.0)
    e = np.where(where, np.exp(x - maximum), 0.0)
    return e / np.where(where.any(-1, keepdims=True), e.sum(-1, keepdims=True), 1.0)


def softmax_gradient(y, dy):
    """Given the softmax; and the size of the terms whose difference it is."""
    y, dy = f64(y), f64(dy)
    total = (y * dy).sum(-1, keepdims=True)
    return y * (dy - total), y * (np.abs(dy) + (y * np.abs(dy)).sum(-1, keepdims=True))


def cross_entropy(logits, labels, dlosses):
    """The losses and the gradient."""
    x, rows = f64(logits), np.arange(len(labels))
    p = softmax(x)
    maximum = x.max(-1)
    losses = np.log(np.exp(x - maximum[:, None]).sum(-1)) + maximum - x[rows, labels]
    mine = np.zeros_like(p)
    mine[rows, labels] = 1
    return losses, (p - mine) * f64(dlosses)[:, None]


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


def assert_rounded(got, want, *, scale, slack=4e-7):
    """Fails unless `got` is `want`, off by at most slack * scale, rounded once to its dtype.

    `scale` is the size of the terms that `want` is made of: where they cancel, f32 keeps no more.
    """
    info = jnp.finfo(got.dtype)
    assert got.shape == want.shape
    assert np.isfinite(f64(got)).all()
    spacing = np.maximum(np.abs(want), float(info.tiny)) * float(info.eps)
    error = np.abs(f64(got) - want) / (0.5 * spacing + slack * np.abs(scale))
    where = np.unravel_index(error.argmax(), error.shape)
    assert error[where] <= 1.001, f"{error[where]:.4g} of one rounding at {where}"
