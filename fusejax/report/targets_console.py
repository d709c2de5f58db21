"""Ops or a function on several cards, as one table for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from fusejax.report.units import mib, tensor

_NAME, _CELL, _PER_LINE = 14, 21, 4


def print_targets(document: Mapping[str, Any], console: Console) -> None:
    """Prints a document of the "fusejax.targets/1" schema: a row per path, a column per card."""
    comparisons, refused = document["comparisons"], document["refused"]
    subjects = dict.fromkeys(
        subject for found in (comparisons, refused) for by in found.values() for subject in by
    )
    one = next((doc for by in comparisons.values() for doc in by.values()), None)
    reasons: dict[str, dict[str, None]] = {}
    for target, by in refused.items():
        for subject, reason in by.items():
            reasons.setdefault(reason, {})[f"{subject} on {target}"] = None
    if one is not None:
        console.print(_heading(one, comparisons), highlight=False)
        console.print(Text(f"\n{_row('path', [f'{name[-19:]} ' for name in comparisons])}"))
        for subject in subjects:
            for line in _lines(subject, comparisons, reasons):
                console.print(line, highlight=False)
        console.print(
            "\nLaunches, bytes moved over the minimum, predicted µs (none was measured); "
            "* fastest, or within 2 % of it; - not served.",
            style="dim",
            highlight=False,
        )
    for reason, where in reasons.items():
        console.print(Text(f"{_merged(list(where))}: {reason}"), highlight=False)


def _heading(one: Mapping[str, Any], comparisons: Mapping[str, Mapping[str, Any]]) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    lines = [f"{one['mode']}{', ' + one['dtype'] if one['dtype'] else ''}; {versions}"]
    if one["xla_options"]:
        listed = ", ".join(f"{name}={value}" for name, value in one["xla_options"].items())
        lines.append(f"XLA options of every path: {listed}")
    for name, by in comparisons.items():
        target = next((doc["target"] for doc in by.values()), None)
        if target is not None:
            rate = target["bandwidth_bytes_per_s"] / 1e12
            lines.append(
                f"{name}: {target['description']}, {rate:.2f} TB/s; rates: {target['rates']}"
            )
    return Text("\n".join(lines))


def _lines(
    subject: str,
    comparisons: Mapping[str, Mapping[str, Any]],
    reasons: dict[str, dict[str, None]],
) -> Iterator[Text]:
    """The rows of an op; adds to `reasons` where a path is not served."""
    documents = {target: by.get(subject) for target, by in comparisons.items()}
    given = next((doc for doc in documents.values() if doc), None)
    if given is None:
        return
    shape = tensor(given["dtype"], given["shape"]) if given["shape"] else given["formula"]
    yield Text.assemble((subject, "bold"), f"  {shape}, at least {mib(given['minimum_bytes'])}")
    for path in given["paths"]:
        cells = []
        for target, document in documents.items():
            found = document["paths"][path] if document else None
            if found and found["status"] != "ok":
                reasons.setdefault(found["reason"], {})[f"{path} on {target}"] = None
            cells.append(_cell(found, document))
        yield Text(_row(f"  {path}", cells))


def _row(name: str, cells: Sequence[str]) -> str:
    """The cells, as many in a line as there is room for."""
    lines = []
    for start in range(0, len(cells), _PER_LINE):
        some = "".join(f"{cell:>{_CELL}}" for cell in cells[start : start + _PER_LINE])
        lines.append(f"{'' if start else name:{_NAME}}{some}".rstrip())
    return "\n".join(lines)


def _cell(found: Mapping[str, Any] | None, document: Mapping[str, Any] | None) -> str:
    if found is None or document is None or found["status"] != "ok":
        return "-"
    time = found["time_us"]["predicted"]
    times = [
        path["time_us"]["predicted"]
        for path in document["paths"].values()
        if path["time_us"]["predicted"] is not None
    ]
    ratio = found["bytes"]["modelled"]["total"] / max(1, document["minimum_bytes"])
    if time is None:
        return f"{found['launches']}  {ratio:.2f}x"
    mark = "*" if time <= min(times) * 1.02 else " "
    return f"{found['launches']}  {ratio:.2f}x {time:9,.1f}{mark}"


def _merged(places: list[str]) -> str:
    """ "pallas on a100", "pallas on b200" as "pallas on a100, b200"."""
    by_path: dict[str, list[str]] = {}
    for place in places:
        path, _, target = place.partition(" on ")
        by_path.setdefault(path, []).append(target)
    by_targets: dict[str, list[str]] = {}
    for path, names in by_path.items():
        by_targets.setdefault(", ".join(names), []).append(path)
    return "; ".join(f"{', '.join(paths)} on {names}" for names, paths in by_targets.items())
