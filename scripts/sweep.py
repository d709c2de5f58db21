"""Compares the paths of ops over widths, rows and dtypes: where the best path changes.

Examples:
  python scripts/sweep.py --ops softmax --widths 1024,4096,16384,32768 --target h200
  python scripts/sweep.py --ops bias_gelu_rowsum,residual_ln --dtypes float16,float32 \\
      --json sweep.json --plot sweep.svg
  python scripts/sweep.py --ops gemm_gelu_rowsum --shapes 8192x8192x512,65536x1024x1024
  python scripts/sweep.py --read sweep.json --plot sweep.svg
  python scripts/sweep.py --ops softmax --target h200 --against sweep_of_the_card.json

Rows are as many as make --elements. Cells are compiled side by side; on a GPU they are measured one
by one, and the table ends with how far the predictions are off. Without one, times are predicted.
"""

import os
import re
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32")
WIDTHS = ("1024", "4096", "8192", "16384", "32768")

_OPS = flags.DEFINE_list(
    "ops", None, "Ops, by commas; all by default. compare.py --list names them."
)
_WIDTHS = flags.DEFINE_list("widths", list(WIDTHS), "Elements per row.")
_ELEMENTS = flags.DEFINE_integer(
    "elements", 2**26, "Of each tensor: rows are this / width.", lower_bound=1
)
_SHAPES = flags.DEFINE_list(
    "shapes", [], "Whole shapes instead, such as 8192x8192 or 8192x8192x512, by commas."
)
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16"], f"Some of {', '.join(DTYPES)}.")
_MODES = flags.DEFINE_list("modes", ["forward"], "forward, backward, or both.")
_PATHS = flags.DEFINE_list("paths", None, "Which paths; all that an op has by default.")
_TARGET = flags.DEFINE_string("target", "auto", "As of compare.py.")
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Processes; as many as there are processors by default.", lower_bound=1
)
_READ = flags.DEFINE_list("read", [], "Show these files of --json instead of comparing.")
_AGAINST = flags.DEFINE_string(
    "against", None, "Hold the kernels' registers and so on against those in this file of --json."
)
_JSON = flags.DEFINE_string("json", None, "Also write everything to this file; - for the output.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the times into this .svg, .png or .pdf.")


def main() -> None:
    """Reads the flags, sweeps, prints."""
    platform.prepare_process()
    from rich.console import Console

    from fusejax.report.console import WIDTH
    from fusejax.report.sweep_console import print_sweep
    from fusejax.report.sweep_plot import require_plotting, save_plot
    from fusejax.sweep import files

    if _PLOT.value is not None:
        require_plotting("--plot", _PLOT.value)
    for flag, path in (("--json", _JSON.value), ("--plot", _PLOT.value)):
        cli.check_writable(flag, path)
    others = None if _AGAINST.value is None else files.read("--against", [_AGAINST.value])
    errors = Console(stderr=True)
    documents = files.read("--read", _READ.value) if _READ.value else _compared(errors)
    if _JSON.value != "-":
        print_sweep(documents, Console(width=WIDTH), others)
    if _JSON.value:
        cli.write_json("--json", _JSON.value, files.document(documents))
    if _PLOT.value:
        save_plot(documents, _PLOT.value)


def _compared(errors: Any) -> list[dict[str, Any]]:
    from fusejax import paths
    from fusejax.compile import targets
    from fusejax.ops import OPS
    from fusejax.report.progress import progress
    from fusejax.sweep import cells

    ops = _some_of("--ops", list(OPS) if _OPS.value is None else _OPS.value, OPS)
    names = None if _PATHS.value is None else _some_of("--paths", _PATHS.value, paths.NAMES)
    _, notice = targets.resolve(_TARGET.value)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    wanted = cells.grid(
        ops,
        [_number("--widths", width) for width in _WIDTHS.value],
        _ELEMENTS.value,
        _some_of("--dtypes", _DTYPES.value, DTYPES),
        _some_of("--modes", _MODES.value, paths.MODES),
        [_whole_shape(text) for text in _SHAPES.value],
        None if names is None else tuple(name for name in paths.NAMES if name in names),
    )
    if not wanted and not _SHAPES.value:
        raise UsageError("--widths is empty: give elements per row, such as 1024,8192")
    if not wanted:
        raise UsageError(
            "--shapes: none has as many sizes as an op of --ops: see compare.py --list"
        )
    jobs = min(_JOBS.value or len(os.sched_getaffinity(0)), len(wanted))
    with progress(errors) as tell:
        documents = list(cells.run(wanted, _TARGET.value, jobs, tell))
    failed = [document["failed"] for document in documents if "failed" in document]
    if len(failed) == len(documents):
        raise UsageError(f"nothing could be compared: {failed[0]}")
    return documents


def _whole_shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[1-9][0-9]{0,17}(x[1-9][0-9]{0,17})+", text.strip()):
        raise UsageError(
            f"--shapes {text!r}: give sizes above 0 such as 8192x8192 or 8192x8192x512"
        )
    return tuple(int(size) for size in text.split("x"))


def _number(flag: str, text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text.strip()):
        raise UsageError(f"{flag} {text!r}: give whole numbers above 0")
    return int(text)


def _some_of(flag: str, given: Any, known: Any) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        if name not in known:
            raise UsageError(f"{flag} {name!r} is unknown: give some of {', '.join(known)}")
    if not names:
        raise UsageError(f"{flag} is empty: give some of {', '.join(known)}")
    return names


if __name__ == "__main__":
    cli.run(main, __doc__)
