"""Exceptions as lines, so that nobody's failure takes the others with it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fusejax.errors import first_line


@dataclasses.dataclass(frozen=True)
class Failed:
    """An exception as a line: the exception itself would keep the arrays of its frames."""

    line: str


def attempt(action: Callable[[], Any]) -> Any:
    """What an action gives, or `Failed`: nobody's failure must take the others with it."""
    try:
        return action()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {first_line(error)}"[:200])
