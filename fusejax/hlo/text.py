"""Reads HLO text: as printed by XLA over the years, dumped, published or written by hand."""

import re
from typing import NamedTuple, NoReturn

from fusejax.errors import UsageError
from fusejax.hlo import infer
from fusejax.hlo.module import (
    CALLING,
    DTYPES,
    Computation,
    Frame,
    Instruction,
    Module,
    Operand,
    Shape,
)

# Possessive quantifiers throughout: no input, however broken, makes a match go back over its tracks.
_SPACE = r"(?:\s++|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+)*+"
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_NAME = rf"%?+(?:{_STRING}|'(?:[^'\\]++|\\.)*+'|[A-Za-z0-9_][\w.\-]*+)"
_ARRAY = r"[a-z][a-z0-9]*+\[[^\]\n]*+\](?:\{[^{}]*+\})?+"


def _nested(opening: str, closing: str, depth: int) -> str:
    plain = rf'[^{opening}{closing}"]++|{_STRING}'
    pattern = rf"{opening}(?:{plain})*+{closing}"
    for _ in range(depth):
        pattern = rf"{opening}(?:{plain}|{pattern})*+{closing}"
    return pattern


_FLAGS = re.DOTALL
_space = re.compile(_SPACE, _FLAGS)
_name = re.compile(_NAME, _FLAGS)
_array = re.compile(_ARRAY)
_array_parts = re.compile(r"([a-z][a-z0-9]*)\[([^\]\n]*)\](?:\{([^{}]*)\})?")
_dims = re.compile(r"\s*(?:(?:<=)?\s*[0-9]{1,18}|\?)(?:\s*,\s*(?:(?:<=)?\s*[0-9]{1,18}|\?))*\s*")
_opcode = re.compile(r"([A-Za-z_][\w\-]*+)\s*+\(")
_instruction = re.compile(
    rf"(ROOT\s++)?+({_NAME})\s*+=\s*+(?:({_ARRAY})\s*+([A-Za-z_][\w\-]*+)\()?+", _FLAGS
)
_parentheses = re.compile(_nested(r"\(", r"\)", 3), _FLAGS)
_operand = re.compile(rf"{_SPACE}(?:({_ARRAY})\s++)?+({_NAME})((?:#\d++)*+){_SPACE}(,|$)", _FLAGS)
_piece = (
    rf"[^\s,{{}}()\[\]\"]++|{_STRING}|{_nested('{', '}', 6)}"
    rf"|{_nested(r'\[', r'\]', 2)}|{_nested(r'\(', r'\)', 2)}"
)
_attribute = re.compile(rf",{_SPACE}([\w.\-]++)\s*+=\s*+((?:{_piece})(?:{_piece}|\s++(?=\{{))*+)", _FLAGS)
_key = re.compile(rf",{_SPACE}([\w.\-]++)\s*+=\s*+", _FLAGS)
_anonymous = re.compile(rf"\{{{_SPACE}(?:ROOT\s++)?+{_NAME}\s*+=", _FLAGS)
_token = re.compile(rf'{_STRING}|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+|[(){{}}\[\]]', _FLAGS)
_plain = re.compile(r'[^\s,{}()\[\]"]++', _FLAGS)
_header = re.compile(r"HloModule\s++([^\s,{}]++)")
_table = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\b")
_row = re.compile(rf"\s*+([0-9]{{1,9}})\s++({_STRING}|\{{[^{{}}]*+\}})", _FLAGS)
_field = re.compile(r"(\w+)=([0-9]{1,9})\b")
_separator = re.compile(r"^//[ \t]*-{3,}[ \t]*$", re.MULTILINE)

_CLOSING = {"(": ")", "{": "}", "[": "]"}
_MAX_DEPTH = 64


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
    starts = [0, *(match.end() for match in _separator.finditer(text)), len(text)]
    modules: list[Module] = []
    for start, end in zip(starts, starts[1:], strict=False):
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
        self.position = _space.match(self.text, self.position).end()  # type: ignore[union-attr]

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
        match = _name.match(self.text, self.position)
        if match is None:
            self.fail(what)
        self.position = match.end()
        return _bare(match[0])

    def module(self) -> Module:
        self.computations = {}
        header = self.header() if _header.match(self.text, self.position) else None
        entry = None
        while not self.at_end():
            if _header.match(self.text, self.position) and self.computations:
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
        match = _header.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        attributes = self.attributes(within=0)
        tables: dict[str, dict[int, str]] = {}
        while not self.at_end() and (match := _table.match(self.text, self.position)):
            self.position = match.end()
            rows = tables.setdefault(match[1], {})
            while row := _row.match(self.text, self.position):
                self.position = row.end()
                rows[int(row[1])] = row[2]
        return _Header(match[1] if False else _header_name(self.text), attributes, _frames(tables))
