"""The JAX side: our kernels, the floor and XLA, by the card's own clock.

Several processes may measure on one card at a time: each makes and times its arrays in its turn,
and compiles while others measure.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusejax.measure.attempts import Failed, attempt
from fusejax.measure.peers import compiling, copies, formulas
from fusejax.measure.peers.cells import FORWARD, OPS, OURS, XLA, Cell, Settings
from fusejax.measure.peers.copies import Copy
from fusejax.measure.peers.values import Values
from fusejax.measure.turns import card_turn

_SAVED, _AGAIN = "saved", "computed again"  # what XLA's backward starts from


def measure(
    ops: Sequence[str],
    widths: Sequence[int],
    until: float,
    tell: Callable[[str], None],
    settings: Settings,
) -> tuple[Copy, list[Cell], list[tuple[str, int]]]:
    """Times the copy, our kernels and XLA; and the cells that there was no time to begin."""
    from pallas_kernels import catalogue

    known = catalogue.launches()
    with card_turn():
        values = Values(max(widths), max(known[op].streams for op in ops) + 1, settings)
    tell("looking for the fastest copy")
    copy = copies.fastest_copy(values.flats[0], settings)
    cells: list[Cell] = []
    unbegun: list[tuple[str, int]] = []
    for op in ops:
        compiled = {}
        with compiling.pool() as pool:
            for width in widths:
                if time.monotonic() < until:
                    tell(f"compiling {op}, {width}")
                    compiled[width] = {
                        name: pool.submit(compiling.compiled, attempt(lower))
                        for name, lower in lowerings(op, known[op], width, settings).items()
                    }
        for width in widths:
            if width not in compiled or time.monotonic() >= until:
                unbegun.append((op, width))
                continue
            tell(f"timing {op}, {width}")
            ready = {name: future.result() for name, future in compiled.pop(width).items()}
            with card_turn():
                cells.append(jax_cell(op, known[op], width, ready, copy, values, settings))
    return copy, cells, unbegun


def lowerings(op: str, launch: Any, width: int, settings: Settings) -> dict[str, Callable[[], Any]]:
    """What lowers each variant of a cell, by name. "forward" only gives XLA's saved values."""
    import jax

    ours = launch.arguments(settings.rows_of(width), width, settings.dtype)
    found = {OURS: lambda: jax.jit(lambda *given: launch.function(*given)).lower(*ours)}
    if settings.only_ours:
        return found
    shapes = formulas.argument_shapes(op, width, settings)
    if op in FORWARD:
        return {**found, XLA: lambda: jax.jit(formulas.formulas()[op]).lower(*shapes)}
    forward = formulas.with_saved(op)

    def saved():
        result, gradients = jax.eval_shape(forward, *shapes)
        return jax.jit(lambda function, dy: function(dy)).lower(gradients, result)

    def again():
        result, _ = jax.eval_shape(forward, *shapes)
        return jax.jit(lambda dy, *given: forward(*given)[1](dy)).lower(result, *shapes)

    return {
        **found,
        "forward": lambda: jax.jit(forward).lower(*shapes),
        _SAVED: saved,
        _AGAIN: again,
    }


def jax_cell(
    op: str,
    launch: Any,
    width: int,
    ready: Mapping[str, Any],
    copy: Copy,
    values: Values,
    settings: Settings,
) -> Cell:
    """Times what compiled, in turn with the copy."""
    import jax

    from fusejax.measure import timing

    rows = settings.rows_of(width)
    failures = {name: found.line for name, found in ready.items() if isinstance(found, Failed)}
    variants = {name: found for name, found in ready.items() if name not in failures}
    arguments: dict[str, Any] = {}
    if OURS in variants:
        arguments[OURS] = values.like(launch.arguments(rows, width, settings.dtype), width)
    if XLA in variants:
        arguments[XLA] = values.like(formulas.argument_shapes(op, width, settings), width)
    forward = variants.pop("forward", None)
    if forward is not None:
        given = values.like(formulas.argument_shapes(op, width, settings), width)
        ran = attempt(lambda: jax.block_until_ready(forward(*given)))
        if isinstance(ran, Failed):
            failures |= dict.fromkeys((_SAVED, _AGAIN), ran.line)
        else:
            result, saved = ran
            (dy,) = values.like([result], width, first=OPS[op].arrays)
            arguments |= {_SAVED: (saved, dy), _AGAIN: (dy, *given)}
    for name in list(variants):
        if name in arguments:
            ran = attempt(functools.partial(_run, variants[name], arguments[name]))
            if isinstance(ran, Failed):
                failures[name] = ran.line
        if name in failures or name not in arguments:
            del variants[name]
    variants["copy"], arguments["copy"] = copy.function, (copy.source,)
    times = attempt(
        lambda: timing.device_times(
            variants,
            {name: arguments[name] for name in variants},
            rounds=settings.rounds,
            iterations=settings.iterations,
        )
    )
    if isinstance(times, Failed):
        failed = dict.fromkeys([*variants, *failures], times.line)
        return Cell(op, width, rows, failures=_told({**failed, **failures}))
    us = {name: found.median_us for name, found in times.items()}
    copy_us = us.pop("copy")
    details: dict[str, Any] = {
        "copy_us": copy_us,
        "low_high_us": {name: (times[name].low_us, times[name].high_us) for name in us},
        "kernels": {
            name: [(kernel.function, kernel.median_us) for kernel in times[name].kernels]
            for name in us
        },
    }
    backward = {name: us.pop(name) for name in (_SAVED, _AGAIN) if name in us}
    if backward:
        us[XLA] = min(backward.values())
        details["xla_from"] = backward
    return Cell(
        op,
        width,
        rows,
        copy_us * launch.array_bytes(rows, width, settings.dtype) / copy.moved,
        us,
        details,
        _told(failures),
    )


def _run(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import jax

    jax.block_until_ready(function(*arguments))


def _told(failures: Mapping[str, str]) -> dict[str, str]:
    """Under the names that a reader knows."""
    names = {
        _SAVED: f"{XLA} (saved)",
        _AGAIN: f"{XLA} (computed again)",
        "forward": f"{XLA} (saving)",
    }
    return {names.get(name, name): line for name, line in failures.items() if name != "copy"}
