"""Reads XLA's thunk sequence: what a program launches, in order, and how."""

import dataclasses
import re
from collections.abc import Sequence

from fusejax.hlo.analysis import Kernel
from fusejax.resources.matching import match

_INDENT = 4
_THUNK = re.compile(r"(?P<indent> *)(?P<id>\d+): k(?P<kind>\w+)\s+\[[^\]]*\](?P<rest>.*)")
_TRIPLE = r"\d+, ?\d+, ?\d+"
_LAUNCH = re.compile(
    rf"(?P<function>\S+) grid: \[(?P<grid>{_TRIPLE})\] threads: \[(?P<threads>{_TRIPLE})\]"
    r"\s+shared_memory: (?P<shared>\d+) bytes"
)


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of the sequence; grid, threads and shared memory where it launches a kernel."""

    kind: str
    """CustomKernel, CustomCall, Copy, While, Conditional, Gemm, ..."""
    depth: int
    """Loops and branches around it."""
    function: str | None = None
    """Name of the device function."""
    grid: tuple[int, int, int] | None = None
    threads: tuple[int, int, int] | None = None
    """Per block."""
    dynamic_shared_bytes: int | None = None
    """Per block, what the kernel declares itself not counted."""


def parse(text: str) -> tuple[Thunk, ...]:
    """The steps of a thunk sequence in the order of the text; lines of other shapes are skipped."""
    thunks = []
    for line in text.splitlines():
        thunk = _THUNK.match(line)
        if thunk is None:
            continue
        depth = len(thunk["indent"]) // _INDENT
        launch = _LAUNCH.search(thunk["rest"])
        if launch is None:
            thunks.append(Thunk(thunk["kind"], depth))
            continue
        thunks.append(
            Thunk(
                thunk["kind"],
                depth,
                launch["function"],
                _triple(launch["grid"]),
                _triple(launch["threads"]),
                int(launch["shared"]),
            )
        )
    return tuple(thunks)


def by_kernel(text: str, kernels: Sequence[Kernel]) -> dict[str, Thunk]:
    """The launches of a thunk sequence, by the names of the compiled kernels.

    A kernel whose launch cannot be told from another's is left out.
    """
    launches = [thunk for thunk in parse(text) if thunk.function is not None]
    names = match([thunk.function or "" for thunk in launches], kernels, per_run=False)
    return {name: thunk for name, thunk in zip(names, launches, strict=True) if name is not None}


def _triple(text: str) -> tuple[int, int, int]:
    x, y, z = (int(number) for number in text.split(","))
    return x, y, z
