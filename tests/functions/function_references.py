"""The functions in float64 numpy, arguments for them, and what the tests here share."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fusejax.compile.platform import gpu_present

# Takes half of the time to compile for a CPU; XLA's own passes are the same.
QUICK = {} if gpu_present() else {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)
EPSILON = 1e-6
OFFSET = 0.5
_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclasses.dataclass(frozen=True)
class Case:
    """A function: what it takes, and its results by the definition.

    `shapes` has a letter for each array: a for [..., width], w for [width], i for labels, m for a
    mask. `value` takes the options' arrays in float64, with the sum in the place of x and residual.
    """

    shapes: str
    value: Callable
    options: dict = dataclasses.field(default_factory=dict)
    adds: bool = False

    def arguments(self, rng, shape, dtype, parameter_dtype=jnp.float32):
        draw = {
            "a": lambda: jnp.asarray(rng.normal(size=shape) * 2 + 1, dtype),
            "w": lambda: jnp.asarray(rng.normal(size=shape[-1:]), parameter_dtype),
            "i": lambda: jnp.asarray(rng.integers(0, shape[-1], shape[:-1])),
            "m": lambda: jnp.asarray(rng.random(shape) < 0.7),
        }
        return [draw[letter]() for letter in self.shapes]

    def inexact(self):
        """Positions of what has a gradient."""
        return tuple(i for i, letter in enumerate(self.shapes) if letter in "aw")

    def exact(self, arguments):
        """The results in float64, as a tuple."""
        return self._value([np.asarray(a) for a in arguments])

    def gradients(self, arguments, cotangents):
        """Of sum(results * cotangents), by central differences in float64; one per inexact one."""
        given = self._in_float64([np.asarray(a) for a in arguments])
        found = []
        for position in range(len(given)):
            if given[position].dtype != np.float64:
                continue
            flat = given[position].reshape(-1)
            gradient = np.zeros(flat.size)
            for i in range(flat.size):
                kept, losses = flat[i], []
                for step in (1e-5, -1e-5):
                    flat[i] = kept + step
                    results = self._tuple(self.value(*given, **self.options))
                    losses.append(
                        sum((r * c).sum() for r, c in zip(results, cotangents, strict=True))
                    )
                flat[i] = kept
                gradient[i] = (losses[0] - losses[1]) / 2e-5
            found.append(gradient.reshape(given[position].shape))
        return [found[0], *found] if self.adds else found

    def _value(self, arguments):
        return self._tuple(self.value(*self._in_float64(arguments), **self.options))

    def _in_float64(self, arguments):
        if self.adds:  # the norm is that of the rounded sum
            x, residual, *rest = arguments
            arguments = [(f64(x) + f64(residual)).astype(x.dtype), *rest]
        return [f64(a) if a.dtype.kind not in "ib" else a for a in arguments]

    @staticmethod
    def _tuple(results):
        return results if isinstance(results, tuple) else (results,)


def f64(array):
    return np.asarray(array).astype(np.float64)


def _norm(h, scale, bias=None, *, centred, returns_sum=False, epsilon=EPSILON, scale_offset=0.0):
    d = h - h.mean(-1, keepdims=True) if centred else h
    y = d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon) * (scale + scale_offset)
    y = y if bias is None else y + bias
    return (y, h) if returns_sum else y


def _gelu(z, approximate):
    if approximate:
        return z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z / 2 * (1 + _erf(z / math.sqrt(2)))


def _bias_gelu_rowsum(x, bias, approximate=True):
    y = _gelu(x + bias, approximate)
    return y, y.sum(-1)


def softmax(x, where=True):
    e = np.where(where, np.exp(x - x.max(-1, keepdims=True)), 0.0)
    return e / e.sum(-1, keepdims=True)


def _cross_entropy(logits, labels):
    picked = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


_layer = functools.partial(_norm, centred=True)
_rms = functools.partial(_norm, centred=False)
_shifted = {"epsilon": 1e-3, "scale_offset": OFFSET}
CASES = {
    "layer_norm": Case("aww", _layer),
    "rms_norm": Case("aw", _rms, _shifted),
    "residual_layer_norm": Case("aaww", _layer, {"epsilon": 1e-3}, adds=True),
    "residual_rms_norm": Case("aaw", _rms, _shifted, adds=True),
    "prenorm_layer_norm": Case("aaww", functools.partial(_layer, returns_sum=True), adds=True),
    "prenorm_rms_norm": Case("aaw", functools.partial(_rms, returns_sum=True), adds=True),
    "bias_gelu": Case("aw", lambda x, b, approximate=True: _gelu(x + b, approximate)),
    "bias_gelu_rowsum": Case("aw", _bias_gelu_rowsum, {"approximate": False}),
    "softmax": Case("a", softmax),
    "softmax_cross_entropy": Case("ai", _cross_entropy),
    "swiglu": Case("aa", lambda gate, up: gate / (1 + np.exp(-gate)) * up),
    "geglu": Case("aa", lambda gate, up, approximate=True: _gelu(gate, approximate) * up),
}
