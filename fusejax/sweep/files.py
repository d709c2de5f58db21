"""Sweeps as files: JSON of the schema "fusejax.sweep/1"."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError

SCHEMA = "fusejax.sweep/1"

# What is read of a comparison: a type, several types, a list of one form, or an object of fields.
_NUMBER = (int, float, type(None))
_BYTES = {"read": int, "written": int, "total": int}
_KERNEL = {
    "name": str, "emitter": str, "scopes": [str], "count": int, "bytes": _BYTES,
    "registers": _NUMBER, "spill_bytes": _NUMBER, "shared_bytes": _NUMBER, "threads": _NUMBER,
    "occupancy": _NUMBER, "time_us": _NUMBER,
}  # fmt: skip
_BOUNDARY = {
    "producer": str, "consumers": [str], "dtype": str, "shape": [int], "written_bytes": int,
    "read_bytes": int, "reason": {"kind": str, "text": str},
}  # fmt: skip
_TIMES = dict.fromkeys(("predicted", "measured", "end_to_end"), _NUMBER)
_REFUSED = {"status": str, "reason": str, "time_us": _TIMES}
_SERVED = {
    "status": str, "launches": int, "bytes": {"modelled": _BYTES}, "kernels": [_KERNEL],
    "boundaries": [_BOUNDARY], "time_us": _TIMES, "compile_s": {"cold": _NUMBER},
}  # fmt: skip
_CELL = {
    "op": str, "formula": str, "mode": str, "dtype": str, "shape": [int], "minimum_bytes": int,
    "copy_floor_us": _NUMBER, "target": {"kind": str, "description": str}, "versions": {},
    "paths": {},
}  # fmt: skip
_FAILED = {"failed": str, "cell": {"op": str, "dtype": str, "shape": [int]}}


def document(cells: Sequence[Any]) -> dict[str, Any]:
    """What is written: the comparisons, and cells that failed, in order."""
    return {"schema": SCHEMA, "cells": list(cells)}


def read(flag: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of several files, one after another.

    Raises:
      UsageError: one cannot be read, is not such a file or is damaged, or there is no cell in any;
        the message names the flag and the place.
    """
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            document = json.loads(pathlib.Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{flag} {name!r} cannot be read as JSON: {error}") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise UsageError(f"{flag} {name!r} is not a file that sweep.py --json wrote")
        problem = _problem(document, {"cells": [{}]}, "")
        for number, cell in enumerate([] if problem else document["cells"]):
            problem = problem or _problem_of_cell(cell, f"cells[{number}]")
        if problem:
            raise UsageError(f"{flag} {name!r} is damaged: {problem}; make it again with sweep.py")
        found += document["cells"]
    if not found:
        raise UsageError(f"{flag} {','.join(names)}: there is no comparison in it")
    return found


def _problem_of_cell(cell: Mapping[str, Any], where: str) -> str | None:
    if "failed" in cell:
        return _problem(cell, _FAILED, where)
    problem = _problem(cell, _CELL, where)
    if problem:
        return problem
    for name, path in cell["paths"].items():
        is_served = isinstance(path, Mapping) and path.get("status") == "ok"
        problem = _problem(path, _SERVED if is_served else _REFUSED, f"{where}.paths.{name}")
        if problem:
            return problem
    return None


def _problem(value: Any, form: Any, where: str) -> str | None:
    """What is wrong with a JSON value, with its place; None where it has the form."""
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return f"{where or 'it'} is no object"
        for field, inner in form.items():
            place = f"{where}.{field}" if where else field
            if field not in value:
                return f"{place} is missing"
            if problem := _problem(value[field], inner, place):
                return problem
        return None
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        found = (_problem(one, form[0], f"{where}[{i}]") for i, one in enumerate(value))
        return next((problem for problem in found if problem), None)
    return None if isinstance(value, form) else f"{where} is {value!r:.40}"
