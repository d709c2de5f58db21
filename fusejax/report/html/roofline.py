"""Kernels against what the card can do: rate of operations over operations per byte."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.html.roofline_picture import Mark, picture
from fusejax.report.html.rows import Row
from fusejax.report.html.view import Program
from fusejax.report.units import counted

# More marks than this hide one another; the longest are shown.
_MOST_MARKS = 250


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A picture, or why there is none."""

    svg: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()


def roofline(programs: Sequence[Program]) -> Roofline:
    """The roofline plot of all kernels of which work and time are known."""
    rows = [row for program in programs for row in program.kernels]
    if not rows:
        return Roofline(reason="There is no kernel.")
    targets = [program.target for program in programs if program.target]
    target = next((t for t in targets if t.get("effective_bandwidth_bytes_per_s")), None)
    if target is None:
        return Roofline(
            reason="No rates are known of what this was compiled for"
            + (f" ({targets[0]['description']})" if targets else ", which the text does not name")
            + ": no plot."
        )
    if all(row["flops"] is None for row in rows):
        return Roofline(reason="The document does not say what the kernels compute: no plot.")
    # A kernel of one card says nothing under the roofs of another.
    under = [number for number, one in enumerate(programs) if one.target == target]
    marks = [mark for number in under for mark in _marks(number, programs[number].kernels)]
    if not marks:
        return Roofline(reason="No kernel has floating-point operations and a time: no plot.")
    shown = sorted(marks, key=lambda mark: -mark.us * mark.kernels)[:_MOST_MARKS]
    held = [row for number in under for row in programs[number].kernels]
    others = [one.label for number, one in enumerate(programs) if number not in under]
    notes = [*_notes(held, target), *_others(others, target), *_cut(len(marks))]
    return Roofline(picture(shown, programs, target), "", tuple(notes))


def _marks(number: int, rows: Sequence[Row]) -> list[Mark]:
    """Kernels that agree in three figures are one mark: a model's layers are alike."""
    found: dict[tuple[Any, ...], Mark] = {}
    for row in rows:
        is_measured = row["time_us"] is not None
        time = row["time_us" if is_measured else "predicted_us"]
        moved = row["bytes"] / row["count"] if row["count"] else 0
        if not row["flops"] or not time or not moved:
            continue
        rate = row["flops"] / time * 1e6
        mark = Mark(number, row, is_measured, row["flops"] / moved, rate, kernels=1)
        key = (is_measured, f"{mark.intensity:.2e}", f"{rate:.2e}")
        known = found.get(key)
        if known is not None:
            mark = dataclasses.replace(known, kernels=known.kernels + 1)
        found[key] = mark
    return list(found.values())


def _notes(rows: Sequence[Row], target: Mapping[str, Any]) -> list[str]:
    notes = [
        f"Roofs: {target['rates']}. Every operation of an element is one flop, a tanh as well as "
        "an addition, although it takes many times as long."
    ]
    hidden = sum(row["flops"] is None for row in rows)
    if hidden:
        notes.append(
            f"Not shown: {counted(hidden, 'kernel')} of which the compiled text does not say what "
            "is inside (Pallas kernels, library calls)."
        )
    idle = sum(row["flops"] == 0 for row in rows)
    if idle:
        notes.append(f"Not shown: {counted(idle, 'kernel')} without floating-point operations.")
    return notes


def _others(labels: Sequence[str], target: Mapping[str, Any]) -> list[str]:
    if not labels:
        return []
    return [f"Not shown, as not compiled for {target['description']}: {', '.join(labels)}."]


def _cut(marks: int) -> list[str]:
    return [f"The {_MOST_MARKS} longest of {marks} marks."] if marks > _MOST_MARKS else []
