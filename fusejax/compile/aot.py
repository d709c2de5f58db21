"""Compiles a function for a target and keeps what the compiler said about it."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from fusejax.compile import platform
from fusejax.compile.dump import compile_with_dump
from fusejax.compile.targets import Target
from fusejax.errors import UsageError, first_line
from fusejax.functions import card
from fusejax.program import Program


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled function with what the compiler wrote and what compiling cost."""

    program: Program
    cold_s: float
    """Seconds to trace, lower and compile, the first time in this process."""
    executable_bytes: int | None
    """Size of the serialised executable; None where the back end cannot serialise it."""
    executable: Any = dataclasses.field(repr=False)
    """The `jax.stages.Compiled`; it can be called where the target is this machine's."""


def compile_program(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    options: Mapping[str, Any] | None = None,
) -> Compilation:
    """Compiles `function` for `target`.

    Args:
      function: jitted or not.
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
      target: see `fusejax.compile.targets.resolve`.
      options: further compiler options.

    Raises:
      UsageError: the target's description is not one that XLA accepts.
      Whatever tracing, lowering or compiling `function` raises.
    """
    start = time.perf_counter()
    executable, program = compile_with_dump(_lower(function, arguments, target), options)
    seconds = time.perf_counter() - start
    return Compilation(program, seconds, _executable_bytes(executable), executable)


def warm_compile_s(function: Callable[..., Any], arguments: Sequence[Any], target: Target) -> float:
    """Seconds to trace, lower and compile `function` again in a process that has done it before."""
    start = time.perf_counter()
    _lower(lambda *args: function(*args), arguments, target).compile()
    return time.perf_counter() - start


def _lower(function: Callable[..., Any], arguments: Sequence[Any], target: Target) -> Any:
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    device = _device(target)
    # Numbers and words may be static; the arrays say what to compile for, as long as there are any.
    has_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(arguments))
    placed = jax.tree.map(
        lambda leaf: leaf if has_arrays and not hasattr(leaf, "dtype") else _placed(device, leaf),
        arguments,
    )
    with compiling_for(target):
        return jitted.lower(*placed)


def compiling_for(target: Target) -> contextlib.AbstractContextManager[None]:
    """While it lasts, functions of fusejax choose for the target's card."""
    major, minor = target.figure("major"), target.figure("minor")
    if major is None:
        return contextlib.nullcontext()
    return card.compiling_for(card.Card(target.title, (major, minor or 0)))


def _placed(device: Any, leaf: Any) -> Any:
    shape_and_dtype = jax.eval_shape(lambda: leaf) if not hasattr(leaf, "dtype") else leaf
    return jax.ShapeDtypeStruct(
        shape_and_dtype.shape,
        shape_and_dtype.dtype,
        sharding=jax.sharding.SingleDeviceSharding(device),
    )


@functools.cache
def _device(target: Target) -> Any:
    platform.discover_backends_quietly()
    if target.kind == "cpu":
        return jax.devices("cpu")[0]
    if target.kind == "device":
        return jax.devices("cuda")[0]
    return _topology(target).devices[0]


def _topology(target: Target) -> Any:
    def describe() -> Any:
        with platform.silent_stderr():
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name=target.title,
                topology="1x1x1",
                target_config=target.description,
            )

    try:
        try:
            return describe()
        except NotImplementedError:  # this JAX came up without the CUDA plugin
            platform.register_cuda_compiler()
            return describe()
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--target {target.name!r} is not a description that XLA accepts ({first_line(error)}):"
            " give the text form of a GpuTargetConfigProto"
        ) from error


def _executable_bytes(executable: Any) -> int | None:
    try:
        return len(executable.runtime_executable().serialize())
    except (AttributeError, RuntimeError):
        return None
