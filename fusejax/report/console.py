"""A comparison as tables for a terminal, at most 100 columns wide."""

import dataclasses
import io
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusejax import rates
from fusejax.comparison import Comparison, PathResult, Refusal
from fusejax.report.units import clock_sentence, counted, mib, tensor
from fusejax.sheet import Sheet

WIDTH = 100
_SHOWN = 20  # kernels, and boundaries, of a function: a model has hundreds


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the sheet, the paths, their kernels and boundaries, and the verdict."""
    sizes = f", {tensor(comparison.dtype, comparison.shape)}" if comparison.shape else ""
    console.print(
        Text.assemble((comparison.op, "bold"), f"  {comparison.formula}  {comparison.mode}{sizes}"),
        highlight=False,
    )
    _print_found(comparison, console, None if comparison.shape else _SHOWN)


def functions_as_text(comparison: Comparison, differences: Mapping[str, float]) -> str:
    """The same of functions that are not made of stages: their largest kernels and boundaries."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH)
    console.print(Text(f"{comparison.op}  of {comparison.formula}"), highlight=False)
    _print_found(comparison, console, _SHOWN)
    others = [f"{name} by {value:.1e}" for name, value in list(differences.items())[1:]]
    if others:
        console.print(
            f"Results differ from those of {next(iter(differences))}, over the largest value: "
            f"{', '.join(others)}.",
            highlight=False,
            markup=False,
        )
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _print_found(comparison: Comparison, console: Console, most: int | None) -> None:
    target = comparison.target
    console.print(_target_line(comparison), highlight=False)
    if comparison.xla_options:
        listed = ", ".join(f"{name}={value}" for name, value in comparison.xla_options.items())
        console.print(Text(f"XLA options of every path: {listed}"), highlight=False)
    console.print()
    if comparison.sheet is not None:
        console.print(_sheet(comparison.sheet, most))
    console.print(_paths(comparison))
    for refused in comparison.paths.values():
        if isinstance(refused, Refusal):
            reason = f"{refused.name}: not compared: {refused.reason}"
            console.print(reason, highlight=False, markup=False)
    if not comparison.served():
        console.print("No path could be compared.")
        return
    _print_notes(comparison, console)
    console.print(_times(comparison))
    for path in comparison.served():
        if path.attribution and path.timing and path.timing.device_us and path.cost:
            share = path.timing.device_us / path.cost.kernels_us - 1
            told = f"{path.name}'s kernels take {abs(share):.0%} {'more' if share > 0 else 'less'}"
            console.print(
                f"{told} than predicted: {path.attribution}", highlight=False, markup=False
            )
    if comparison.clocks is not None:
        told = clock_sentence(dataclasses.asdict(comparison.clocks))
        console.print(told, highlight=False, markup=False)
    console.print()
    console.print(_kernels(comparison, most))
    if any(path.boundaries for path in comparison.served()):
        console.print(_boundaries(comparison, most))
    for path in comparison.served():
        for warning in path.warnings:
            console.print(f"{path.name}: {warning}", highlight=False, markup=False)
    if comparison.verdict is not None:
        console.print("[bold]Verdict[/bold]")
        console.print(comparison.verdict.summary, highlight=False, markup=False)
        for step in comparison.verdict.steps:
            console.print(
                Text(f"  {step.origin} -> {step.to}: {step.explanation}"), highlight=False
            )
    if target.kind == "deviceless":
        console.print(
            "Compiled for a card that is not there: times are predicted, none was measured.",
            style="dim",
        )


def _target_line(comparison: Comparison) -> str:
    target = comparison.target
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    figures = ""
    rate = rates.of(target)
    if rate and target.bandwidth_bytes_per_s:
        figures = (
            f", {target.bandwidth_bytes_per_s / 1e12:.2f} TB/s, of which a copy reaches "
            f"{rate.copy_bytes_per_s / 1e12:.2f}"
        )
    rates_line = f"Rates: {rate.source}\n" if rate else ""
    return f"Target: {target.title} ({target.kind}{figures})\n{rates_line}{versions}"


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _sheet(sheet: Sheet, most: int | None) -> Table:
    is_cut = most is not None and max(map(len, (sheet.inputs, sheet.handovers))) > most
    table = _table(
        "Traffic sheet: what stages run one by one store and load"
        + (f", the {most} largest of each" if is_cut else ""),
        ("tensor", "left"), ("role", "left"), ("shape", "left"),
        ("stored", "right"), ("loaded", "right"),
    )  # fmt: skip
    for name, size in _largest(sheet.inputs, most, lambda one: one[1]):
        table.add_row(name, "input", "", "", mib(size))
    for h in _largest(sheet.handovers, most, lambda h: h.stored_bytes + h.loaded_bytes):
        role = f"{h.producer} -> {', '.join(h.consumers)}"
        stored = mib(h.stored_bytes) if h.stored_bytes else "(output)"
        table.add_row(h.value, role, tensor(h.dtype, h.shape), stored, mib(h.loaded_bytes))
    if sheet.reread_bytes:
        table.add_row("", "inputs that more stages load", "", "", mib(sheet.reread_bytes))
    for name, size in _largest(sheet.outputs, most, lambda one: one[1]):
        table.add_row(name, "output", "", mib(size), "")
    table.caption = (
        f"Inputs and outputs once: {mib(sheet.minimum_bytes)}. One kernel for all stages would "
        f"save {mib(sheet.saved_bytes)} and {counted(sheet.saved_launches, 'launch')}."
    )
    table.caption_justify = "left"
    return table


def _largest[T](entries: Sequence[T], most: int | None, size: Callable[[T], int]) -> list[T]:
    """The `most` largest, in their order."""
    kept = sorted(range(len(entries)), key=lambda at: -size(entries[at]))[:most]
    return [entries[at] for at in sorted(kept)]


def _paths(comparison: Comparison) -> Table:
    table = _table(
        "Paths",
        ("path", "left"), ("launches", "right"), ("read", "right"), ("written", "right"),
        ("x minimum", "right"), ("compile cold / warm", "right"), ("executable", "right"),
        ("relative error", "right"),
    )  # fmt: skip
    for name, path in comparison.paths.items():
        error = f"{path.error.max_rel:.1e}" if path.error else ""
        if isinstance(path, Refusal):
            table.add_row(name, *["-"] * 6, error)
            continue
        bound = "<= " if path.traffic.is_bound else ""
        size = path.executable_bytes
        table.add_row(
            name,
            str(path.launches),
            bound + mib(path.traffic.read),
            mib(path.traffic.written),
            f"{path.traffic.total / max(1, comparison.minimum_bytes):.2f}",
            _compile(path),
            "" if size is None else mib(size),
            error,
        )
    return table


def _times(comparison: Comparison) -> Table:
    def timed(path: PathResult) -> list[str]:
        if path.timing is None:
            return [""] * (3 if any_on_card else 2)
        spread = f"{path.timing.low_us:,.1f}-{path.timing.high_us:,.1f}"
        times = [spread, _us(path.timing.end_to_end_us)]
        return [_us(path.timing.device_us), *times] if any_on_card else times

    def dram(path: PathResult) -> list[str]:
        return [mib(path.counted.read), mib(path.counted.written)] if path.counted else ["", ""]

    served = comparison.served()
    any_timed = any(path.timing for path in served)
    any_on_card = any(path.timing and path.timing.device_us is not None for path in served)
    any_predicted = any(path.predicted_us is not None for path in served)
    any_counted = any(path.counted for path in served)
    columns = [("path", "left")]
    if any_predicted:
        columns.append(("predicted", "right"))
    if any_on_card:
        columns.append(("kernels", "right"))
    if any_timed:
        columns += [("10-90 %", "right"), ("end to end", "right")]
    if any_counted:
        columns += [("counted read", "right"), ("counted written", "right")]
    table = _table("Time, µs", *columns)
    for path in served:
        table.add_row(
            path.name,
            *([_us(path.predicted_us)] if any_predicted else ()),
            *(timed(path) if any_timed else ()),
            *(dram(path) if any_counted else ()),
        )
    if comparison.floor_us is not None:
        table.caption = (
            f"A copy that moves the minimum bytes took {comparison.floor_us:,.1f} µs in this run."
        )
        table.caption_justify = "left"
    return table


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:,.1f}"


def _compile(path: PathResult) -> str:
    warm = "" if path.compile_warm_s is None else f" / {path.compile_warm_s:.2f}"
    return f"{path.compile_cold_s:.2f}{warm} s"


def _print_notes(comparison: Comparison, console: Console) -> None:
    errors = [path.error for path in comparison.paths.values() if path.error]
    if errors:
        where = ", ".join(dict.fromkeys(error.where for error in errors))
        console.print(
            "Relative error: the largest error against float64 over the largest value, "
            f"{errors[0].rows} rows, run on: {where}.",
            style="dim",
            highlight=False,
        )
    for note in comparison.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _kernels(comparison: Comparison, most: int | None) -> Table:
    cut = f", of each those {most} that move most" if _is_cut(comparison, "kernels", most) else ""
    table = _table(
        f"Kernels in launch order{cut}",
        ("path", "left"), ("kernel", "left"), ("emitter", "left"), ("scopes", "left"),
        ("bytes", "right"), ("regs", "right"), ("spill", "right"), ("occ.", "right"),
        ("µs", "right"),
    )  # fmt: skip
    for path in comparison.served():
        times = (path.timing.kernel_us if path.timing else None) or (None,) * len(path.kernels)
        shown = sorted(path.kernels, key=lambda kernel: -kernel.traffic.total * kernel.count)[:most]
        for kernel, time in zip(path.kernels, times, strict=True):
            if kernel not in shown:
                continue
            used = path.resources.get(kernel.name, {})
            occupancy = used.get("occupancy")
            table.add_row(
                path.name,
                kernel.name + (f" x{kernel.count}" if kernel.count > 1 else ""),
                kernel.emitter,
                ", ".join(kernel.scopes),
                mib(kernel.traffic.total),
                _number(used.get("registers")),
                _number(used.get("spill_bytes")),
                "" if occupancy is None else f"{occupancy:.0%}",
                _us(time),
            )
    return table


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _is_cut(comparison: Comparison, field: str, most: int | None) -> bool:
    longest = max((len(getattr(path, field)) for path in comparison.served()), default=0)
    return most is not None and longest > most


def _boundaries(comparison: Comparison, most: int | None) -> Table:
    cut = f", the {most} largest of each" if _is_cut(comparison, "boundaries", most) else ""
    table = _table(
        f"Boundaries: tensors that one kernel writes and another reads{cut}",
        ("path", "left"), ("tensor", "left"), ("written", "right"), ("re-read", "right"),
        ("from -> to", "left"), ("why", "left"),
    )  # fmt: skip
    for path in comparison.served():
        for b in path.boundaries[:most]:
            source = f" ({pathlib.Path(b.source).name})" if b.source else ""
            # The scopes of an op's kernels are its stages, which are in the names.
            if b.scopes and not comparison.shape:
                source = f"\n{', '.join(b.scopes)}{source}"
            table.add_row(
                path.name,
                tensor(b.dtype, b.shape),
                mib(b.written_bytes) if b.written_bytes else "(output)",
                mib(b.read_bytes),
                f"{b.producer} -> {', '.join(b.consumers)}{source}",
                f"{b.reason.kind}: {b.reason.text}",
            )
    return table
