"""Functions with named scopes, small enough to compile many of them in one program.

Each takes the arrays in `ARGUMENTS[name]`. `FUSED` names those that XLA:GPU makes into kernels
across scopes when nothing keeps them apart.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax

from fusejax.flax.scopes import named_scopes
from fusejax.ops import OPS

scope = jax.named_scope
F32 = jnp.float32


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F32)


X = array(16, 64)


def steps(x):
    with scope("a"):
        y = jnp.sin(x) * 2
    with scope("b"):
        y = jnp.exp(y) + x
    with scope("c"):
        return jnp.tanh(y) * x


def nested(x):
    with scope("outer"):
        with scope("first"):
            y = jnp.sin(x)
        with scope("second"):
            y = jnp.cos(y)
        y = y * 3
    with scope("next"):
        return jnp.exp(y)


def equal_casts(x):
    """XLA would merge the casts, and each kernel would hold one of the other's scope."""
    x = (x * 2).astype(jnp.float16)
    with scope("mean"):
        mean = x.astype(F32).mean(-1, keepdims=True)
    with scope("subtract"):
        return x.astype(F32) - mean


def siblings(x):
    """Two readers of one array, which XLA puts into one kernel with two outputs."""
    with scope("sum"):
        a = (x * 2).sum(-1)
    with scope("max"):
        return a, (x * 3).max(-1)


def repeated(x):
    for _ in range(3):
        with scope("again"):
            x = jnp.sin(x)
        with scope("scale"):
            x = x * 1.5
    return x


def jitted(x):
    return jax.jit(steps)(jax.jit(nested)(x))


def scanned(x):
    def body(carry, y):
        with scope("turn"):
            carry = jnp.sin(carry)
        with scope("grow"):
            carry = jnp.cos(carry) * y
        return carry, carry.sum()

    return lax.scan(body, x[0], x)


def while_loop(x):
    def body(state):
        count, y = state
        with scope("turn"):
            y = jnp.sin(y)
        with scope("grow"):
            return count + 1, jnp.cos(y) * x

    return lax.while_loop(lambda state: state[0] < 4, body, (0, x))


def fori_loop(x):
    def body(i, y):
        with scope("turn"):
            y = jnp.sin(y)
        with scope("shift"):
            return jnp.exp(y * 0.1) + i

    return lax.fori_loop(0, 3, body, x)


def branches(x):
    def left(x):
        with scope("left_a"):
            y = jnp.sin(x)
        with scope("left_b"):
            return jnp.cos(y) * x

    def right(x):
        with scope("right_a"):
            y = jnp.tanh(x)
        with scope("right_b"):
            return jnp.exp(y) * x

    return lax.cond(x[0, 0] > 0, left, right, x)


def mapped(x):
    return lax.map(steps, x)


@jax.checkpoint
def _block(x):
    with scope("up"):
        y = jnp.sin(x)
    with scope("down"):
        return jnp.cos(y) * x


def rematerialised(x):
    return _block(_block(x))


@jax.custom_vjp
def _scaled(x):
    with scope("primal"):
        y = jnp.sin(x)
    with scope("primal_end"):
        return jnp.cos(y)


def _scaled_forward(x):
    with scope("rule"):
        y = jnp.cos(x)
    with scope("rule_end"):
        return jnp.exp(y), y


def _scaled_backward(y, g):
    with scope("pull"):
        g = jnp.sin(g) * y
    with scope("pull_end"):
        return (jnp.tanh(g) * 7,)


_scaled.defvjp(_scaled_forward, _scaled_backward)


def custom_gradient(x):
    with scope("before"):
        x = jnp.sin(x) * 0.5
    return _scaled(x)


def custom_tangent(x):
    with scope("before"):
        x = jnp.sin(x) * 0.5
    y = jax.nn.relu(x)
    with scope("after"):
        return jax.nn.softplus(y)


def softmax_loss(x):
    with scope("max"):
        m = lax.stop_gradient(x.max(-1, keepdims=True))
    with scope("exp"):
        e = jnp.exp(x - m)
    with scope("loss"):
        return jnp.log(e.sum(-1)) - x[:, 0] + m[:, 0]


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        with scope("up"):
            y = nn.gelu(nn.Dense(64, name="dense_up")(y))
        with scope("add"):
            return x + nn.tanh(y)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(_ScannedMlp),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return block(name="layers")(x, None)[0]


class _ScannedMlp(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Mlp(name="mlp")(x), None


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.activation = _Activation()
        self.scale = nnx.RMSNorm(64, rngs=rngs)

    def __call__(self, x):
        return self.scale(self.activation(self.norm(x)))


class _Activation(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x) * 2


def _linen(module):
    variables = module.init(jax.random.key(0), X)
    return module.apply, (variables, X)


def _nnx():
    graph, state = nnx.split(named_scopes(Normalised(nnx.Rngs(0))))
    return lambda state, x: nnx.merge(graph, state)(x), (state, X)


def quick_jit(function):
    """Compiled in less time, for code that is run once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def loss(function):
    """The sum of all floating-point results, and so something to differentiate."""

    def summed(*arguments):
        leaves = jax.tree.leaves(function(*arguments))
        return sum(leaf.sum() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))

    return summed


def gradient(function):
    return jax.grad(loss(function))


def _op(name):
    op = OPS[name]()
    arguments = tuple(
        jnp.asarray(np.random.default_rng(i).random(one.shape) > 0.3, one.dtype)
        if one.dtype == bool
        else array(*one.shape, seed=i)
        for i, one in enumerate(op.argument_shapes((32,) * len(op.axes), F32))
    )
    return op.chain.program(name), arguments


SIMPLE = {
    f.__name__: f
    for f in (
        steps, nested, equal_casts, siblings, repeated, jitted, scanned, while_loop, fori_loop,
        branches, mapped, rematerialised, custom_gradient, custom_tangent, softmax_loss,
    )
}  # fmt: skip


@functools.cache
def everything():
    """Functions by name, each with its arguments."""
    found = {name: (f, (X,)) for name, f in SIMPLE.items()}
    found |= {f"op_{name}": _op(name) for name in OPS}
    found |= {"linen_mlp": _linen(Mlp()), "linen_stack": _linen(Stack()), "nnx_model": _nnx()}
    for name in SIMPLE:
        if name != "while_loop":
            found[f"grad_{name}"] = gradient(SIMPLE[name]), (X,)
            found[f"vmap_{name}"] = jax.vmap(SIMPLE[name]), (jnp.stack([X, X * 0.5]),)
    for name in ("linen_mlp", "linen_stack", "nnx_model"):
        function, arguments = found[name]
        found[f"grad_{name}"] = gradient(function), arguments
    return found


def together(names):
    """Many functions in one program, each in a scope of its name, and all their arguments."""
    found = everything()

    def program(arguments):
        results = {}
        for name in names:
            with scope(name):
                results[name] = found[name][0](*arguments[name])
        return results

    return program, {name: found[name][1] for name in names}


def assert_same(found, wanted, tolerance=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        scale = np.abs(b).max(initial=0.0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)
