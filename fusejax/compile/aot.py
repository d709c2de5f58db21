"""Compiles a function for a target and keeps what the compiler said about it."""

import contextlib
import dataclasses
import functools
import re
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

# What the function is called, in the name of its module and at the head of operations' names.
_FUNCTION_NAME = re.compile(r'(?<=module )@\S+|(?<="jit\()[^()"]+')
_QUOTED = re.compile(r'"[^"\n]*"')


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled function with what the compiler wrote and what compiling cost."""

    program: Program
    cold_s: float
    """Seconds to trace, lower and compile, the first time in this process; of what was known, to
    trace and lower."""
    executable_bytes: int | None
    """Size of the serialised executable; None where the back end cannot serialise it."""
    executable: Any = dataclasses.field(repr=False)
    """The `jax.stages.Compiled`; it can be called where the target is this machine's."""


Known = dict[str, tuple[str, Compilation]]
"""What was compiled before for one target with the same options, and its scope, by the text of the
program without that name and the function's own."""


def compile_program(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    options: Mapping[str, Any] | None = None,
    known: Known | None = None,
    *,
    scope: str = "",
    with_ptx: bool = True,
) -> Compilation:
    """Compiles `function` for `target`.

    Args:
      function: jitted or not.
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
      target: see `fusejax.compile.targets.resolve`.
      options: further compiler options.
      known: what is in there is not compiled again, and what is not is added.
      scope: a scope around it, in whose name alone it may differ from what is known: layers of a
        model do.
      with_ptx: whether the kernels' PTX, which tells registers, is wanted.

    Raises:
      UsageError: the target's description is not one that XLA accepts.
      Whatever tracing, lowering or compiling `function` raises.
    """
    start = time.perf_counter()
    lowered = _lower(function, arguments, target)
    text = ""
    if known is not None:
        # With scopes and source lines, which reports show.
        text = _FUNCTION_NAME.sub("", _renamed(lowered.as_text(debug_info=True), scope, ""))
        if text in known:
            other, found = known[text]
            program = _with_scope(found.program, other, scope)
            seconds = time.perf_counter() - start
            return dataclasses.replace(found, program=program, cold_s=seconds)
    executable, program = compile_with_dump(lowered, options, with_ptx=with_ptx)
    seconds = time.perf_counter() - start
    found = Compilation(program, seconds, _executable_bytes(executable), executable)
    if known is not None:
        known[text] = scope, found
    return found


def _with_scope(program: Program, old: str, new: str) -> Program:
    if old == new:
        return program
    return dataclasses.replace(
        program,
        hlo=_renamed(program.hlo, old, new),
        unoptimised=program.unoptimised and _renamed(program.unoptimised, old, new),
        decisions=program.decisions and _renamed(program.decisions, old, new),
    )


def _renamed(text: str, old: str, new: str) -> str:
    """The text with a scope renamed in its names of operations, which are quoted paths."""
    if not old:
        return text
    part = re.compile(rf"(?<=[/(]){re.escape(old)}(?=[)/])")
    return _QUOTED.sub(lambda quoted: part.sub(lambda _: new, quoted[0]), text)


def warm_compile_s(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Seconds to trace, lower and compile `function` again in a process that has done it before."""
    start = time.perf_counter()
    lowered = _lower(lambda *args: function(*args), arguments, target)
    lowered.compile(compiler_options=dict(options or {}))
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
        lowered = jitted.lower(*placed)
        if target.kind == "deviceless" and not _kept_arguments(lowered):
            return _lower_by_results(jitted, placed, device)
        return lowered


def _kept_arguments(lowered: Any) -> int:
    """Arguments of a program; those that it does not use are dropped."""
    (main,) = (
        operation
        for operation in lowered.compiler_ir("stablehlo").body.operations
        if operation.attributes["sym_name"].value == "main"
    )
    return len(main.arguments)


def _lower_by_results(function: Any, arguments: Sequence[Any], device: Any) -> Any:
    """Lowers where no argument says what for: by where the results are to be."""
    leaves, tree = jax.tree.flatten(tuple(arguments))

    def call(*arrays: Any) -> Any:
        turn = iter(arrays)
        given = [next(turn) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
        return function(*jax.tree.unflatten(tree, given))

    call.__name__ = getattr(function, "__name__", call.__name__)
    there = jax.sharding.SingleDeviceSharding(device)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    return jax.jit(call, out_shardings=there).lower(*arrays)


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
