"""What a sweep says: who is best where, and how good the predictions were. Works on documents."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.measure.timing import percentile

type Document = Mapping[str, Any]

# Times closer than this share are called equal, and the range of the path before goes on.
_TIE = 0.02


@dataclasses.dataclass(frozen=True)
class Series:
    """One op, mode and dtype on one target, over its shapes."""

    op: str
    mode: str
    dtype: str
    target: str
    is_measured: bool
    documents: tuple[Document, ...]


@dataclasses.dataclass(frozen=True)
class Range:
    """Neighbouring shapes of a series at which one path is best."""

    best: str
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One path of one cell, predicted and measured, in µs."""

    op: str
    mode: str
    shape: tuple[int, ...]
    dtype: str
    path: str
    predicted_us: float
    measured_us: float
    """Of its kernels, gaps between launches not counted."""
    predicted_kernels_us: float
    attribution: str

    @property
    def error(self) -> float:
        """Share by which the prediction is off, from the measured time; below 0 where it is low."""
        return self.predicted_kernels_us / self.measured_us - 1


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How far predictions are from measurements, as shares of the measured times."""

    count: int
    median: float
    percentile_90: float
    worst: tuple[Prediction, ...]


def series(documents: Sequence[Document]) -> list[Series]:
    """The comparisons by op, mode, dtype and target, each in the order given."""
    found: dict[tuple[str, str, str, str, bool], list[Document]] = {}
    for document in documents:
        if "failed" not in document:
            target = document["target"]
            measured = any(
                path["time_us"]["end_to_end"] is not None for path in document["paths"].values()
            )
            what = document["op"], document["mode"], document["dtype"]
            found.setdefault((*what, target["description"], measured), []).append(document)
    return [Series(*key, tuple(own)) for key, own in found.items()]


def time_us(path: Mapping[str, Any]) -> float | None:
    """What a path is judged by: measured end to end, else predicted; None where it has neither."""
    times = path["time_us"]
    return times["predicted"] if times["end_to_end"] is None else times["end_to_end"]


def times(document: Document) -> dict[str, float]:
    """Time by path, of those that have one."""
    found = {name: time_us(path) for name, path in document["paths"].items()}
    return {name: time for name, time in found.items() if time is not None}


def ranges(one: Series) -> list[Range]:
    """Where which path is best; a path keeps its range as long as it is as good as equal."""
    found: list[Range] = []
    for document in one.documents:
        by_path = times(document)
        if not by_path:
            continue
        shape = tuple(document["shape"])
        best = min(by_path, key=by_path.__getitem__)
        held = found[-1].best if found else None
        if held in by_path and by_path[held] * (1 - _TIE) <= by_path[best]:
            found[-1] = dataclasses.replace(found[-1], last=shape)
        else:
            found.append(Range(best, shape, shape))
    return found


def predictions(documents: Sequence[Document]) -> list[Prediction]:
    """Every path that was both predicted and measured on a card."""
    return [
        Prediction(
            document["op"],
            document["mode"],
            tuple(document["shape"]),
            document["dtype"],
            name,
            path["time_us"]["predicted"],
            path["time_us"]["measured"],
            path["time_us"]["predicted_kernels"],
            path.get("attribution") or "",
        )
        for document in documents
        if "failed" not in document and document["target"]["kind"] == "device"
        for name, path in document["paths"].items()
        if path["time_us"]["measured"] and path["time_us"].get("predicted_kernels")
    ]


def accuracy(found: Sequence[Prediction], worst: int = 10) -> Accuracy | None:
    """Median and 90th percentile of the errors' sizes; None where nothing was measured."""
    if not found:
        return None
    sizes = [abs(one.error) for one in found]
    ordered = sorted(found, key=lambda one: -abs(one.error))
    return Accuracy(
        len(found), statistics.median(sizes), percentile(sizes, 0.9), tuple(ordered[:worst])
    )
