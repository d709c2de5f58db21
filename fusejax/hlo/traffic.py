"""Bytes that one launch reads and writes, told from what stands inside it."""

import dataclasses
import re
from collections.abc import Mapping

from fusejax.hlo import infer
from fusejax.hlo.module import ASYNC_STARTS, Computation, Instruction, Module, Shape

# Element i of the result needs element i (in some order) of each operand of the same size.
_ONE_TO_ONE = frozenset((
    "abs", "add", "and", "atan2", "bitcast", "bitcast-convert", "cbrt", "ceil", "clamp", "compare",
    "complex", "convert", "copy", "cosine", "divide", "erf", "exponential",
    "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic",
    "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real",
    "reduce-precision", "remainder", "reshape", "reverse", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "transpose", "xor",
))  # fmt: skip


_ALIASED = re.compile(r"\{([\d,\s]{0,99})\}\s*:")


@dataclasses.dataclass(frozen=True)
class Access:
    """What one launch touches of its operands and results."""

    reads: tuple[int, ...]
    """Bytes read of each operand."""
    writes: Mapping[tuple[int, ...], int]
    """Bytes written of each array of the result, by index path."""
    in_place: Mapping[tuple[int, ...], int]
    """Results that are an operand updated in place, with the operand's number."""
    is_bound: bool
    """True where a read is an upper bound."""


def result_path(opcode: str, elements: int) -> tuple[int, ...]:
    """Where the result stands in the tuple that the start of an async pair is printed with."""
    if opcode == "copy":  # (destination, source, context)
        return (0,)
    return (1,) if elements > 1 else ()  # (operands, result, context...)


def access(module: Module, computation: Computation, instruction: Instruction) -> Access:
    """What the launch of `instruction`, which stands in `computation`, reads and writes.

    Whole arrays, except: slices and gathers read what they pick, as far as nothing else inside
    needs the rest; updates in place touch the update alone; an element-wise chain into a slice
    needs what the slice needs.
    """
    opcode = instruction.opcode
    shapes = [
        infer.element(computation.by_name[o.name].shape, o.element) or Shape("opaque")
        for o in instruction.operands
    ]
    called = instruction.called
    if opcode == "fusion" and called:
        return _inside(module.computations[called[0]], module, len(shapes))
    if opcode in ASYNC_STARTS and called:
        inner = _inside(module.computations[called[0]], module, len(shapes))
        moved = {(1, *path): size for path, size in inner.writes.items()}
        aliased = {(1, *path): operand for path, operand in inner.in_place.items()}
        return Access(inner.reads, moved, aliased, inner.is_bound)
    if opcode == "send":
        return Access(tuple(shape.bytes for shape in shapes), {}, {}, False)
    if opcode == "recv":
        return Access((0,) * len(shapes), _writes(instruction.shape, (0,)), {}, False)
    if opcode.endswith("-start"):
        path: tuple[int, ...] = ()
        if instruction.shape.is_tuple and opcode != "all-reduce-start":
            path = result_path(opcode.removesuffix("-start"), len(instruction.shape.elements))
        return Access(
            tuple(shape.bytes for shape in shapes), _writes(instruction.shape, path), {}, False
        )
    if opcode == "custom-call":
        reads, writes = tuple(shape.bytes for shape in shapes), _writes(instruction.shape, ())
        # Whether a call that updates an operand in place touches all of it is not told.
        updated = _aliased_bytes(instruction, writes)
        return Access(reads, writes, {}, updated > (sum(reads) + sum(writes.values())) // 1000)
    return _alone(instruction, tuple(shapes))


def _aliased_bytes(call: Instruction, writes: Mapping[tuple[int, ...], int]) -> int:
    """Bytes of a call's results that are operands too, a Pallas kernel's semaphores for example."""
    aliasing = call.attributes.get("output_to_operand_aliasing", "")
    paths = [
        tuple(int(index) for index in path.split(",") if index.strip())
        for path in _ALIASED.findall(aliasing)
    ]
    return sum(writes.get(path, 0) for path in paths)


def _writes(shape: Shape, under: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    part = infer.element(shape, under)
    return {path: leaf.bytes for path, leaf in part.leaves(under)} if part else {}


def _alone(instruction: Instruction, shapes: tuple[Shape, ...]) -> Access:
    """An instruction outside any fusion is a fusion of itself."""
    names = [operand.name for operand in instruction.operands]
    parameters = tuple(
        Instruction(f"parameter {number}", "parameter", shape, (), str(number), {}, False)
        for number, shape in enumerate(shapes)
    )
    operands = tuple(
        operand._replace(name=f"parameter {number}", element=())
        for number, operand in enumerate(instruction.operands)
    )
    body = Computation(
        instruction.name, (*parameters, instruction._replace(operands=operands, is_root=True))
    )
    return _measure(body, None, len(names))


def _inside(computation: Computation, module: Module, operands: int) -> Access:
    key = ("access", computation.name, operands)
    if key not in module.memo:
        module.memo[key] = _measure(computation, module, operands)
    return module.memo[key]


def _measure(body: Computation, module: Module | None, operands: int) -> Access:
    writes, in_place, updated = _root_writes(body)
    is_bound = False
    # Elements needed of each value, from the root backwards: a computation is in postorder.
    needed: dict[str, int] = {}
    roots = {body.root.name}
    if body.root.opcode == "tuple":
        roots |= {operand.name for operand in body.root.operands}
    for instruction in reversed(body.instructions):
        full = _count(instruction.shape)
        demand = full if instruction.name in roots else 0
        for user in body.users.get(instruction.name, ()):
            if demand >= full and user.name not in updated:
                break
            for position, operand in enumerate(user.operands):
                if operand.name == instruction.name and user.opcode != "tuple":
                    part, bound = _demand(
                        user,
                        position,
                        full,
                        needed[user.name],
                        user.name in updated,
                        _combined(body, user) if user.name in updated else 0,
                        module,
                    )
                    demand += part
                    is_bound |= bound
        needed[instruction.name] = min(full, demand)
    reads = []
    for number in range(operands):
        parameter = body.parameters.get(number)
        elements = needed[parameter.name] if parameter else 0
        reads.append(_bytes(parameter.shape, elements) if parameter else 0)
    return Access(tuple(reads), writes, in_place, is_bound)


def _count(shape: Shape) -> int:
    """Elements of an array; bytes of a tuple, whose elements differ in size."""
    return shape.bytes if shape.is_tuple else shape.count


def _bytes(shape: Shape, elements: int) -> int:
    return elements if shape.is_tuple else (elements * shape.bits + 7) // 8


def _demand(
    user: Instruction,
    position: int,
    full: int,
    needed: int,
    is_updated: bool,
    touched: int,
    module: Module | None,
) -> tuple[int, bool]:
    """Elements that `user` needs of its operand, and whether that is an upper bound."""
    opcode = user.opcode
    if opcode == "dynamic-update-slice" and is_updated and position == 0:
        return 0, False
    if opcode == "scatter" and is_updated and 2 * position < len(user.operands) - 1:
        return touched, False
    if opcode in ("slice", "dynamic-slice") and position == 0:
        return min(full, needed), False
    if opcode == "gather" and position == 0:
        return min(full, needed), needed < full
    if opcode == "get-tuple-element":
        return user.shape.bytes, False
    if opcode == "dynamic-update-slice" and position == 0:
        return min(full, needed), False
    is_view = opcode in _ONE_TO_ONE or (opcode == "fusion" and _is_alias(user))
    if is_view and full == _count(user.shape):
        return needed, False
    if opcode == "broadcast":
        return min(full, needed), False
    if opcode == "fusion" and module is not None and user.called:
        called = module.computations[user.called[0]]
        inner = _inside(called, module, len(user.operands))
        shape = called.parameters[position].shape if position in called.parameters else None
        if shape is not None and shape.bits:
            return min(full, inner.reads[position] * 8 // shape.bits), inner.is_bound
    return full, False


def _combined(body: Computation, scatter: Instruction) -> int:
    """Elements of its operand that a scatter reads to combine them with the updates."""
    if scatter.opcode != "scatter" or len(scatter.operands) < 3:
        return 0
    return body.by_name[scatter.operands[-1].name].shape.count


def _root_writes(
    body: Computation,
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int], set[str]]:
    """Bytes written per result, results that are in place, and the updates that make them so."""
    writes: dict[tuple[int, ...], int] = {}
    in_place: dict[tuple[int, ...], int] = {}
    updated: set[str] = set()
    for path, shape in body.root.shape.leaves():
        writes[path] = shape.bytes
        update, operand, size = _update(body, path)
        if update is not None:
            target = _origin(body, update.operands[operand].name)
            if target.opcode == "parameter" and target.shape.bytes == shape.bytes:
                writes[path] = size
                in_place[path] = int(target.literal)
                updated.add(update.name)
    return writes, in_place, updated


def _update(body: Computation, path: tuple[int, ...]) -> tuple[Instruction | None, int, int]:
    """The update that ends in the result at `path`, its operand's number, and bytes it touches."""
    value = body.root
    index = 0
    if value.opcode == "tuple" and path and path[0] < len(value.operands):
        operand = value.operands[path[0]]
        value = body.by_name[operand.name]
        index = operand.element[0] if operand.element else 0
    elif path:
        index = path[0]
    while value.opcode in ("bitcast", "get-tuple-element") and value.operands:
        if value.opcode == "get-tuple-element":
            text = value.attributes.get("index", "0")
            index = int(text) if text.isdigit() and len(text) < 9 else 0
        value = body.by_name[value.operands[0].name]
    if value.opcode == "dynamic-update-slice" and len(value.operands) > 1:
        return value, 0, body.by_name[value.operands[1].name].shape.bytes
    inputs = (len(value.operands) - 1) // 2
    if value.opcode == "scatter" and index < inputs:
        update = body.by_name[value.operands[inputs + 1 + index].name]
        return value, index, update.shape.bytes
    return None, 0, 0


def _is_alias(fusion: Instruction) -> bool:
    """Whether a nested fusion is its only operand under another layout, as TPU modules have it."""
    aliasing = fusion.attributes.get("output_to_operand_aliasing", "")
    return aliasing.replace(" ", "") == "{{}:(0,{})}" and len(fusion.operands) == 1


def _origin(body: Computation, name: str) -> Instruction:
    value = body.by_name[name]
    while value.opcode in ("bitcast", "get-tuple-element", "copy", "fusion") and value.operands:
        if value.opcode == "fusion" and not _is_alias(value):
            break
        if (
            value.opcode == "copy"
            and value.shape.layout != body.by_name[value.operands[0].name].shape.layout
        ):
            break
        value = body.by_name[value.operands[0].name]
    return value
