"""Warnings about a compiled module that its author can act on."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fusejax.hlo import reasons, spaces, values
from fusejax.hlo.analysis import Boundary, Kernel, Traffic
from fusejax.hlo.decisions import stem
from fusejax.hlo.flow import Buffer, Flow, Launch, beginnings, origins
from fusejax.hlo.module import Computation, Instruction, Module, Shape

GEMM_NOT_AUTOTUNED = (
    "GEMM back end not autotuned: compiled without a device every matrix product becomes a Triton "
    "GEMM; a real card may choose cuBLAS"
)
GEMM_PERHAPS_NOT_AUTOTUNED = (
    "GEMM back end not autotuned, if this was compiled without a device: then every matrix product "
    "becomes a Triton GEMM; a real card may choose cuBLAS"
)
_MOST_OF_A_KIND = 5
_SMALLEST_BYTES = 4096
_VIEWS = frozenset(("bitcast", "reshape", "transpose", "broadcast", "copy", "slice"))
_FLOATS = re.compile(r"(?:b?f\d|f8)")
_MUST_FUSE = re.compile(r'\bMUST_FUSE="?([^",}]*)')

_WORTH_NARROWING = 1 << 20  # bytes


def warnings(
    flow: Flow,
    kernels: Mapping[str, Kernel],
    boundaries: Sequence[Boundary],
    evidence: reasons.Evidence,
    back_end: str,
    names: Mapping[int, str],
) -> Iterator[str]:
    """Yields what could be done better, in words; at most a few of each kind, largest first.

    Args:
      kernels: under their names.
      names: name of every launch's kernel, under the launch's id().
    """
    emitters = {kernel.emitter for kernel in kernels.values()}
    if back_end == "gpu" and "triton_gemm" in emitters:
        if evidence.deviceless:
            yield GEMM_NOT_AUTOTUNED
        elif evidence.deviceless is None and "cublas" not in emitters:
            yield GEMM_PERHAPS_NOT_AUTOTUNED
    yield from _idle_barriers(flow, evidence)
    yield from _must_fuse(flow, evidence, back_end, names)
    on_host = sum(launch.host_bytes * launch.count for launch in flow.launches)
    if on_host:
        yield (
            f"{on_host:,} bytes per run go to host memory or come from it, over the bus: no figure "
            "here includes them"
        )
    if back_end == "unoptimised":
        return  # nothing was fused or reused yet: what stands there is not what will run
    yield from _few(_wide(flow, boundaries, names), "boundaries wider than both their ends")
    total = sum((k.traffic * k.count for k in kernels.values()), Traffic(0, 0)).total
    smallest = max(_SMALLEST_BYTES, total // 100)
    yield from _few(_written_twice(flow, evidence, smallest, names), "values written twice")
    yield from _few(_copies(flow, evidence.module, names), "copies that donation would remove")
    yield from _few(_elided(evidence), "casts to a narrower type that were dropped")


def _few(lines: Iterable[str], what: str) -> Iterator[str]:
    found = list(dict.fromkeys(lines))
    yield from found[:_MOST_OF_A_KIND]
    if len(found) > _MOST_OF_A_KIND:
        yield f"{len(found) - _MOST_OF_A_KIND} more {what}"


def _idle_barriers(flow: Flow, evidence: reasons.Evidence) -> Iterator[str]:
    """Barriers of the program across which no kernel hands a tensor to another."""
    if evidence.before is None or not any(
        i.opcode == "opt-barrier" for i in _all_instructions(evidence.before)
    ):
        return
    crossed: set[Buffer] = set()
    for launch in flow.launches:
        for buffer in launch.reads:
            crossed.update(o for o in origins(buffer) if o.writer not in (None, launch))
    used = {name for buffer in crossed for name in reasons.barriers(evidence, buffer)}
    told = {i.name: i for i in _all_instructions(evidence.unoptimised)}
    idle, count = [], 0
    last = _in_front_of_results(evidence.before)
    for barrier in _all_instructions(evidence.before):
        if barrier.opcode != "opt-barrier" or barrier.name in last:
            continue
        written = told.get(barrier.name) or told.get(stem(barrier.name)) or barrier
        if "checkpoint" in written.op_name or "remat" in written.op_name:
            continue  # JAX's own, against recomputation being merged away
        count += 1
        if barrier.name not in used:
            source = evidence.unoptimised.source(written) if evidence.unoptimised else None
            idle.append(source or barrier.name)
    if idle:
        places = ", ".join(dict.fromkeys(idle[:_MOST_OF_A_KIND]))
        which = "the optimization barrier" if count == 1 else f"{len(idle)} of {count} barriers"
        yield f"{which} split nothing: no tensor goes from one kernel to another at {places}"


def _in_front_of_results(module: Module) -> set[str]:
    """Instructions that hand results on: a boundary there is for what the caller does with them."""
    by_name = {i.name: i for i in module.entry.instructions}
    found: set[str] = set()
    waiting = [module.entry.root.name]
    while waiting:
        name = waiting.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        if by_name[name].opcode in ("tuple", "get-tuple-element", "bitcast", "opt-barrier"):
            waiting += [operand.name for operand in by_name[name].operands]
    return found


def _all_instructions(module: Module | None) -> Iterator[Instruction]:
    for computation in module.computations.values() if module else ():
        yield from computation.instructions


def _must_fuse(
    flow: Flow, evidence: reasons.Evidence, back_end: str, names: Mapping[int, str]
) -> Iterator[str]:
    if back_end == "tpu":
        return
    asked = dict.fromkeys(
        found[1]
        for module in (evidence.unoptimised, evidence.module)
        for i in _all_instructions(module)
        if (found := _MUST_FUSE.search(i.attributes.get("frontend_attributes", "")))
    )
    if not asked:
        return
    holders: dict[str, dict[str, None]] = {}
    for launch in flow.launches:
        for name in launch.instruction.called:
            for i in (launch.instruction, *evidence.module.computations[name].instructions):
                found = _MUST_FUSE.search(i.attributes.get("frontend_attributes", ""))
                if found:
                    holders.setdefault(found[1], {})[names[id(launch)]] = None
    for group in asked:
        kernels = holders.get(group, {})
        where = f"; its operations are in {', '.join(kernels)}" if len(kernels) > 1 else ""
        yield f"MUST_FUSE={group!r} has no effect on this target ({back_end}){where}"


def _wide(flow: Flow, boundaries: Sequence[Boundary], names: Mapping[int, str]) -> Iterator[str]:
    by_name = {names[id(launch)]: launch for launch in flow.launches}
    for boundary in boundaries:
        width = _width_around(boundary, by_name)
        bits = Shape(boundary.dtype).bits
        # A row's statistics are small, and wide for a reason.
        small = Shape(boundary.dtype, boundary.shape).bytes < _WORTH_NARROWING
        is_counted = boundary.memory == spaces.DEVICE
        if width and bits > width and is_counted and not small:
            yield (
                f"boundary {boundary.producer} -> {', '.join(boundary.consumers)}: {boundary.dtype}"
                f" is wider ({bits} bits) than what comes in and goes out ({width} bits): cast "
                "before it"
            )


def _width_around(boundary: Boundary, by_name: Mapping[str, Launch]) -> int:
    """Widest element, in bits, among large arrays read by the producer and written by consumers.

    0 where one side has no array as large as the boundary: then its width cannot be compared.
    """
    size = Shape(boundary.dtype, boundary.shape).count
    before = [b.shape for b in by_name[boundary.producer].reads]
    after = [b.shape for name in boundary.consumers for b in by_name[name].results.values()]
    large = [[s.bits for s in side if s.count >= size > 1] for side in (before, after)]
    return max(large[0] + large[1]) if all(large) else 0


def _written_twice(
    flow: Flow, evidence: reasons.Evidence, smallest: int, names: Mapping[int, str]
) -> Iterator[str]:
    groups: dict[tuple[int, str], list[values.Written]] = {}
    for array in values.written(flow, evidence.module):
        if flow.memory(array.buffer) != spaces.DEVICE:
            continue
        if array.buffer.shape.bytes >= smallest and not array.buffer.base:
            key = (array.unconverted, array.buffer.shape.layout.split(":")[0])
            groups.setdefault(key, []).append(array)
    repeated = [group for group in groups.values() if len(group) > 1]
    repeated.sort(key=lambda group: -sum(array.buffer.shape.bytes for array in group))
    for group in repeated:
        places = ", ".join(
            dict.fromkeys(f"{names[id(a.launch)]} ({_array(a.buffer.shape)})" for a in group)
        )
        if len({array.number for array in group}) == 1:
            yield f"the same value is written {_times(len(group))}: {places}"
        elif len({array.launch for array in group}) > 1:
            yield f"the same value is written {_times(len(group))}, as different types: {places}"


def _array(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _copies(flow: Flow, module: Module, names: Mapping[int, str]) -> Iterator[str]:
    """Copies of an argument that are made because the argument must survive an update in place."""
    arguments = _arguments(flow, module)
    donated = set(re.findall(r"\(\s*(\d+)\s*,", module.attributes.get("input_output_alias", "")))
    copies: dict[Buffer, tuple[Launch, str]] = {}
    for launch in flow.launches:
        argument = next(iter(launch.reads), None)
        if argument in arguments and _is_copy(launch, module):
            number, name = arguments[argument]
            # A copy between memories is a move that is wanted.
            memories = {flow.memory(b) for b in (*launch.reads, *launch.results.values())}
            if str(number) not in donated and len(memories) == 1:
                copies.update(dict.fromkeys(launch.results.values(), (launch, name)))
    for launch in flow.launches if copies else ():
        for result in launch.results.values():
            for start in beginnings(result) if result.base else ():
                if start in copies and start.shape.bytes >= _SMALLEST_BYTES:
                    copy, name = copies[start]
                    yield (
                        f"{names[id(copy)]} copies argument {name} ({start.shape.bytes:,} bytes) "
                        f"before {names[id(launch)]} updates it in place: donating it "
                        "(jax.jit's donate_argnums) would remove the copy"
                    )


def _arguments(flow: Flow, module: Module) -> dict[Buffer | None, tuple[int, str]]:
    found: dict[Buffer | None, tuple[int, str]] = {}
    pending = iter(flow.inputs)
    for number, parameter in module.entry.parameters.items():
        for _ in parameter.shape.leaves():
            buffer = next(pending, None)
            found[buffer] = (number, parameter.op_name or parameter.name)
    found.pop(None, None)
    return found


def _is_copy(launch: Launch, module: Module) -> bool:
    instruction = launch.instruction
    if instruction.opcode in ("copy", "copy-start"):
        return True
    body: Computation | None = None
    if instruction.opcode == "fusion" and instruction.called:
        body = module.computations[instruction.called[0]]
    return body is not None and all(
        i.opcode in ("parameter", "copy", "bitcast") for i in body.instructions
    )


def _elided(evidence: reasons.Evidence) -> Iterator[str]:
    """Casts to a narrower float and back that the compiled program does not do."""
    if evidence.unoptimised is None:
        return
    kept = {
        (i.shape.dtype, i.shape.count)
        for i in _all_instructions(evidence.module)
        if i.opcode in ("convert", "reduce-precision")
    }
    for computation in evidence.unoptimised.computations.values():
        for narrow in computation.instructions:
            if narrow.opcode != "convert" or (narrow.shape.dtype, narrow.shape.count) in kept:
                continue
            wide = computation.by_name[narrow.operands[0].name] if narrow.operands else narrow
            is_narrowing = _is_float(wide) and _is_float(narrow)
            if (
                is_narrowing
                and narrow.shape.bits < wide.shape.bits
                and _widened(computation, narrow)
            ):
                source = evidence.unoptimised.source(narrow)
                where = f" ({source})" if source else ""
                yield (
                    f"the cast of {_array(wide.shape)} to {narrow.shape.dtype}"
                    f" and back{where} is not done: XLA keeps the wider value; "
                    "jax.lax.reduce_precision rounds where that is meant"
                )


def _is_float(instruction: Instruction) -> bool:
    return bool(_FLOATS.match(instruction.shape.dtype))


def _widened(computation: Computation, narrow: Instruction) -> bool:
    pending, seen = [narrow.name], set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for user in computation.users.get(name, ()):
            if user.opcode == "convert" and _is_float(user):
                if user.shape.bits > narrow.shape.bits:
                    return True
            elif user.opcode in _VIEWS:
                pending.append(user.name)
    return False
