"""The program that Nsight Compute watches: every path of a comparison once, and nothing else.

It is handed the very executables that were timed: compiled again, products might be tuned to other
kernels, and under ncu that takes minutes.
"""

import dataclasses
import json
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusejax.measure import counters
from fusejax.measure.turns import card_turn, counting_turn

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

    def command(self, executables: pathlib.Path) -> list[str]:
        """The command line that runs what is in the file `executables`."""
        fields = {
            **vars(self),
            "shape": list(self.shape),
            "dtype": np.dtype(self.dtype).name,
            "names": list(self.names),
        }
        told = json.dumps(fields)
        return [sys.executable, "-m", "fusejax.measure.counting", str(executables), told]


def count(
    request: Request, executables: Mapping[str, Sequence[Any]]
) -> tuple[tuple[counters.Counted, ...], ...] | None:
    """The launches of each path, as Nsight Compute counts them.

    Args:
      request: what the executables are.
      executables: of every path, for this machine's card and compiled without CUDA graphs.

    Raises:
      UsageError: as `counters.run_under_ncu`.
    """
    from jax.experimental import serialize_executable

    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        file = pathlib.Path(folder, "executables")
        kept = [[serialize_executable.serialize(e) for e in executables[n]] for n in request.names]
        file.write_bytes(pickle.dumps(kept))
        with counting_turn():
            launches = counters.run_under_ncu(request.command(file))
    return by_path(launches, len(request.names))


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


def main(executables: str, text: str) -> None:
    """Loads and warms up the paths, then runs each once where it is counted."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.serialize_executable import deserialize_and_load

    from fusejax import paths
    from fusejax.measure.inputs import random_on_device
    from fusejax.ops import OPS

    request = Request(**json.loads(text))
    op = OPS[request.op](**request.options)
    shapes = paths.argument_shapes(op, request.mode, request.shape, jnp.dtype(request.dtype))
    values = random_on_device(shapes, seed=0)
    runs = []
    with card_turn(shared=True):
        kept = pickle.loads(pathlib.Path(executables).read_bytes())
        for name, serialised in zip(request.names, kept, strict=True):
            path = paths.build(op, name, request.mode)
            programs = [deserialize_and_load(*one) for one in serialised]
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
    main(*sys.argv[1:])
