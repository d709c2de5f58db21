"""Losses of several trainings as one picture."""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence


def save(losses: Mapping[str, Sequence[float]], title: str, path: str) -> None:
    """Draws a line per training into a file, written aside and renamed.

    Args:
      losses: of every step, by what the legend calls the training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(losses.items()):
        axes.plot(
            range(1, len(values) + 1), values, label=name,
            linestyle=("-", "--")[number % 2], linewidth=2.5 - number, alpha=0.9,
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    target = pathlib.Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fusejax-") as folder:
        aside = pathlib.Path(folder, target.name)
        figure.savefig(aside)
        aside.replace(target)
