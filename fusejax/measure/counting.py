"""The program that Nsight Compute watches: every path of a comparison once, and nothing else."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusejax.measure import counters

# Part of the name of the kernel that is launched between two paths; none of an op is called so.
_MARK = "xor"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to run: the arguments of a comparison."""

    op: str
    options: Mapping[str, Any]
    mode: str
    shape: Sequence[int]
    dtype: Any
    names: tuple[str, ...]

    def command(self) -> list[str]:
        """The command line that runs it."""
        fields = {
            **vars(self),
            "shape": list(self.shape),
            "dtype": np.dtype(self.dtype).name,
            "names": list(self.names),
        }
        return [sys.executable, "-m", "fusejax.measure.counting", json.dumps(fields)]


def by_path(
    found: Sequence[counters.Counted], paths: int
) -> tuple[tuple[counters.Counted, ...], ...] | None:
    """The launches of each path, told apart by the marks between them.

    A library may launch more kernels for a product than its one instruction says, so that counting
    them off would not do.

    Returns:
      None where there are not so many marks.
    """
    runs: list[list[counters.Counted]] = [[]]
    for launch in found:
        if _MARK in launch.function:
            runs.append([])
        else:
            runs[-1].append(launch)
    return tuple(map(tuple, runs)) if len(runs) == paths else None


def main(text: str) -> None:
    """Compiles and warms up the paths, then runs each once where it is counted."""
    import jax
    import jax.numpy as jnp

    from fusejax import paths
    from fusejax.measure import timing
    from fusejax.measure.inputs import random_on_device
    from fusejax.measure.turns import card_turn
    from fusejax.ops import OPS

    request = Request(**json.loads(text))
    op = OPS[request.op](**request.options)
    shapes = paths.argument_shapes(op, request.mode, request.shape, jnp.dtype(request.dtype))
    values = random_on_device(shapes, seed=0)
    runs = []
    with card_turn(shared=True):
        for name in request.names:
            path = paths.build(op, name, request.mode)
            known = path.chain.shapes(shapes)
            programs = [
                jax.jit(stage.function)
                .lower(*(known[value] for value in stage.inputs))
                .compile(compiler_options=timing.GRAPHS_OFF)
                for stage in path.chain.stages
            ]
            runs.append((path, programs))
            jax.block_until_ready(path.run(programs, values))
        bits = jnp.zeros(3, jnp.uint8)
        mark = jax.jit(lambda bits: bits ^ 1).lower(bits).compile()
        jax.block_until_ready(mark(bits))
    with card_turn(), counters.counted():
        for number, (path, programs) in enumerate(runs):
            if number:
                jax.block_until_ready(mark(bits))
            jax.block_until_ready(path.run(programs, values))


if __name__ == "__main__":
    main(sys.argv[1])
