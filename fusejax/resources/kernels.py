"""What each kernel of a compiled program occupies: registers, shared memory, threads."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fusejax.hlo.analysis import Kernel
from fusejax.program import Program
from fusejax.resources import launches, mosaic, ptxas
from fusejax.resources.occupancy import SmLimits, occupancy

# What the counters of an H200 show for every kernel that ptxas gives fewer.
_LEAST_REGISTERS = 16


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of one kernel; None where they are not known."""

    registers: int | None = None
    """Per thread, as the card allocates them: never fewer than 16."""
    spill_bytes: int | None = None
    """Bytes that a thread's spills store and load, counted in the code, not at run time."""
    shared_bytes: int | None = None
    """Per block, static and dynamic together."""
    threads: int | None = None
    """Per block."""
    grid: tuple[int, int, int] | None = None
    """Blocks along x, y and z."""
    occupancy: float | None = None
    """Warps that can be resident over warps that the multiprocessor has room for, 0 to 1."""
    occupancy_limiter: str | None = None
    """registers, shared_memory, threads or blocks."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


def kernel_resources(
    program: Program, kernels: Sequence[Kernel], limits: SmLimits | None
) -> dict[str, Resources]:
    """What the kernels of a program occupy, by kernel name, without a GPU.

    Args:
      program: its launch order and PTX are read, and its HLO for Mosaic GPU kernels.
      kernels: the program's kernels in launch order.
      limits: of the card; None leaves the occupancy out.

    Returns:
      An entry for every kernel of which something is known. Kernels of libraries (cuBLAS, cuDNN)
      are never among them.
    """
    launched = launches.by_kernel(program.launch_order or "", kernels)
    usage = {
        function: used for report in ptxas.usages(program.ptx) for function, used in report.items()
    }
    found = {
        name: _resources(
            usage.get(launch.function or ""),
            launch.grid,
            launch.threads,
            launch.dynamic_shared_bytes,
            limits,
        )
        for name, launch in launched.items()
    }
    names = {kernel.name for kernel in kernels}
    pallas = [call for call in mosaic.calls(program.hlo) if call.instruction in names]
    mosaic_usage = mosaic.usage_of(pallas)
    for call in pallas:
        found[call.instruction] = _resources(
            mosaic_usage.get(call.instruction),
            call.grid,
            call.threads,
            call.dynamic_shared_bytes,
            limits,
        )
    return found


def _resources(
    usage: ptxas.Usage | None,
    grid: tuple[int, int, int] | None,
    threads: tuple[int, int, int] | None,
    dynamic_shared: int | None,
    limits: SmLimits | None,
) -> Resources:
    per_block = math.prod(threads) if threads else None
    registers = max(usage.registers, _LEAST_REGISTERS) if usage else None
    # Without the PTX only the dynamic part is known, which is not the whole.
    shared = (
        usage.static_shared_bytes + dynamic_shared if usage and dynamic_shared is not None else None
    )
    resources = Resources(
        registers=registers,
        spill_bytes=usage.spill_store_bytes + usage.spill_load_bytes if usage else None,
        shared_bytes=shared,
        threads=per_block,
        grid=grid,
    )
    if registers is None or shared is None or per_block is None or limits is None:
        return resources
    fits = occupancy(registers, per_block, shared, limits)
    return dataclasses.replace(resources, occupancy=fits.share, occupancy_limiter=fits.limiter)
