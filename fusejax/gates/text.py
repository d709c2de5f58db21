"""What a gate says of kernels and boundaries, in lines of plain text."""

from collections.abc import Iterator, Sequence

from fusejax.gates.budget import Budget, Difference
from fusejax.hlo.analysis import Boundary, Kernel
from fusejax.hlo.diff import boundary_bytes, kernel_bytes
from fusejax.report.units import counted, mib, tensor

_MOST = 12
"""Rows of a list; what is left out is counted."""
_SCOPES = 4
"""Scopes of a row."""


def kernels(title: str, found: Sequence[Kernel], sign: str = "") -> Iterator[str]:
    """A list of kernels; nothing where there are none."""
    yield from _listed(title, [[f"{sign}{_kernel(k)}"] for k in found])


def boundaries(title: str, found: Sequence[Boundary], sign: str = "") -> Iterator[str]:
    """A list of boundaries with their reasons; nothing where there are none."""
    rows = [
        [
            f"{sign}{tensor(b.dtype, b.shape)}, {mib(boundary_bytes(b))}{_handed(b)}{_where(b)}",
            *_reason(b),
        ]
        for b in found
    ]
    yield from _listed(title, rows)


def difference(found: Difference) -> Iterator[str]:
    """Which boundaries and kernels appeared, went and changed."""
    appeared, went = found.boundaries.appeared, found.boundaries.went
    yield from boundaries("boundaries that appeared:", appeared, "+ ")
    changed = [
        [
            f"~ {_both(a, b)}, {boundary_bytes(a):,} -> {boundary_bytes(b):,} bytes{_where(b)}",
            *_reason(b),
        ]
        for a, b in found.boundaries.changed(boundary_bytes)
    ]
    yield from _listed("boundaries that changed:", changed)
    yield from boundaries("boundaries that went:", went, "- ")
    yield from kernels("kernels that appeared:", found.kernels.appeared, "+ ")
    changed = [
        [f"~ {b.emitter}, {kernel_bytes(a):,} -> {kernel_bytes(b):,} bytes{_where(b)}{_name(b)}"]
        if a.emitter == b.emitter
        else [f"~ {a.emitter}, {mib(kernel_bytes(a))} -> {_kernel(b)}"]
        for a, b in found.kernels.pairs
        if (a.emitter, a.count, kernel_bytes(a)) != (b.emitter, b.count, kernel_bytes(b))
    ]
    yield from _listed("kernels that changed:", changed)
    yield from kernels("kernels that went:", found.kernels.went, "- ")


def summary(budget: Budget) -> str:
    """The quantities that bind, in words."""
    crossing = f"{mib(budget.boundary_bytes)} of that at boundaries"
    return (
        f"{counted(budget.launches, 'launch')}, {mib(budget.bytes)} read and written, "
        f"{crossing if budget.boundaries else 'no boundaries'}"
    )


def _listed(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"  {title}"
    for row in rows[:_MOST]:
        yield f"    {row[0]}"
        yield from (f"        {line}" for line in row[1:])
    if len(rows) > _MOST:
        yield f"    and {len(rows) - _MOST} more"


def _kernel(kernel: Kernel) -> str:
    return f"{kernel.emitter}, {mib(kernel_bytes(kernel))}{_where(kernel)}{_name(kernel)}"


def _name(kernel: Kernel) -> str:
    times = f"x{kernel.count}" if kernel.count != 1 else ""
    name = " ".join(filter(None, (kernel.name, times)))
    return f" ({name})" if name else ""


def _both(a: Boundary, b: Boundary) -> str:
    before, after = tensor(a.dtype, a.shape), tensor(b.dtype, b.shape)
    return after if before == after else f"{before} -> {after}"


def _handed(boundary: Boundary) -> str:
    if not boundary.consumers:  # of a record, which keeps no names
        return ""
    return (
        f" ({mib(boundary.written_bytes)} written, {mib(boundary.read_bytes)} read again) from "
        f"{boundary.producer} to {', '.join(boundary.consumers)}"
    )


def _where(thing: Kernel | Boundary) -> str:
    more = f", {len(thing.scopes) - _SCOPES} more" if len(thing.scopes) > _SCOPES else ""
    scopes = f", in {', '.join(thing.scopes[:_SCOPES])}{more}" if thing.scopes else ""
    return scopes + (f", at {thing.source}" if thing.source else "")


def _reason(boundary: Boundary) -> list[str]:
    return [": ".join(filter(None, (boundary.reason.kind, boundary.reason.text)))]
