"""Whether kernels' resources are the same without a device, on the card, and by its counters."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

type Document = Mapping[str, Any]

RESOURCES = ("registers", "spill_bytes", "shared_bytes", "threads", "occupancy")
# Theoretical occupancies are ratios of small whole numbers: as good as equal below this.
_NEAR = 0.005


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Where two compilations of a path have other kernels: a card tunes products and row sums."""

    op: str
    here: tuple[str, ...]
    """Emitters."""
    there: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Kernels that were compared, and those that differ."""

    kernels: int
    """Of paths that are made of the same kernels."""
    differ: tuple[str, ...]
    """A line for each."""
    beside: int = 0
    """Kernels of the other paths: what is chosen otherwise can change its neighbours too."""
    beside_differ: tuple[str, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    """What could not be compared."""


def of_sweeps(documents: Sequence[Document], others: Sequence[Document]) -> Agreement:
    """Compares the kernels of two sweeps, path by path of the cells that both have.

    In a path, kernels in launch order are matched by emitter and scopes.
    """
    known = {_key(one): one for one in others if "failed" not in one}
    count, differ, beside, beside_differ, chosen = 0, [], 0, [], []
    for document in documents:
        twin = None if "failed" in document else known.get(_key(document))
        if twin is None:
            continue
        for name, path in document["paths"].items():
            same = twin["paths"].get(name)
            if same is None or "ok" not in (path["status"], same["status"]):
                continue
            where = f"{_named(document)} {name}"
            parts = list(_matched(path["kernels"], same["kernels"]))
            alike = [part for part in parts if _kinds(part[0]) == _kinds(part[1])]
            pairs = [pair for ours, theirs in alike for pair in zip(ours, theirs, strict=True)]
            lines = [f"{where} {line}" for pair in pairs for line in _differences(*pair)]
            if len(alike) == len(parts):
                count += len(pairs)
                differ += lines
            else:
                beside += len(pairs)
                beside_differ += lines
            chosen += [
                Chosen(document["op"], _emitters(ours), _emitters(theirs))
                for ours, theirs in parts
                if _kinds(ours) != _kinds(theirs)
            ]
    return Agreement(count, tuple(differ), beside, tuple(beside_differ), tuple(chosen))


def _differences(ours: Document, theirs: Document) -> Iterator[str]:
    wrong = [
        f"{field} {ours[field]} and {theirs[field]}"
        for field in RESOURCES
        if not _equal(ours[field], theirs[field])
    ]
    if wrong:
        yield f"{ours['name']}: {', '.join(wrong)}"


def _matched(
    ours: Sequence[Document], theirs: Sequence[Document]
) -> Iterator[tuple[Sequence[Document], Sequence[Document]]]:
    """Runs of kernels that are alike, and what stands between them on either side."""
    matcher = difflib.SequenceMatcher(None, _kinds(ours), _kinds(theirs), autojunk=False)
    for _, i, j, k, n in matcher.get_opcodes():
        yield ours[i:j], theirs[k:n]


def _kinds(kernels: Sequence[Document]) -> list[tuple[Any, ...]]:
    return [(kernel["emitter"], *kernel["scopes"]) for kernel in kernels]


def _emitters(kernels: Sequence[Document]) -> tuple[str, ...]:
    return tuple(kernel["emitter"] for kernel in kernels)


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
