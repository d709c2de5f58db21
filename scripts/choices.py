"""Tells the functions of fusejax where XLA is faster than the kernels, from times of peers.py.

Example:
  python scripts/peers.py --json large.json
  python scripts/peers.py --json small.json --elements 1048576
  python scripts/choices.py large.json small.json

Usage: choices.py PEERS [PEERS ...] [--file FILE]

PEERS is what scripts/peers.py --json wrote on a card. For every function, element size, array size
and row length of which forward and backward were measured, in one file or in two, the sums of both
go into the table that fusejax chooses by; what was there of the same is replaced, the rest is kept.
"""

import json
import os
import pathlib
import re
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError, first_line
from fusejax.functions import measured

_FILE = flags.DEFINE_string("file", str(measured.FILE), "The table; by default the package's own.")


def main(paths: list[str]) -> None:
    """Reads, adds to the table, tells what changed hands."""
    if not paths:
        raise UsageError("PEERS is missing: give files that scripts/peers.py --json wrote")
    if _FILE.value == "-":
        raise UsageError("--file '-' is no table to add to: give the name of a file")
    cli.check_writable("--file", _FILE.value)
    file = pathlib.Path(_FILE.value)
    new = measured.from_peers(*map(_document, paths))
    if not new:
        raise UsageError(f"{', '.join(paths)}: nothing was measured both forward and backward")
    old = _kept(file) if file.exists() else {}
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(_text({"cards": measured.merged(old, new)}))
    aside.replace(file)
    for line in measured.told(new):
        print(line)


def _kept(file: pathlib.Path) -> measured.Table:
    try:
        table = measured.read(file)
        measured.told(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--file {str(file)!r} is no table of this script's ({first_line(error)}): give another"
        ) from error
    return table


def _document(path: str) -> Any:
    try:
        document = json.loads(pathlib.Path(path).read_text())
        measured.from_peers(document)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give another file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not what scripts/peers.py --json writes ({first_line(error)})"
        ) from error
    return document


def _text(document: Any) -> str:
    """JSON with each measurement on a line of its own."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\{[^{}]+\}", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


if __name__ == "__main__":
    cli.run(main, __doc__, takes_arguments=True)
