"""Checks a function's arguments, and runs or names what is chosen for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fusejax.functions import arguments
from fusejax.functions.card import CUDA
from fusejax.functions.choice import Asked, Choice, choose, names
from fusejax.functions.function import Function

# A function is traced before it is known what for: any platform without kernels stands for all.
_ELSEWHERE = "cpu"


def call(
    function: Function, arrays: Sequence[Any], options: Mapping[str, Any], asked: Asked
) -> Any:
    """The function's results, by what is chosen once it is lowered.

    Raises:
      ValueError: no implementation makes sense of the arguments, or none that is asked for can run.
    """
    given, options = checked(function, arrays, options)
    chosen = choose(function, given, asked, CUDA).implementation
    if chosen != "pallas":
        # A kernel is a scope of its own.
        with jax.named_scope(function.name):
            return (function.xla if chosen == "xla" else function.split)(*given, **options)
    if names(asked) == ("pallas",):
        return function.kernel(*given, **options, fallback=False)
    if choose(function, given, asked, _ELSEWHERE).implementation == "xla":
        return function.kernel(*given, **options, fallback=True)
    return jax.lax.platform_dependent(
        *given,
        cuda=lambda *given: function.kernel(*given, **options, fallback=False),
        default=lambda *given: function.split(*given, **options),
    )


def explain(
    function: Function,
    arrays: Sequence[Any],
    options: Mapping[str, Any],
    asked: Asked,
    platform: str,
) -> Choice:
    """The choice of `call` on a platform; arrays may be `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: what `call` raises.
    """
    found: list[Choice] = []

    def trace(*arrays: Any) -> None:
        given, _ = checked(function, arrays, options)
        found.append(choose(function, given, asked, platform))

    jax.eval_shape(trace, *arrays)
    return found[0]


def checked(
    function: Function, arrays: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arrays as arrays of JAX, and the options.

    Raises:
      ValueError: no implementation makes sense of them.
    """
    found = [
        None if value is None and name in function.optional else arguments.array(name, value)
        for name, value in zip(function.arrays, arrays, strict=True)
    ]
    function.check(*found)
    return found, {name: function.options[name](name, value) for name, value in options.items()}
