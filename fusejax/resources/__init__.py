from typing import Any, Protocol

from fusejax.hlo.analysis import Analysis
from fusejax.program import Program
from fusejax.resources.kernels import Resources, kernel_resources
from fusejax.resources.occupancy import Occupancy, SmLimits, limits_of, occupancy

__all__ = [
    "Occupancy",
    "Resources",
    "SmLimits",
    "kernel_resources",
    "limits_of",
    "occupancy",
    "of_program",
]


class Described(Protocol):
    """A target, as far as this stage needs to know one."""

    @property
    def description(self) -> str | None:
        """Text form of XLA's GpuTargetConfigProto; None for the CPU."""


def of_program(
    program: Program, analysis: Analysis, target: Described
) -> dict[str, dict[str, Any]]:
    """`kernel_resources` of an analysed program on a target, as JSON values by kernel name."""
    limits = limits_of(target.description) if target.description else None
    found = kernel_resources(program, analysis.kernels, limits)
    return {name: resources.to_json() for name, resources in found.items()}
