"""What XLA's options change, as a table for a terminal."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusejax.comparison import PathResult
from fusejax.hlo.analysis import Boundary
from fusejax.report.units import mib, tensor
from fusejax.what_if import Change, WhatIf

_SHOWN_BOUNDARIES = 4


def print_what_if(found: WhatIf, console: Console) -> None:
    """Prints launches, bytes and boundaries of every path without the options -> with them."""
    console.print(Text("What XLA's options change", style="bold"))
    variants = list(dict.fromkeys(change.options for change in found.changes))
    for options in variants:
        changes = [change for change in found.changes if change.options == options]
        console.print(Text(_sentence(options, changes)), highlight=False)
        if not any(change.is_one for change in changes):
            continue
        console.print(_table(changes))
        # Of several options, those of each alone say which one it is.
        if options == variants[0] and len(variants) > 1:
            continue
        for change in changes:
            for line in _boundaries(change):
                console.print(Text(line), highlight=False)


def _table(changes: Sequence[Change]) -> Table:
    results = [path for change in changes for path in (change.before, change.after) if path]
    is_measured = any(path.timing is not None for path in results)
    table = Table(box=None, pad_edge=False)
    table.add_column("  path")
    for name in ("launches", "bytes", "boundaries", "predicted µs"):
        table.add_column(name, justify="right")
    if is_measured:
        table.add_column("measured µs", justify="right")
    for change in changes:
        table.add_row(*_row(change, is_measured))
    return table


def _row(change: Change, is_measured: bool) -> list[str]:
    def both(text: Callable[[PathResult], str]) -> str:
        sides = [text(path) if path else "-" for path in (change.before, change.after)]
        return sides[0] if sides[0] == sides[1] else " -> ".join(sides)

    def measured(path: PathResult) -> str:
        return f"{path.timing.end_to_end_us:,.1f}" if path.timing else ""

    row = [
        f"  {change.path}",
        both(lambda path: str(path.launches)),
        both(lambda path: mib(path.traffic.total)),
        both(lambda path: str(len(path.boundaries))),
        both(lambda path: "" if path.predicted_us is None else f"{path.predicted_us:,.1f}"),
    ]
    return [*row, both(measured)] if is_measured else row


def _sentence(options: str, changes: Sequence[Change]) -> str:
    changed = [change.path for change in changes if change.is_one]
    same = [change.path for change in changes if not change.is_one]
    if not changed:
        return f"{options} changes no path: the same kernels, bytes and boundaries."
    others = f", and not {', '.join(same)}" if same else ""
    return f"{options} changes {', '.join(changed)}{others}; without -> with:"


def _boundaries(change: Change) -> list[str]:
    def told(sign: str, boundary: Boundary) -> str:
        return (
            f"  {change.path}: {sign} {tensor(boundary.dtype, boundary.shape)} from "
            f"{boundary.producer} to {', '.join(boundary.consumers)} ({boundary.reason.kind}: "
            f"{boundary.reason.text})"
        )

    lines = [told("new boundary", one) for one in change.new_boundaries()]
    lines += [told("no longer", one) for one in change.gone_boundaries()]
    more = len(lines) - _SHOWN_BOUNDARIES
    return lines[:_SHOWN_BOUNDARIES] + ([f"  {change.path}: and {more} more"] if more > 0 else [])
