"""Inputs that a path cannot serve: who refuses, in which words, and what is left.

The Pallas kernel of an op refuses with a sentence before anything is compiled; the xla path is what
serves the input instead, or refuses too where the input makes no sense.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax import paths
from fusejax.compile import aot, platform, targets
from fusejax.compile.targets import Target
from fusejax.errors import first_line
from fusejax.hlo.analyse import analyse
from fusejax.ops.op import Op, hlo_dtype
from fusejax.report.units import tensor

ROWS, WIDTH, DEPTH = 64, 1024, 512
WIDE = 300_000  # beyond what the shared memory of a cluster holds of a row
RAGGED = (100, 1000, 100)

type Arguments = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """An input that is not what the kernels were made for."""

    name: str
    arguments: Arguments
    x64: bool = False
    """Whether JAX has 64-bit types enabled; else it takes float64 arrays for float32 ones."""
    card: str | None = None
    """Another target."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a path does with an input."""

    launches: int | None
    """Of the compiled path; None where it refuses. That it compiles says nothing of how much an
    8-bit type keeps of the result."""
    refusal: str | None
    """Why it refuses, one sentence."""
    raised: str | None = None
    """The exception that calling it anyway raises, and its first line; of a kernel that refuses."""


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One case."""

    case: str
    arguments: str
    """As HLO writes them."""
    target: str
    pallas: Outcome
    xla: Outcome

    @property
    def serves(self) -> str | None:
        """The path that serves the input: the first of pallas and xla that does, or neither."""
        outcomes = (("pallas", self.pallas), ("xla", self.xla))
        return next((name for name, found in outcomes if found.launches is not None), None)


def cases(op: Op) -> tuple[Case, ...]:
    """The cases for an op."""
    shape = (ROWS, WIDTH, DEPTH)[: len(op.axes)]
    bfloat16 = jnp.bfloat16

    def given(sizes: Sequence[int], dtype: Any = bfloat16) -> Arguments:
        return op.argument_shapes(sizes, dtype)

    usual = given(shape)
    found = (
        Case("float64", given(shape, np.float64), x64=True),
        Case("int8", given(shape, np.int8)),
        Case("float8_e4m3fn", given(shape, jnp.float8_e4m3fn)),
        Case("no rows", given((0, *shape[1:]))),
        Case("no columns", given((shape[0], 0, *shape[2:]))),
        Case("very wide rows", given((shape[0], WIDE, *shape[2:]))),
        Case("2^31 elements", given((2**18, 2**13, *shape[2:]))),
        Case("odd sizes", given(RAGGED[: len(op.axes)])),
        Case("rank 0", tuple(_struct((), a.dtype) for a in usual)),
        Case("rank 3", _batched(op, usual)),
        Case("vectors too short", tuple(_shorter(a) if len(a.shape) == 1 else a for a in usual)),
        Case("x wider than the others", (_wider(usual[0]), *usual[1:])),
        Case("a card before Hopper", usual, card="a100"),
    )
    alone = len(usual) == 1  # an argument that is alone cannot disagree with another
    return tuple(
        case
        for case in found
        if not (case.arguments == usual and case.card is None)
        and not (alone and case.name.startswith("x wider"))
    )


def fallbacks(
    op: Op, target: Target, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[Fallback, ...]:
    """What the Pallas kernel and XLA do with every case. Nothing that they raise gets out."""
    found = []
    for case in cases(op):
        used = target
        if case.card is not None:
            if platform.missing_compiler() is not None:
                continue
            used = targets.deviceless(case.card)
        progress(f"unsupported input: {case.name}")
        with jax.enable_x64(True) if case.x64 else contextlib.nullcontext():
            found.append(
                Fallback(
                    case=case.name,
                    arguments=", ".join(map(_written, case.arguments)),
                    target=used.name,
                    pallas=_pallas(op, case.arguments, used),
                    xla=_compiled(op.chain.program(op.name), case.arguments, used),
                )
            )
    return tuple(found)


def _pallas(op: Op, arguments: Arguments, target: Target) -> Outcome:
    refusal = _sentence(op, arguments, target)
    if refusal is None:
        return _compiled(op.kernel, arguments, target)
    try:
        jax.jit(op.kernel).trace(*arguments).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return Outcome(None, refusal, _named(error))
    return Outcome(None, refusal)


def _sentence(op: Op, arguments: Arguments, target: Target) -> str | None:
    try:
        reason = op.kernel_refusal(*arguments)
    except Exception as error:  # a refusal that cannot cope with its input is worth a row, no less
        return f"the check itself fails: {_named(error)}"
    usual = (ROWS, WIDTH, DEPTH)[: len(op.axes)]
    return reason or paths.refusal(op, "pallas", "forward", usual, jnp.bfloat16, target)


def _compiled(function: Callable[..., Any], arguments: Arguments, target: Target) -> Outcome:
    try:
        program = aot.compile_program(function, arguments, target).program
    except Exception as error:
        return Outcome(None, _named(error))
    return Outcome(analyse(program).launches, None)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _batched(op: Op, usual: Arguments) -> Arguments:
    """Arguments with rows get an axis more in front."""
    return tuple(
        _struct((2, *a.shape), a.dtype) if name in op.row_arguments else a
        for name, a in zip(op.chain.arguments, usual, strict=True)
    )


def _shorter(argument: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return _struct((*argument.shape[:-1], argument.shape[-1] - 1), argument.dtype)


def _wider(argument: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return _struct((*argument.shape[:-1], argument.shape[-1] + 1), argument.dtype)


def _written(argument: jax.ShapeDtypeStruct) -> str:
    name = np.dtype(argument.dtype).name
    short = {"bool": "pred", "int8": "s8"}.get(name) or hlo_dtype(argument.dtype).replace("_", "")
    return tensor(short, argument.shape)
