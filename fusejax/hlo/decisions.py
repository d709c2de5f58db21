"""Reads what XLA's priority-fusion pass wrote down about its decisions."""

import dataclasses
import math
import re
from collections.abc import Mapping

from fusejax.errors import UsageError
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analysis import Reason
from fusejax.hlo.module import Instruction, Module

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_event = re.compile(
    rf"\b(update_priority|fusion|producer_ineligible)\s*+\{{((?:[^{{}}\"]++|{_STRING})*+)\}}",
    re.DOTALL,
)
_field = re.compile(rf"(\w+)\s*:\s*({_STRING}|[^\s{{}}]++)", re.DOTALL)
_module = re.compile(rf"\bhlo_module_before_fusion\s*:\s*((?:{_STRING}\s*)++)", re.DOTALL)
# A field of a text proto, or the end of a message.
_part = re.compile(
    rf"\s*+(?:(?P<open>\w++\s*+:?\s*+\{{)|\w++\s*+:\s*+(?:(?:{_STRING}\s*+)++|[^\s{{}}\"]++)"
    rf"|(?P<close>\}}))",
    re.DOTALL,
)
_escape = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

_RULES = {
    "the producer is not fusible": "XLA does not fuse this kind of kernel into what reads it",
    "the consumer is not fusible": "XLA does not fuse anything more into the kernel that reads it",
    "both the producer and the consumer contain a reduce": (
        "XLA does not put two reductions, one feeding the other, into one kernel"
    ),
    "fusion into output of a reduce fusion would create a loop fusion": (
        "XLA does not continue a reduction's kernel with what reads its result"
    ),
    "do not fuse into the in-place operand of scatter": (
        "a scatter updates this tensor in place, so it has to be in memory first"
    ),
    "do not fuse into the output of scatter": (
        "a scatter writes this tensor in place, so it is read again from memory"
    ),
    "not fusing because there are only bitcast users": (
        "only its view under another shape is read, and XLA does not fuse through that"
    ),
    "No users to fuse": "XLA's fusion pass saw no kernel to fuse it into",
}


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The last word of the pass on every producer."""

    last: Mapping[str, Reason]
    """The reason of the last refusal, under the producer's last name."""
    names: Mapping[str, str]
    """The last name of the fusion whose result an instruction became."""
    before: Module | None
    """The module as it went into the pass."""
    damage: str | None = None
    """What is wrong with the text, in a few words; None where nothing is."""

    def reason(self, name: str) -> Reason | None:
        """Why the value that instruction `name` (of `before`) ends in was not fused further."""
        return self.last.get(self.names.get(name, name))


def read(text: str) -> Decisions:
    """Reads the text form of a FusionProcessDumpProto; what it does not know it passes over.

    Of a damaged text as much is taken as can be read.
    """
    last: dict[str, Reason] = {}
    names: dict[str, str] = {}
    roots: dict[str, str] = {}
    for kind, body in _event.findall(text.split("hlo_module_before_fusion", 1)[0]):
        fields = {key: _plain(value) for key, value in _field.findall(body)}
        producer = fields.get("producer_name", "")
        if kind == "fusion":
            fused, consumer = fields.get("fusion_name", ""), fields.get("consumer_name", "")
            roots[fused] = roots.get(consumer, consumer)
            names[roots[fused]] = fused
            if fused != consumer:
                last.pop(fused, None)
        elif kind == "producer_ineligible":
            last[producer] = rule(fields.get("reason", ""))
        else:
            last[producer] = _priced(fields)
    found = _module.search(text)
    before, damage = None, _damage(text)
    if found:
        quoted = re.findall(_STRING, found[1], re.DOTALL)
        try:
            before = hlo_text.read_module("".join(_plain(part) for part in quoted))
        except UsageError as error:  # reasons can then be matched by name only
            damage = damage or f"its hlo_module_before_fusion: {error}"
    elif damage is None:  # XLA writes it last, whatever was decided
        damage = "it ends before hlo_module_before_fusion"
    return Decisions(last, names, before, damage)


def _damage(text: str) -> str | None:
    """What keeps a text from being a text proto; None where nothing does."""
    if not text.strip():
        return "it is empty"
    position = depth = 0
    while part := _part.match(text, position):
        depth += (part["open"] is not None) - (part["close"] is not None)
        if depth < 0:
            break
        position = part.end()
    rest = text[position:].lstrip()
    line = text.count("\n", 0, len(text) - len(rest)) + 1
    if rest:
        return f"line {line}: expected a field, found {rest[:24].splitlines()[0]!r}"
    return f"it ends inside a message, in line {line}" if depth else None


def rule(reason: str) -> Reason:
    """XLA's refusal as a sentence, with XLA's own words behind it."""
    sentence = _RULES.get(reason)
    return Reason("rule", f"{sentence} ({reason})" if sentence else f"XLA's rule: {reason}")


def _priced(fields: Mapping[str, str]) -> Reason:
    fused, unfused = (_number(fields.get(key, "0")) for key in ("us_fused", "us_unfused"))
    if fused > unfused:
        return Reason(
            "cost_model",
            f"XLA's cost model expects {fused:.1f} µs fused against {unfused:.1f} µs unfused",
            fused,
            unfused,
        )
    return Reason(
        "unknown",
        f"XLA's cost model was for fusing ({fused:.1f} µs against {unfused:.1f} µs unfused); "
        "what stopped it is not in its dump",
        fused,
        unfused,
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _plain(value: str) -> str:
    if not value.startswith('"'):
        return value

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "01234567":
            return chr(int(code, 8))
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, code)

    return _escape.sub(character, value[1:-1])


type Index = Mapping[tuple[str, str, tuple[int, ...]], list[Instruction]]


def stem(name: str) -> str:
    """A name without the last of the suffixes that XLA adds when it copies an instruction."""
    return re.sub(r"(?:\.\d+|\.clone|\.remat\d*)$", "", name)


def index_names(module: Module) -> Index:
    """Every instruction under its name, whole and without XLA's suffixes, opcode and dimensions."""
    index: dict[tuple[str, str, tuple[int, ...]], list[Instruction]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            names = (instruction.name, stem(instruction.name), stem(stem(instruction.name)))
            for name in dict.fromkeys(names):
                key = (name, instruction.opcode, instruction.shape.dims)
                index.setdefault(key, []).append(instruction)
    return index


def match(instruction: Instruction, index: Index) -> Instruction | None:
    """The instruction of an earlier module that `instruction` came from; None where unsure.

    The name decides, with the numbers that XLA appends taken off one after the other; opcode and
    dimensions have to agree, and a framework's name if both have one.
    """
    name = instruction.name
    for _ in range(4):
        found = {
            id(other): other
            for other in index.get((name, instruction.opcode, instruction.shape.dims), ())
            if not (other.op_name and instruction.op_name) or other.op_name == instruction.op_name
        }
        if len(found) == 1:
            return next(iter(found.values()))
        if stem(name) == name:
            return None
        name = stem(name)
    return None
