"""Modelled bytes beside counted ones, launch by launch, and why they differ where that is known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fusejax.errors import UsageError
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.measure.counters import Counted
from fusejax.resources.matching import match

# Reads of kernels that the model knows exactly agreed within 0.1 % on an H200.
TOLERANCE = 0.02
_SMALL = 1_000_000
_PRODUCTS = frozenset(("cublas", "cudnn", "triton_gemm", "dot", "convolution"))


@dataclasses.dataclass(frozen=True)
class Run:
    """A function that was to be run once where it is counted."""

    function: str
    kernels: tuple[Kernel, ...] = ()
    """By the model, in launch order."""
    failure: str | None = None
    """Why it was not run to its end, in one line; None where it was."""
    is_begun: bool = False
    """Whether it was begun where it is counted, whatever came of it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One launch: what its kernel should move, and what the card counted."""

    function: str
    kernel: str
    """Name of the compiled kernel; of the device function where it is not known which it was."""
    emitter: str | None
    modelled: Traffic | None
    """None where it is not known which kernel it was."""
    counted: Traffic

    @property
    def off(self) -> float | None:
        """How far the counted reads are off, 0.01 for one per cent more than modelled."""
        if self.modelled is None or not self.modelled.read:
            return None
        return self.counted.read / self.modelled.read - 1

    def to_json(self) -> dict[str, Any]:
        """A row of the "fusejax.check_bytes/1" schema."""
        return {
            "function": self.function,
            "kernel": self.kernel,
            "emitter": self.emitter,
            "modelled_read": self.modelled.read if self.modelled else None,
            "modelled_written": self.modelled.written if self.modelled else None,
            "counted_read": self.counted.read,
            "counted_written": self.counted.written,
            "is_bound": self.modelled.is_bound if self.modelled else None,
            "why_off": why_off(self),
        }


def rows(runs: Sequence[Run], launches: Sequence[Counted], marker: str) -> tuple[Row, ...]:
    """A row for every launch of the runs that came to their end.

    Args:
      runs: all, in the order in which they were to be run.
      launches: those of the runs that were begun, in order; a launch of the device function
        `marker` stands before each run.

    Raises:
      UsageError: the launches are of more or fewer runs.
    """
    counted: list[list[Counted]] = []
    for launch in launches:
        if launch.function == marker:
            counted.append([])
        elif counted:
            counted[-1].append(launch)
    begun = [run for run in runs if run.is_begun]
    if len(counted) != len(begun):
        raise UsageError(
            f"ncu counted {len(counted)} runs and {len(begun)} were begun: count fewer functions"
        )
    return tuple(
        row
        for run, own in zip(begun, counted, strict=True)
        if run.failure is None
        for row in _run_rows(run, own)
    )


def _run_rows(run: Run, launches: Sequence[Counted]) -> list[Row]:
    known = {kernel.name: kernel for kernel in run.kernels}
    names = match([launch.function for launch in launches], run.kernels, per_run=True)
    found = []
    for name, launch in zip(names, launches, strict=True):
        kernel = known.get(name or "")
        found.append(
            Row(
                function=run.function,
                kernel=kernel.name if kernel else launch.function,
                emitter=kernel.emitter if kernel else None,
                modelled=kernel.traffic if kernel else None,
                counted=Traffic(launch.read_bytes, launch.written_bytes),
            )
        )
    return found


def why_off(row: Row) -> str | None:
    """Why a launch's reads are off by more than `TOLERANCE`; None where they are not.

    That the kernel before left its result in the cache is no reason: ncu empties the cache before
    every kernel.
    """
    if row.modelled is None:
        return "which kernel this launch is cannot be told"
    more = row.counted.read - row.modelled.read
    if abs(more) <= TOLERANCE * row.modelled.read:
        return None
    if row.modelled.is_bound and more < 0:
        return "the model is an upper bound: which elements are picked is known only at run time"
    if abs(more) < _SMALL:
        return "less than 1 MB: code, constants and sectors used in part are not modelled"
    if row.emitter in _PRODUCTS and more > 0:
        return (
            "the model counts an operand of a product once; a tile that has left the cache is read "
            "again"
        )
    return "not explained"
