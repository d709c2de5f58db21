"""Kernels that fusion may have made too large: they spill, or few of their warps fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fusejax.comparison import PathResult
from fusejax.hlo.analysis import Kernel
from fusejax.ops.op import Op, hlo_dtype, nbytes
from fusejax.report.units import mib, tensor

# Below this share of the warps a multiprocessor hides little latency. Kernels of Mosaic GPU have
# copies in flight without warps waiting for them.
_FEW_WARPS = 0.25


def with_flags(path: PathResult, op: Op, shapes: Sequence[Any]) -> PathResult:
    """The path with a warning for each kernel that is possibly over-fused.

    Args:
      shapes: of the op's arguments, and of the cotangents after them in a backward pass.
    """
    flags = tuple(
        f"{kernel.name} {why}: possibly over-fused. {_shorter(kernel, op, shapes)}"
        for kernel in path.kernels
        if (why := strained(kernel, path.resources.get(kernel.name, {})))
    )
    return dataclasses.replace(path, warnings=(*path.warnings, *flags))


def flags(path: PathResult) -> PathResult:
    """The same of a path whose stages are not known."""
    told = tuple(
        f"{kernel.name} {why}: possibly over-fused"
        for kernel in path.kernels
        if (why := strained(kernel, path.resources.get(kernel.name, {})))
    )
    return dataclasses.replace(path, warnings=(*path.warnings, *told))


def strained(kernel: Kernel, used: dict[str, Any]) -> str | None:
    """What shows that a kernel holds too much at once, in words; None where nothing does."""
    registers, spilled = used.get("registers"), used.get("spill_bytes")
    occupancy = used.get("occupancy")
    if spilled:
        return f"spills {spilled} B a thread at {registers} registers"
    is_limited = used.get("occupancy_limiter") == "registers" and kernel.emitter != "mosaic_gpu"
    if is_limited and occupancy and occupancy < _FEW_WARPS:
        return f"leaves {occupancy:.0%} of the warps with {registers} registers a thread"
    return None


def _shorter(kernel: Kernel, op: Op, shapes: Sequence[Any]) -> str:
    """The split inside the kernel that hands over the fewest bytes."""
    inside = [stage for stage in op.chain.stages if stage.name in kernel.scopes]
    stages = inside if len(inside) > 1 else list(op.chain.stages)
    values = op.chain.shapes(shapes[: len(op.chain.arguments)])
    # A stage whose values nobody reads hands nothing over, and the last one is the end in any case.
    cuts = [
        (sum(nbytes(values[name]) for name in stage.outputs), stage)
        for stage in stages[:-1]
        if any(op.chain.readers(name) for name in stage.outputs)
    ]
    if not cuts:
        return "It is one stage, and no split of the op would make it smaller"
    size, stage = min(cuts, key=lambda cut: cut[0])
    handed = ", ".join(tensor(hlo_dtype(values[n].dtype), values[n].shape) for n in stage.outputs)
    return (
        f"A split behind stage {stage.name} would end its live values there and hand over {handed} "
        f"({mib(size)} written, and read again)"
    )
