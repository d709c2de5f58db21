"""Shows the kernels of compiled HLO, the tensors that go between them, and why XLA stopped there.

Usage: inspect_hlo.py PATH [PATH ...] [flags]

PATH is an HLO text file (of as_text(), say), a folder that XLA_FLAGS=--xla_dump_to=FOLDER filled,
or - for standard input. A dump folder says most: XLA's fusion decisions, the order of launches and
the kernels' PTX are read from it too, best with --xla_dump_hlo_pass_re=priority-fusion and
--xla_dump_emitter_re='^ptx$' among the XLA_FLAGS.

Examples:
  python scripts/inspect_hlo.py module.txt --top 10
  python scripts/inspect_hlo.py dump_folder --scope mlp --json report.json
  python scripts/inspect_hlo.py --diff before_folder after_folder --html page
  python scripts/inspect_hlo.py dump_folder --max-kernels 1 --max-boundary-bytes 0

Limits (--max-...) hold for each module on its own, per run of the module: loop bodies count as
often as they run. With --scope they hold for what belongs to the scope, with --diff for the second
PATH. --max-boundary-bytes is about all boundaries of a module together.

Exit code: 0; 1 where a limit is exceeded; 2 where something cannot be read.
"""

import sys

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError

_DIFF = flags.DEFINE_boolean(
    "diff", False, "Tell what differs between two PATHs: matched by scope and source, not by name."
)
_SCOPE = flags.DEFINE_string(
    "scope", None, "Only what has instructions of this named scope: mlp, or block_1/mlp."
)
_TOP = flags.DEFINE_integer(
    "top", 20, "Most kernels and boundaries that are printed of a module.", lower_bound=1
)
_JSON = flags.DEFINE_string(
    "json", None, "Also write the report to this file; - for standard output."
)
_HTML = flags.DEFINE_string(
    "html", None, "Also save the report as index.html in this folder (extra 'report')."
)
_MAX_KERNELS = flags.DEFINE_integer(
    "max-kernels", None, "Exit with 1 where a module launches more.", lower_bound=0
)
_MAX_BYTES = flags.DEFINE_integer(
    "max-bytes", None, "Exit with 1 where a module's kernels move more.", lower_bound=0
)
_MAX_BOUNDARY_BYTES = flags.DEFINE_integer(
    "max-boundary-bytes",
    None,
    "Exit with 1 where a module's boundaries cost more bytes, written and read again.",
    lower_bound=0,
)


def main(paths: list[str]) -> int:
    """Reads, prints, and holds against the limits."""
    if not paths:
        raise UsageError("PATH is missing: give an HLO text file, a dump folder or -; see --help")
    if _DIFF.value and len(paths) != 2:
        raise UsageError(f"--diff takes two PATHs, not {len(paths)}: give the one before first")
    if paths.count("-") > 1:
        raise UsageError("- stands for standard input and can be given once")
    cli.check_writable("--json", _JSON.value)
    if _HTML.value is not None:
        from fusejax.report import html

        html.check_folder("--html", _HTML.value)
    from rich.console import Console

    from fusejax import inspection
    from fusejax.report.inspection_console import WIDTH, as_text, print_report

    report = inspection.inspect_paths(paths, scope=_SCOPE.value, compare=_DIFF.value)
    if _JSON.value != "-":
        if sys.stdout.isatty():
            console = Console()
            console.width = min(console.width, WIDTH)
            print_report(report, console, _TOP.value)
        else:
            print(as_text(report, _TOP.value))
    document = report.to_json() if _JSON.value or _HTML.value is not None else {}
    if _JSON.value:
        cli.write_json("--json", _JSON.value, document)
    if _HTML.value is not None:
        html.save(document, _HTML.value)
    limits = inspection.Limits(_MAX_KERNELS.value, _MAX_BYTES.value, _MAX_BOUNDARY_BYTES.value)
    broken = inspection.exceeded(report, limits)
    sys.stdout.flush()
    for line in broken:
        print(f"inspect_hlo.py: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    cli.run(main, __doc__, takes_arguments=True)
