"""Shapes that a text leaves out, where they follow from the operands."""

from collections.abc import Mapping, Sequence

from fusejax.hlo.module import Computation, Operand, Shape, called_names

_LIKE_FIRST_OPERAND = frozenset(
    [
        "abs",
        "add",
        "and",
        "atan2",
        "cbrt",
        "ceil",
        "copy",
        "cosine",
        "divide",
        "exponential",
        "exponential-minus-one",
        "floor",
        "log",
        "log-plus-one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "opt-barrier",
        "or",
        "power",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "rsqrt",
        "select-and-scatter",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "sine",
        "sqrt",
        "subtract",
        "tan",
        "tanh",
        "while",
        "xor",
        "dynamic-update-slice",
        "sort",
        "all-reduce",
        "collective-permute",
        "erf",
        "domain",
    ]
)


def element(shape: Shape, path: Sequence[int]) -> Shape | None:
    """The element of a tuple at an index path; None where there is none."""
    for index in path:
        if not shape.is_tuple or not 0 <= index < len(shape.elements):
            return None
        shape = shape.elements[index]
    return shape


def shape(
    opcode: str,
    operands: Sequence[Operand],
    attributes: Mapping[str, str],
    known: Mapping[str, Shape],
    computations: Mapping[str, Computation],
) -> Shape | None:
    """The shape of an instruction printed without one; None where it cannot be told."""
    taken = [element(known[operand.name], operand.element) for operand in operands]
    shapes = [found for found in taken if found is not None]
    if opcode == "tuple":
        return Shape("tuple", elements=tuple(shapes))
    if opcode in ("call", "fusion", "async-start"):
        called = called_names(attributes.get("to_apply", attributes.get("calls", "")))
        return computations[called[0]].root.shape if called and called[0] in computations else None
    if not shapes:
        return None
    if opcode == "get-tuple-element":
        index = attributes.get("index", "")
        return element(shapes[0], (int(index),)) if index.isdigit() and len(index) < 9 else None
    if opcode in ("compare", "is-finite"):
        return Shape("pred", shapes[0].dims)
    if opcode in ("select", "clamp"):
        return shapes[1] if len(shapes) > 1 else None
    return shapes[0] if opcode in _LIKE_FIRST_OPERAND else None
