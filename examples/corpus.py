"""Text to learn from: the documentation of Python that comes with it, as bytes."""

import functools
from pydoc_data import topics

import numpy as np


@functools.cache
def text() -> np.ndarray:
    """The help topics of this Python in order of their names, uint8."""
    pages = (topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer("\n".join(pages).encode(), np.uint8)


def batch(step: int, *, size: int, length: int, seed: int) -> np.ndarray:
    """Windows from random places, int32 [size, length + 1]: the same for the same seed and step."""
    data = text()
    starts = np.random.default_rng((seed, step)).integers(len(data) - length, size=size)
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
