"""Runs compiled paths on this machine: their errors and their times."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fusejax.compile.targets import Target
from fusejax.measure import host
from fusejax.ops.op import Op
from fusejax.paths import Path


def measure(
    op: Op,
    mode: str,
    shapes: Sequence[Any],
    built: Mapping[str, tuple[Path, Sequence[Any]]],
    target: Target,
    progress: Callable[[str], None],
    *,
    counters: bool,
) -> dict[str, dict[str, Any]]:
    """What was measured, by path name, as fields of `fusejax.comparison.PathResult`."""
    progress("making random inputs")
    values = random_on_device(shapes, seed=0)
    calls = {
        name: lambda path=path, programs=programs: path.run(programs, values)
        for name, (path, programs) in built.items()
    }
    progress(f"timing {', '.join(calls)} in turn")
    return {name: {"timing": timing} for name, timing in host.wall_times(calls).items()}


def random_on_device(shapes: Sequence[Any], seed: int) -> tuple[jax.Array, ...]:
    """An array per shape: standard normal, rounded to its dtype, made where JAX computes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    make = jax.jit(
        lambda keys: tuple(
            jax.random.normal(key, shape.shape, "float32").astype(shape.dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )
    )
    return make(keys)
