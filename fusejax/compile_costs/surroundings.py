"""What XLA puts around a kernel that it cannot look into, for inputs as they come in practice.

A Mosaic GPU kernel is a custom call: it takes whole row-major arrays and hands back whole ones.
Whatever else the program has (a slice, a cast, another layout, element-wise neighbours) becomes
kernels of its own, with tensors in memory between, where XLA would fuse it into its own kernels.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax import paths
from fusejax.comparison import Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.errors import first_line
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analyse import analyse_module
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.hlo.module import Instruction, Module
from fusejax.ops.op import Op, nbytes

PATHS = ("xla", "pallas")

_CARRIERS = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "fusion")
)


@dataclasses.dataclass(frozen=True)
class Input:
    """A way in which an op is called inside a larger program."""

    name: str
    code: str
    """What the program computes, op being the op."""
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    """What the program takes."""
    before: Callable[..., tuple[Any, ...]]
    """From those to the arguments of the op."""
    after: Callable[[Any], Any] = lambda result: result
    """What happens to each result of the op."""


@dataclasses.dataclass(frozen=True)
class Extra:
    """A kernel beside the Mosaic GPU kernels of a program."""

    name: str
    emitter: str
    does: tuple[str, ...]
    """HLO opcodes inside, each once, in order; without those that move or compute nothing."""
    traffic: Traffic


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """A program around one path of the op."""

    input: str
    path: str
    launches: int
    traffic: Traffic
    needed_bytes: int
    """What the op takes of the program's arguments, read once; its results, written once."""
    boundary_bytes: int
    """Written and read again between its kernels."""
    mosaic_kernels: int
    extras: tuple[Extra, ...]
    """Of the xla path all kernels."""

    @property
    def extra_bytes(self) -> int:
        """Read and written by the extra kernels."""
        return sum(extra.traffic.total for extra in self.extras)


def inputs(op: Op, shape: Sequence[int], dtype: Any) -> tuple[Input, ...]:
    """The cases for an op whose first argument is a matrix, as it has for all ops here."""
    dtype = jnp.dtype(dtype)
    wide = jnp.dtype(jnp.float32)
    other = wide if dtype != wide else jnp.dtype(jnp.bfloat16)
    x, *rest = op.argument_shapes(shape, dtype)
    rows, width = x.shape

    def first(name: str, code: str, given: tuple[Sequence[int], Any], back: Any) -> Input:
        argument = jax.ShapeDtypeStruct(tuple(given[0]), given[1])
        return Input(name, code, (argument, *rest), lambda a, *more: (back(a), *more))

    def shaped(name: str, code: str, sizes: Sequence[int]) -> Input:
        return Input(name, code, op.argument_shapes(sizes, dtype), lambda *given: given)

    parameters_narrow = tuple(
        jax.ShapeDtypeStruct(
            argument.shape,
            argument.dtype
            if argument.dtype == np.bool_
            else jnp.bfloat16
            if len(argument.shape) == 1
            else wide,
        )
        for argument in (x, *rest)
    )
    return (
        shaped("row-major", "op(x)", shape),
        first("transposed", "op(x.T)", ((width, rows), dtype), lambda a: a.T),
        first(
            "rows of a larger array",
            f"op(x[{rows}:])",
            ((2 * rows, width), dtype),
            lambda a: a[rows:],
        ),
        first(
            "columns of a larger array",
            f"op(x[:, {width}:])",
            ((rows, 2 * width), dtype),
            lambda a: a[:, width:],
        ),
        first(
            f"cast from {other.name}",
            f"op(x.astype({dtype.name}))",
            (x.shape, other),
            lambda a: a.astype(dtype),
        ),
        Input(
            "float32, bfloat16 vectors",
            "op(x, bf16 vectors)",
            parameters_narrow,
            lambda *given: given,
        ),
        shaped("odd rows", f"op(x[{rows - 1},...])", (rows - 1, *shape[1:])),
        shaped("odd width", f"op(x[..,{shape[1] - 1}])", (shape[0], shape[1] - 1, *shape[2:])),
        dataclasses.replace(
            first(
                "between element-wise neighbours",
                "op(x * 1.5) + 1",
                (x.shape, dtype),
                lambda a: a * 1.5,
            ),
            after=lambda result: result + 1,
        ),
    )


def surroundings(
    op: Op,
    shape: Sequence[int],
    dtype: Any,
    target: Target,
    *,
    names: Sequence[str] = PATHS,
    cases: Sequence[Input] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Surroundings | Refusal, ...]:
    """Compiles every case with XLA's own kernels and with the Pallas kernel.

    Args:
      cases: by default all of `inputs`.

    Returns:
      Paths that do not serve the shape at all; then by case and path, where a path that does not
      serve the case is a `Refusal` named "path, case".
    """
    refused = {name: paths.refusal(op, name, "forward", shape, dtype, target) for name in names}
    found: list[Surroundings | Refusal] = [
        Refusal(name, reason) for name, reason in refused.items() if reason is not None
    ]
    for case in inputs(op, shape, dtype) if cases is None else cases:
        for name in names:
            if refused[name] is not None:
                continue
            progress(f"{name}, input {case.name}")
            taken = jax.eval_shape(case.before, *case.arguments)
            reason = op.kernel_refusal(*taken) if name == "pallas" else None
            if reason is None:
                try:
                    found.append(_surrounded(op, case, name, target))
                except Exception as error:
                    reason = f"does not compile: {first_line(error)}"
            if reason is not None:
                found.append(Refusal(f"{name}, {case.name}", reason))
    return tuple(found)


def _surrounded(op: Op, case: Input, name: str, target: Target) -> Surroundings:
    (stage,) = paths.build(op, name, "forward").chain.stages

    def program(*given: Any) -> Any:
        return tuple(case.after(result) for result in stage.function(*case.before(*given)))

    program.__name__ = f"{op.name}_{name}"
    compiled = aot.compile_program(program, case.arguments, target).program
    module = hlo_text.read_module(compiled.hlo)
    analysis = analyse_module(module, compiled)
    return Surroundings(
        input=case.name,
        path=name,
        launches=analysis.launches,
        traffic=analysis.traffic,
        needed_bytes=_needed_bytes(program, case),
        boundary_bytes=sum(b.written_bytes + b.read_bytes for b in analysis.boundaries),
        mosaic_kernels=sum(k.count for k in analysis.kernels if k.emitter == "mosaic_gpu"),
        extras=tuple(_extra(k, module) for k in analysis.kernels if k.emitter != "mosaic_gpu"),
    )


def _needed_bytes(program: Callable[..., Any], case: Input) -> int:
    taken = jax.eval_shape(case.before, *case.arguments)
    read = sum(
        math.prod(used.shape) * given.dtype.itemsize
        for given, used in zip(case.arguments, taken, strict=True)
    )
    return read + sum(map(nbytes, jax.eval_shape(program, *case.arguments)))


def _extra(kernel: Kernel, module: Module) -> Extra:
    return Extra(
        kernel.name, kernel.emitter, opcodes(kernel.name, module), kernel.traffic * kernel.count
    )


def opcodes(kernel: str, module: Module) -> tuple[str, ...]:
    """What an instruction, or the fusion that it is, computes: HLO opcodes in order, each once."""
    launched = next(
        (
            computation.by_name[name]
            for computation in module.computations.values()
            if (name := kernel.rpartition("/")[2]) in computation.by_name
        ),
        None,
    )
    if launched is None:
        return ()
    found = dict.fromkeys(i.opcode for i in _inside(launched, module))
    return tuple(opcode for opcode in found if opcode not in _CARRIERS)


def _inside(instruction: Instruction, module: Module) -> list[Instruction]:
    if instruction.opcode != "fusion":
        return [instruction]
    return [
        inner
        for name in instruction.called
        for outer in module.computations[name].instructions
        for inner in _inside(outer, module)
    ]
