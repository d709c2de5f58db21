"""Named scopes that end in a boundary which compilation keeps."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_F = TypeVar("_F", bound=Callable[..., Any])


def stage(name: str) -> Callable[[_F], _F]:
    """Makes a function one stage of a program: a named scope whose results are materialised.

        @fusejax.stage("gelu")
        def gelu(x, bias):
            return jax.nn.gelu(x + bias)

    XLA writes the results to memory and no kernel reaches across them. The values do not change.
    Differentiable and vmappable; under `jax.grad` the boundary is transposed, so the backward pass
    is split at the same place.

    Args:
      name: shown as the scope of every kernel of the stage. Not empty, without "/".

    Raises:
      ValueError: `name` is empty or holds "/".
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"a stage's name must be one path element without '/', not {name!r}")

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def staged(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(name):
                results = function(*args, **kwargs)
            return jax.lax.optimization_barrier(results)

        return staged  # type: ignore[return-value]

    return decorate
