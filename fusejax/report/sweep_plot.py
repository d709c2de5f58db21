"""A sweep as a picture: time per element over the row's length, a line per path."""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError
from fusejax.sweep import summary

FORMATS = (".svg", ".png", ".pdf")
_COLOURS = {
    "eager": "#7f7f7f",
    "split": "#1f77b4",
    "recompute": "#9467bd",
    "xla": "#ff7f0e",
    "pallas_split": "#17becf",
    "pallas": "#2ca02c",
    "copy of the minimum": "#000000",
}


def require_plotting(flag: str, path: str) -> None:
    """Raises UsageError where no picture could be made at `path`, before the work is done."""
    if pathlib.Path(path).suffix not in FORMATS:
        raise UsageError(f"{flag} {path!r}: the name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{flag} needs matplotlib: install the extra with pip install 'fusejax[report]'"
        ) from error


def save_plot(documents: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draws every series of the sweep into one file, written aside and renamed.

    Products' shapes differ in more than one size, so their points are not joined.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = summary.series(documents)
    columns = min(3, len(found)) or 1
    rows = -(-len(found) // columns) or 1
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    legend: dict[str, Any] = {}
    for number, one in enumerate(found, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw(axes, one)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    if legend:
        figure.legend(
            legend.values(),
            legend.keys(),
            loc="outside upper center",
            ncols=len(legend),
            fontsize=8,
        )
    target = pathlib.Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fusejax-") as folder:
        aside = pathlib.Path(folder, target.name)
        figure.savefig(aside)
        aside.replace(target)


def _draw(axes: Any, one: summary.Series) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for place, document in enumerate(one.documents):
        for name, time in summary.times(document).items():
            lines.setdefault(name, []).append((place, time))
        if document["copy_floor_us"] is not None:
            lines.setdefault("copy of the minimum", []).append((place, document["copy_floor_us"]))
    is_product = any(len(document["shape"]) > 2 for document in one.documents)
    for name, points in lines.items():
        style = "--" if name == "copy of the minimum" else "-"
        axes.plot(
            *zip(*points, strict=True),
            marker="_" if is_product else "o",
            linestyle="none" if is_product else style,
            markersize=12 if is_product else 3,
            label=name,
            color=_COLOURS.get(name),
        )
    labels = ["x".join(map(str, document["shape"])) for document in one.documents]
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel(f"µs, {'measured end to end' if one.is_measured else 'predicted'}", fontsize=8)
    if is_product:
        axes.set_yscale("log")
        axes.set_xlim(-0.5, len(labels) - 0.5)
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(f"{one.op}, {one.mode}, {one.dtype}", fontsize=9)
    axes.grid(alpha=0.3)
