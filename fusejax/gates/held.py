"""Compiles what a gate holds against its limits."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from fusejax.errors import UsageError
from fusejax.inspection import Inspected, inspect

_PACKAGES = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True)
class Held:
    """A function as it was compiled for a target, or what of it belongs to a scope."""

    name: str
    """Of the function."""
    target: str
    """The name by which `fusejax.inspect` knows it; of this machine's GPU also the card."""
    jax: str
    """Version of JAX, and of jaxlib where that is another."""
    module: Inspected
    """Sources are relative to the root that was given."""


def compiled(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: str | Any,
    scope: str | None,
    root: pathlib.Path,
) -> Held:
    """Compiles a function for a target.

    Args:
      function, arguments, target: as `fusejax.inspect` takes them.
      scope: limits kernels and boundaries to those with instructions of this named scope.
      root: folder that sources are made relative to.

    Raises:
      UsageError: the target is unknown or cannot be compiled for here, or the function has no such
        scope.
      Whatever tracing, lowering or compiling `function` raises.
    """
    from fusejax.compile import platform, targets

    platform.prepare_process()
    if not isinstance(target, str | targets.Target):
        raise UsageError(f"target {target!r} is none: give one of {', '.join(targets.NAMES)}")
    chosen = targets.resolve(target)[0] if isinstance(target, str) else target
    (module,) = inspect(function, *arguments, target=chosen).modules
    module = _relative(dataclasses.replace(module, scope=scope), root)
    if scope is not None and not module.kernels and not module.selected().scopes:
        names = [s.name for s in module.analysis.scopes]
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise UsageError(
            f"scope {scope!r} is not in {name_of(function)}: "
            + (f"give one of {known}" if names else "it names no scopes")
        )
    title = f"device ({chosen.title})" if chosen.kind == "device" else chosen.name
    return Held(name_of(function), title, jax_version(), module)


def name_of(function: Callable[..., Any]) -> str:
    """A function's own name, also where arguments are bound to it."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def jax_version() -> str:
    """Version of JAX, and of jaxlib, in which XLA is, where that is another."""
    import jax
    import jaxlib

    if jax.__version__ == jaxlib.__version__:
        return jax.__version__
    return f"{jax.__version__} (jaxlib {jaxlib.__version__})"


def _relative(module: Inspected, root: pathlib.Path) -> Inspected:
    found = module.analysis
    kernels = (dataclasses.replace(k, source=place(k.source, root)) for k in found.kernels)
    boundaries = (dataclasses.replace(b, source=place(b.source, root)) for b in found.boundaries)
    found = dataclasses.replace(found, kernels=tuple(kernels), boundaries=tuple(boundaries))
    return dataclasses.replace(module, analysis=found)


def place(source: str | None, root: pathlib.Path) -> str | None:
    """A "file:line" without the folders that differ from machine to machine.

    Relative to `root`, or to the folder of installed packages; the file's name alone elsewhere.
    """
    if source is None:
        return None
    path = pathlib.PurePath(source)
    for folder in _PACKAGES:
        if folder in path.parts:
            last = len(path.parts) - path.parts[::-1].index(folder)
            return pathlib.PurePath(*path.parts[last:]).as_posix()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
