"""What a calibration measures: sizes, and how often."""

import dataclasses

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of what is timed. The defaults are for a card with more than 16 GB of memory."""

    rounds: int = 3
    """Turns of everything that is timed."""
    memory_bytes: tuple[int, ...] = tuple(_MIB << shift for shift in (0, 2, 4, 6, 8, 10))
    """Read plus written by one kernel."""
    l2_bytes: tuple[int, ...] = (4 * _MIB, 8 * _MIB, 16 * _MIB, 24 * _MIB)
    """The same, for data that stay in the L2 cache: a fraction of it, as outputs are not always put
    where the ones before were."""
    driver_copy_bytes: tuple[int, ...] = (64 * _MIB, 256 * _MIB, 1024 * _MIB)
    emitter_bytes: int = 512 * _MIB
    widths: tuple[int, ...] = (1024, 4096, 8192, 16384)
    """Row lengths of Triton's row kernels, whose speed depends on them."""
    chain_elements: int = 1 << 24
    matmuls: tuple[tuple[int, int, int], ...] = (
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (2048, 2048, 2048),
        (1024, 1024, 1024),
        (65536, 1024, 1024),
        (8192, 512, 8192),
    )
    """m, n, k."""
    program_bytes: int = 256 * _MIB
    """Of the array of the programs between which the gap is measured: a kernel on it takes longer
    than the host needs to dispatch."""
    link_bytes: int = 128 * _MIB
    """Of the array of the programs of many kernels: larger than the L2 cache, for what is in it
    would be there at other times with the profiler than without."""
    links: tuple[int, int] = (4, 16)
    tiny_links: tuple[int, int] = (64, 128)
    """Kernels of these programs, and of those of kernels that do next to nothing: so many that the
    device is not faster than the host dispatches."""
