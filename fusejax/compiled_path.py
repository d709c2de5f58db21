"""A path of an op, compiled: its kernels, boundaries, resources and predicted cost."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax import predict, rates, resources
from fusejax.comparison import PathResult
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.hlo.analyse import analyse
from fusejax.hlo.analysis import Analysis, Boundary, Kernel, Reason
from fusejax.ops.op import Op, hlo_dtype, nbytes
from fusejax.paths import Path

# Without a card there is nothing to tune on, and XLA compiles candidates all the same: a third of
# the whole compile, for the same kernels.
_UNTUNED = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """How the programs of a comparison are compiled."""

    target: Target
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """XLA's, by name, for every program."""
    is_brief: bool = False
    """Leaves out what launches, bytes and boundaries do not need: registers, a second compile."""
    known: aot.Known | None = None
    """Programs that are not compiled again; by default those of the same path alone."""


def compile_path(
    path: Path, shapes: Sequence[Any], compiler: Compiler, op: Op | None = None
) -> tuple[PathResult, list[Any]]:
    """Compiles a path's programs and says what can be said without running them.

    Args:
      shapes: of the arguments of the path's chain.
      op: whose path it is, if one of ours.

    Returns:
      The result so far, and the executables.
    """
    values = path.chain.shapes(shapes)
    compilations: list[aot.Compilation] = []
    analyses, used = [], {}
    several = len(path.chain.stages) > 1
    target = compiler.target
    known = {} if compiler.known is None else compiler.known
    options = dict(compiler.options)
    if compiler.is_brief and target.kind == "deviceless":
        options = _UNTUNED | options
    warm = None if compiler.is_brief else 0.0
    for stage in path.chain.stages:
        arguments = tuple(values[name] for name in stage.inputs)
        compilation = aot.compile_program(
            stage.function,
            arguments,
            target,
            options,
            known,
            scope=_scope(stage.name),
            with_ptx=not compiler.is_brief,
        )
        is_new = all(compilation.executable is not other.executable for other in compilations)
        if warm is not None and is_new:
            warm += aot.warm_compile_s(stage.function, arguments, target, options)
        found = analyse(compilation.program)
        brief = compiler.is_brief
        needs = {} if brief else resources.of_program(compilation.program, found, target)
        prefix = f"{stage.name}/" if several else ""
        used.update({f"{prefix}{kernel}": value for kernel, value in needs.items()})
        compilations.append(compilation)
        analyses.append(_renamed(found, prefix, stage.name) if several else found)
    sizes = [compilation.executable_bytes for compilation in compilations]
    kernels = tuple(kernel for found in analyses for kernel in found.kernels)
    if op is not None and path.name == "pallas":
        kernels = tuple(_with_product(kernel, op, shapes) for kernel in kernels)
    rate = rates.of(target)
    result = PathResult(
        name=path.name,
        kernels=kernels,
        boundaries=_by_cost(
            [b for found in analyses for b in found.boundaries]
            + (_dispatch_boundaries(path, analyses, values) if several else [])
        ),
        programs=len(path.chain.stages),
        cost=None if rate is None else predict.path_cost(kernels, len(path.chain.stages), rate),
        compile_cold_s=sum(compilation.cold_s for compilation in compilations),
        compile_warm_s=warm,
        executable_bytes=None if None in sizes else sum(size for size in sizes if size),
        warnings=_warnings(path, analyses),
        resources=used,
    )
    return result, [compilation.executable for compilation in compilations]


def _scope(stage: str) -> str:
    """The scope that a stage was cut at, see `fusejax.scope_stages`: "mlp" of "mlp.2 backward"."""
    return re.sub(r"\.\d+$", "", stage.partition(" ")[0])


def _warnings(path: Path, analyses: Sequence[Analysis]) -> tuple[str, ...]:
    told = dict.fromkeys(warning for found in analyses for warning in found.warnings)
    if path.name == "recompute":  # its barriers are there for the order of its runs
        return tuple(warning for warning in told if "split nothing" not in warning)
    return tuple(told)


def _with_product(kernel: Kernel, op: Op, shapes: Sequence[Any]) -> Kernel:
    """The kernel with the op's matrix product in it, which its text does not show."""
    sizes: dict[str, int] = {}
    for name, value in zip(op.chain.arguments, shapes, strict=False):
        sizes |= zip(op.dimensions[name], value.shape, strict=True)
    if kernel.emitter != "mosaic_gpu" or kernel.work is None or "depth" not in sizes:
        return kernel
    work = dataclasses.replace(
        kernel.work,
        matmul_flops=2 * math.prod(sizes.values()),
        matmul_dtype=hlo_dtype(shapes[0].dtype),
    )
    return dataclasses.replace(kernel, work=work)


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


def with_lost_boundaries(split: PathResult, op: Op, shape: Sequence[int], dtype: Any) -> PathResult:
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
