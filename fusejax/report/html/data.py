"""The rows of a page as a block of JSON for its script, every text in it once."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.html import columns
from fusejax.report.html.rows import Row
from fusejax.report.html.view import View

# Numbers and ids that stand as they are; all else is a text, or a list of texts.
_KERNEL_NUMBERS = (
    "program", "count", "read", "written", "is_bound", "flops", "predicted_us",
    "time_us", "registers", "spill_bytes", "shared_bytes", "threads", "occupancy",
    "measured_occupancy", "measured_dram", "measured_issue", "measured_tensor_pipe",
)  # fmt: skip
_KERNEL_TEXTS = ("name", "emitter", "source", "direction", "grid", "limiter", "change", "scopes")
_BOUNDARY_NUMBERS = ("program", "written", "read", "from", "to")
_BOUNDARY_TEXTS = (
    "tensor", "producer", "consumers", "source", "memory", "kind", "why", "change", "scopes",
)  # fmt: skip


def block(view: View) -> str:
    """The JSON, safe to stand in a script element."""
    texts = _Texts()
    document = {
        "programs": [
            {"label": program.label, "columns": columns.as_json(columns.launch_columns(program))}
            for program in view.programs
        ],
        "columns": {
            "boundaries": columns.as_json(columns.boundary_columns(view.programs)),
            "resources": columns.as_json(columns.kernel_columns(view.programs)),
        },
        "kernels": _table(
            [row for program in view.programs for row in program.kernels],
            _KERNEL_NUMBERS, _KERNEL_TEXTS, texts,
        ),
        "boundaries": _table(
            [row for program in view.programs for row in program.boundaries],
            _BOUNDARY_NUMBERS, _BOUNDARY_TEXTS, texts,
        ),
    }  # fmt: skip
    text = json.dumps({**document, "texts": texts.known}, separators=(",", ":"), allow_nan=False)
    # "</script" and "<!--" would end the element or change how it is read.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


class _Texts:
    """Numbers for texts, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    @property
    def known(self) -> list[str]:
        return list(self.numbers)

    def number(self, value: str | Sequence[str] | None) -> int | list[int] | None:
        if value is None or isinstance(value, str):
            return None if value is None else self.numbers.setdefault(value, len(self.numbers))
        return [self.numbers.setdefault(text, len(self.numbers)) for text in value]


def _table(
    rows: Sequence[Row], numbers: Sequence[str], texts: Sequence[str], known: _Texts
) -> Mapping[str, Any]:
    """Fields that are the same in no row at all are left out."""
    kept = [name for name in numbers if any(row[name] is not None for row in rows)]
    told = [name for name in texts if any(row[name] is not None for row in rows)]
    return {
        "numbers": kept,
        "texts": told,
        "rows": [
            [*(_rounded(row[name]) for name in kept), *(known.number(row[name]) for name in told)]
            for row in rows
        ],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value
