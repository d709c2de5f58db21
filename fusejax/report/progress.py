"""Says what long work is at: a spinner on a terminal, a line per step elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from absl import logging
from rich.console import Console


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that is told, in a few words, what is being done."""
    if not console.is_terminal:
        yield lambda doing: logging.info("%s", doing)
        return
    with console.status("starting") as status:
        yield lambda doing: status.update(doing)
