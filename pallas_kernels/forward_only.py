"""Kernels without a gradient say so, instead of whatever differentiating a launch would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def forward_only(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, whose differentiation in any mode is a `TypeError` that names it."""

    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise TypeError(
            f"{name} has no gradient: differentiate the same formula in plain JAX instead."
        )

    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(refuse)
    return wrapped
