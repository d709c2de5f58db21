"""Compiles every path of an op for a target, checks it, predicts it and, on hardware, times it."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import fusejax
from fusejax import accuracy, paths, predict, resources, verdict
from fusejax.comparison import Comparison, PathResult, Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.errors import UsageError, first_line
from fusejax.hlo.analyse import analyse
from fusejax.hlo.analysis import Analysis, Boundary, Reason
from fusejax.measure import counting, on_machine
from fusejax.ops.op import Op, hlo_dtype, nbytes
from fusejax.paths import Path
from fusejax.sheet import traffic_sheet

# The CPU check runs on few rows, and not at all on rows that would not fit in memory.
_CHECKED_ROWS = 4
_CHECKED_ELEMENTS = 1 << 24


def compare_op(
    op: Op,
    shape: Sequence[int],
    dtype: Any,
    target: Target,
    *,
    mode: str = "forward",
    names: Sequence[str] = paths.NAMES,
    options: Mapping[str, Any] | None = None,
    counters: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compares the paths of `op` on tensors of `shape` [rows, width].

    Args:
      op: see `fusejax.ops`.
      shape: rows and width, each at least 1.
      dtype: float16, bfloat16 or float32.
      target: see `fusejax.compile.targets.resolve`.
      mode: "forward", or "backward" for the gradient of all arguments.
      names: which of `fusejax.paths.NAMES`.
      options: what the op was built with, for the report.
      counters: count DRAM bytes on the card as well, with Nsight Compute.
      progress: told in a few words what is being done.

    Raises:
      fusejax.errors.UsageError: the target's description is not usable, or the arrays are larger
        than its memory.
    """
    shapes = paths.argument_shapes(op, mode, shape, dtype)
    sheet = traffic_sheet(paths.eager_chain(op, mode), shapes)
    _refuse_what_does_not_fit(shape, sheet.minimum_bytes, target)
    results: dict[str, PathResult | Refusal] = {}
    built: dict[str, tuple[Path, list[Any]]] = {}
    progress(f"preparing the compiler for {target.title}")
    aot.compile_program(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), np.float32),), target)
    for name in names:
        reason = paths.refusal(op, name, mode, shape, dtype, target)
        if reason is None:
            progress(f"compiling {name} for {target.title}")
            path = paths.build(op, name, mode)
            try:
                found, executables = _compile(path, shapes, target)
                if name == "split" and mode == "forward" and target.kind != "cpu":
                    found = _with_lost_boundaries(found, op, shape, dtype)
                results[name] = found
                built[name] = path, executables
            except Exception as error:
                if name != "pallas":
                    raise
                reason = f"does not compile: {first_line(error)}"
        if reason is not None:
            results[name] = Refusal(name, reason)
    if target.kind != "device":
        results = _with_cpu_errors(op, mode, shape, dtype, results, progress)
    floor_us = None
    if target.kind != "deviceless" and built:
        compiled = {name: path for name, path in results.items() if isinstance(path, PathResult)}
        request = counting.Request(op.name, dict(options or {}), mode, shape, dtype, tuple(built))
        measured = on_machine.measure(
            op, mode, shapes, built, compiled, target, sheet.minimum_bytes, progress,
            counted=request if counters else None,
        )  # fmt: skip
        results |= measured.paths
        floor_us = measured.floor_us
    served = [path for path in results.values() if isinstance(path, PathResult)]
    return Comparison(
        op=op.name,
        formula=op.formula,
        mode=mode,
        shape=tuple(shape),
        dtype=np.dtype(dtype).name,
        target=target,
        versions={
            "fusejax": fusejax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        sheet=sheet,
        minimum_bytes=sheet.minimum_bytes,
        floor_us=floor_us,
        paths=results,
        verdict=verdict.judge(served, target),
        options=dict(options or {}),
    )


def _with_lost_boundaries(
    split: PathResult, op: Op, shape: Sequence[int], dtype: Any
) -> PathResult:
    """The path with a warning for every boundary of the op that compilation did not keep.

    What counts is the tensor in memory, not the scope of a kernel: XLA merges equal casts on both
    sides of a boundary, and the kernel of one stage then carries the other's scope as well.
    """
    values = op.chain.shapes(op.argument_shapes(shape, dtype))
    kept = {(b.dtype, math.prod(b.shape)) for b in split.boundaries}
    lost = [
        f"the boundary behind stage {stage.name} ({name}) did not survive compilation"
        for stage in op.chain.stages
        if stage.name in op.split_after
        for name in stage.outputs
        if (hlo_dtype(values[name].dtype), math.prod(values[name].shape)) not in kept
    ]
    return dataclasses.replace(split, warnings=(*split.warnings, *lost))


def _refuse_what_does_not_fit(shape: Sequence[int], size: int, target: Target) -> None:
    memory = target.figure("device_memory_size")
    if memory is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise UsageError(
            f"--shape {','.join(map(str, shape))}: inputs and outputs take {size / 2**30:,.0f} "
            f"GiB, and {target.title} has {memory / 2**30:,.0f}: give a smaller shape"
        )


def _compile(path: Path, shapes: Sequence[Any], target: Target) -> tuple[PathResult, list[Any]]:
    values = path.chain.shapes(shapes)
    compilations, analyses, used = [], [], {}
    several = len(path.chain.stages) > 1
    warm = 0.0
    for stage in path.chain.stages:
        arguments = tuple(values[name] for name in stage.inputs)
        compilation = aot.compile_program(stage.function, arguments, target)
        warm += aot.warm_compile_s(stage.function, arguments, target)
        found = analyse(compilation.program)
        known = resources.of_program(compilation.program, found, target)
        prefix = f"{stage.name}/" if several else ""
        used.update({f"{prefix}{kernel}": value for kernel, value in known.items()})
        compilations.append(compilation)
        analyses.append(_renamed(found, prefix, stage.name) if several else found)
    sizes = [compilation.executable_bytes for compilation in compilations]
    kernels = tuple(kernel for found in analyses for kernel in found.kernels)
    result = PathResult(
        name=path.name,
        kernels=kernels,
        boundaries=_by_cost(
            [b for found in analyses for b in found.boundaries]
            + (_dispatch_boundaries(path, analyses, values) if several else [])
        ),
        programs=len(path.chain.stages),
        predicted_us=None,
        compile_cold_s=sum(compilation.cold_s for compilation in compilations),
        compile_warm_s=warm,
        executable_bytes=None if None in sizes else sum(size for size in sizes if size),
        warnings=tuple(dict.fromkeys(w for found in analyses for w in found.warnings)),
        resources=used,
    )
    predicted = predict.time_us(result.traffic, result.launches, result.programs, target)
    return (
        dataclasses.replace(result, predicted_us=predicted),
        [compilation.executable for compilation in compilations],
    )


def _renamed(found: Analysis, prefix: str, stage: str) -> Analysis:
    """The same with names that are unique over several programs; the stage is the scope."""
    return dataclasses.replace(
        found,
        kernels=tuple(
            dataclasses.replace(k, name=prefix + k.name, scopes=k.scopes or (stage,))
            for k in found.kernels
        ),
        boundaries=tuple(
            dataclasses.replace(
                b, producer=prefix + b.producer, consumers=tuple(prefix + c for c in b.consumers)
            )
            for b in found.boundaries
        ),
    )


def _dispatch_boundaries(
    path: Path, analyses: Sequence[Analysis], values: Mapping[str, Any]
) -> list[Boundary]:
    """What one program hands to another: always a tensor in memory."""
    label = {
        stage.name: found.kernels[0].name if len(found.kernels) == 1 else stage.name
        for stage, found in zip(path.chain.stages, analyses, strict=True)
    }
    boundaries = []
    for stage in path.chain.stages:
        for name in stage.outputs:
            readers = path.chain.readers(name)
            if not readers:
                continue
            size = nbytes(values[name])
            boundaries.append(
                Boundary(
                    producer=label[stage.name],
                    consumers=tuple(label[reader] for reader in readers),
                    dtype=hlo_dtype(values[name].dtype),
                    shape=tuple(values[name].shape),
                    written_bytes=0 if name in path.chain.results else size,
                    read_bytes=size * len(readers),
                    scopes=(stage.name, *readers),
                    source=None,
                    reason=Reason(
                        "dispatch",
                        "The stages are separate programs, dispatched one after another.",
                    ),
                )
            )
    return boundaries


def _by_cost(boundaries: Sequence[Boundary]) -> tuple[Boundary, ...]:
    return tuple(sorted(boundaries, key=lambda b: -(b.written_bytes + b.read_bytes)))


def _with_cpu_errors(
    op: Op,
    mode: str,
    shape: Sequence[int],
    dtype: Any,
    results: Mapping[str, PathResult | Refusal],
    progress: Callable[[str], None],
) -> dict[str, PathResult | Refusal]:
    """The results with errors from a run of each path on this CPU, on a few rows."""
    rows = min(shape[0], _CHECKED_ROWS, max(1, _CHECKED_ELEMENTS // shape[1]))
    if rows * shape[1] > _CHECKED_ELEMENTS:
        return dict(results)
    values = accuracy.random_values(
        paths.argument_shapes(op, mode, (rows, shape[1]), dtype), seed=0
    )
    expected = accuracy.reference(op, mode, values)
    checked = {}
    for name, result in results.items():
        if name == "pallas" and op.kernel_refusal(*values[: len(op.chain.arguments)]):
            checked[name] = result
            continue
        where = "simulation" if name == "pallas" else "cpu"
        progress(f"checking {name} in float64 ({where}, {rows} rows)")
        with jax.default_device(jax.devices("cpu")[0]):
            interpret = _simulation() if name == "pallas" else None
            path = paths.build(op, name, mode, interpret=interpret)
            got = path.run([jax.jit(stage.function) for stage in path.chain.stages], values)
        error = accuracy.compare(got, expected, rows=rows, where=where)
        checked[name] = dataclasses.replace(result, error=error)
    return checked


def _simulation() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()
