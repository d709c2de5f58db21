"""The file beside a test module that keeps the budgets of its checks."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from fusejax.errors import UsageError
from fusejax.files import replace_text
from fusejax.gates import budget
from fusejax.gates.budget import Budget

SCHEMA = "fusejax.budgets/1"

type Budgets = dict[str, dict[str, Budget]]
"""By test, without the file's name ("TestBlock::test_mlp[bf16]"), and by check."""


def read(path: pathlib.Path) -> Budgets:
    """The budgets in a file; none where there is no file.

    Raises:
      UsageError: the file cannot be read; the message names the place and what was expected there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(_unreadable(getattr(error, "strerror", None) or "it is no text")) from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(_unreadable(f"line {error.lineno}: {error.msg}")) from None
    except RecursionError:
        raise UsageError(_unreadable("it is nested too deeply")) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(_unreadable(f'its "schema" is not "{SCHEMA}"'))
    return {
        test: {check: _budget(test, check, entry) for check, entry in _table(test, checks)}
        for test, checks in _table("budgets", document.get("budgets"))
    }


def write(path: pathlib.Path, budgets: Mapping[str, Mapping[str, Budget]]) -> None:
    """Writes a file whole, or not at all; sorted, a line for each kernel and boundary.

    Raises:
      UsageError: it cannot be written.
    """
    entries = {
        test: {check: entry.to_json() for check, entry in sorted(checks.items())}
        for test, checks in sorted(budgets.items())
    }
    text = _formatted({"schema": SCHEMA, "budgets": entries}) + "\n"
    check_writable(path)
    try:
        replace_text(path, text)
    except OSError as error:
        raise UsageError(f"it cannot be written ({error.strerror})") from None


def check_writable(path: pathlib.Path) -> None:
    """Raises UsageError where a file is marked read-only, which replacing it would pass over."""
    if path.is_file() and not path.stat().st_mode & 0o222:
        raise UsageError("it is read-only: make it writable to record budgets in it")


def _unreadable(why: str) -> str:
    return f"it cannot be read ({why}): mend it, or delete it and run pytest with --fusion-update"


def _table(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise UsageError(_unreadable(f'"{name}" is {value!r}, and no table'))
    return iter(value.items())


def _budget(test: str, check: str, entry: Any) -> Budget:
    try:
        return budget.from_json(entry)
    except UsageError as error:
        raise UsageError(_unreadable(f"{test}, {check}: {error}")) from None


def _formatted(value: Any, depth: int = 0) -> str:
    """JSON in which what lies in a list takes one line, so that a changed kernel is one too."""
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(k)}: {_formatted(v, depth + 1)}" for k, v in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and value:
        rows, brackets = [json.dumps(item) for item in value], "[]"
    else:
        return json.dumps(value)
    body = ",\n".join(inner + row for row in rows)
    return f"{brackets[0]}\n{body}\n{outer}{brackets[1]}"
