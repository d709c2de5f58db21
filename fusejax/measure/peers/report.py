"""The tables and the verdict, for a terminal."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.measure.peers.cells import BACKWARD, XLA, Cell, Settings, failures, table, verdict
from fusejax.measure.peers.copies import Copy
from fusejax.measure.peers.libraries import LIBRARIES


def report(
    console: Any,
    card: str,
    versions: Mapping[str, str],
    copy: Copy,
    cells: Sequence[Cell],
    notes: Sequence[str],
    settings: Settings,
) -> None:
    """Prints the tables and the verdict."""
    from rich.table import Table
    from rich.text import Text

    def say(line: str) -> None:
        console.print(Text(line))

    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    say(f"{card}; {named}; {settings.dtype}, {settings.elements} elements an array; µs")
    beside = [cell.details["copy_us"] for cell in cells if "copy_us" in cell.details]
    if beside:
        median = statistics.median(beside)
        say(
            f"Floor: a copy of one array ({copy.name}), {copy.moved / 1e6:.1f} MB in "
            f"{median:.1f} µs ({min(beside):.1f} to {max(beside):.1f} beside the cells), "
            f"{copy.moved / median / 1e6:.2f} TB/s; of each cell, by its arrays' bytes."
        )
    say("ours, XLA: kernels of a call, by the card's clock. PyTorch: events around it, gaps too.")
    if any(cell.op in BACKWARD for cell in cells):
        say("Backward: no forward in it, but that XLA's may compute again what it needs.")
    say("")
    for op in dict.fromkeys(cell.op for cell in cells):
        headings, rows = table([cell for cell in cells if cell.op == op], (XLA, *LIBRARIES))
        shown = Table(title=op, title_justify="left", box=None)
        for heading in headings:
            shown.add_column(heading, justify="right")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        console.print()
    for line in (*notes, *(f"No time: {line}" for line in failures(cells))):
        say(line)
    say("Verdict")
    for line in verdict(cells):
        say(line)
