"""Compile costs as tables for a terminal, at most 100 columns wide."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fusejax.comparison import Refusal
from fusejax.compile_costs.breaks import Break
from fusejax.compile_costs.costs import CompileCosts
from fusejax.compile_costs.fallbacks import Fallback, Outcome
from fusejax.compile_costs.fresh import CompileTimes
from fusejax.compile_costs.surroundings import Extra, Surroundings
from fusejax.compile_costs.variants import KernelOfShape, Mix, Variants
from fusejax.report.units import counted, mib


def print_costs(costs: CompileCosts, console: Console) -> None:
    """Prints every part that was asked for."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, style=style)

    versions = ", ".join(f"{name} {version}" for name, version in costs.versions.items())
    say(f"{costs.op}  {costs.formula}  {costs.dtype}{list(costs.shape)}", "bold")
    say(f"Target: {costs.target.title} ({costs.target.kind})\n{versions}\n")
    if costs.times:
        console.print(_times(_served(costs.times)))
        for said in _refused(costs.times):
            say(said)
        reasons = dict.fromkeys(t.no_hit for t in _served(costs.times) if t.no_hit)
        for reason in reasons:
            say(f"No hit: {reason}")
        say(
            "Each column in a process of its own, the compiler up; warm in that of cold. Hits are "
            "counted by JAX's event.\n",
            "dim",
        )
    if costs.mix is not None:
        _print_mix(costs.mix, console, say)
    if costs.surroundings:
        console.print(_surroundings(_served(costs.surroundings)))
        for said in _refused(costs.surroundings):
            say(said)
        say("Extra: beside the Mosaic GPU kernel. Needed: what goes in and comes out, once.\n",
            "dim")  # fmt: skip
    if costs.breaks:
        console.print(_breaks(costs.breaks))
        for said in _by_reason((b.construct, b.refusal) for b in costs.breaks if b.refusal):
            say(said)
        if any(b.is_stand_in for b in costs.breaks):
            say("* of the same custom call without a Python function, which could not run.", "dim")
        say(_branches(costs.breaks) + "\n", "dim")
    if costs.fallbacks:
        console.print(_fallbacks(costs.fallbacks))


def _print_mix(mix: Mix, console: Console, say: Any) -> None:
    console.print(_variants(_served(mix.variants)))
    for said in _refused(mix.variants):
        say(said)
    partly = [row for row in _served(mix.variants) if row.refusal]
    for said in _by_reason((f"{row.path} {row.policy}, not all", row.refusal) for row in partly):
        say(said)
    if mix.note:
        say(mix.note)
    say(
        "Rows: padded to. Extra: share of bytes that is for padding. Pad and cut: copies where "
        "batches do not lie in padded arrays. Kernels: distinct ones of Mosaic GPU; ways: in "
        "threads and shared memory.\n",
        "dim",
    )
    if mix.kernels:
        console.print(_kernels(mix.kernels))
        console.print()


def _served(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if not isinstance(row, Refusal)]


def _refused(rows: Iterable[Any]) -> list[str]:
    return _by_reason((row.name, row.reason) for row in rows if isinstance(row, Refusal))


def _by_reason(refused: Iterable[tuple[str, str]]) -> list[str]:
    """Lines "names: reason", a reason once."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(found)}: {reason}" for reason, found in names.items()]


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _times(rows: Sequence[CompileTimes]) -> Table:
    table = _table(
        "Compile times, s",
        ("path", "left"), ("programs", "right"), ("cold", "right"), ("warm", "right"),
        ("fills cache", "right"), ("with cache", "right"), ("hits", "right"),
        ("executable", "right"), ("cache entries", "right"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.path,
            str(row.programs),
            f"{row.cold_s:.2f}",
            f"{row.warm_s:.2f}",
            f"{row.fill_s:.2f}",
            "-" if row.cached_s is None else f"{row.cached_s:.2f}",
            f"{row.hits} of {row.requests}",
            _size(row.executable_bytes),
            mib(row.entry_bytes),
        )
    return table


def _variants(rows: Sequence[Variants]) -> Table:
    calls = counted(rows[0].calls, "call") if rows else "no calls"
    table = _table(
        f"Executables for a mix of {calls}",
        ("path", "left"), ("rows", "left"), ("served", "right"),
        ("executables", "right"), ("compile, s", "right"), ("size", "right"),
        ("extra", "right"), ("pad and cut", "right"), ("kernels", "right"), ("ways", "right"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.path,
            row.policy,
            str(row.served),
            str(row.executables),
            f"{row.compile_s:.1f}",
            _size(row.executable_bytes),
            f"{row.extra_bytes / row.moved_bytes:.2%}" if row.extra_bytes else "",
            mib(row.copied_bytes) if row.copied_bytes else "",
            str(row.mosaic_kernels or ""),
            str(row.configurations or ""),
        )
    return table


def _kernels(rows: Sequence[KernelOfShape]) -> Table:
    table = _table(
        "Pallas kernels of the mix, rows as they are",
        ("shape", "left"), ("calls", "right"), ("kernel", "left"), ("CTAs", "right"),
        ("threads", "right"), ("shared", "right"), ("plan", "left"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            "x".join(map(str, row.shape)),
            str(row.calls),
            row.function,
            str(row.grid[0] * row.grid[1] * row.grid[2]),
            str(row.threads),
            mib(row.shared_bytes),
            row.plan or "",
        )
    return table


def _surroundings(rows: Sequence[Surroundings]) -> Table:
    table = _table(
        "Around the kernel: what the program launches for inputs as they come",
        ("input", "left"), ("path", "left"), ("launches", "right"), ("bytes", "right"),
        ("x needed", "right"), ("between", "right"), ("extra kernels", "left"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.input if row.path == rows[0].path else "",
            row.path,
            str(row.launches),
            mib(row.traffic.total),
            f"{row.traffic.total / row.needed_bytes:.2f}",
            mib(row.boundary_bytes) if row.boundary_bytes else "",
            "; ".join(map(_extra, row.extras)) if row.mosaic_kernels else "",
        )
    return table


def _extra(extra: Extra) -> str:
    return f"{extra.emitter}: {', '.join(extra.does)} ({mib(extra.traffic.total)})"


def _breaks(rows: Sequence[Break]) -> Table:
    table = _table(
        "What ends a compiled region",
        ("in the middle of the op", "left"), ("lowers", "left"), ("programs", "right"),
        ("launches", "right"), ("bytes", "right"), ("between", "right"), ("host bytes", "right"),
        ("host waits", "right"),
    )  # fmt: skip
    for row in rows:
        known = row.refusal is None or row.is_stand_in
        figures = (
            str(row.programs),
            str(row.launches),
            mib(row.traffic.total),
            mib(row.boundary_bytes) if row.boundary_bytes else "",
            mib(row.host_bytes) if row.host_bytes else "",
            str(row.host_waits or ""),
        )
        name = row.construct + (" *" if row.is_stand_in else "")
        lowers = "no" if row.refusal else "yes"
        table.add_row(name, lowers, *(figures if known else ("-",) * len(figures)))
    return table


def _branches(rows: Sequence[Break]) -> str:
    if any(row.conditionals for row in rows):
        return "jax.lax.cond: one of its branches runs, the bytes of both are counted."
    return "jax.lax.cond: XLA made a select of it, so that both branches are computed."


def _fallbacks(rows: Sequence[Fallback]) -> Table:
    table = _table(
        "Inputs that are not what the kernel was made for",
        ("input", "left"), ("pallas", "left"), ("xla", "left"), ("served by", "left"),
    )  # fmt: skip
    for row in rows:
        table.add_row(row.case, _outcome(row.pallas), _outcome(row.xla), row.serves or "none")
    return table


def _outcome(outcome: Outcome) -> str:
    if outcome.launches is not None:
        return counted(outcome.launches, "launch")
    return outcome.refusal or ""


def _size(size: int | None) -> str:
    return "" if size is None else mib(size)
