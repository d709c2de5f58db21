"""A comparison as the JSON document "fusejax.compare/1"."""

import dataclasses
import math
from typing import Any

from fusejax import rates
from fusejax.comparison import Comparison, PathResult, Refusal, Verdict
from fusejax.hlo.analyse import boundary_json, kernel_json, traffic_json
from fusejax.hlo.analysis import Kernel
from fusejax.rates import Rates
from fusejax.report.predictions import predicted_us, target_json
from fusejax.sheet import Sheet

SCHEMA = "fusejax.compare/1"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The document; docs/reports.md has its fields."""
    rate = rates.of(comparison.target)
    return {
        "schema": SCHEMA,
        "op": comparison.op,
        "formula": comparison.formula,
        "options": comparison.options,
        "xla_options": comparison.xla_options,
        "notes": list(comparison.notes),
        "mode": comparison.mode,
        "shape": list(comparison.shape),
        "dtype": comparison.dtype,
        "target": target_json(comparison.target),
        "versions": comparison.versions,
        "minimum_bytes": comparison.minimum_bytes,
        "copy_floor_us": comparison.floor_us,
        "clocks": dataclasses.asdict(comparison.clocks) if comparison.clocks else None,
        "traffic_sheet": _sheet_json(comparison.sheet) if comparison.sheet else None,
        "paths": {name: _path_json(path, rate) for name, path in comparison.paths.items()},
        "verdict": _verdict_json(comparison.verdict),
    }


def _path_json(path: PathResult | Refusal, rate: Rates | None) -> dict[str, Any]:
    if isinstance(path, Refusal):
        return {
            "status": "unsupported",
            "reason": path.reason,
            "launches": None,
            "programs": None,
            "bytes": None,
            "boundaries": [],
            "kernels": [],
            "time_us": dict.fromkeys(("predicted", "measured", "low", "high", "end_to_end")),
            "compile_s": dict.fromkeys(("cold", "warm")),
            "executable_bytes": None,
            "error": _error_json(path),
        }
    timing = path.timing
    measured = None if timing is None else timing.device_us
    if timing is not None and measured is None:
        measured = timing.end_to_end_us
    times = (timing.kernel_us if timing else None) or (None,) * len(path.kernels)
    return {
        "status": "ok",
        "reason": None,
        "launches": path.launches,
        "programs": path.programs,
        "bytes": {
            "modelled": traffic_json(path.traffic),
            "measured": traffic_json(path.counted) if path.counted else None,
        },
        "boundaries": [boundary_json(boundary) for boundary in path.boundaries],
        "kernels": [
            _kernel_json(
                kernel,
                {
                    **path.resources.get(kernel.name, {}),
                    "time_us": time,
                    "predicted_us": predicted,
                },
            )
            for kernel, time, predicted in zip(
                path.kernels, times, predicted_us(path.kernels, rate), strict=True
            )
        ],
        "time_us": {
            "predicted": path.predicted_us,
            "predicted_kernels": path.cost.kernels_us if path.cost else None,
            "predicted_terms": dataclasses.asdict(path.cost) if path.cost else None,
            "measured": measured,
            "low": timing.low_us if timing else None,
            "high": timing.high_us if timing else None,
            "end_to_end": timing.end_to_end_us if timing else None,
            "end_to_end_without_graphs": timing.without_graphs_us if timing else None,
            "launch_gaps": timing.gaps_us if timing else None,
        },
        "compile_s": {"cold": path.compile_cold_s, "warm": path.compile_warm_s},
        "executable_bytes": path.executable_bytes,
        "error": _error_json(path),
        "attribution": path.attribution,
        "warnings": list(path.warnings),
    }


def _kernel_json(kernel: Kernel, known: dict[str, Any]) -> dict[str, Any]:
    counted = {name: value for name, value in known.items() if name.startswith("measured_")}
    return {**kernel_json(kernel, known), **counted}


def _error_json(path: PathResult | Refusal) -> dict[str, Any] | None:
    error = path.error
    if error is None:
        return None
    return {
        "max_abs": _finite(error.max_abs),
        "max_rel": _finite(error.max_rel),
        "reference": "float64",
        "rows": error.rows,
        "where": error.where,
    }


def _finite(number: float) -> float | str:
    """JSON has no infinity."""
    return number if math.isfinite(number) else str(number)


def _sheet_json(sheet: Sheet) -> dict[str, Any]:
    return {
        "inputs": dict(sheet.inputs),
        "outputs": dict(sheet.outputs),
        "boundaries": [
            {
                "value": h.value,
                "dtype": h.dtype,
                "shape": list(h.shape),
                "producer": h.producer,
                "consumers": list(h.consumers),
                "stored_bytes": h.stored_bytes,
                "loaded_bytes": h.loaded_bytes,
            }
            for h in sheet.handovers
        ],
        "reread_input_bytes": sheet.reread_bytes,
        "one_kernel_saves": {"bytes": sheet.saved_bytes, "launches": sheet.saved_launches},
    }


def _verdict_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "fastest": verdict.fastest,
        "basis": verdict.basis,
        "summary": verdict.summary,
        "comparisons": [
            {
                "from": step.origin,
                "to": step.to,
                "removed_bytes": step.removed_bytes,
                "removed_launches": step.removed_launches,
                "predicted_gain_us": step.predicted_gain_us,
                "measured_gain_us": step.measured_gain_us,
                "explanation": step.explanation,
            }
            for step in verdict.steps
        ],
    }
