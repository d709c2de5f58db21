"""Named scopes for the modules of an nnx model, which linen gives its modules by itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx


def named_scopes[M: nnx.Module](model: M) -> M:
    """The model with a `jax.named_scope` around the `__call__` of each of its modules.

        model = named_scopes(Transformer(rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(model)
        report = fusejax.inspect(lambda state, x: nnx.merge(graphdef, state)(x), state, x)

    A module has the name of the attribute that holds it, `blocks_0` for the first of a list
    `blocks`, and the model that of its class, as linen names them: kernels and boundaries are those
    of Transformer/blocks_0/attention, say. A module in two places has the name of the first.

    The result is a copy with the same parameters. Its modules are instances of subclasses, so that
    the names outlast `nnx.split`, `nnx.merge` and nnx's transformations; they cannot be pickled.

    Args:
      model: is left as it was.
    """
    named = nnx.clone(model)
    modules = {path: module for path, module in nnx.iter_modules(named) if callable(module)}
    for path, module in modules.items():
        above = max((n for n in range(len(path)) if path[:n] in modules), default=0)
        name = "_".join(map(str, path[above:])) or type(model).__name__
        object.__setattr__(module, "__class__", _in_scope(type(module), name))
    return named


@functools.cache  # equal models have to have equal classes, or `nnx.jit` would trace them again
def _in_scope(module: Any, name: str) -> Any:
    @functools.wraps(module.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return module.__call__(self, *args, **kwargs)

    attributes = {
        "__call__": call,
        "__doc__": module.__doc__,
        "__module__": module.__module__,
        "__qualname__": module.__qualname__,
    }
    return type(module)(module.__name__, (module,), attributes, pytree=module._pytree__is_pytree)
