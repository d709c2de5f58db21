"""The folder of a report: made, or known again as one of ours; nothing else is ever overwritten."""

import contextlib
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from fusejax.errors import UsageError
from fusejax.files import replace_text
from fusejax.report.html.page import MARKER, page

_PAGE = "index.html"
_NEEDED = ("jinja2", "matplotlib")


def check_folder(flag: str, folder: str | os.PathLike[str]) -> None:
    """Raises UsageError where no report could be saved into a folder, before the work is done.

    It may be absent (its parent is not), empty, or hold a report of ours and nothing else.

    Args:
      flag: what the message begins with, "--html" for example.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{flag} needs {' and '.join(missing)}: install the extra with "
            "pip install 'fusejax[report]'"
        )
    text = os.fspath(folder)
    if not text:
        raise UsageError(f"{flag} {text!r} is empty: give the name of a folder")
    with _in_one_line(flag, text):
        place = pathlib.Path(os.path.realpath(text))
        if not place.exists():
            if not place.parent.is_dir():
                raise UsageError(
                    f"{flag} {text!r}: there is no folder {str(place.parent)!r}; make it first"
                )
            # Only trying tells: some folders (/proc) say that they can be written to.
            place.mkdir()
            place.rmdir()
            return
        if not place.is_dir():
            raise UsageError(f"{flag} {text!r} is a file: give the name of a folder")
        others = sorted(one.name for one in place.iterdir() if not _is_ours(one))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UsageError(
                f"{flag} {text!r} holds {others[0]!r}{more}, which is no report of fusejax: give "
                "a folder that is new or empty"
            )
        tempfile.TemporaryFile(dir=place).close()


def save(
    document: Mapping[str, Any], folder: str | os.PathLike[str], *, flag: str = "--html"
) -> pathlib.Path:
    """Writes the page of a document, whole or not at all, and returns the path of the page.

    Args:
      document: of the schema "fusejax.compare/1" or "fusejax.inspect/1".
      folder: as of `check_folder`.
      flag: what messages begin with.

    Raises:
      UsageError: `check_folder` says no, or the page cannot be written.
      ValueError: the document is of no schema that is known.
    """
    check_folder(flag, folder)
    text = page(document)
    with _in_one_line(flag, os.fspath(folder)):
        place = pathlib.Path(os.path.realpath(folder))
        is_new = not place.exists()
        place.mkdir(exist_ok=True)
        try:
            replace_text(place / _PAGE, text.encode(errors="replace").decode())
        except BaseException:
            if is_new:
                place.rmdir()
            raise
        return place / _PAGE


def _is_ours(path: pathlib.Path) -> bool:
    if path.name != _PAGE or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return MARKER.encode() in file.read(1024)


@contextlib.contextmanager
def _in_one_line(flag: str, folder: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{flag} {folder[:80]!r} cannot be written to ({why}): give another folder"
        ) from error
