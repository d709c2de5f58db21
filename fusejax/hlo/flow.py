"""Follows values through a module: what is launched, what each launch reads, and who wrote it."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from fusejax.errors import UsageError
from fusejax.hlo import infer, spaces, traffic
from fusejax.hlo.module import Computation, Instruction, Module, Shape

_NO_LAUNCH = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "domain", "partition-id", "replica-id", "add-dependency", "async-update",
))  # fmt: skip
_NO_LAUNCH_TARGETS = frozenset((
    "AllocateBuffer", "CreateBuffer", "Pin", "Unpin", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "LayoutConstraint", "annotate_device_placement", "MoveToHost",
    "MoveToDevice", "AssumeGatherIndicesInBound",
))  # fmt: skip
_TRIP_COUNT = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*:\s*"?([0-9]{1,12})')
_MOST_STEPS = 2_000_000
"""Instructions followed before giving up: calls of calls can double at every level."""


_MOST_TRIPS = 10**15


@dataclasses.dataclass(eq=False)
class Buffer:
    """An array in memory; two of them are the same array where they are the same object."""

    shape: Shape
    writer: "Launch | None" = None
    path: tuple[int, ...] = ()
    """Index path in the writer's result."""
    is_input: bool = False
    """True for a parameter of the entry computation."""
    base: "Buffer | None" = None
    """The array that the writer updates in place, if it does."""
    sources: list[tuple["Buffer", Fraction]] = dataclasses.field(default_factory=list)
    """Of a loop's carry or a branch's result: what it may be, and the share of the reads."""

    known_bottom: "Buffer | None" = None
    """`bottom`, once it was asked for."""

    def bottom(self) -> "Buffer":
        """The array that a chain of updates in place began with."""
        chain, current = [], self
        while (below := current.known_bottom or current.base) is not None:
            chain.append(current)
            current = below
        for buffer in chain:  # a long chain is walked once, not once for each of its links
            buffer.known_bottom = current
        return current


type Value = Buffer | tuple["Value", ...]


@dataclasses.dataclass(eq=False)
class Launch:
    """One launch in its place: an instruction, and the arrays it touches."""

    instruction: Instruction
    computation: str
    count: int
    access: traffic.Access
    """What is written is counted where it is in device memory."""
    reads: dict[Buffer, int]
    """Bytes read of each array, by one launch; 0 where it is only updated in place, or is not in
    device memory."""
    results: dict[tuple[int, ...], Buffer]
    operands: "tuple[Value, ...]"
    host_bytes: int = 0
    """Bytes read from and written to host memory, by one launch."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """All launches in order, with the arrays that enter and leave the module."""

    launches: tuple[Launch, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    warnings: tuple[str, ...]
    back_end: str

    def memory(self, buffer: Buffer) -> str:
        """Which memory an array is in, see `fusejax.hlo.spaces`."""
        return spaces.memory(buffer.shape, self.back_end)


def leaves(value: Value) -> Iterator[Buffer]:
    """Yields the arrays of a value, depth first."""
    if isinstance(value, Buffer):
        yield value
        return
    for element in value:
        yield from leaves(element)


def origins(buffer: Buffer) -> dict[Buffer, Fraction]:
    """The arrays that were written (or came in) as `buffer`, each with its share of the reads.

    A kernel that updates an array in place hands on the same array, so what is found is the array
    that was written as a whole, where a kernel of this module wrote it.
    """
    found: dict[Buffer, Fraction] = {}
    pending = [(buffer, Fraction(1))]
    seen: set[Buffer] = set()
    while pending:
        current, share = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.sources:
            pending += [(source, share * part) for source, part in current.sources]
        elif current.base is not None and any(o.writer for o in beginnings(current)):
            pending.append((current.bottom(), share))
        else:
            found[current] = found.get(current, Fraction(0)) + share
    return found


def beginnings(buffer: Buffer) -> list[Buffer]:
    """The arrays that `buffer` may be, as they were before any update in place."""
    pending, seen, found = [buffer], set(), []
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.sources:
            pending += [source for source, _ in current.sources]
        elif current.base is not None:
            pending.append(current.bottom())
        else:
            found.append(current)
    return found


def follow(module: Module, back_end: str) -> Flow:
    """Follows the module from its entry.

    Args:
      back_end: "gpu", "cpu", "tpu" or "unoptimised": tells which memories a layout can name.

    Raises:
      UsageError: the module's calls multiply beyond what can be followed.
    """
    walk = _Walk(module, back_end)
    inputs = {
        number: _value(parameter.shape, is_input=True)
        for number, parameter in module.entry.parameters.items()
    }
    output = walk.run(module.entry, inputs, 1)
    return Flow(
        tuple(walk.launches),
        tuple(buffer for value in inputs.values() for buffer in leaves(value)),
        tuple(leaves(output)),
        tuple(dict.fromkeys(walk.warnings)),
        back_end,
    )


def _value(shape: Shape, *, is_input: bool = False) -> Value:
    if shape.is_tuple:
        return tuple(_value(element, is_input=is_input) for element in shape.elements)
    return Buffer(shape, is_input=is_input)


def _at(value: Value, path: Sequence[int]) -> Value:
    for index in path:
        if isinstance(value, Buffer) or not 0 <= index < len(value):
            return Buffer(Shape("opaque"))  # a text that says what cannot be
        value = value[index]
    return value


class _Walk:
    """The launches so far; every computation is walked once for each place that calls it."""

    def __init__(self, module: Module, back_end: str):
        self.module = module
        self.back_end = back_end
        self.launches: list[Launch] = []
        self.warnings: list[str] = []
        self.steps = 0

    def run(self, computation: Computation, inputs: dict[int, Value], count: int) -> Value:
        known: dict[str, Value] = {}
        for instruction in computation.instructions:
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise UsageError(
                    f"module {self.module.name!r} runs more than {_MOST_STEPS} instructions: "
                    "give a part of it"
                )
            operands = [_at(known[o.name], o.element) for o in instruction.operands]
            if instruction.opcode == "parameter":
                number = int(instruction.literal)
                known[instruction.name] = inputs.get(number, _value(instruction.shape))
            else:
                known[instruction.name] = self.step(computation, instruction, operands, count)
        return known[computation.root.name]

    def step(
        self, computation: Computation, instruction: Instruction, operands: list[Value], count: int
    ) -> Value:
        opcode = instruction.opcode
        called = [self.module.computations[name] for name in instruction.called]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and operands:
            index = instruction.attributes.get("index", "")
            return _at(operands[0], (int(index),) if index.isdigit() and len(index) < 9 else (-1,))
        if opcode in ("bitcast", "opt-barrier", "domain", "add-dependency", "async-update"):
            return operands[0] if operands else _value(instruction.shape)
        if opcode.endswith("-done") and operands:
            return _done(instruction, operands[0])
        if opcode == "while" and operands and {"body", "condition"} <= set(instruction.attributes):
            return self.loop(instruction, operands[0], count)
        if opcode == "conditional" and called:
            return self.branches(instruction, called, operands[1:], count)
        if opcode == "call" and called:
            return self.run(called[0], dict(enumerate(operands)), count)
        if opcode in _NO_LAUNCH:
            return _value(instruction.shape)
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        if opcode == "custom-call" and target in _NO_LAUNCH_TARGETS:
            return (
                operands[0]
                if operands and target != "AllocateBuffer"
                else _value(instruction.shape)
            )
        return self.launch(computation, instruction, operands, count)

    def launch(
        self, computation: Computation, instruction: Instruction, operands: list[Value], count: int
    ) -> Value:
        access = traffic.access(self.module, computation, instruction)
        writes = dict(access.writes)
        host_bytes = 0
        for path, size in access.writes.items():
            shape = infer.element(instruction.shape, path)
            memory = spaces.memory(shape, self.back_end) if shape else spaces.DEVICE
            if memory != spaces.DEVICE:
                writes[path] = 0
                host_bytes += size if memory == spaces.HOST else 0
        access = dataclasses.replace(access, writes=writes)
        reads: dict[Buffer, int] = {}
        for operand, read in zip(operands, access.reads, strict=False):
            arrays = list(leaves(operand))
            for buffer in arrays:
                part = read if len(arrays) == 1 else buffer.shape.bytes
                whole = max(buffer.shape.bytes, part)
                reads[buffer] = min(whole, reads.get(buffer, 0) + part)
        for buffer, size in reads.items():
            memory = spaces.memory(buffer.shape, self.back_end)
            if memory != spaces.DEVICE:
                reads[buffer] = 0
                host_bytes += size if memory == spaces.HOST else 0
        launch = Launch(
            instruction, computation.name, count, access, reads, {}, tuple(operands), host_bytes
        )
        self.launches.append(launch)

        def written(shape: Shape, path: tuple[int, ...]) -> Value:
            if shape.is_tuple:
                return tuple(written(part, (*path, i)) for i, part in enumerate(shape.elements))
            buffer = Buffer(shape, launch, path)
            if path in access.in_place and access.in_place[path] < len(operands):
                base = operands[access.in_place[path]]
                buffer.base = base if isinstance(base, Buffer) else None
            launch.results[path] = buffer
            return buffer

        return written(instruction.shape, ())

    def loop(self, instruction: Instruction, initial: Value, count: int) -> Value:
        """Follows a loop's condition and body, both once for every trip.

        Where the trip count is known XLA's GPU runtime counts on the host and launches no
        condition. Its kernel is counted all the same, since the module's text has it: one launch
        too many for each trip, which compares two scalars.
        """
        condition, body = (
            self.module.computations.get(instruction.attributes[key].strip("%\"'"))
            for key in ("condition", "body")
        )
        if condition is None or body is None:
            return _value(instruction.shape)
        found = _TRIP_COUNT.search(instruction.backend_config)
        trips = int(found[1]) if found else 1
        if not found:
            self.warnings.append(
                f"trip count of loop {instruction.name} is unknown: its body is counted once"
            )
        back = Fraction(max(trips - 1, 0), trips) if found and trips else Fraction(1)
        if count * trips > _MOST_TRIPS:
            raise UsageError(
                f"loop {instruction.name!r} runs {count * trips} times: expected at most "
                f"{_MOST_TRIPS}"
            )
        carry = _carried(initial, Fraction(1, trips) if trips else Fraction(1))
        self.run(condition, {0: carry}, count * trips)
        result = self.run(body, {0: carry}, count * trips)
        return _close(carry, result, back)

    def branches(
        self,
        instruction: Instruction,
        called: list[Computation],
        operands: list[Value],
        count: int,
    ) -> Value:
        before = len(self.launches)
        results = [
            self.run(branch, {0: operand}, count)
            for branch, operand in zip(called, operands, strict=False)
        ]
        if len(self.launches) > before:
            self.warnings.append(
                f"one of {len(called)} branches of {instruction.name} runs: all are counted"
            )
        merged = _value(instruction.shape)
        for result in results:
            for target, source in zip(leaves(merged), leaves(result), strict=False):
                target.sources.append((source, Fraction(1, len(results))))
        return merged


def _carried(initial: Value, share: Fraction) -> Value:
    if isinstance(initial, Buffer):
        return Buffer(initial.shape, sources=[(initial, share)])
    return tuple(_carried(element, share) for element in initial)


def _close(carry: Value, result: Value, back: Fraction) -> Value:
    """Ties the body's result to the carry; returns the loop's result."""
    if not isinstance(carry, Buffer) and not isinstance(result, Buffer):
        return tuple(_close(c, r, back) for c, r in zip(carry, result, strict=False))
    if not isinstance(carry, Buffer) or not isinstance(result, Buffer):
        return result
    if result is carry:  # an invariant of the loop is what it was before
        carry.sources = [(carry.sources[0][0], Fraction(1))]
        return carry.sources[0][0]
    if back:
        carry.sources.append((result, back))
    return result


def _done(instruction: Instruction, started: Value) -> Value:
    """What an async pair yields, out of the tuple that its start is printed with."""
    opcode = instruction.opcode.removesuffix("-done")
    if isinstance(started, Buffer):
        return started
    if opcode == "recv" and started:
        return (started[0], Buffer(Shape("token")))
    if opcode in ("send", "all-reduce"):
        return started if instruction.shape.is_tuple else _at(started, (0,))
    return _at(started, traffic.result_path(opcode, len(started)))
