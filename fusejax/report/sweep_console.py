"""A sweep as tables for a terminal, at most 100 columns wide."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fusejax.sweep import agreement, summary


def print_sweep(
    documents: Sequence[Mapping[str, Any]],
    console: Console,
    others: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Prints times by shape and path, the ranges of the best path, and the predictions' errors.

    Args:
      others: another sweep, whose kernels are compared with these.
    """
    for document in documents:
        if "failed" in document:
            cell = document["cell"]
            where = f"{cell['op']} {_shape(cell['shape'])} {cell['dtype']}"
            console.print(f"{where}: {document['failed']}", highlight=False, markup=False)
    for one in summary.series(documents):
        console.print(_times(one))
        console.print(_ranges(one), highlight=False, markup=False)
        for name, reason in _refusals(one).items():
            console.print(f"{name}: {reason}", highlight=False, markup=False)
        console.print()
    accuracy = summary.accuracy(summary.predictions(documents))
    if accuracy is not None:
        console.print(_accuracy(accuracy))
    counted = agreement.with_counters(documents)
    if counted.kernels:
        _print_agreement("by ptxas and by the card's counters", counted, console)
    if others is not None:
        _print_agreement("here and there", agreement.of_sweeps(documents, others), console)


def _print_agreement(where: str, found: agreement.Agreement, console: Console) -> None:
    same = found.kernels - len(found.differ)
    console.print(f"Resources {where}: the same for {same} of {found.kernels} kernels.")
    for line in found.differ:
        console.print(f"  {line}", highlight=False, markup=False)
    if found.beside:
        same = found.beside - len(found.beside_differ)
        console.print(f"Beside kernels that were chosen otherwise: for {same} of {found.beside}.")
    for line in found.beside_differ:
        console.print(f"  {line}", highlight=False, markup=False)
    places = collections.Counter(
        f"{' + '.join(one.here) or 'nothing'} here, {' + '.join(one.there) or 'nothing'} there"
        for one in found.chosen
    )
    if places:
        console.print(f"Other kernels in {places.total()} places, as a card tunes them:")
    for change, count in places.most_common():
        console.print(f"  {count} x {change}", highlight=False, markup=False)


def _times(one: summary.Series) -> Table:
    names = list(dict.fromkeys(name for document in one.documents for name in document["paths"]))
    measured = one.is_measured
    table = Table(
        title=f"{one.op}, {one.mode}, {one.dtype}, {one.target}: µs "
        f"{'end to end' if measured else 'predicted'}",
        title_justify="left", title_style="bold", box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("shape")
    for name in (*names, *(["copy"] if measured else [])):
        table.add_column(name, justify="right")
    table.add_column("best")
    for document in one.documents:
        by_path = summary.times(document)
        floor = document["copy_floor_us"]
        table.add_row(
            _shape(document["shape"]),
            *(f"{by_path[name]:,.1f}" if name in by_path else "-" for name in names),
            *([f"{floor:,.1f}" if floor is not None else ""] if measured else []),
            min(by_path, key=by_path.__getitem__, default="-"),
        )
    return table


def _ranges(one: summary.Series) -> str:
    def said(found: summary.Range) -> str:
        if found.first == found.last:
            return f"{found.best} at {_shape(found.first)}"
        return f"{found.best} from {_shape(found.first)} to {_shape(found.last)}"

    return "Best: " + "; ".join(said(found) for found in summary.ranges(one)) + "."


def _refusals(one: summary.Series) -> dict[str, str]:
    """Why a path is missing, of the first shape at which it is."""
    found: dict[str, str] = {}
    for document in one.documents:
        for name, path in document["paths"].items():
            if path["status"] != "ok":
                found.setdefault(name, f"not at {_shape(document['shape'])}: {path['reason']}")
    return found


def _accuracy(accuracy: summary.Accuracy) -> Table:
    table = Table(
        title=f"Predicted against measured kernel time, {accuracy.count} paths: error "
        f"{accuracy.median:.1%} in the median, {accuracy.percentile_90:.1%} at the 90th percentile",
        title_justify="left", title_style="bold", box=None, pad_edge=False,
    )  # fmt: skip
    for name in ("worst: op", "shape", "dtype", "path"):
        table.add_column(name)
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right")
    table.add_column("measured more or less because of", overflow="fold")
    for one in accuracy.worst:
        table.add_row(
            one.op + ("" if one.mode == "forward" else " (backward)"),
            _shape(one.shape),
            one.dtype,
            one.path,
            f"{one.predicted_kernels_us:,.1f}",
            f"{one.measured_us:,.1f}",
            f"{one.error:+.0%}",
            one.attribution,
        )
    return table


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
