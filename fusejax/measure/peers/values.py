"""Arrays to measure with."""

import math
from collections.abc import Sequence
from typing import Any

from fusejax.measure.peers.cells import Settings
from fusejax.measure.peers.copies import LONGEST_VIEW


class Values:
    """Random arrays of any width, cut from the same flat ones: made once, each again where needed.

    Standard normal; numbers per row and parameters are between 0.5 and 1.5, labels anywhere.
    """

    def __init__(self, widest: int, arrays: int, settings: Settings):
        import jax
        import jax.numpy as jnp

        size = max(settings.elements, widest, LONGEST_VIEW)
        make = jax.jit(
            lambda key: jax.random.normal(key, (size,), jnp.float32).astype(settings.dtype)
        )
        self.flats = [make(jax.random.key(number)) for number in range(arrays)]
        jax.block_until_ready(self.flats)

    def like(self, shapes: Sequence[Any], width: int, first: int = 0) -> list[Any]:
        """An array for each shape: labels below `width`, large ones from flat one `first` on."""
        import jax
        import jax.numpy as jnp

        found = []
        for number, shape in enumerate(shapes, first):
            if len(shape.shape) == 2:
                array = self.flats[number][: math.prod(shape.shape)].reshape(shape.shape)
            elif jnp.issubdtype(shape.dtype, jnp.integer):
                key = jax.random.key(100 + number)
                array = jax.random.randint(key, shape.shape, 0, width, shape.dtype)
            else:
                key = jax.random.key(200 + number)
                array = jax.random.uniform(key, shape.shape, shape.dtype, 0.5, 1.5)
            found.append(array)
        return found
