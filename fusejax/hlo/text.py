"""Reads HLO text: as printed by XLA over the years, dumped, published or written by hand."""

import itertools
from typing import NamedTuple, NoReturn

from fusejax.errors import UsageError
from fusejax.hlo import frames, grammar, infer
from fusejax.hlo.memory import no_collection
from fusejax.hlo.module import (
    CALLING,
    DTYPES,
    Computation,
    Frame,
    Instruction,
    Module,
    Operand,
    Shape,
    called_names,
)

_CLOSING = {"(": ")", "{": "}", "[": "]"}
_MAX_DEPTH = 64
_MOST_ELEMENTS = 2**62
_CALLING = frozenset(CALLING)


class _Header(NamedTuple):
    name: str
    attributes: dict[str, str]
    frames: dict[int, Frame]


def read_module(text: str) -> Module:
    """Reads text that holds one module.

    Raises:
      UsageError: the text cannot be read, or holds several modules (`read_modules` reads those).
        The message names the line and what was expected there.
    """
    modules = read_modules(text)
    if len(modules) > 1:
        raise UsageError(f"HLO text holds {len(modules)} modules: give one at a time")
    return modules[0]


def read_modules(text: str) -> tuple[Module, ...]:
    """Reads every module of a text, in order; several are parted by headers or "// -----" lines.

    Raises:
      UsageError: the text cannot be read. The message names the line and what was expected there.
    """
    if "\0" in text[:4096]:
        raise UsageError("line 1: expected HLO text, found binary data")
    starts = [0, *(match.end() for match in grammar.SEPARATOR.finditer(text)), len(text)]
    modules: list[Module] = []
    with no_collection():
        for start, end in itertools.pairwise(starts):
            reader = _Reader(text, start, end)
            while not reader.at_end():
                modules.append(reader.module())
    if not modules:
        _Reader(text, len(text), len(text)).fail("an HLO module")
    return tuple(modules)


class _Reader:
    """A position in a text, and what was read before it."""

    def __init__(self, text: str, start: int, end: int):
        self.text = text if end == len(text) else text[:end]
        self.position = start
        self.shapes: dict[str, Shape] = {}
        self.computations: dict[str, Computation] = {}
        self.anonymous = 0

    def fail(self, expected: str, position: int | None = None) -> NoReturn:
        position = self.position if position is None else position
        line = self.text.count("\n", 0, position) + 1
        found = self.text[position : position + 24].split("\n")[0].strip()
        raise UsageError(
            f"line {line}: expected {expected}, found {found!r}"
            if found
            else f"line {line}: expected {expected}, found the end of the "
            + ("line" if position < len(self.text) else "text")
        )

    def skip(self) -> None:
        self.position = grammar.SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]

    def at_end(self) -> bool:
        self.skip()
        return self.position >= len(self.text)

    def accept(self, word: str) -> bool:
        if self.text.startswith(word, self.position):
            self.position += len(word)
            return True
        return False

    def expect(self, word: str) -> None:
        self.skip()
        if not self.accept(word):
            self.fail(repr(word))

    def name(self, what: str) -> str:
        match = grammar.NAME.match(self.text, self.position)
        if match is None:
            self.fail(what)
        self.position = match.end()
        return _bare(match[0])

    def module(self) -> Module:
        self.computations = {}
        header = self.header() if grammar.HEADER.match(self.text, self.position) else None
        entry = None
        while not self.at_end():
            if grammar.HEADER.match(self.text, self.position) and self.computations:
                break
            name, is_entry = self.computation()
            entry = name if is_entry else entry
        if not self.computations:
            self.fail("a computation")
        # Without ENTRY the last computation is the one that is run: those above are its callees.
        entry = entry or next(reversed(self.computations))
        name, attributes, frames = header or _Header(entry, {}, {})
        return Module(name, attributes, self.computations, entry, frames)

    def header(self) -> _Header:
        match = grammar.HEADER.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        attributes = self.attributes(0)
        tables: dict[str, dict[int, str]] = {}
        while not self.at_end() and (table := grammar.TABLE.match(self.text, self.position)):
            self.position = table.end()
            rows = tables.setdefault(table[1], {})
            while row := grammar.ROW.match(self.text, self.position):
                self.position = row.end()
                rows[int(row[1])] = row[2]
        return _Header(match[1], attributes, frames.join(tables))

    def computation(self) -> tuple[str, bool]:
        is_entry = bool(grammar.ENTRY.match(self.text, self.position))
        if is_entry:
            self.position += len("ENTRY")
            self.skip()
        start = self.position
        name = self.name("a computation")
        self.skip()
        if self.text.startswith("(", self.position):
            self.position = self.balanced_end()
            self.expect("->")
            self.skip()
            self.shape()
        self.expect("{")
        # XLA wants names to be unique in a module; parts of published files repeat them, and there
        # a name means the nearest definition above.
        self.computations.pop(name, None)
        self.computations[name] = Computation(name, self.body(0))
        if not name:
            self.fail("the name of a computation", start)
        self.attributes(0)
        return name, is_entry

    def body(self, depth: int) -> tuple[Instruction, ...]:
        instructions: list[Instruction] = []
        known: dict[str, Shape] = {}
        while True:
            self.skip()
            if self.accept("}"):
                break
            self.instruction(instructions, known, depth)
        if not instructions:
            self.fail("an instruction", self.position - 1)
        return tuple(instructions)

    def instruction(
        self, instructions: list[Instruction], known: dict[str, Shape], depth: int
    ) -> None:
        start = self.position
        match = grammar.INSTRUCTION.match(self.text, start)
        if match is None:
            self.fail("an instruction or '}'")
        self.position = match.end()
        name = _bare(match[2])
        if name in known:
            self.fail(f"a name not yet taken in this computation (again {name!r})", start)
        shape: Shape | None
        if match[3]:
            shape, opcode = self.array(match[3], match.start(3)), match[4]
        else:
            shape, opcode = self.shape_and_opcode()
        self.finish(instructions, known, name, shape, opcode, bool(match[1]), depth)

    def shape_and_opcode(self) -> tuple[Shape | None, str]:
        self.skip()
        shape = None
        if (match := grammar.OPCODE.match(self.text, self.position)) is None or match[1] == "b":
            shape = self.shape()
            self.skip()
            match = grammar.OPCODE.match(self.text, self.position)
        if match is None:
            self.fail("an opcode and '('")
        self.position = match.end()
        return shape, match[1]

    def finish(
        self,
        instructions: list[Instruction],
        known: dict[str, Shape],
        name: str,
        shape: Shape | None,
        opcode: str,
        is_root: bool,
        depth: int,
    ) -> None:
        """Reads from after "opcode(" to the end of the instruction and takes it in."""
        start = self.position
        operands: tuple[Operand, ...] = ()
        literal = ""
        if opcode == "constant":
            end = self.balanced_end(start - 1)
            literal = self.text[start : end - 1]
            self.position = end
        elif opcode == "parameter":
            match = grammar.PARAMETER_NUMBER.match(self.text, start)
            if match is None:
                self.fail("the parameter's number")
            literal, self.position = match[1], match.end()
        else:
            operands = self.operands(instructions, known, depth)
        attributes = self.attributes(depth)
        if shape is None:
            shape = infer.shape(opcode, operands, attributes, known, self.computations)
            if shape is None:
                self.fail(f"the shape of {name!r} (it does not follow from its operands)", start)
        known[name] = shape
        instructions.append(
            Instruction(name, opcode, shape, operands, literal, attributes, is_root)
        )

    def operands(
        self, instructions: list[Instruction], known: dict[str, Shape], depth: int
    ) -> tuple[Operand, ...]:
        text, found = self.text, []
        self.skip()
        if self.accept(")"):
            return ()
        while True:
            self.skip()
            start = self.position
            match = grammar.OPERAND.match(text, start)
            if match is None:
                found.append(self.long_operand(instructions, known, depth))
                self.skip()
                separator = text[self.position : self.position + 1]
                self.position += 1
            else:
                self.position = match.end()
                found.append(self.operand(match[2], match[3], known, start))
                separator = match[4]
            if separator == ")":
                return tuple(found)
            if separator != ",":
                self.position -= 1
                self.fail("',' or ')' after an operand")

    def operand(self, name: str, element: str, known: dict[str, Shape], start: int) -> Operand:
        name = _bare(name)
        shape = known.get(name)
        if shape is None:
            self.fail(f"an operand defined above (not {name!r})", start)
        path = tuple(int(index) for index in element.split("#")[1:]) if element else ()
        if path and infer.element(shape, path) is None:
            self.fail(f"an element of the tuple {name!r} (it has no {element})", start)
        return Operand(name, path)

    def long_operand(
        self, instructions: list[Instruction], known: dict[str, Shape], depth: int
    ) -> Operand:
        """Reads an operand with a tuple's type, or an instruction written in an operand's place."""
        if depth >= _MAX_DEPTH:
            self.fail("less deeply nested instructions")
        start = self.position
        shape = None
        if grammar.OPCODE.match(self.text, start) is None:
            shape = self.shape()
            self.skip()
        if opcode := grammar.OPCODE.match(self.text, self.position):
            self.position = opcode.end()
            name = f"{opcode[1]}.{len(instructions)}"
            while name in known:
                name += "."
            self.finish(instructions, known, name, shape, opcode[1], False, depth + 1)
            return Operand(name)
        position = self.position
        name = self.name("the name of an operand")
        element = grammar.ELEMENT.match(self.text, self.position)
        assert element is not None
        self.position = element.end()
        return self.operand(name, element[0], known, position)

    def attributes(self, depth: int) -> dict[str, str]:
        text = self.text
        found: dict[str, str] = {}
        while True:
            match = grammar.ATTRIBUTE.match(text, self.position)
            if match is None:
                self.skip()
                if not text.startswith(",", self.position):
                    return found
                match = grammar.KEY.match(text, self.position)
                if match is None:
                    self.fail("an attribute", self.position + 1)
                self.position = start = match.end()
                value = None
            else:
                self.position, start, value = match.end(), match.start(2), match[2]
            key = match[1]
            if key in _CALLING:
                if grammar.ANONYMOUS.match(text, start):
                    self.position = start
                    value = self.unnamed(depth)
                else:
                    value = value or self.long_value()
                    self.check_called(key, value, start)
            found[key] = value or self.long_value()

    def check_called(self, key: str, value: str, position: int) -> None:
        for name in called_names(value):
            if name not in self.computations:
                self.fail(f"a computation defined above ({key}={name!r} is not)", position)

    def unnamed(self, depth: int) -> str:
        """Reads a computation written in place of its name; returns the name it is filed under."""
        if depth >= _MAX_DEPTH:
            self.fail("less deeply nested computations")
        self.position += 1
        body = self.body(depth + 1)
        self.anonymous += 1
        name = f"computation.{self.anonymous}"
        while name in self.computations:
            name += "."
        self.computations[name] = Computation(name, body)
        return name

    def long_value(self) -> str:
        """Reads an attribute's value that is nested more deeply than the quick pattern takes."""
        start = self.position
        while True:
            character = self.text[self.position : self.position + 1]
            if character and character in _CLOSING:
                self.position = self.balanced_end()
            elif match := (grammar.PLAIN.match if character != '"' else grammar.STRING.match)(
                self.text, self.position
            ):
                self.position = match.end()
            else:
                break
        if self.position == start:
            self.fail("the attribute's value")
        return self.text[start : self.position]

    def balanced_end(self, start: int | None = None) -> int:
        """Position after the bracket that closes the one at `start` (or here)."""
        start = self.position if start is None else start
        quick = grammar.PARENTHESES.match(self.text, start)
        if quick:
            return quick.end()
        open_brackets: list[str] = []
        for match in grammar.TOKEN.finditer(self.text, start):
            token = match[0]
            if token in _CLOSING:
                open_brackets.append(_CLOSING[token])
            elif token in (")", "}", "]"):
                if token != open_brackets.pop():
                    self.fail("a matching bracket", match.start())
                if not open_brackets:
                    return match.end()
        self.fail(f"the closing {_CLOSING[self.text[start]]!r}", start)

    def array(self, text: str, position: int) -> Shape:
        shape = self.shapes.get(text)
        if shape is None:
            match = grammar.ARRAY_PARTS.match(text)
            if match is None or match[1] not in DTYPES:
                self.fail("an element type such as f32", position)
            dims = match[2].strip()
            if dims and not grammar.DIMS.fullmatch(dims):
                self.fail("dimensions", position + match.start(2))
            sizes = tuple(
                0 if size.strip() == "?" else int(size.strip().removeprefix("<="))
                for size in dims.split(",")
                if dims
            )
            shape = Shape(match[1], sizes, match[3] or "")
            if shape.count >= _MOST_ELEMENTS:
                self.fail("an array of fewer than 2**62 elements", position)
            self.shapes[text] = shape
        return shape

    def shape(self, depth: int = 0) -> Shape:
        match = grammar.ARRAY.match(self.text, self.position)
        if match:
            self.position = match.end()
            return self.array(match[0], match.start())
        if depth >= _MAX_DEPTH:
            self.fail("a less deeply nested shape")
        is_buffer = self.accept("b(")
        if not is_buffer and not self.accept("("):
            self.fail("a shape")
        elements: list[Shape] = []
        self.skip()
        while not self.accept(")"):
            elements.append(self.shape(depth + 1))
            self.skip()
            if not self.accept(",") and not self.text.startswith(")", self.position):
                self.fail("',' or ')' in a tuple's shape")
            self.skip()
        return elements[0] if is_buffer and elements else Shape("tuple", elements=tuple(elements))


def _bare(name: str) -> str:
    return name.removeprefix("%").strip("\"'")
