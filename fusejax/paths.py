"""The ways to run an op, each a list of programs that are dispatched one after another."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fusejax.compile.targets import Target
from fusejax.ops.gradient import (
    cotangent,
    gradient_chain,
    gradient_program,
    gradient_results,
)
from fusejax.ops.op import Chain, Op, Stage

NAMES = ("eager", "split", "recompute", "xla", "pallas_split", "pallas")
"""From the most to the least split."""
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


PALLAS = ("pallas_split", "pallas")
"""Those with kernels of ours."""


def of(op: Op) -> tuple[str, ...]:
    """The paths of an op: "recompute" where a value has several consumers, "pallas_split" where a
    matrix product can be left to the library."""
    missing = set() if op.recomputed else {"recompute"}
    missing |= {"pallas_split"} if op.split_kernel is None else set()
    return tuple(name for name in NAMES if name not in missing)


def eager_chain(op: Op, mode: str) -> Chain:
    """The op's stages, or those of its gradient."""
    return op.chain if mode == "forward" else gradient_chain(op.chain)


def build(op: Op, name: str, mode: str, *, interpret: Any = None) -> Path:
    """A path of an op. `interpret` is handed to the Pallas kernel, to run it in simulation."""
    if name == "eager":
        return Path(name, eager_chain(op, mode))
    arguments, results = op.chain.arguments, op.chain.results
    if name in PALLAS:
        kernel = op.kernel if name == "pallas" else op.split_kernel
        program = _kernel_program(f"{op.name}_{name}", kernel, interpret)
    elif name == "recompute":
        program = op.chain.program(op.name, recomputed=op.recomputed)
    else:
        program = op.chain.program(op.name, op.split_after if name == "split" else ())
    if mode == "backward":
        program = gradient_program(program, op.chain)
        results = gradient_results(op.chain)
        arguments = (*arguments, *(cotangent(result) for result in op.chain.results))
    return Path(name, Chain(arguments, (Stage(name, program, arguments, results),), results))


def _kernel_program(name: str, kernel: Any, interpret: Any) -> Any:
    def run(*values: Any) -> tuple[Any, ...]:
        found = kernel(*values, interpret=interpret)
        return found if isinstance(found, tuple) else (found,)

    run.__name__ = name
    return run


def refusal(
    op: Op, name: str, mode: str, shape: Sequence[int], dtype: Any, target: Target
) -> str | None:
    """Why a path cannot serve this input on this target, or None."""
    if name == "recompute":
        if not op.recomputed:
            return f"no value of {op.name} has several consumers"
        return None if mode == "forward" else "what is recomputed is laid down for forward only"
    if name not in PALLAS:
        return None
    if name == "pallas_split" and op.split_kernel is None:
        return f"{op.name} has no path of this kind"
    if name == "pallas" and mode not in op.kernel_modes:
        return f"the kernel of {op.name} has no gradient"
    if name == "pallas":
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
    if name == "pallas" and op.kernel_is_for_hopper and capability not in (None, 9):
        return f"the kernel of {op.name} is for Hopper (9.0) alone; {target.title} has {capability}"
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
