"""Compares ways to run a function of the user's own: its named scopes apart, split, and fused."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax import float64_run, over_fused, residual, verdict
from fusejax.accuracy import Error
from fusejax.compare_ops import prepare, refuse_what_does_not_fit, versions
from fusejax.comparison import Comparison, PathResult, Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.compiled_path import Compiler, compile_path
from fusejax.errors import UsageError, first_line
from fusejax.inspection import traced_scopes
from fusejax.measure import on_machine
from fusejax.measure.turns import card_turn
from fusejax.ops.op import Chain, Stage, hlo_dtype, nbytes
from fusejax.paths import Path
from fusejax.report.units import tensor
from fusejax.scope_stages import stages_of
from fusejax.sheet import traffic_sheet
from fusejax.split_scopes import split_at_scopes
from fusejax.user_function import is_array

NAMES = ("eager", "split", "xla")
"""Paths of a function, from the most to the least split."""
_NO_SCOPES = (
    "{name} has no named scopes to cut at: put its steps into jax.named_scope or fusejax.stage"
)
# Argument shapes that are listed; a model has hundreds of parameters.
_SHOWN_ARGUMENTS = 6


@dataclasses.dataclass(frozen=True)
class Call:
    """A function, and the arguments to call it with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of arrays or shapes, and of whatever else the function takes."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The leaves that are arrays or shapes, in order."""
        return tuple(leaf for leaf in jax.tree.leaves(self.arguments) if is_array(leaf))

    def flat(self, *arrays: Any) -> tuple[Any, ...]:
        """The leaves of the results, from those of the arguments that are arrays."""
        leaves, tree = jax.tree.flatten(self.arguments)
        turn = iter(arrays)
        filled = [next(turn) if is_array(leaf) else leaf for leaf in leaves]
        return tuple(jax.tree.leaves(self.function(*jax.tree.unflatten(tree, filled))))


def gradient_of(call: Call) -> Call:
    """The gradient of all floating-point arguments, given them and the results' cotangents.

    As `fusejax.ops.gradient`: nothing is saved by a forward pass before it. Results that are not
    floating-point have no cotangent.

    Raises:
      UsageError: no argument, or no result, is floating-point.
    """
    results = jax.eval_shape(call.flat, *call.arrays)
    chosen = [i for i, result in enumerate(results) if _is_floating(result)]
    variable = [i for i, array in enumerate(call.arrays) if _is_floating(array)]
    if not variable or not chosen:
        what = "argument" if not variable else "result"
        raise UsageError(f"--mode 'backward': the function has no floating-point {what}")

    def gradient(arguments: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays = list(Call(call.function, arguments).arrays)

        def of_variables(*variables: Any) -> tuple[Any, ...]:
            given = list(arrays)
            for position, value in zip(variable, variables, strict=True):
                given[position] = value
            found = call.flat(*given)
            return tuple(jnp.asarray(found[i]) for i in chosen)

        found, pull = jax.vjp(of_variables, *(arrays[i] for i in variable))
        return pull(
            tuple(
                cotangent.astype(result.dtype)
                for cotangent, result in zip(cotangents, found, strict=True)
            )
        )

    gradient.__name__ = f"{_name(call.function)}_gradient"
    cotangents = tuple(jax.ShapeDtypeStruct(results[i].shape, results[i].dtype) for i in chosen)
    found = Call(gradient, (call.arguments, cotangents))
    try:
        jax.eval_shape(found.flat, *found.arrays)
    except Exception as error:
        raise UsageError(
            f"--mode 'backward': {_name(call.function)} cannot be differentiated: "
            f"{first_line(error)}"
        ) from error
    return found


def compare_fn(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    *,
    mode: str = "forward",
    names: Sequence[str] = NAMES,
    scopes: Sequence[str] | None = None,
    xla_options: Mapping[str, Any] | None = None,
    is_brief: bool = False,
    known: aot.Known | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compares the paths of a function.

    Where the target is this machine's, the paths are timed on random data (integers are small, and
    below every size of the arguments, so that they can be indices), and their results held against
    a run in float64.

    Args:
      name: what the report calls it.
      function: jitted or not.
      arguments: arrays, shapes, or trees of them, and whatever else the function takes.
      target: see `fusejax.compile.targets.resolve`.
      mode: "forward", or "backward" for the gradient of all floating-point arguments.
      names: which of `NAMES`.
      scopes: those to cut at; all by default.
      xla_options, is_brief, known: as of `fusejax.compare_ops.compare_op`.
      progress: told in a few words what is being done.

    Raises:
      UsageError: the target's description is not usable, the arrays are larger than its memory, or
        the function has no scope of that name.
      Whatever tracing the function raises.
    """
    call = Call(function, tuple(arguments))
    formula = _formula(call)
    if mode == "backward":
        call = gradient_of(call)
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in call.arrays)
    compiler = Compiler(target, dict(xla_options or {}), is_brief, known)
    with aot.compiling_for(target):
        traced = jax.jit(call.flat).trace(*shapes)
    results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in traced.out_info]
    size = sum(map(nbytes, (*shapes, *results)))
    refuse_what_does_not_fit(f"--fn {name!r}", size, target)
    with aot.compiling_for(target), _wrong_scopes_in_one_line():
        cut_up = stages_of(call.function, call.arguments, scopes)
        has_scopes = traced_scopes(call.flat, shapes, "cpu" if target.kind == "cpu" else "cuda")
    sheet = traffic_sheet(cut_up.chain, shapes)
    reason = None if has_scopes else _NO_SCOPES.format(name=name)
    prepare(compiler, progress)
    found: dict[str, PathResult | Refusal] = {}
    built: dict[str, tuple[Path, list[Any]]] = {}
    beside_others = card_turn(shared=True) if target.kind == "device" else contextlib.nullcontext()
    with beside_others:
        for path_name in names:
            if path_name != "xla" and reason is not None:
                found[path_name] = Refusal(path_name, reason)
                continue
            progress(f"compiling {path_name} for {target.title}")
            path = _path(path_name, call, cut_up.chain, scopes)
            try:
                result, executables = compile_path(path, shapes, compiler)
            except Exception as error:  # the others can still be compared
                found[path_name] = Refusal(path_name, f"does not compile: {first_line(error)}")
                continue
            found[path_name] = over_fused.flags(result)
            built[path_name] = path, executables
    notes: list[str] = []
    floor_us = clocks = None
    if target.kind == "deviceless" or is_brief:
        notes.append("No errors: nothing was run (--target cpu or device runs the function).")
    elif built:
        compiled = {n: path for n, path in found.items() if isinstance(path, PathResult)}
        measured = on_machine.measure(
            shapes, built, compiled, compiler, size, progress,
            errors=functools.partial(_errors, call, target.kind, notes),
        )  # fmt: skip
        found |= measured.paths
        floor_us, clocks = measured.floor_us, measured.clocks
    found = {
        path_name: residual.attributed(path, target) if isinstance(path, PathResult) else path
        for path_name, path in found.items()
    }
    served = [path for path in found.values() if isinstance(path, PathResult)]
    return Comparison(
        op=name,
        formula=formula,
        mode=mode,
        shape=(),
        dtype="",
        target=target,
        versions=versions(),
        sheet=sheet if reason is None else None,
        minimum_bytes=sheet.minimum_bytes,
        floor_us=floor_us,
        paths=found,
        verdict=verdict.judge(served, target),
        xla_options=dict(xla_options or {}),
        notes=tuple(notes),
        clocks=clocks,
    )


def _path(name: str, call: Call, cut_up: Chain, scopes: Sequence[str] | None) -> Path:
    if name == "eager":
        return Path(name, cut_up)
    if name == "split":
        call = Call(split_at_scopes(call.function, scopes), call.arguments)

    def program(*arrays: Any) -> tuple[Any, ...]:
        return call.flat(*arrays)

    program.__name__ = f"{_name(call.function)}_{name}"
    stage = Stage(name, program, cut_up.arguments, cut_up.results)
    return Path(name, Chain(cut_up.arguments, (stage,), cut_up.results))


def _errors(
    call: Call,
    kind: str,
    notes: list[str],
    values: Sequence[jax.Array],
    built: Mapping[str, tuple[Path, Sequence[Any]]],
) -> dict[str, Error | None]:
    """The errors of every path; a note says why there are none."""
    right = float64_run.of(call.flat, [np.asarray(value) for value in values])
    if right.note:
        notes.append(right.note)
    return {
        name: float64_run.error(path.run(programs, values), right, where=kind)
        for name, (path, programs) in built.items()
    }


@contextlib.contextmanager
def _wrong_scopes_in_one_line():
    try:
        yield
    except ValueError as error:
        raise UsageError(f"--scopes: {error}") from error


def _formula(call: Call) -> str:
    """ "(f16[8,8], f16[8]) -> f16[8,8]", as HLO writes shapes."""
    given, returned = call.arrays, jax.eval_shape(call.flat, *call.arrays)
    return f"({_listed(given)}) -> {_listed(returned)}"


def _listed(arrays: Sequence[Any]) -> str:
    shown = [tensor(hlo_dtype(one.dtype), one.shape) for one in arrays[:_SHOWN_ARGUMENTS]]
    more = len(arrays) - len(shown)
    return ", ".join([*shown, f"and {more} more"] if more else shown)


def _is_floating(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
