"""The layers of both libraries, Flax's and ours, in one form: parameters and a function of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fusejax.flax.linen
import fusejax.flax.nnx

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
LIBRARIES = ("linen", "nnx")
NORMS = ("LayerNorm", "RMSNorm")
RESIDUAL_NORMS = tuple(f"{form}{norm}" for form in ("Residual", "Prenorm") for norm in NORMS)


def layer_class(library, name, *, ours=True):
    theirs = nn if library == "linen" else nnx
    return getattr(getattr(fusejax.flax, library) if ours else theirs, name)


def dense(library):
    return "Dense" if library == "linen" else "Linear"


def make(library, name, *sizes, ours=True, seed=0, leading=(1,), **options):
    """(parameters, function of them and the inputs).

    sizes: of the features that go in, and that come out where those are others; leading axes
    of what linen's parameters are made for.
    """
    cls = layer_class(library, name, ours=ours)
    if library == "nnx":
        graph, state = nnx.split(cls(*sizes, rngs=nnx.Rngs(seed), **options))
        return state, lambda state, *given, **k: nnx.merge(graph, state)(*given, **k)
    layer = cls(*sizes[1:], **options)
    inputs = [jax.ShapeDtypeStruct((*leading, sizes[0]), F32)] * (1 + (name in RESIDUAL_NORMS))
    parameters = layer.lazy_init(jax.random.key(seed), *inputs).get("params", {})
    return parameters, lambda tree, *given, **k: layer.apply({"params": tree}, *given, **k)


def make_softmax(library, **options):
    layer = layer_class(library, "Softmax")(**options)
    if library == "nnx":
        return layer
    return lambda *inputs, **k: layer.apply({}, *inputs, **k)


def values(parameters):
    """As nested dicts of arrays."""
    return nnx.to_pure_dict(parameters) if isinstance(parameters, nnx.State) else parameters


def random(seed, shape, dtype=F32, *, mean=0.0, deviation=1.0):
    found = np.random.default_rng(seed).normal(mean, deviation, shape)
    return jnp.asarray(found.astype(jnp.dtype(dtype)))  # by NumPy, which compiles nothing


def randomized(parameters, seed=0, dtype=None):
    """The same tree with random numbers of a deviation of a half."""
    leaves, structure = jax.tree.flatten(parameters)
    drawn = [
        random(seed + n, leaf.shape, dtype or leaf.dtype, deviation=0.5)
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def f64(array):
    return np.asarray(jnp.asarray(array), np.float64)


def norm64(name, h, scale=None, bias=None, *, epsilon=1e-6):
    """LayerNorm or RMSNorm in float64, by its definition."""
    d = f64(h)
    if "Layer" in name:
        d = d - d.mean(-1, keepdims=True)
    y = d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon)
    return y * (1 if scale is None else f64(scale)) + (0 if bias is None else f64(bias))


def pullback64(name, h, scale, bias, dy, dh=0.0):
    """Gradients with respect to h, scale and bias, by the chain rule in float64."""
    centred = "Layer" in name
    d = h - h.mean(-1, keepdims=True) if centred else h
    reciprocal = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-6)
    unit = d * reciprocal
    g = dy * scale
    dd = reciprocal * (g - unit * (g * unit).mean(-1, keepdims=True))
    dx = dd - dd.mean(-1, keepdims=True) if centred else dd
    rows = tuple(range(h.ndim - 1))
    return dx + dh, (dy * unit).sum(rows), dy.sum(rows)
