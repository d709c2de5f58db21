"""Which columns the tables of kernels and boundaries have: for the template, and for the script.

The first rows are written into the page by the template, so that they are there without the script
and on paper; the script builds the others when they are asked for, column by column the same.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fusejax.report.html.rows import Row
from fusejax.report.html.view import Program


@dataclasses.dataclass(frozen=True)
class Column:
    """One column."""

    key: str
    """Of the row: what is shown, and what is sorted by."""
    title: str
    kind: str
    """How it is written: a macro of the templates, and a function of the script."""
    hint: str = ""


_NUMBERS = ("bytes", "cost", "count", "us", "share", "flops")
_MOVED = (Column("read", "read", "bytes"), Column("written", "written", "bytes"))
_PREDICTED = Column("predicted_us", "µs, predicted", "us", "of one launch")
_MEASURED = Column("time_us", "µs, measured", "us", "of one launch, by the card's profiler")
_COUNTED = (
    Column("measured_occupancy", "achieved", "share", "warps in flight, by the card's counters"),
    Column("measured_dram", "DRAM", "share", "throughput of device memory, counted"),
    Column("measured_issue", "issue", "share", "issue slots in use, counted"),
    Column("measured_tensor_pipe", "tensor", "share", "tensor cores in use, counted"),
)


def is_number(column: Column) -> bool:
    """Whether a column is aligned to the right."""
    return column.kind in _NUMBERS


def launch_columns(program: Program) -> list[Column]:
    """Of the list of a program's kernels in launch order."""
    time = _time(program.kernels)
    return [
        Column("name", "kernel", "launch"),
        *_MOVED,
        *([time] if time else []),
    ]


def _time(kernels: Sequence[Row]) -> Column | None:
    """The measured time where there is any, else the predicted one: a column is never both."""
    for column in (
        Column("time_total_us", "µs, measured", "us", "of all its launches"),
        Column("predicted_total_us", "µs, predicted", "us", "of all its launches"),
    ):
        if any(row[column.key] is not None for row in kernels):
            return column
    return None


def boundary_columns(programs: Sequence[Program]) -> list[Column]:
    """Of the table of boundaries."""
    return [
        *_program(programs),
        Column("tensor", "tensor", "tensor"),
        Column("written", "written", "written"),
        Column("read", "read again", "bytes"),
        Column("cost", "cost", "cost", "written and read again"),
        Column("producer", "from → to", "flow"),
        Column("source", "where", "where"),
        Column("kind", "why XLA stopped there", "why"),
    ]


def kernel_columns(programs: Sequence[Program]) -> list[Column]:
    """Of the table of times and resources: what is known of at least one kernel."""
    rows = [row for program in programs for row in program.kernels]
    times = Column("count", "times", "count", "launches a run")
    optional = [
        Column("flops", "flop", "flops", "floating-point operations of one launch"),
        _PREDICTED,
        _MEASURED,
        Column("registers", "registers", "count", "a thread"),
        Column("spill_bytes", "spilled", "bytes", "a thread, stored and loaded"),
        Column("shared_bytes", "shared", "bytes", "shared memory of a block"),
        Column("threads", "threads", "count", "a block"),
        Column("grid", "blocks", "text"),
        Column("occupancy", "occupancy", "share", "warps that fit, over warps there is room for"),
        Column("limiter", "limited by", "text"),
        *_COUNTED,
    ]
    return [
        *_program(programs),
        Column("number", "launch", "count"),
        Column("name", "kernel", "kernel"),
        Column("emitter", "emitter", "text"),
        *([times] if any(row["count"] != 1 for row in rows) else []),
        Column("bytes", "bytes", "bytes", "read and written in all launches"),
        *(column for column in optional if any(row[column.key] is not None for row in rows)),
    ]


def _program(programs: Sequence[Program]) -> list[Column]:
    served = [program for program in programs if program.refusal is None]
    return [Column("program", "program", "program")] if len(served) > 1 else []


def as_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """For the script."""
    return [{"key": c.key, "kind": c.kind, "number": is_number(c)} for c in columns]
