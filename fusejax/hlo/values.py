"""Numbers the values that kernels write, so that equal values get equal numbers."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from fusejax.hlo.flow import Buffer, Flow, Launch, Value
from fusejax.hlo.module import ASYNC_STARTS, CALLING, Computation, Instruction, Module, called_names

# Instructions that are looked at, for each of the module's: computations may be used repeatedly.
_MOST_VISITS = 8
_SINGULAR = frozenset((
    "custom-call", "rng", "rng-get-and-update-state", "infeed", "outfeed", "send", "recv",
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "after-all",
    "collective-broadcast", "ragged-all-to-all", "partition-id", "replica-id", "while", "call",
    "conditional", "async-start",
))  # fmt: skip
# Say nothing about the value.
_IRRELEVANT = frozenset((
    "metadata", "backend_config", "frontend_attributes", "sharding", "control-predecessors",
    "kind", "origin", "statistics",
))  # fmt: skip

type Number = int | tuple["Number", ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """An array that a launch writes."""

    launch: Launch
    buffer: Buffer
    number: int
    """Equal for equal values."""
    unconverted: int
    """Number of the value before its last conversions between element types."""


def written(flow: Flow, module: Module) -> tuple[Written, ...]:
    """Every array that is written, with its number; none of a module that is too large for it."""
    numbering = _Numbering(module)
    found = []
    for launch in flow.launches:
        result = numbering.launch(launch)
        for path, buffer in launch.results.items():
            number = _element(result, path)
            if not isinstance(number, int):
                number = numbering.fresh()
            numbering.buffers[buffer] = number
            found.append(Written(launch, buffer, number, numbering.unconverted(number)))
        if numbering.steps > numbering.most_steps:
            return ()
    return tuple(found)


def _element(number: Number, path: Sequence[int]) -> Number | None:
    for index in path:
        if isinstance(number, int) or not 0 <= index < len(number):
            return None
        number = number[index]
    return number


class _Numbering:
    def __init__(self, module: Module):
        self.module = module
        self.table: dict[Hashable, int] = {}
        self.buffers: dict[Buffer, int] = {}
        self.converted: dict[int, int] = {}
        self.bodies: dict[str, Number] = {}
        self.last = 0
        self.steps = 0
        size = sum(len(c.instructions) for c in module.computations.values())
        self.most_steps = 10_000 + _MOST_VISITS * size

    def fresh(self) -> int:
        self.last += 1
        return self.last

    def number(self, key: Hashable) -> int:
        if key not in self.table:
            self.table[key] = self.fresh()
        return self.table[key]

    def unconverted(self, number: int) -> int:
        while number in self.converted:
            number = self.converted[number]
        return number

    def value(self, value: Value) -> Number:
        if not isinstance(value, Buffer):
            return tuple(self.value(element) for element in value)
        if value not in self.buffers:
            self.buffers[value] = self.fresh()
        return self.buffers[value]

    def launch(self, launch: Launch) -> Number:
        operands = [self.value(operand) for operand in launch.operands]
        instruction = launch.instruction
        if instruction.opcode in ASYNC_STARTS and instruction.opcode != "async-start":
            called = self.module.computations[instruction.called[0]] if instruction.called else None
            inner = self.body(called, dict(enumerate(operands))) if called else self.fresh()
            return (self.fresh(), inner)
        if instruction.opcode.endswith("-start"):
            return self.fresh()
        before = [] if instruction.opcode == "fusion" else launch.operands
        layouts = [v.shape.layout if isinstance(v, Buffer) else "" for v in before]
        return self.instruction(instruction, operands, layouts)

    def body(self, computation: Computation, inputs: Mapping[int, Number]) -> Number:
        known: dict[str, Number] = {}
        for instruction in computation.instructions:
            self.steps += 1
            if self.steps > self.most_steps:
                return self.fresh()
            if instruction.opcode == "parameter":
                known[instruction.name] = inputs.get(int(instruction.literal), self.fresh())
                continue
            operands, layouts = [], []
            for operand in instruction.operands:
                number = _element(known[operand.name], operand.element)
                operands.append(self.fresh() if number is None else number)
                layouts.append(computation.by_name[operand.name].shape.layout)
            known[instruction.name] = self.instruction(instruction, operands, layouts)
        return known[computation.root.name]

    def instruction(
        self, instruction: Instruction, operands: Sequence[Number], layouts: Sequence[str]
    ) -> Number:
        opcode, shape = instruction.opcode, instruction.shape
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and operands:
            index = instruction.attributes.get("index", "")
            path = (int(index),) if index.isdigit() and len(index) < 9 else (-1,)
            element = _element(operands[0], path)
            return self.fresh() if element is None else element
        if opcode == "copy" and operands:
            return operands[0]
        if opcode == "fusion" and instruction.called:
            body = self.module.computations[instruction.called[0]]
            return self.body(body, dict(enumerate(operands)))
        if opcode in _SINGULAR or "..." in instruction.literal:
            return self.fresh()
        view = (tuple(layouts), shape.layout) if opcode in ("bitcast", "bitcast-convert") else ()
        attributes = tuple(
            (key, self.called(value) if key in CALLING else value)
            for key, value in sorted(instruction.attributes.items())
            if key not in _IRRELEVANT
        )
        number = self.number((
            opcode, shape.dtype, shape.dims, instruction.literal, tuple(operands), attributes, view,
        ))  # fmt: skip
        if opcode == "convert" and operands and isinstance(operands[0], int):
            self.converted[number] = operands[0]
        if shape.is_tuple:
            return tuple(self.number((number, i)) for i in range(len(shape.elements)))
        return number

    def called(self, text: str) -> Hashable:
        numbers = []
        for name in called_names(text):
            if name not in self.bodies:
                body = self.module.computations[name]
                inputs = {i: self.number(("input", i)) for i in body.parameters}
                self.bodies[name] = self.body(body, inputs)
            numbers.append(self.bodies[name])
        return tuple(numbers)
