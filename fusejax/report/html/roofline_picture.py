"""The picture of a roofline, drawn by matplotlib, as an element of the page."""

import dataclasses
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.html.formats import flops as written_flops
from fusejax.report.html.rows import Row
from fusejax.report.html.view import Program
from fusejax.report.units import counted

# Colours of the page's style sheet stand in the picture as colours that nothing else has.
_INK, _FAINT, _RULE, _PAPER = "#010203", "#010204", "#010205", "#010206"
_VARIABLES = {_INK: "--ink", _FAINT: "--faint", _RULE: "--rule", _PAPER: "--paper"}
_SERIES = [f"#0102{16 + number:02x}" for number in range(8)]
_VARIABLES |= {colour: f"--series-{number}" for number, colour in enumerate(_SERIES)}
_MARKERS = "osD^vP*X"


@dataclasses.dataclass(frozen=True)
class Mark:
    """Kernels that come out at the same place."""

    program: int
    row: Row
    """The first of them."""
    is_measured: bool
    intensity: float
    """Operations per byte."""
    flop_per_s: float
    kernels: int

    @property
    def us(self) -> float:
        """Of one launch: measured or predicted, as `is_measured` says."""
        time: float = self.row["time_us" if self.is_measured else "predicted_us"]
        return time


def picture(marks: Sequence[Mark], programs: Sequence[Program], target: Mapping[str, Any]) -> str:
    """SVG of the marks under the roofs of a target, as a text that can stand in the page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "roofline", "font.size": 9.5}
    ):
        figure = Figure(figsize=(8.4, 4.3), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        _roofs(axes, marks, target)
        longest = max(mark.us for mark in marks)
        for number in dict.fromkeys(mark.program for mark in marks):
            _draw(axes, [mark for mark in marks if mark.program == number], longest)
        _legend(axes, marks, programs)
        _dress(axes)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return _titled(_inline(file.getvalue()), marks)


def _roofs(axes: Any, marks: Sequence[Mark], target: Mapping[str, Any]) -> None:
    bandwidth = target["effective_bandwidth_bytes_per_s"]
    rates = target.get("flop_per_s") or {}
    shown = {_roof_name(name): rate for name, rate in rates.items() if _is_wanted(name, marks)}
    highest = max(shown.values(), default=max(mark.flop_per_s for mark in marks))
    left = min(0.05, min(mark.intensity for mark in marks) / 2)
    right = max(highest / bandwidth * 4, max(mark.intensity for mark in marks) * 2)
    axes.plot(
        [left, highest / bandwidth],
        [left * bandwidth, highest],
        color=_INK,
        linewidth=1.1,
        zorder=1,
    )
    for name, rate in shown.items():
        start = rate / bandwidth
        axes.plot([start, right], [rate, rate], color=_INK, linewidth=1.1, zorder=1)
        axes.annotate(
            f"{name} {written_flops(rate)}", (right, rate), (5, 0),
            textcoords="offset points", va="center", color=_FAINT, fontsize=8.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    lowest = min(min(mark.flop_per_s for mark in marks), left * bandwidth)
    axes.set_ylim(lowest / 2, highest * 2.5)
    middle = (left * highest / bandwidth) ** 0.5
    axes.annotate(
        f"a copy, {bandwidth / 1e12:.2f} TB/s", (middle, middle * bandwidth), (-8, 4),
        textcoords="offset points", ha="right", color=_FAINT, fontsize=8.5,
    )  # fmt: skip


def _is_wanted(name: str, marks: Sequence[Mark]) -> bool:
    """Roofs of products only where there are products."""
    highest = max(mark.intensity for mark in marks)
    return not name.startswith("matmul:") or (name != "matmul:f16" and highest > 16)


def _roof_name(name: str) -> str:
    kind, _, dtype = name.partition(":")
    return f"{dtype} {'products' if kind == 'matmul' else 'element-wise'}"


def _draw(axes: Any, marks: Sequence[Mark], longest: float) -> None:
    for is_measured in (True, False):
        chosen = [mark for mark in marks if mark.is_measured == is_measured]
        if not chosen:
            continue
        number = chosen[0].program
        colour = _SERIES[number % len(_SERIES)]
        drawn = axes.scatter(
            [mark.intensity for mark in chosen],
            [mark.flop_per_s for mark in chosen],
            s=[24 + 130 * mark.us / longest for mark in chosen],
            marker=_MARKERS[number % len(_MARKERS)],
            facecolor=colour if is_measured else _PAPER,
            edgecolor=colour,
            linewidth=1.4,
            zorder=2,
        )
        drawn.set_urls([f"#{mark.row['id']}" for mark in chosen])


def _legend(axes: Any, marks: Sequence[Mark], programs: Sequence[Program]) -> None:
    found = sorted({(mark.program, not mark.is_measured) for mark in marks})
    for number, is_predicted in found:
        colour = _SERIES[number % len(_SERIES)]
        label = programs[number].label if len(programs) > 1 else "kernels"
        axes.scatter(
            [], [], marker=_MARKERS[number % len(_MARKERS)], edgecolor=colour, linewidth=1.4,
            facecolor=_PAPER if is_predicted else colour,
            label=f"{label}, {'predicted' if is_predicted else 'measured'}",
        )  # fmt: skip
    axes.legend(loc="lower right", frameon=False, labelcolor=_INK, fontsize=9)


def _dress(axes: Any) -> None:
    axes.set_xlabel("arithmetic intensity, flop per byte", color=_INK)
    axes.set_ylabel("flop/s", color=_INK)
    axes.patch.set_alpha(0)
    axes.grid(color=_RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", color=_RULE, labelcolor=_FAINT)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: written_flops(value).replace(".0", ""))
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_RULE)


def _inline(svg: str) -> str:
    """The picture as an element of the page: its fonts and colours are the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"<[^>]*>", _rounded, svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', _svg_tag, svg, count=1)
    return re.sub(r">\s+<", "><", re.sub(r" ?\n", " ", svg)).strip()


def _rounded(tag: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag[0])


def _titled(svg: str, marks: Sequence[Mark]) -> str:
    """With what a mark stands for, for whoever points at it."""
    titles = {mark.row["id"]: html.escape(_title(mark)) for mark in marks}
    return re.sub(
        r'<a xlink:href="#(k[\d-]+)"[^>]*>',
        lambda found: f'<a href="#{found[1]}" tabindex="-1"><title>{titles[found[1]]}</title>',
        svg,
    )


def _title(mark: Mark) -> str:
    alike = f" and {counted(mark.kernels - 1, 'kernel')} like it" if mark.kernels > 1 else ""
    basis = "measured" if mark.is_measured else "predicted"
    return (
        f"{mark.row['name']}{alike}: {mark.intensity:,.2f} flop per byte, "
        f"{written_flops(mark.flop_per_s)}flop/s, {mark.us:,.1f} µs {basis}"
    )


def _svg_tag(found: re.Match[str]) -> str:
    return (
        f'<svg class="roofline" viewBox="{found[1]}" role="img" '
        'aria-label="Roofline plot: the table of kernels has the same figures" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
