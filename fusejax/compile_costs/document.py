"""Compile costs as the JSON document "fusejax.compile_costs/1"."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fusejax.comparison import Refusal
from fusejax.compile_costs.costs import CompileCosts
from fusejax.compile_costs.surroundings import Surroundings
from fusejax.compile_costs.variants import Mix
from fusejax.hlo.analyse import traffic_json
from fusejax.hlo.analysis import Traffic

SCHEMA = "fusejax.compile_costs/1"


def costs_json(costs: CompileCosts) -> dict[str, Any]:
    """The document. Fields are those of the data classes; parts not asked for are null."""
    target = costs.target
    return {
        "schema": SCHEMA,
        "op": costs.op,
        "formula": costs.formula,
        "options": dict(costs.options),
        "dtype": costs.dtype,
        "shape": list(costs.shape),
        "target": {"name": target.name, "kind": target.kind, "description": target.title},
        "versions": dict(costs.versions),
        "times": _rows(costs.times),
        "mix": None if costs.mix is None else _mix(costs.mix),
        "surroundings": _rows(costs.surroundings),
        "breaks": _rows(costs.breaks),
        "fallbacks": None
        if not costs.fallbacks
        else [{**_plain(row), "serves": row.serves} for row in costs.fallbacks],
    }


def _mix(mix: Mix) -> dict[str, Any]:
    return {
        "variants": _rows(mix.variants),
        "kernels": [_plain(kernel) for kernel in mix.kernels],
        "note": mix.note,
    }


def _rows(rows: Iterable[Any]) -> list[dict[str, Any]] | None:
    return [_row(row) for row in rows] or None


def _row(row: Any) -> dict[str, Any]:
    if isinstance(row, Refusal):
        return {"status": "unsupported", "name": row.name, "reason": row.reason}
    more = {"extra_bytes": row.extra_bytes} if isinstance(row, Surroundings) else {}
    return {"status": "ok", **_plain(row), **more}


def _plain(value: Any) -> Any:
    """Data classes as objects, bytes with their total, tuples as lists."""
    if isinstance(value, Traffic):
        return traffic_json(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple | list):
        return [_plain(element) for element in value]
    return value
