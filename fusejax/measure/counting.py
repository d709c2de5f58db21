"""The program that Nsight Compute watches: every path of a comparison once, and nothing else."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


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


def main(text: str) -> None:
    """Compiles and warms up the paths, then runs each once where it is counted."""
    import jax
    import jax.numpy as jnp

    from fusejax import paths
    from fusejax.measure import counters, timing
    from fusejax.measure.inputs import random_on_device
    from fusejax.ops import OPS

    request = Request(**json.loads(text))
    op = OPS[request.op](**request.options)
    shapes = paths.argument_shapes(op, request.mode, request.shape, jnp.dtype(request.dtype))
    values = random_on_device(shapes, seed=0)
    runs = []
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
    with counters.counted():
        for path, programs in runs:
            jax.block_until_ready(path.run(programs, values))


if __name__ == "__main__":
    main(sys.argv[1])
