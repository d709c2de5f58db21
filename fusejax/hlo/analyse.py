"""From a program's text to its kernels, boundaries and what they cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError
from fusejax.hlo import advice, arithmetic, boundaries, flow, kernels, reasons, scopes, spaces
from fusejax.hlo import text as hlo_text
from fusejax.hlo.advice import GEMM_NOT_AUTOTUNED
from fusejax.hlo.analysis import Analysis, Boundary, Kernel, Scope, Traffic, Work
from fusejax.hlo.memory import no_collection
from fusejax.hlo.module import ASYNC_STARTS, Instruction, Module, Shape
from fusejax.program import Program

__all__ = [
    "GEMM_NOT_AUTOTUNED",
    "analyse",
    "analyse_module",
    "boundary_json",
    "kernel_json",
    "to_json",
    "traffic_json",
]

_RESOURCES = (
    "registers",
    "spill_bytes",
    "shared_bytes",
    "threads",
    "grid",
    "occupancy",
    "occupancy_limiter",
    "time_us",
    "predicted_us",
)


def analyse(program: Program, *, expected_scopes: Sequence[str] = ()) -> Analysis:
    """Analyses one program.

    Args:
      expected_scopes: named scopes of the traced function. Those whose instructions did not
        survive optimisation are listed with no kernels.

    Raises:
      UsageError: the HLO text cannot be read; the message names the line.
    """
    return analyse_module(hlo_text.read_module(program.hlo), program, expected_scopes)


def analyse_module(
    module: Module, program: Program, expected_scopes: Sequence[str] = ()
) -> Analysis:
    """Analyses the module that was read from a program's text (or is one of those in it).

    Raises:
      UsageError: the module cannot be followed.
    """
    try:
        with no_collection():
            return _analyse(module, program, expected_scopes)
    except RecursionError:
        raise UsageError(
            f"module {module.name!r}: expected calls that are less deeply nested"
        ) from None


def _analyse(module: Module, program: Program, expected_scopes: Sequence[str]) -> Analysis:
    back_end = program.backend or kernels.backend(module)
    followed = flow.follow(module, back_end)
    launches = followed.launches
    emitters = {id(launch): kernels.emitter(launch.instruction, module) for launch in launches}
    names = _names(launches)
    inner = {id(launch): tuple(_instructions(launch, module)) for launch in launches}
    found_scopes = {key: _scopes(instructions) for key, instructions in inner.items()}
    sources = {key: _source(instructions, module) for key, instructions in inner.items()}
    evidence = reasons.gather(program, module, emitters)
    used = _used(followed)
    merged: dict[str, Kernel] = {}
    for launch in launches:
        key = id(launch)
        earlier = merged.get(names[key])
        directions = set(map(scopes.direction, _operations(inner[key])))
        merged[names[key]] = Kernel(
            name=names[key],
            emitter=emitters[key],
            scopes=found_scopes[key],
            source=sources[key],
            count=launch.count + (earlier.count if earlier else 0),
            traffic=_traffic(launch, used),
            direction=directions.pop() if len(directions) == 1 else "both" if directions else None,
            work=arithmetic.work(
                module, module.computations[launch.computation], launch.instruction
            ),
        )
    found = boundaries.find(followed, names, found_scopes, sources, evidence)
    expected = (*expected_scopes, *_scopes_before(evidence.unoptimised))
    return Analysis(
        name=module.name,
        backend=back_end,
        kernels=tuple(merged.values()),
        boundaries=found,
        minimum_bytes=_minimum_bytes(followed),
        scopes=_survivors(tuple(merged.values()), expected),
        warnings=(
            *followed.warnings,
            *_damage(program, evidence),
            *advice.warnings(followed, merged, found, evidence, back_end, names),
        ),
    )


def kernel_json(kernel: Kernel, resources: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A kernel as JSON; `resources` fills the fields that are null where nothing is known."""
    known: dict[str, Any] = {
        "name": kernel.name,
        "emitter": kernel.emitter,
        "scopes": list(kernel.scopes),
        "count": kernel.count,
        "bytes": traffic_json(kernel.traffic),
        "source": kernel.source,
        "direction": kernel.direction,
        "work": _work_json(kernel.work),
        "flops": _flops(kernel),
    }
    return known | {field: (resources or {}).get(field) for field in _RESOURCES}


def _work_json(work: Work | None) -> dict[str, Any] | None:
    if work is None:
        return None
    return {"operations": dict(work.operations), "matmul_flops": work.matmul_flops}


def _flops(kernel: Kernel) -> int | None:
    work = kernel.work
    if work is None:
        return None
    return arithmetic.flops(kernel.emitter, work.operations, work.matmul_flops)


def boundary_json(boundary: Boundary) -> dict[str, Any]:
    """A boundary as JSON."""
    return {
        "producer": boundary.producer,
        "consumers": list(boundary.consumers),
        "dtype": boundary.dtype,
        "shape": list(boundary.shape),
        "written_bytes": boundary.written_bytes,
        "read_bytes": boundary.read_bytes,
        "scopes": list(boundary.scopes),
        "source": boundary.source,
        "memory": boundary.memory,
        "reason": {
            "kind": boundary.reason.kind,
            "text": boundary.reason.text,
            "us_fused": boundary.reason.us_fused,
            "us_unfused": boundary.reason.us_unfused,
        },
    }


def traffic_json(traffic: Traffic) -> dict[str, Any]:
    """Bytes as JSON; "is_bound" stands there where they are only an upper bound."""
    counted: dict[str, Any] = {
        "read": traffic.read,
        "written": traffic.written,
        "total": traffic.total,
    }
    return counted | ({"is_bound": True} if traffic.is_bound else {})


def to_json(
    analysis: Analysis, *, file: str | None = None, resources: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One module of the "fusejax.inspect/1" schema.

    Args:
      resources: per kernel name, the fields that `kernel_json` fills in.
    """
    ratio = analysis.traffic.total / analysis.minimum_bytes if analysis.minimum_bytes else None
    return {
        "name": analysis.name,
        "file": file,
        "backend": analysis.backend,
        "launches": analysis.launches,
        "bytes": traffic_json(analysis.traffic),
        "minimum_bytes": analysis.minimum_bytes,
        "ratio": ratio,
        "kernels": [kernel_json(k, (resources or {}).get(k.name)) for k in analysis.kernels],
        "boundaries": [boundary_json(boundary) for boundary in analysis.boundaries],
        "scopes": [
            {
                "name": scope.name,
                "kernels": list(scope.kernels),
                "status": "kernels" if scope.kernels else "folded",
            }
            for scope in analysis.scopes
        ],
        "warnings": list(analysis.warnings),
    }


def _names(launches: Sequence[flow.Launch]) -> dict[int, str]:
    """Names of kernels: the instruction's, with its computation before it where it is not alone."""
    holders: dict[str, set[str]] = {}
    for launch in launches:
        holders.setdefault(launch.instruction.name, set()).add(launch.computation)
    return {
        id(launch): launch.instruction.name
        if len(holders[launch.instruction.name]) == 1
        else f"{launch.computation}/{launch.instruction.name}"
        for launch in launches
    }


def _instructions(launch: flow.Launch, module: Module) -> Iterator[Instruction]:
    """What runs inside a launch, nested fusions included; the launched instruction comes last."""
    if launch.instruction.opcode in ("fusion", *ASYNC_STARTS):
        pending, seen = list(launch.instruction.called), set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for instruction in module.computations[name].instructions:
                yield instruction
                if instruction.opcode == "fusion":
                    pending += instruction.called
    yield launch.instruction


def _scopes(instructions: Sequence[Instruction]) -> tuple[str, ...]:
    names = map(scopes.scope, _operations(instructions))
    return tuple(dict.fromkeys(name for name in names if name))


def _operations(instructions: Sequence[Instruction]) -> list[str]:
    names = dict.fromkeys(instruction.op_name for instruction in instructions)
    return list(dict.fromkeys(one for name in names for one in scopes.operations(name)))


def _source(instructions: Sequence[Instruction], module: Module) -> str | None:
    """The line of the launch itself, else of the last instruction inside that tells one."""
    return next((s for i in reversed(instructions) if (s := module.source(i))), None)


def _used(followed: flow.Flow) -> set[flow.Buffer]:
    used: set[flow.Buffer] = set(followed.outputs)
    for launch in followed.launches:
        used.update(launch.reads)
    return used | {origin for buffer in used for origin in flow.origins(buffer)}


def _minimum_bytes(followed: flow.Flow) -> int:
    """Inputs and outputs once; those on the host are not the device's, in whichever direction."""
    ends = (*followed.inputs, *followed.outputs)
    return sum(b.shape.bytes for b in ends if followed.memory(b) != spaces.HOST)


def _damage(program: Program, evidence: reasons.Evidence) -> Iterator[str]:
    found = evidence.decisions.damage if evidence.decisions else None
    if found is not None:
        yield (
            f"{program.decisions_file or 'the dump of fusion decisions'} is damaged ({found}): "
            "reasons of boundaries may be missing or not the last ones"
        )


def _traffic(launch: flow.Launch, used: set[flow.Buffer]) -> Traffic:
    def is_scratch(path: tuple[int, ...], shape: Shape) -> bool:
        # Bytes that a library call asks for, which nobody reads afterwards.
        is_call = launch.instruction.opcode == "custom-call" and path
        return bool(is_call) and shape.dtype in ("u8", "s8") and launch.results[path] not in used

    written = sum(
        size
        for path, size in launch.access.writes.items()
        if path not in launch.results or not is_scratch(path, launch.results[path].shape)
    )
    return Traffic(sum(launch.reads.values()), written, launch.access.is_bound)


def _scopes_before(unoptimised: Module | None) -> Iterator[str]:
    """Yields the scopes of the module before optimisation."""
    if unoptimised is not None:
        for computation in unoptimised.computations.values():
            yield from _scopes(computation.instructions)


def _survivors(found: Sequence[Kernel], expected: Sequence[str]) -> tuple[Scope, ...]:
    held: dict[str, dict[str, None]] = {}
    for kernel in found:
        for scope in kernel.scopes:
            for name in scopes.within(scope):
                held.setdefault(name, {})[kernel.name] = None
    names = dict.fromkeys((*expected, *(scope for kernel in found for scope in kernel.scopes)))
    return tuple(Scope(name, tuple(held.get(name.strip("/"), ()))) for name in names if name)
