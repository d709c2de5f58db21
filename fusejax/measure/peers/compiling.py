"""Several programs compiled at a time."""

import concurrent.futures
import os
from typing import Any

from fusejax.measure.attempts import Failed, attempt

_MOST_COMPILES = 8


def pool() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that compile: XLA does so without Python's lock."""
    return concurrent.futures.ThreadPoolExecutor(min(_MOST_COMPILES, os.cpu_count() or 1))


def compiled(lowered: Any) -> Any:
    """A lowered function compiled without CUDA graphs; `Failed` where either did not work."""
    from fusejax.measure import timing

    if isinstance(lowered, Failed):
        return lowered
    return attempt(lambda: lowered.compile(compiler_options=timing.GRAPHS_OFF))
