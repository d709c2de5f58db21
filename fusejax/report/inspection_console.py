"""An inspection as tables for a terminal, at most 100 columns wide."""

import io
import pathlib
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusejax.hlo import spaces
from fusejax.hlo.analysis import Boundary, Kernel
from fusejax.hlo.diff import Matching, ModuleDiff, boundary_bytes, kernel_bytes
from fusejax.inspection import Inspected, Report
from fusejax.report.units import mib, tensor

WIDTH = 100
TOP = 20


def as_text(report: Report, top: int = TOP) -> str:
    """The tables as plain text."""
    file = io.StringIO()
    print_report(report, Console(file=file, width=WIDTH), top)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_report(report: Report, console: Console, top: int = TOP) -> None:
    """Prints every module; of two things that were compared, what differs.

    Args:
      top: most kernels and boundaries that are listed of a module.
    """
    for module in report.modules if report.diff is None else ():
        _print_module(module, console, top)
        console.print()
    for difference in report.diff or ():
        _print_difference(difference, console, top)
        console.print()


def _print_module(module: Inspected, console: Console, top: int) -> None:
    found = module.analysis
    heading = Text(found.name, style="bold")
    card = f", {module.target.title}" if module.target and found.backend == "gpu" else ""
    heading.append(
        f"  {found.backend}{card}" + (f", {module.file}" if module.file else ""), style=""
    )
    console.print(heading, highlight=False)
    bound = "at most " if found.traffic.is_bound else ""
    ratio = f", {found.traffic.total / found.minimum_bytes:.2f} x" if found.minimum_bytes else ","
    line = (
        f"{_counted(found.launches, 'launch', 'launches')}; {bound}{mib(found.traffic.total)} read "
        f"and written{ratio} the minimum of {mib(found.minimum_bytes)} (inputs and outputs once)"
    )
    if not found.minimum_bytes:
        line = line.replace(", the minimum of 0 B (inputs and outputs once)", "")
    console.print(line, highlight=False, markup=False)
    if module.scope is not None:
        console.print(
            f"in scope {module.scope}: {_counted(module.launches, 'launch', 'launches')}, "
            f"{mib(module.bytes)}",
            highlight=False, markup=False,
        )  # fmt: skip
    if module.kernels:
        console.print(_kernels(module, top))
    if module.boundaries:
        console.print(_boundaries(module.boundaries, top))
    elif module.kernels:
        console.print("No boundaries: no kernel reads what another wrote.", highlight=False)
    folded = [scope.name for scope in module.selected().scopes if not scope.kernels]
    if folded:
        shown = ", ".join(folded[:top]) + (f", and {len(folded) - top} more" * (len(folded) > top))
        console.print(
            Text(f"Folded scopes (no instruction of theirs is left): {shown}"), highlight=False
        )
    for warning in module.warnings:
        console.print(Text(f"Warning: {warning}"), highlight=False)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _limited(what: str, count: int, top: int) -> str:
    return f"{what}, largest {top} of {count}" if count > top else what


def _kernels(module: Inspected, top: int) -> Table:
    kernels = module.kernels
    largest = sorted(kernels, key=kernel_bytes, reverse=True)[:top]
    is_limited = len(kernels) > top
    has_resources = any(
        module.resources.get(kernel.name, {}).get("registers") is not None for kernel in largest
    )
    columns = [("emitter", "left"), ("read", "right"), ("written", "right")]
    if has_resources:
        columns += [("regs", "right"), ("spill", "right"), ("occ.", "right")]
    columns.append(("kernel and where it comes from", "left"))
    table = _table(
        _limited("Kernels" + ("" if is_limited else " in launch order"), len(kernels), top),
        *columns,
    )
    for kernel in largest if is_limited else kernels:
        bound = "<=" if kernel.traffic.is_bound else ""
        cells = [
            kernel.emitter,
            bound + mib(kernel.traffic.read),
            mib(kernel.traffic.written),
        ]
        if has_resources:
            used = module.resources.get(kernel.name, {})
            share = used.get("occupancy")
            cells += [
                _number(used.get("registers")),
                _number(used.get("spill_bytes")),
                "" if share is None else f"{share:.0%}",
            ]
        name = kernel.name + (f" x{kernel.count}" if kernel.count != 1 else "")
        cells.append(_lines(name, _names(kernel.scopes), _place(kernel.source)))
        table.add_row(*map(Text, cells))
    return table


def _boundaries(boundaries: Sequence[Boundary], top: int) -> Table:
    table = _table(
        _limited("Boundaries: what one kernel writes and others read", len(boundaries), top),
        ("tensor", "left"), ("written", "right"), ("re-read", "right"), ("where and why", "left"),
    )  # fmt: skip
    for b in boundaries[:top]:
        kernels = f"{b.producer} -> {_names(b.consumers)}"
        where = _lines(kernels, _names(b.scopes), _place(b.source))
        table.add_row(
            Text(tensor(b.dtype, b.shape)),
            _written(b),
            mib(b.read_bytes),
            Text(f"{where}\n{b.reason.kind}: {b.reason.text}"),
        )
    return table


def _written(boundary: Boundary) -> str:
    if boundary.memory != spaces.DEVICE:  # its bytes are not counted
        return f"({boundary.memory.replace('_', ' ')})"
    return mib(boundary.written_bytes) if boundary.written_bytes else "(output)"


def _lines(name: str, scopes: str, place: str) -> str:
    where = "; ".join(filter(None, (scopes, place)))
    return f"{name}\n{where}" if where else name


def _names(names: Sequence[str], most: int = 3) -> str:
    more = f", {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _place(source: str | None) -> str:
    return pathlib.PurePath(source).name if source else ""


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _print_difference(diff: ModuleDiff, console: Console, top: int) -> None:
    a, b = diff.a, diff.b
    one = a or b
    assert one is not None
    if a is None or b is None:
        side = "second" if a is None else "first"
        console.print(Text(f"{one.name}: only in the {side}"), highlight=False)
    else:
        console.print(
            Text(
                f"Difference {a.name} -> {b.name}: launches {a.launches} -> {b.launches}, "
                f"{mib(a.traffic.total)} -> {mib(b.traffic.total)}",
                style="bold",
            ),
            highlight=False,
        )
    if diff.is_empty:
        console.print("Nothing appeared, went or changed bytes.", highlight=False)
        return
    for title, rows in (
        ("Kernels", _kernel_changes(diff.kernels)),
        ("Boundaries", _boundary_changes(diff.boundaries)),
    ):
        listed = list(rows)
        if not listed:
            continue
        table = _table(
            _limited(title, len(listed), top),
            ("", "left"), ("what", "left"), ("scopes", "left"), ("source", "left"),
            ("before", "right"), ("after", "right"),
        )  # fmt: skip
        for row in listed[:top]:
            table.add_row(*map(Text, row))
        console.print(table)


type _Row = tuple[str, str, str, str, str, str]


def _kernel_changes(found: Matching[Kernel]) -> Iterable[_Row]:
    def row(sign: str, kernel: Kernel, before: str, after: str) -> _Row:
        return (sign, kernel.name, _names(kernel.scopes), _place(kernel.source), before, after)

    for kernel in found.appeared:
        yield row("+", kernel, "", mib(kernel_bytes(kernel)))
    for kernel in found.went:
        yield row("-", kernel, mib(kernel_bytes(kernel)), "")
    for a, b in found.changed(kernel_bytes):
        yield row("~", b, mib(kernel_bytes(a)), mib(kernel_bytes(b)))


def _boundary_changes(found: Matching[Boundary]) -> Iterable[_Row]:
    def row(sign: str, b: Boundary, before: str, after: str) -> _Row:
        return (sign, tensor(b.dtype, b.shape), _names(b.scopes), _place(b.source), before, after)

    for boundary in found.appeared:
        yield row("+", boundary, "", mib(boundary_bytes(boundary)))
    for boundary in found.went:
        yield row("-", boundary, mib(boundary_bytes(boundary)), "")
    for a, b in found.changed(boundary_bytes):
        yield row("~", b, mib(boundary_bytes(a)), mib(boundary_bytes(b)))
