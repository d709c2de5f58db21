"""The four ways to run an op, each a list of programs that are dispatched one after another."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fusejax.compile.targets import Target
from fusejax.ops.gradient import cotangent, gradient_chain, gradient_program
from fusejax.ops.op import Chain, Op, Stage

NAMES = ("eager", "split", "xla", "pallas")
MODES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Path:
    """A way to run an op. Every stage of its chain is a program of its own."""

    name: str
    chain: Chain

    def run(self, programs: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Dispatches `programs`, one callable per stage of the chain, on `arguments`."""
        values = dict(zip(self.chain.arguments, arguments, strict=True))
        for stage, program in zip(self.chain.stages, programs, strict=True):
            outputs = program(*(values[name] for name in stage.inputs))
            if not isinstance(outputs, tuple | list):
                outputs = (outputs,)
            values.update(zip(stage.outputs, outputs, strict=True))
        return tuple(values[name] for name in self.chain.results)


def eager_chain(op: Op, mode: str) -> Chain:
    """The op's stages, or those of its gradient."""
    return op.chain if mode == "forward" else gradient_chain(op.chain)


def build(op: Op, name: str, mode: str, *, interpret: Any = None) -> Path:
    """A path of an op. `interpret` is handed to the Pallas kernel, to run it in simulation."""
    if name == "eager":
        return Path(name, eager_chain(op, mode))
    arguments, results = op.chain.arguments, op.chain.results
    if name == "pallas":
        program = _kernel_program(op, interpret)
    else:
        program = op.chain.program(op.name, op.split_after if name == "split" else ())
    if mode == "backward":
        program = gradient_program(program, len(arguments))
        results = tuple(cotangent(argument) for argument in arguments)
        arguments = (*arguments, *(cotangent(result) for result in op.chain.results))
    return Path(name, Chain(arguments, (Stage(name, program, arguments, results),), results))


def _kernel_program(op: Op, interpret: Any) -> Any:
    def kernel(*values: Any) -> tuple[Any, ...]:
        found = op.kernel(*values, interpret=interpret)
        return found if isinstance(found, tuple) else (found,)

    kernel.__name__ = f"{op.name}_pallas"
    return kernel


def refusal(
    op: Op, name: str, mode: str, shape: Sequence[int], dtype: Any, target: Target
) -> str | None:
    """Why a path cannot serve this input on this target, or None."""
    if name != "pallas":
        return None
    reason = op.kernel_refusal(*op.argument_shapes(shape, dtype))
    if reason is not None:
        return reason
    if target.kind == "cpu":
        return "Mosaic GPU kernels run on a GPU; on a CPU this one is only checked, in simulation"
    capability = target.figure("major")
    if capability is not None and capability < 9:
        return (
            "Mosaic GPU kernels need a GPU of compute capability 9.0 or newer (Hopper); "
            f"{target.title} has {capability}.{target.figure('minor') or 0}"
        )
    return None


def argument_shapes(
    op: Op, mode: str, shape: Sequence[int], dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of what every path of the op takes: arguments, then cotangents."""
    arguments = op.argument_shapes(shape, dtype)
    if mode == "forward":
        return arguments
    values = op.chain.shapes(arguments)
    return (*arguments, *(values[result] for result in op.chain.results))
