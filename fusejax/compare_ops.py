"""Compiles every path of an op for a target, checks it, predicts it and, on hardware, times it."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import fusejax
from fusejax import over_fused, paths, residual, verdict
from fusejax.comparison import Comparison, PathResult, Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.compiled_path import Compiler, compile_path, with_lost_boundaries
from fusejax.cpu_check import with_cpu_errors
from fusejax.errors import UsageError, first_line
from fusejax.measure import counting, on_machine
from fusejax.measure.turns import card_turn
from fusejax.ops.op import Op
from fusejax.paths import Path
from fusejax.sheet import traffic_sheet


def compare_op(
    op: Op,
    shape: Sequence[int],
    dtype: Any,
    target: Target,
    *,
    mode: str = "forward",
    names: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    xla_options: Mapping[str, Any] | None = None,
    is_brief: bool = False,
    known: aot.Known | None = None,
    counters: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compares the paths of `op` at sizes `shape`.

    Args:
      op: see `fusejax.ops`.
      shape: sizes in the order of `op.axes`, each at least 1.
      dtype: float16, bfloat16 or float32.
      target: see `fusejax.compile.targets.resolve`.
      mode: "forward", or "backward" for the gradient of all arguments.
      names: which of `fusejax.paths.NAMES`; by default those of the op.
      options: what the op was built with, for the report.
      xla_options: of XLA, by name, for every program of every path.
      is_brief: compile each path once and run nothing: no registers, errors, or measured times.
      known: as of `fusejax.compiled_path.Compiler`.
      counters: count DRAM bytes on the card as well, with Nsight Compute.
      progress: told in a few words what is being done.

    Raises:
      fusejax.errors.UsageError: the target's description is not usable, or the arrays are larger
        than its memory.
    """
    shapes = paths.argument_shapes(op, mode, shape, dtype)
    sheet = traffic_sheet(paths.eager_chain(op, mode), shapes)
    given = f"--shape {','.join(map(str, shape))}"
    refuse_what_does_not_fit(given, sheet.minimum_bytes, target)
    beside_others = card_turn(shared=True) if target.kind == "device" else contextlib.nullcontext()
    compiler = Compiler(target, dict(xla_options or {}), is_brief, known)
    with beside_others:
        results, built = _compiled(
            op, mode, shape, dtype, paths.of(op) if names is None else names, compiler, progress
        )
    if target.kind != "device" and not is_brief:
        options_here = compiler.options if target.kind == "cpu" else {}
        results = with_cpu_errors(op, mode, shape, dtype, results, progress, options_here)
    floor_us = clocks = None
    if target.kind != "deviceless" and built and not is_brief:
        compiled = {name: path for name, path in results.items() if isinstance(path, PathResult)}
        request = counting.Request(op.name, dict(options or {}), mode, shape, dtype, tuple(built))
        measured = on_machine.measure(
            shapes, built, compiled, compiler, sheet.minimum_bytes, progress,
            errors=None if target.kind == "cpu" else functools.partial(on_machine.errors, op, mode),
            counted=request if counters else None,
        )  # fmt: skip
        results |= measured.paths
        floor_us, clocks = measured.floor_us, measured.clocks
    results = {
        name: residual.attributed(path, target) if isinstance(path, PathResult) else path
        for name, path in results.items()
    }
    served = [path for path in results.values() if isinstance(path, PathResult)]
    return Comparison(
        op=op.name,
        formula=op.formula,
        mode=mode,
        shape=tuple(shape),
        dtype=np.dtype(dtype).name,
        target=target,
        versions=versions(),
        sheet=sheet,
        minimum_bytes=sheet.minimum_bytes,
        floor_us=floor_us,
        paths=results,
        verdict=verdict.judge(served, target),
        options=dict(options or {}),
        xla_options=dict(xla_options or {}),
        clocks=clocks,
    )


def versions() -> dict[str, str]:
    """Of what a comparison is made with."""
    return {
        "fusejax": fusejax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def _compiled(
    op: Op,
    mode: str,
    shape: Sequence[int],
    dtype: Any,
    names: Sequence[str],
    compiler: Compiler,
    progress: Callable[[str], None],
) -> tuple[dict[str, PathResult | Refusal], dict[str, tuple[Path, list[Any]]]]:
    """Every path's result so far, and chain and executables of those that compile."""
    shapes = paths.argument_shapes(op, mode, shape, dtype)
    results: dict[str, PathResult | Refusal] = {}
    built: dict[str, tuple[Path, list[Any]]] = {}
    target = compiler.target
    prepare(compiler, progress)
    for name in names:
        reason = paths.refusal(op, name, mode, shape, dtype, target)
        if reason is None:
            progress(f"compiling {name} for {target.title}")
            path = paths.build(op, name, mode)
            try:
                found, executables = compile_path(path, shapes, compiler, op)
                if name == "split" and mode == "forward" and target.kind != "cpu":
                    found = with_lost_boundaries(found, op, shape, dtype)
                results[name] = over_fused.with_flags(found, op, shapes)
                built[name] = path, executables
            except Exception as error:
                if name not in paths.PALLAS:
                    raise
                reason = f"does not compile: {first_line(error)}"
        if reason is not None:
            results[name] = Refusal(name, reason)
    return results, built


def prepare(compiler: Compiler, progress: Callable[[str], None]) -> None:
    """Has the compiler start, so that the first path's compile time is its own."""
    progress(f"preparing the compiler for {compiler.target.title}")
    probe = (jax.ShapeDtypeStruct((8,), np.float32),)
    aot.compile_program(lambda x: x + 1, probe, compiler.target)


def refuse_what_does_not_fit(given: str, size: int, target: Target) -> None:
    """Raises UsageError where `size` bytes are more than the target's memory.

    Args:
      given: what the message begins with, such as "--shape 8192,8192".
    """
    memory = target.figure("device_memory_size")
    if memory is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise UsageError(
            f"{given}: inputs and outputs take {size / 2**30:,.0f} GiB, and {target.title} has "
            f"{memory / 2**30:,.0f}: give a smaller shape"
        )
