"""Executables that `jax.jit` makes of a mix of shapes, and what padding rows would save and cost.

    variants    = distinct shapes of arguments, counted by how often jit traces
    extra bytes = sum over calls of (bytes at the padded shape - bytes at the shape as it is)
    copies      = sum over padded calls of what padding the arguments and cutting the results moves

Bytes are modelled from the compiled programs. Copies are there only where batches do not already
lie in arrays of the padded size.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fusejax import paths
from fusejax.comparison import Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.compile_costs.mix import POLICIES, Policy
from fusejax.errors import first_line
from fusejax.hlo.analyse import analyse
from fusejax.ops.op import Op, nbytes
from fusejax.paths import Path
from fusejax.resources import mosaic
from pallas_kernels import catalogue

type Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A path at one shape, its programs together."""

    compile_s: float
    executable_bytes: int | None
    moved_bytes: int
    calls: tuple[mosaic.MosaicCall, ...]
    """Its Mosaic GPU kernels."""


@dataclasses.dataclass(frozen=True)
class Variants:
    """A path under one policy, over all calls of the mix."""

    path: str
    policy: str
    calls: int
    served: int
    """Calls that the path serves at their padded shape; all that follows is of these."""
    refusal: str | None
    """Of the first call that it does not serve."""
    executables: int
    """That jit makes: each program of the path once for each distinct shape."""
    compile_s: float
    """Of all of them, cold in a process whose compiler is up."""
    executable_bytes: int | None
    moved_bytes: int
    extra_bytes: int
    """For padding, of the calls that the path serves as they are too."""
    copied_bytes: int
    """By padding arguments and cutting results, where batches do not lie in padded arrays."""
    mosaic_kernels: int
    """Distinct Mosaic GPU kernels: array sizes are compiled in."""
    configurations: int
    """Distinct ways to launch them, not counting how many CTAs."""


@dataclasses.dataclass(frozen=True)
class KernelOfShape:
    """The Mosaic GPU kernel that a shape takes."""

    shape: Shape
    calls: int
    """Of the mix."""
    function: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    plan: str | None
    """In words; None for kernels that are not row kernels."""


@dataclasses.dataclass(frozen=True)
class Mix:
    """What a mix of calls compiles to."""

    variants: tuple[Variants | Refusal, ...]
    """By path, then policy."""
    kernels: tuple[KernelOfShape, ...]
    note: str | None
    """What padding would do to results, where they are not one per row."""


def of_mix(
    op: Op,
    calls: Sequence[Shape],
    dtype: Any,
    target: Target,
    names: Sequence[str],
    *,
    policies: Sequence[Policy] = POLICIES,
    progress: Callable[[str], None] = lambda _: None,
) -> Mix:
    """Compiles every path at every distinct shape of the mix, as it is and padded.

    Args:
      calls: shapes in the order of `op.axes`, with repetitions.
      policies: the first one pads nothing.
    """
    variants: list[Variants | Refusal] = []
    kernels: tuple[KernelOfShape, ...] = ()
    for name in names:
        path = paths.build(op, name, "forward")
        known: dict[Shape, Compiled] = {}
        reasons: dict[Shape, str] = {}
        padded = {(policy.rows(shape[0]), *shape[1:]) for policy in policies for shape in calls}
        for number, shape in enumerate(sorted(padded, reverse=True), 1):
            progress(f"compiling {name} at {len(padded)} shapes: {number}")
            reason = paths.refusal(op, name, "forward", shape, dtype, target)
            if reason is None:
                try:
                    known[shape] = _compiled(path, op.argument_shapes(shape, dtype), target)
                except Exception as error:
                    reason = f"does not compile: {first_line(error)}"
            if reason is not None:
                reasons[shape] = reason
        if not known:
            variants.append(Refusal(name, next(iter(reasons.values()))))
            continue
        for policy in policies:
            variants.append(_variants(op, path, policy, calls, dtype, known, reasons))
        if name == "pallas":
            kernels = _kernels(calls, dtype, known)
    return Mix(tuple(variants), kernels, _note(op))


def _note(op: Op) -> str | None:
    if not op.mixes_rows:
        return None
    return f"{op.name}: padded rows get into its results, unless they are masked or cut off there"


def _compiled(path: Path, shapes: Sequence[Any], target: Target) -> Compiled:
    values = path.chain.shapes(shapes)
    compilations = [
        aot.compile_program(stage.function, tuple(values[name] for name in stage.inputs), target)
        for stage in path.chain.stages
    ]
    sizes = [compilation.executable_bytes for compilation in compilations]
    return Compiled(
        compile_s=sum(compilation.cold_s for compilation in compilations),
        executable_bytes=None if None in sizes else sum(size for size in sizes if size),
        moved_bytes=sum(analyse(c.program).traffic.total for c in compilations),
        calls=tuple(call for c in compilations for call in mosaic.calls(c.program.hlo)),
    )


def _variants(
    op: Op,
    path: Path,
    policy: Policy,
    calls: Sequence[Shape],
    dtype: Any,
    known: Mapping[Shape, Compiled],
    reasons: Mapping[Shape, str],
) -> Variants:
    pairs = [(shape, (policy.rows(shape[0]), *shape[1:])) for shape in calls]
    served = [(own, padded) for own, padded in pairs if padded in known]
    distinct = [known[shape] for shape in dict.fromkeys(padded for _, padded in served)]
    sizes = [found.executable_bytes for found in distinct]
    kernels = [call for found in distinct for call in found.calls]
    return Variants(
        path=path.name,
        policy=policy.name,
        calls=len(calls),
        served=len(served),
        refusal=next((reasons[padded] for _, padded in pairs if padded in reasons), None),
        executables=traced(path, [op.argument_shapes(padded, dtype) for _, padded in served]),
        compile_s=sum(found.compile_s for found in distinct),
        executable_bytes=None if None in sizes else sum(size for size in sizes if size),
        moved_bytes=sum(known[padded].moved_bytes for _, padded in served),
        extra_bytes=sum(
            known[padded].moved_bytes - known[own].moved_bytes
            for own, padded in served
            if own in known
        ),
        copied_bytes=sum(copied_bytes(op, own, padded, dtype) for own, padded in served),
        mosaic_kernels=len({call.identity for call in kernels}),
        configurations=len({(c.function, c.threads, c.dynamic_shared_bytes) for c in kernels}),
    )


def traced(path: Path, calls: Sequence[Sequence[Any]]) -> int:
    """How many executables jit makes of the path's programs over all calls.

    Each program is traced by jit for every call; jit runs its Python only where it has no
    executable for such arguments yet.
    """
    count = 0

    def counting(function: Callable[..., Any]) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return function(*arguments)

        return jax.jit(run)

    jitted = [counting(stage.function) for stage in path.chain.stages]
    for shapes in calls:
        values = path.chain.shapes(shapes)
        for stage, program in zip(path.chain.stages, jitted, strict=True):
            program.trace(*(values[name] for name in stage.inputs))
    return count


def copied_bytes(op: Op, shape: Shape, larger: Shape, dtype: Any) -> int:
    """Bytes of padding the arguments from one shape to a larger one, and cutting the results."""
    own, padded = (op.chain.shapes(op.argument_shapes(s, dtype)) for s in (shape, larger))
    grown = [name for name in own if own[name].shape != padded[name].shape]
    return sum(
        nbytes(own[name]) + nbytes(padded[name]) for name in op.chain.arguments if name in grown
    ) + sum(2 * nbytes(own[name]) for name in op.chain.results if name in grown)


def _kernels(
    calls: Sequence[Shape], dtype: Any, known: Mapping[Shape, Compiled]
) -> tuple[KernelOfShape, ...]:
    return tuple(
        KernelOfShape(
            shape=shape,
            calls=list(calls).count(shape),
            function=call.function.removesuffix("_mosaic_gpu_kernel"),
            grid=call.grid,
            threads=call.threads[0] * call.threads[1] * call.threads[2],
            shared_bytes=call.dynamic_shared_bytes,
            plan=_plan(call.function.removesuffix("_mosaic_gpu_kernel"), shape, dtype),
        )
        for shape in dict.fromkeys(calls)
        if shape in known
        for call in known[shape].calls
    )


def _plan(function: str, shape: Shape, dtype: Any) -> str | None:
    launch = catalogue.launches().get(function)
    if launch is None or len(shape) != 2:
        return None
    plan = launch.plan(*shape, dtype)
    rows = f"{plan.rows_per_block} rows" if plan.rows_per_block > 1 else "1 row"
    parts = f" of {plan.parts} parts" if plan.parts > 1 else ""
    return f"{plan.cut.value}, {rows}{parts}, {plan.stages} stages"
