"""Kernels and boundaries of a document as the rows of the page's tables.

A row is known by its id: `k1-0` is the first kernel of the second program, `b1-0` its dearest
boundary. What a document does not say is None.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.hlo.arithmetic import flops
from fusejax.report.units import tensor

type Row = dict[str, Any]

# What the card's counters saw, where they were read.
COUNTED = ("measured_occupancy", "measured_dram", "measured_issue", "measured_tensor_pipe")


def kernel_rows(program: int, kernels: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The kernels of a program, in launch order."""
    return [_kernel_row(program, number, kernel) for number, kernel in enumerate(kernels)]


def _kernel_row(program: int, number: int, kernel: Mapping[str, Any]) -> Row:
    count = kernel["count"]
    moved = kernel["bytes"]
    grid = kernel.get("grid")
    return {
        "id": f"k{program}-{number}",
        "program": program,
        "number": number + 1,
        "name": kernel["name"],
        "emitter": kernel["emitter"],
        "scopes": list(kernel["scopes"]),
        "source": kernel.get("source"),
        "direction": kernel.get("direction"),
        "count": count,
        "read": moved["read"] * count,
        "written": moved["written"] * count,
        "bytes": moved["total"] * count,
        "is_bound": bool(moved.get("is_bound")),
        "flops": _flops(kernel),
        "predicted_us": kernel.get("predicted_us"),
        "time_us": kernel.get("time_us"),
        "predicted_total_us": _times(kernel.get("predicted_us"), count),
        "time_total_us": _times(kernel.get("time_us"), count),
        "registers": kernel.get("registers"),
        "spill_bytes": kernel.get("spill_bytes"),
        "shared_bytes": kernel.get("shared_bytes"),
        "threads": kernel.get("threads"),
        "grid": _grid(grid) if grid else None,
        "occupancy": kernel.get("occupancy"),
        "limiter": (kernel.get("occupancy_limiter") or "").replace("_", " ") or None,
        **{name: kernel.get(name) for name in COUNTED},
        "change": None,
    }


def _flops(kernel: Mapping[str, Any]) -> int | None:
    """Also of documents that were kept before they had "flops"."""
    work = kernel.get("work")
    if "flops" in kernel or work is None:
        return kernel.get("flops")
    return flops(kernel["emitter"], work["operations"], work["matmul_flops"])


def _grid(grid: Sequence[int]) -> str:
    """Blocks along x, y and z without ones at the end."""
    used = max((place for place, size in enumerate(grid, 1) if size != 1), default=1)
    return " × ".join(f"{size:,}" for size in grid[:used])


def _times(one: float | None, count: int) -> float | None:
    return None if one is None else one * count


def boundary_rows(
    program: int, boundaries: Sequence[Mapping[str, Any]], kernels: Sequence[Row]
) -> list[Row]:
    """The boundaries of a program, the dearest first."""
    places = {row["name"]: number for number, row in enumerate(kernels)}
    by_cost = sorted(boundaries, key=lambda b: -(b["written_bytes"] + b["read_bytes"]))
    return [_boundary_row(program, number, b, places) for number, b in enumerate(by_cost)]


def _boundary_row(
    program: int, number: int, boundary: Mapping[str, Any], places: Mapping[str, int]
) -> Row:
    reason = boundary["reason"]
    consumers = boundary["consumers"]
    return {
        "id": f"b{program}-{number}",
        "program": program,
        "tensor": tensor(boundary["dtype"], boundary["shape"]),
        "written": boundary["written_bytes"],
        "read": boundary["read_bytes"],
        "cost": boundary["written_bytes"] + boundary["read_bytes"],
        "producer": boundary["producer"],
        "consumers": list(consumers),
        "from": _place(boundary["producer"], places, last=True),
        "to": [_place(name, places, last=False) for name in consumers],
        "scopes": list(boundary["scopes"]),
        "source": boundary.get("source"),
        "memory": boundary.get("memory", "device"),
        "is_bound": False,
        "kind": reason["kind"],
        "why": reason["text"],
        "change": None,
    }


def _place(name: str, places: Mapping[str, int], *, last: bool) -> int | None:
    """The kernel of a name; a stage of several kernels writes in its last, and reads in its first.

    None where there is none: a stage may have no kernel of its own.
    """
    if name in places:
        return places[name]
    inside = [number for kernel, number in places.items() if kernel.startswith(f"{name}/")]
    return (max(inside) if last else min(inside)) if inside else None


def short_source(source: str | None) -> str:
    """File and line without the folder."""
    return pathlib.PurePath(source).name if source else ""


@dataclasses.dataclass(frozen=True)
class ScopeSum:
    """What the kernels with instructions of a scope do together."""

    name: str
    kernels: int
    launches: int
    bytes: int


def scope_sums(rows: Sequence[Row]) -> list[ScopeSum]:
    """Every scope of the kernels and every one around them, by name.

    A kernel that holds instructions of several scopes counts for each of them.
    """
    held: dict[str, list[Row]] = {}
    for row in rows:
        around = {
            "/".join(parts[:end])
            for parts in (scope.split("/") for scope in row["scopes"])
            for end in range(1, len(parts) + 1)
        }
        for name in around:
            held.setdefault(name, []).append(row)
    return [
        ScopeSum(name, len(found), sum(r["count"] for r in found), sum(r["bytes"] for r in found))
        for name, found in sorted(held.items(), key=lambda item: _natural(item[0]))
    ]


def _natural(name: str) -> list[tuple[str, int]]:
    """Block_2 stands before Block_10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]
