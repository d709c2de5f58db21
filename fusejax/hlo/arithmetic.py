"""What one launch computes, told from what stands inside it."""

import collections
import math
import re
from collections.abc import Mapping

from fusejax.hlo import infer
from fusejax.hlo.analysis import Work
from fusejax.hlo.module import ASYNC_STARTS, Computation, Instruction, Module, Shape

# Operations that move or rename data, or end up in addresses: they cost what the traffic costs.
_FREE = frozenset((
    "parameter", "constant", "iota", "broadcast", "bitcast", "bitcast-convert", "reshape",
    "transpose", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
    "gather", "reverse", "tuple", "get-tuple-element", "opt-barrier", "after-all",
))  # fmt: skip
_CALLING = frozenset(("fusion", "call", *ASYNC_STARTS))
_REDUCING = frozenset(("reduce", "reduce-window", "scatter", "select-and-scatter"))
_MATMULS = re.compile(r"__cublas\$|^cublas")
# Element-wise operations that pick or relabel a value and compute none.
_NO_FLOPS = frozenset(("convert", "select", "clamp", "copy", "is-finite", "reduce-precision"))
# Kernels and operations of which the text does not say how much they compute.
_HIDDEN = frozenset((
    "mosaic_gpu", "mosaic_tpu", "cublas", "cudnn", "library", "custom_call", "custom_fusion",
    "custom-call", "convolution", "fft", "sort", "cholesky", "triangular-solve", "collective",
))  # fmt: skip
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\["?([\d",]*)"?\]')


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Operations of the launch of `instruction`, which stands in `computation`.

    An operation is counted once per element of its result; one that a back end computes again for
    a second consumer is still counted once. What is inside a custom call is not known, but for the
    multiplications of a library's matrix product.
    """
    operations: collections.Counter[str] = collections.Counter()
    flops = _count(module, computation, instruction, operations)
    written = [leaf for _, leaf in instruction.shape.leaves()]
    read = [_operand(computation, instruction, i) for i in range(len(instruction.operands))]
    largest = max((*written, *read), key=lambda shape: shape.bytes, default=Shape("opaque"))
    return Work(
        dict(operations),
        flops,
        dtype=largest.dtype,
        width=largest.dims[-1] if largest.dims else 1,
        elements=max((shape.count for shape in written), default=0),
        matmul_dtype=read[0].dtype if flops and read else "",
        sums_columns=_sums_columns(module, computation, instruction),
    )


def flops(emitter: str, operations: Mapping[str, int], matmul_flops: int) -> int | None:
    """Floating-point operations of one launch: two for every multiplication of a matrix product
    with its addition, one for every other operation of an element, a tanh as well as an addition.

    None where the text does not show what is inside.

    Args:
      emitter: as of `Kernel`.
      operations: with `matmul_flops`, as of `Work`.
    """
    inside = {emitter, *(name.partition(":")[0] for name in operations)}
    # A Triton kernel of the user's own is a custom call too.
    is_empty = emitter == "triton" and not operations
    if not matmul_flops and (is_empty or inside & _HIDDEN):
        return None
    return matmul_flops + sum(
        count for name, count in operations.items() if _is_flop(*name.split(":", 1))
    )


def _is_flop(opcode: str, dtype: str) -> bool:
    return opcode not in _NO_FLOPS and dtype.startswith(("f", "bf", "c"))


def _sums_columns(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Whether the largest reduction inside leaves the last dimension of what it reduces."""
    inside = [(computation, instruction)]
    if instruction.opcode in _CALLING and instruction.called:
        body = module.computations[instruction.called[0]]
        inside = [(body, inner) for inner in body.instructions]
    reductions = [(where, i) for where, i in inside if i.opcode == "reduce"]
    if not reductions:
        return False
    where, largest = max(reductions, key=lambda one: _operand(one[0], one[1], 0).count)
    reduced = re.findall(r"\d+", largest.attributes.get("dimensions", ""))
    return str(len(_operand(where, largest, 0).dims) - 1) not in reduced


def _count(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    operations: collections.Counter[str],
) -> int:
    """Adds to `operations`; returns the floating-point operations of matrix products."""
    opcode = instruction.opcode
    if opcode in _CALLING and instruction.called:
        body = module.computations[instruction.called[0]]
        key = ("work", body.name)
        if key not in module.memo:
            module.memo[key] = _of_body(module, body)
        known, flops = module.memo[key]
        operations.update(known)
        return flops
    if opcode == "dot":
        contracting = instruction.attributes.get("lhs_contracting_dims", "")
        return _flops(computation, instruction, instruction.shape, contracting)
    if opcode == "custom-call":
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        return _library_flops(computation, instruction) if _MATMULS.search(target) else 0
    if opcode in _REDUCING:
        _count_reduction(module, computation, instruction, operations)
    elif opcode not in _FREE and not instruction.shape.is_tuple:
        dtype = instruction.shape.dtype
        if opcode == "convert":
            dtype = f"{_operand(computation, instruction, 0).dtype}>{dtype}"
        operations[f"{opcode}:{dtype}"] += instruction.shape.count
    return 0


def _of_body(module: Module, body: Computation) -> tuple[collections.Counter[str], int]:
    operations: collections.Counter[str] = collections.Counter()
    flops = sum(_count(module, body, inner, operations) for inner in body.instructions)
    return operations, flops


def _count_reduction(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    operations: collections.Counter[str],
) -> None:
    """One run of the reducing computation per element that goes in."""
    times = _operand(computation, instruction, 0).count
    for name in instruction.called:
        body = module.computations.get(name)
        for inner in body.instructions if body else ():
            if inner.opcode not in _FREE and not inner.shape.is_tuple:
                operations[f"{inner.opcode}:{inner.shape.dtype}"] += times


def _library_flops(computation: Computation, instruction: Instruction) -> int:
    found = _CONTRACTING.search(instruction.backend_config)
    product = next((shape for _, shape in instruction.shape.leaves()), Shape("opaque"))
    return _flops(computation, instruction, product, found[1] if found else "")


def _flops(
    computation: Computation, instruction: Instruction, product: Shape, contracting: str
) -> int:
    left = _operand(computation, instruction, 0)
    places = [int(number) for number in re.findall(r"\d+", contracting)]
    depth = math.prod(left.dims[place] for place in places if place < len(left.dims))
    return 2 * product.count * depth if places else 0


def _operand(computation: Computation, instruction: Instruction, index: int) -> Shape:
    if index >= len(instruction.operands):
        return Shape("opaque")
    operand = instruction.operands[index]
    known = computation.by_name.get(operand.name)
    return (infer.element(known.shape, operand.element) if known else None) or Shape("opaque")
