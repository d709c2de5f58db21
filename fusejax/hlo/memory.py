"""Keeps Python's garbage collector from slowing down the reading of large modules."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without garbage collection inside.

    A module is many objects that all stay, and no cycles: looking through them again and again, as
    their number grows, finds nothing and makes the time more than linear.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
