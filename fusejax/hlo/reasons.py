"""Why a kernel ends where it does: XLA's own words where it left them, else what is certain."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from fusejax.errors import UsageError
from fusejax.hlo import decisions, infer
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analysis import Reason
from fusejax.hlo.decisions import Decisions, Index
from fusejax.hlo.flow import Buffer, Launch, leaves
from fusejax.hlo.module import ASYNC_STARTS, Computation, Instruction, Module
from fusejax.program import Program

TRITON_ROW_LIMIT = 16384
"""Longest row that XLA's one-kernel (Triton) row reduction takes."""

_CLOSED = {
    "cublas": "a cuBLAS call",
    "cudnn": "a cuDNN call",
    "mosaic_gpu": "a Pallas (Mosaic GPU) kernel",
    "mosaic_tpu": "a Pallas (Mosaic TPU) kernel",
    "custom_call": "a custom call",
    "collective": "a collective",
    "sort": "a sort",
    "fft": "an FFT",
    "copy": "a copy",
}
_VIEWS = frozenset(("bitcast", "reshape", "tuple", "get-tuple-element", "copy"))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is at hand to explain boundaries with."""

    module: Module
    emitters: Mapping[int, str]
    """Emitter of every launch, under its id()."""
    decisions: Decisions | None
    before: Module | None
    """The module before the fusion pass, or before optimisation."""
    unoptimised: Module | None
    """The module before optimisation."""
    index: Index
    barriers: Mapping[str, frozenset[str]]
    """Of values of `before`: the optimisation barriers that they go into, through views only."""
    deviceless: bool | None


def gather(program: Program, module: Module, emitters: Mapping[int, str]) -> Evidence:
    """Reads what the program carries besides its final text; unreadable parts count as absent."""
    read = None if program.decisions is None else decisions.read(program.decisions)
    unoptimised = None
    if program.unoptimised:
        try:
            unoptimised = hlo_text.read_module(program.unoptimised)
        except UsageError:
            unoptimised = None
    before = read.before if read and read.before else unoptimised
    return Evidence(
        module=module,
        emitters=emitters,
        decisions=read,
        before=before,
        unoptimised=unoptimised,
        index=decisions.index_names(before) if before else {},
        barriers=_values_at_barriers(before) if before else {},
        deviceless=program.deviceless,
    )


def _values_at_barriers(before: Module) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for computation in before.computations.values():
        for barrier in computation.instructions:
            if barrier.opcode != "opt-barrier":
                continue
            pending, seen = [o.name for o in barrier.operands], set()
            while pending:
                value = computation.by_name[pending.pop()]
                if value.name in seen:
                    continue
                seen.add(value.name)
                found[value.name] = found.get(value.name, frozenset()) | {barrier.name}
                if value.opcode in _VIEWS:
                    pending += [operand.name for operand in value.operands]
    return found


def barriers(evidence: Evidence, buffer: Buffer) -> frozenset[str]:
    """Names of the optimisation barriers that keep an array's writer from what reads the array."""
    if buffer.writer is None or not evidence.barriers:
        return frozenset()
    value = written_value(evidence.module, buffer.writer, buffer.path)
    origin = _before(evidence, buffer.writer, value)
    return evidence.barriers.get(origin.name, frozenset()) if origin else frozenset()


def reason(evidence: Evidence, buffer: Buffer, consumers: Sequence[Launch]) -> Reason:
    """Why the array that one launch writes is read by other launches, and not inside the first."""
    producer = buffer.writer
    assert producer is not None
    emitter = evidence.emitters[id(producer)]
    others = [evidence.emitters[id(consumer)] for consumer in consumers]
    value = written_value(evidence.module, producer, buffer.path)
    origin = _before(evidence, producer, value)
    if origin is not None and origin.name in evidence.barriers:
        return Reason(
            "barrier", "an optimization barrier stands between the producer and what reads it"
        )
    stages = [producer, *(c for c in consumers if evidence.emitters[id(c)] == "reduction")]
    row = max(_row_length(evidence.module, stage) for stage in stages)
    if row > TRITON_ROW_LIMIT and emitter == "reduction":
        return Reason(
            "emitter_limit",
            f"rows of {row} elements are longer than the {TRITON_ROW_LIMIT} that XLA's one-kernel "
            "row reduction takes, so the reduction is split",
        )
    if consumers == [producer]:
        return Reason("rule", "a loop carries this tensor from one iteration to the next")
    told = evidence.decisions.reason(origin.name) if evidence.decisions and origin else None
    if told is None and evidence.decisions:
        told = evidence.decisions.last.get(producer.instruction.name)
    if told is None or told.kind == "unknown":
        told = _certain(emitter, others) or told
    if told is None:
        missing = (
            "its fusion decision was not found in the dump"
            if evidence.decisions
            else ("no dump of XLA's fusion decisions is at hand")
        )
        return Reason("unknown", missing)
    is_on_card = evidence.deviceless is False
    if told.kind == "rule" and "triton_gemm" in (emitter, *others) and not is_on_card:
        told = dataclasses.replace(told, text=f"{told.text}; GEMM back end not autotuned")
    return told


def _certain(emitter: str, others: Iterable[str]) -> Reason | None:
    if emitter in _CLOSED:
        return Reason("rule", f"the producer is {_CLOSED[emitter]}, which XLA does not fuse into")
    readers = set(others)
    if readers and readers <= set(_CLOSED):
        names = " and ".join(sorted(_CLOSED[name] for name in readers))
        return Reason("rule", f"the consumer is {names}, which XLA does not fuse into")
    return None


def written_value(module: Module, launch: Launch, path: Sequence[int]) -> Instruction:
    """The instruction inside a launch whose value is the result at `path`, behind bitcasts."""
    instruction = launch.instruction
    if instruction.opcode not in ("fusion", *ASYNC_STARTS) or not instruction.called:
        return instruction
    body = module.computations[instruction.called[0]]
    value = body.root
    if value.opcode == "tuple" and path and path[-1] < len(value.operands):
        value = body.by_name[value.operands[path[-1]].name]
    while value.opcode in ("bitcast", "get-tuple-element") and value.operands:
        value = body.by_name[value.operands[0].name]
    return value


def _before(evidence: Evidence, launch: Launch, value: Instruction) -> Instruction | None:
    if evidence.before is None:
        return None
    whole = evidence.before.entry.by_name.get(launch.instruction.name)
    if whole is not None and whole.opcode == launch.instruction.opcode == "fusion":
        return whole  # made before the pass (a GEMM, a Triton softmax) and left as it was
    return decisions.match(value, evidence.index)


def _row_length(module: Module, launch: Launch, depth: int = 8) -> int:
    """Elements along the row that a row reduction ends up reducing, its partial stages included.

    1 for what is no reduction along the innermost dimension.
    """
    called = launch.instruction.called
    if launch.instruction.opcode != "fusion" or not called or depth == 0:
        return 1
    body = module.computations[called[0]]
    reduce = next((i for i in body.instructions if i.opcode == "reduce" and i.operands), None)
    if reduce is None:
        return 1
    operand = reduce.operands[0]
    taken = infer.element(body.by_name[operand.name].shape, operand.element)
    result = next((shape for _, shape in reduce.shape.leaves()), None)
    if taken is None or result is None or not taken.dims or not result.count:
        return 1
    reduced = reduce.attributes.get("dimensions", "{}").strip("{} ").split(",")
    if str(len(taken.dims) - 1) not in [number.strip() for number in reduced]:
        return 1
    length = taken.count // result.count
    source = _parameter(body, operand.name)
    for buffer, number in _operand_buffers(launch):
        writer = buffer.writer
        if number == source and writer is not None and writer is not launch:
            length *= _row_length(module, writer, depth - 1)
    return length


def _parameter(body: Computation, name: str) -> int | None:
    value = body.by_name[name]
    while value.opcode in ("bitcast", "reshape") and value.operands:
        value = body.by_name[value.operands[0].name]
    return int(value.literal) if value.opcode == "parameter" else None


def _operand_buffers(launch: Launch) -> Iterable[tuple[Buffer, int]]:
    for number, operand in enumerate(launch.operands):
        for buffer in leaves(operand):
            yield buffer, number
