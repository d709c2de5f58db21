"""Times the row kernels beside a copy, XLA, torch.compile, Liger and quack, on this machine's GPU.

Examples:
  python scripts/peers.py --json peers.json
  python scripts/peers.py --ops softmax,softmax_backward --widths 4096,16384 --only_ours

For every operation and width, forward and backward: µs of our Pallas kernel, of the floor (a copy
of the same bytes, measured in turn with it), of XLA on the plain formula, and of the PyTorch
libraries that are installed; then which cells miss their target and where somebody is faster.

JAX is timed by the card's own clock: the sum of the kernels of a call, without the gaps between
them. PyTorch is timed by events around a call (triton's do_bench), in a process of its own; gaps
between its kernels count. Backward alone is timed, for everyone: ours with what our forward saves;
XLA's as the faster of two, with what its own forward saves, and with that computed again from the
arguments; PyTorch's by torch.autograd.grad.

Several runs at a time may share the card, each with its own --ops: one measures while the others
compile.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError
from fusejax.measure.peers import cells, libraries, on_jax, on_torch
from fusejax.measure.peers.cells import Settings
from fusejax.measure.peers.report import report

_OPS = flags.DEFINE_list("ops", list(cells.OPS), "Operations.")
_WIDTHS = flags.DEFINE_list(
    "widths",
    [str(width) for width in cells.WIDTHS],
    "Elements per row.",
)
_PEER_OPS = flags.DEFINE_list("peer_ops", None, "Those of --ops for PyTorch; all without it.")
_PEER_WIDTHS = flags.DEFINE_list(
    "peer_widths",
    None,
    "Those of --widths for PyTorch; without it those among "
    f"{', '.join(map(str, cells.PEER_WIDTHS))}.",
)
_ELEMENTS = flags.DEFINE_integer(
    "elements", 2**26, "Of each array; rows are this / width.", lower_bound=1, upper_bound=2**31 - 1
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["float16", "bfloat16", "float32"], "Of the arrays."
)
_JSON = flags.DEFINE_string("json", None, "Also write everything to this file; - for the output.")
_ONLY_OURS = flags.DEFINE_bool("only_ours", False, "Our kernels and the floor, nobody else.")
_TORCH = flags.DEFINE_bool("torch", True, "PyTorch and its libraries too, where installed.")
_TIME_LIMIT_S = flags.DEFINE_float(
    "time_limit_s",
    None,
    "Seconds after which no further cell is begun; those before are still shown. A third is kept "
    "for PyTorch where it is to be measured.",
    lower_bound=0,
)
_TORCH_TO = flags.DEFINE_string(
    "torch_to", None, "Measure PyTorch's side alone, into this file. The script calls itself so."
)

_JAX_SHARE = 2 / 3  # of the time limit, where PyTorch comes after it
_GRACE_S = 60  # for the cell at which PyTorch is when the time is up


def main() -> None:
    """Measures, prints."""
    begun = time.monotonic()
    ops = _known("--ops", _OPS.value, cells.OPS)
    widths = _numbers("--widths", _WIDTHS.value)
    peer_ops = ops if _PEER_OPS.value is None else _known("--peer_ops", _PEER_OPS.value, ops)
    if _PEER_WIDTHS.value is None:
        peer_widths = [width for width in widths if width in cells.PEER_WIDTHS]
    else:
        peer_widths = _numbers("--peer_widths", _PEER_WIDTHS.value)
        _known("--peer_widths", map(str, peer_widths), list(map(str, widths)))
    settings = Settings(_ELEMENTS.value, _DTYPE.value, _ONLY_OURS.value)
    limit = math.inf if _TIME_LIMIT_S.value is None else _TIME_LIMIT_S.value
    if _TORCH_TO.value is not None:
        on_torch.measure(_TORCH_TO.value, peer_ops, peer_widths, begun + limit, settings)
        return
    cli.check_writable("--json", _JSON.value)
    # Else JAX would keep most of the card's memory while PyTorch is measured.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from fusejax.compile import targets

    card = targets.usable_device().title
    from rich.console import Console

    from fusejax.report.console import WIDTH
    from fusejax.report.progress import progress

    wants_peers = _TORCH.value and not _ONLY_OURS.value and bool(peer_ops and peer_widths)
    installed = libraries.installed() if wants_peers else {}
    notes: list[str] = []
    with progress(Console(stderr=True)) as tell:
        share = _JAX_SHARE if "torch.compile" in installed else 1
        copy, found, unbegun = on_jax.measure(ops, widths, begun + limit * share, tell, settings)
        if unbegun:
            notes.append(f"The time was up: not begun were {cells.listed(unbegun)}.")
        torch_copy = None
        if "torch.compile" in installed:
            left = begun + limit - time.monotonic()
            told, ended = run_torch(peer_ops, peer_widths, left, tell, settings)
            notes += [f"PyTorch: {ended}"] if ended else []
            found = cells.joined(found, told.get("rows", []), settings)
            torch_copy = told.get("copy_us")
    if not found:
        raise UsageError(f"nothing was measured: {' '.join(notes)}")
    if wants_peers and (missing := [name for name in libraries.LIBRARIES if name not in installed]):
        notes.append(f"Not installed, or not without PyTorch: {', '.join(missing)}.")
    if torch_copy is not None:
        notes.append(
            f"PyTorch's own copy of an array of {settings.elements} elements, by its clock: "
            f"{torch_copy:.1f} µs."
        )
    shared = libraries.versions("jax", "jaxlib", *(["triton"] if installed else []))
    packages = {**shared, **installed}
    report(Console(width=WIDTH), card, packages, copy, found, notes, settings)
    if _JSON.value:
        document = {
            "schema": "fusejax.peers/1",
            "card": card,
            "versions": packages,
            "dtype": settings.dtype,
            "elements": settings.elements,
            "copy": copy.to_json(),
            "torch_copy_us": torch_copy,
            "cells": [cell.to_json() for cell in found],
            "notes": notes,
            "verdict": cells.verdict(found),
        }
        cli.write_json("--json", _JSON.value, document)


def _known(flag: str, given: Any, known: Any) -> list[str]:
    names = list(dict.fromkeys(given))
    for name in names:
        if name not in known:
            raise UsageError(f"{flag} {name!r} is unknown: give some of {', '.join(known)}")
    if not names:
        raise UsageError(f"{flag} is empty: give some of {', '.join(known)}")
    return names


def _numbers(flag: str, given: Sequence[str]) -> list[int]:
    try:
        numbers = sorted({int(number) for number in given})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UsageError(f"{flag} {','.join(given)!r}: give whole numbers above 0, by commas")
    return numbers


def run_torch(
    ops: Sequence[str],
    widths: Sequence[int],
    left_s: float,
    tell: Callable[[str], None],
    settings: Settings,
) -> tuple[dict[str, Any], str | None]:
    """Runs this script once more for PyTorch: CUPTI serves one user per process.

    Returns:
      What it measured, and why it ended early, if it did.
    """
    if left_s <= 0:
        return {}, "the time was up before it began"
    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        told = pathlib.Path(folder, "times.json")
        command = [
            sys.executable, __file__, "--torch_to", str(told), "--ops", ",".join(ops),
            "--widths", ",".join(map(str, widths)), "--peer_widths", ",".join(map(str, widths)),
            "--elements", str(settings.elements), "--dtype", settings.dtype,
        ]  # fmt: skip
        if left_s < math.inf:
            command += ["--time_limit_s", f"{left_s:.1f}"]
        with (
            pathlib.Path(folder, "errors").open("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ):
            killer = threading.Timer(min(left_s + _GRACE_S, threading.TIMEOUT_MAX), child.kill)
            killer.daemon = True
            killer.start()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    tell(line.strip())
                code = child.wait()
            finally:
                killer.cancel()
                child.kill()
            errors.seek(0)
            lines = errors.read().strip().splitlines()
        document = json.loads(told.read_text()) if told.exists() else {}
    if code == 0:
        return document, document.get("ended")
    where = f" at {document['at']}" if document.get("at") else ""
    return document, f"it ended{where} with exit code {code}: {(lines or ['it said nothing'])[-1]}"


if __name__ == "__main__":
    cli.run(main, __doc__)
