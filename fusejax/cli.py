"""What the scripts share: flags read by absl, one line and exit code 2 for a user's mistake."""

import errno
import io
import json
import logging as std_logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from fusejax.errors import UsageError
from fusejax.files import replace_text


def run(main: Callable[..., int | None], usage: str, *, takes_arguments: bool = False) -> None:
    """Runs a script's `main` and exits: 0 or what `main` returns; 2 with one line for a mistake.

    Args:
      main: reads the flags it needs from absl.
      usage: what --help prints above the flags.
      takes_arguments: whether `main` is called with a list of the arguments that are no flags,
        wherever they stand between the flags. Without it there may be none.
    """
    flags.FLAGS.set_gnu_getopt(takes_arguments)

    def guarded(argv: Sequence[str]) -> int:
        if takes_arguments:
            return main(list(argv[1:])) or 0
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}: every option is a --flag")
        return main() or 0

    def parse(argv: Sequence[str]) -> list[str]:
        if any(argument in ("--help", "-h", "-help", "--helpfull") for argument in argv[1:]):
            print(f"{usage.strip()}\n\nFlags:\n{flags.FLAGS.module_help(sys.modules['__main__'])}")
            sys.exit(0)
        try:
            return flags.FLAGS(list(argv))
        except flags.Error as error:
            raise app.UsageError(f"{str(error).splitlines()[0]}; see --help") from error

    name = pathlib.Path(sys.argv[0]).name
    std_logging.getLogger("jax").setLevel(std_logging.ERROR)
    logging.set_verbosity(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without "µ" shows "?"
            stream.reconfigure(errors="replace")
    try:
        code = guarded(parse(sys.argv))
        if sys.stdout is not None:
            sys.stdout.flush()
    except (UsageError, app.UsageError) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"{name}: standard output cannot be written to: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def check_writable(flag: str, path: str | None) -> None:
    """Raises UsageError where a file could not be written at `path`, before the work is done."""
    if path is None or path == "-":
        return
    if not path:
        raise UsageError(f"{flag} {path!r} is empty: give the name of a file, or -")
    real = pathlib.Path(os.path.realpath(path))
    try:
        if real.is_dir():
            raise UsageError(f"{flag} {path!r} is a folder: give the name of a file")
        if not real.parent.is_dir():
            raise UsageError(
                f"{flag} {path!r}: there is no folder {str(real.parent)!r}; make it first"
            )
        if real.exists() and not os.access(real, os.W_OK):
            raise UsageError(f"{flag} {path!r} is read-only: give another name")
        if not real.exists():
            # Only trying tells: some folders (/proc) say that they can be written to.
            real.open("x").close()
            real.unlink()
    except OSError as error:
        raise UsageError(
            f"{flag} {path[:80]!r} cannot be written ({error.strerror}): give another name"
        ) from error


def write_json(flag: str, path: str, document: dict[str, Any]) -> None:
    """Writes a document to a file, whole or not at all; "-" is standard output.

    A link is followed. What is no regular file (a pipe, a device) is written to as it stands.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    real = pathlib.Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():
            real.write_text(text)
        else:
            replace_text(real, text)
    except OSError as error:
        raise UsageError(f"{flag} {path!r} cannot be written: {error.strerror}") from error
