"""Whether kernels' resources are the same without a device, on the card, and by its counters."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

type Document = Mapping[str, Any]

RESOURCES = ("registers", "spill_bytes", "shared_bytes", "threads", "occupancy")
# Theoretical occupancies are ratios of small whole numbers: as good as equal below this.
_NEAR = 0.005


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Kernels that were compared, and those that differ."""

    kernels: int
    differ: tuple[str, ...]
    """A line for each."""
    other_kernels: tuple[str, ...] = ()
    """Paths that are not made of the same kernels, a line each: a card that tunes its matrix
    products may choose others."""


def of_sweeps(documents: Sequence[Document], others: Sequence[Document]) -> Agreement:
    """Compares the kernels of two sweeps, path by path of the cells that both have."""
    known = {_key(one): one for one in others if "failed" not in one}
    count, differ, other = 0, [], []
    for document in documents:
        twin = None if "failed" in document else known.get(_key(document))
        if twin is None:
            continue
        for name, path in document["paths"].items():
            same = twin["paths"].get(name)
            if same is None or "ok" not in (path["status"], same["status"]):
                continue
            where = f"{_named(document)} {name}"
            ours, theirs = path["kernels"], same["kernels"]
            if [k["emitter"] for k in ours] != [k["emitter"] for k in theirs]:
                other.append(where)
                continue
            for a, b in zip(ours, theirs, strict=True):
                count += 1
                wrong = [
                    f"{field} {a[field]} and {b[field]}"
                    for field in RESOURCES
                    if not _equal(a[field], b[field])
                ]
                if wrong:
                    differ.append(f"{where} {a['name']}: {', '.join(wrong)}")
    return Agreement(count, tuple(differ), tuple(other))


def with_counters(documents: Sequence[Document]) -> Agreement:
    """Compares what ptxas says with what the card's counters saw, where both are known."""
    count, differ = 0, []
    for document in documents:
        for name, path in () if "failed" in document else document["paths"].items():
            for kernel in path["kernels"]:
                pairs = (
                    ("registers", kernel["registers"], kernel.get("measured_registers")),
                    (
                        "occupancy",
                        kernel["occupancy"],
                        kernel.get("measured_theoretical_occupancy"),
                    ),
                )
                known = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
                count += bool(known)
                wrong = [f"{f} {a} and {b}" for f, a, b in known if not _equal(a, b)]
                if wrong:
                    where = f"{_named(document)} {name} {kernel['name']}"
                    differ.append(f"{where}: {', '.join(wrong)}")
    return Agreement(count, tuple(differ))


def _equal(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= _NEAR


def _key(document: Document) -> tuple[Any, ...]:
    return document["op"], document["mode"], tuple(document["shape"]), document["dtype"]


def _named(document: Document) -> str:
    shape = "x".join(map(str, document["shape"]))
    return f"{document['op']} {shape} {document['dtype']}"
