"""How many warps fit on a multiprocessor together, and what keeps more from fitting."""

import dataclasses
import re

_WARP = 32
# A multiprocessor has four schedulers with a quarter of the registers each.
_SCHEDULERS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
# Since compute capability 8.0 the driver keeps 1 KiB of every block's shared memory for itself.
_RESERVED_SHARED = 1024
_BLOCKS_PER_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
_USUAL_BLOCKS_PER_SM = 32


@dataclasses.dataclass(frozen=True)
class SmLimits:
    """What one multiprocessor (SM) holds. Shared memory in bytes."""

    registers: int = 65_536
    shared_bytes: int = 233_472
    threads: int = 2_048
    blocks: int = 32
    reserved_shared_bytes: int = _RESERVED_SHARED
    """Taken from every block's share by the driver."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Warps that fit over warps that the SM has room for, and what limits them."""

    share: float
    """0 to 1."""
    limiter: str
    """registers, shared_memory, threads or blocks. "threads" at full occupancy."""
    blocks: int
    """Blocks that fit on one SM together; 0 where not even one does."""


def limits_of(description: str) -> SmLimits | None:
    """The limits in a GPU target description (XLA's GpuTargetConfigProto as text).

    None where the description lacks one of them.
    """
    names = ("registers_per_core_limit", "shared_memory_per_core", "threads_per_core_limit")
    found = [re.search(rf"\b{name}: (\d+)", description) for name in names]
    registers, shared, threads = (int(match[1]) if match else None for match in found)
    if registers is None or shared is None or threads is None:
        return None
    capability = _capability(description)
    return SmLimits(
        registers=registers,
        shared_bytes=shared,
        threads=threads,
        blocks=_BLOCKS_PER_SM.get(capability, _USUAL_BLOCKS_PER_SM),
        reserved_shared_bytes=_RESERVED_SHARED if capability >= (8, 0) else 0,
    )


def occupancy(
    registers: int, threads_per_block: int, shared_bytes_per_block: int, limits: SmLimits
) -> Occupancy:
    """The occupancy that CUDA's calculator gives, with the largest shared-memory carve-out.

    Args:
      registers: per thread.
      threads_per_block: at least 1.
      shared_bytes_per_block: static plus dynamic.
      limits: of the card.
    """
    warps = _ceil(threads_per_block, _WARP) // _WARP
    registers_per_warp = _ceil(max(registers, 1) * _WARP, _REGISTER_UNIT)
    warps_by_registers = limits.registers // _SCHEDULERS // registers_per_warp * _SCHEDULERS
    shared = _ceil(shared_bytes_per_block + limits.reserved_shared_bytes, _SHARED_UNIT)
    # In this order, so that where two limit alike the one that is harder to lift is named.
    blocks_by = {
        "threads": limits.threads // (warps * _WARP),
        "blocks": limits.blocks,
        "shared_memory": limits.shared_bytes // shared if shared else limits.blocks,
        "registers": warps_by_registers // warps,
    }
    limiter = min(blocks_by, key=lambda name: blocks_by[name])
    blocks = blocks_by[limiter]
    return Occupancy(blocks * warps * _WARP / limits.threads, limiter, blocks)


def _capability(description: str) -> tuple[int, int]:
    block = re.search(r"cuda_compute_capability\s*\{([^}]*)\}", description)
    # A text proto leaves out fields that are zero.
    major, minor = (
        re.search(rf"\b{name}: (\d+)", block[1] if block else "") for name in ("major", "minor")
    )
    return int(major[1]) if major else 0, int(minor[1]) if minor else 0


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit) * unit
