"""Patterns of HLO text's grammar."""

import re

# Possessive quantifiers throughout: no input, however broken, makes a match retrace its steps.
_SPACE = r"(?:\s++|/\*(?:[^*]|\*(?!/))*+(?:\*/)?|//[^\n]*+)*+"
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
SPACE = re.compile(_SPACE, _FLAGS)
NAME = re.compile(_NAME, _FLAGS)
ARRAY = re.compile(_ARRAY)
ARRAY_PARTS = re.compile(r"([a-z][a-z0-9]*)\[([^\]\n]*)\](?:\{([^{}]*)\})?")
DIMS = re.compile(r"\s*(?:(?:<=)?\s*[0-9]{1,18}|\?)(?:\s*,\s*(?:(?:<=)?\s*[0-9]{1,18}|\?))*\s*")
OPCODE = re.compile(r"([A-Za-z_][\w\-]*+)\s*+\(")
INSTRUCTION = re.compile(
    rf"(ROOT\s++)?+({_NAME})\s*+=\s*+(?:({_ARRAY})\s*+([A-Za-z_][\w\-]*+)\()?+", _FLAGS
)
PARENTHESES = re.compile(_nested(r"\(", r"\)", 3), _FLAGS)
OPERAND = re.compile(
    rf"{_SPACE}(?:({_ARRAY})\s++)?+({_NAME})((?:#[0-9]{{1,9}})*+){_SPACE}([,)])", _FLAGS
)
_PIECE = (
    rf"[^\s,{{}}()\[\]\"]++|{_STRING}|{_nested('{', '}', 6)}"
    rf"|{_nested(r'\[', r'\]', 2)}|{_nested(r'\(', r'\)', 2)}"
)
ATTRIBUTE = re.compile(
    rf",{_SPACE}([\w.\-]++)\s*+=\s*+((?:{_PIECE})(?:{_PIECE}|\s++(?=\{{))*+)", _FLAGS
)
KEY = re.compile(rf",{_SPACE}([\w.\-]++)\s*+=\s*+", _FLAGS)
ANONYMOUS = re.compile(rf"\{{{_SPACE}(?:ROOT\s++)?+{_NAME}\s*+=", _FLAGS)
TOKEN = re.compile(rf"{_STRING}|/\*(?:[^*]|\*(?!/))*+(?:\*/)?|//[^\n]*+|[(){{}}\[\]]", _FLAGS)
STRING = re.compile(_STRING, _FLAGS)
PLAIN = re.compile(r'[^\s,{}()\[\]"]++', _FLAGS)
HEADER = re.compile(r"HloModule\s++([^\s,{}]++)")
TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\b")
ROW = re.compile(rf"\s*+([0-9]{{1,9}})\s++({_STRING}|\{{[^{{}}]*+\}})", _FLAGS)
FIELD = re.compile(r"(\w+)=([0-9]{1,9})\b")
SEPARATOR = re.compile(r"^//[ \t]*-{3,}[ \t]*$", re.MULTILINE)

ENTRY = re.compile(r"ENTRY\b")
PARAMETER_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*\)")
ELEMENT = re.compile(r"(?:#[0-9]{1,9})*")
