"""An HLO module as data: what the text says, with nothing concluded from it."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_BITS = {
    "pred": 8,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4,
    "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "token": 0, "opaque": 0, "buffer": 0,
}  # fmt: skip

DTYPES = frozenset(_BITS)
"""Every element type that HLO text can name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an array, or of a tuple of shapes."""

    dtype: str
    """HLO's name, such as "bf16"; "tuple" for a tuple."""
    dims: tuple[int, ...] = ()
    """Upper bounds where a dimension is dynamic."""
    layout: str = ""
    """As printed between braces: "1,0:T(8,128)S(1)"; empty where none is printed."""
    elements: tuple["Shape", ...] = ()
    """Shapes of a tuple's elements."""

    @property
    def is_tuple(self) -> bool:
        """True for a tuple, the empty one included."""
        return self.dtype == "tuple"

    @property
    def count(self) -> int:
        """Elements of an array: the product of its dimensions."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits per element of an array; 0 for what has no data, such as a token."""
        return _BITS.get(self.dtype, 0)

    @property
    def bytes(self) -> int:
        """Bytes of an array, or of all arrays of a tuple, without padding of the layout."""
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        return (self.count * self.bits + 7) // 8

    def leaves(self, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], "Shape"]]:
        """Yields (index path, array shape) of every array, depth first."""
        if not self.is_tuple:
            yield path, self
            return
        for index, element in enumerate(self.elements):
            yield from element.leaves((*path, index))


class Operand(NamedTuple):
    """The value that an instruction takes: another instruction, or an element of its tuple."""

    name: str
    element: tuple[int, ...] = ()
    """Index path into the tuple: `%fusion#1` is (1,)."""


CALLING = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
    "comparator",
)
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*+"|[^\s{},%]+')
_LIBRARY = re.compile(
    r"[/\\](?:(?:site|dist)-packages|pallas_kernels|fusejax[/\\](?:functions|flax|compile))[/\\]|"
    r"[/\\]fusejax[/\\]inspection\.py$"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*+)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*+)"')
_SOURCE_LINE = re.compile(r"\bsource_line=(\d+)")
_MOST_FRAMES = 1000
ASYNC_STARTS = frozenset(("async-start", "fusion-start"))
"""Opcodes that start a computation of their own in the background."""


def called_names(value: str) -> tuple[str, ...]:
    """Names in the value of an attribute that calls computations: `%a` or `{%a, %b}`."""
    return tuple(name.strip("\"'") for name in _REFERENCE.findall(value))


class Instruction(NamedTuple):
    """One line of a computation. A named tuple, since modules hold many thousands."""

    name: str
    """Without "%" and quotes."""
    opcode: str
    shape: Shape
    operands: tuple[Operand, ...]
    literal: str
    """What stands between the parentheses of a constant or a parameter."""
    attributes: Mapping[str, str]
    """Raw text of every attribute, unknown ones included, under its name."""
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls, in the order printed."""
        names: list[str] = []
        for key in CALLING:
            if key in self.attributes:
                names += called_names(self.attributes[key])
        return tuple(names)

    @property
    def op_name(self) -> str:
        """The framework's name, such as "jit(f)/gelu/mul"; empty where there is none."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def backend_config(self) -> str:
        """Text of the back end's configuration, without the quotes that older versions put."""
        text = self.attributes.get("backend_config", "")
        if text.startswith('"') and text.endswith('"') and len(text) > 1:
            text = re.sub(r"\\(.)", r"\1", text[1:-1])
        return text


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order of the text (the schedule, if scheduled)."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions under their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Parameter instructions under their numbers."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instructions that take a value, under its name, each user once."""
        users: dict[str, dict[str, Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users.setdefault(operand.name, {})[instruction.name] = instruction
        return {name: tuple(found.values()) for name, found in users.items()}


@dataclasses.dataclass(frozen=True)
class Frame:
    """One row of the table of stack frames."""

    file: str
    line: int
    function: str
    parent: int
    """Row of the caller's frame; 0 where there is none."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A module: computations that call one another, and the one that is run."""

    name: str
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    """In the order of the text: a computation stands below those that it calls."""
    entry_name: str
    frames: Mapping[int, Frame] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """What was found out about a computation, so that it is found out once per module."""
        return {}

    @property
    def entry(self) -> Computation:
        """The computation that is run."""
        return self.computations[self.entry_name]

    @property
    def is_scheduled(self) -> bool:
        """True where the order of the text is the order of execution."""
        return self.attributes.get("is_scheduled") == "true"

    def source(self, instruction: Instruction) -> str | None:
        """The user's line, "file:line", innermost frame first; None where it is not told.

        Frames inside installed packages, and inside those of this project's folders that people
        call from programs of their own, are passed over as long as a caller is not.
        """
        metadata = instruction.attributes.get("metadata", "")
        frame_id = _FRAME.search(metadata)
        row = int(frame_id[1]) if frame_id and len(frame_id[1]) < 10 else 0
        innermost: str | None = None
        for _ in range(_MOST_FRAMES):  # a table that loops must not hang the reader
            frame = self.frames.get(row)
            if frame is None:
                break
            place = f"{frame.file}:{frame.line}"
            if not _LIBRARY.search(frame.file):
                return place
            innermost = innermost or place
            row = frame.parent
        if innermost:
            return innermost
        file, line = _SOURCE_FILE.search(metadata), _SOURCE_LINE.search(metadata)
        return f"{file[1]}:{line[1]}" if file and line else None
