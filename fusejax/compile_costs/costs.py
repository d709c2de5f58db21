"""All that compiling an op costs on a target, part by part."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import fusejax
from fusejax import paths
from fusejax.comparison import Refusal
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.compile_costs import mix
from fusejax.compile_costs.breaks import Break, breaks
from fusejax.compile_costs.fallbacks import Fallback, fallbacks
from fusejax.compile_costs.fresh import CompileTimes, Work, compile_times
from fusejax.compile_costs.surroundings import PATHS, Surroundings, surroundings
from fusejax.compile_costs.variants import Mix, of_mix
from fusejax.ops.op import Op

PARTS = ("times", "variants", "kernel", "breaks", "fallbacks")


@dataclasses.dataclass(frozen=True)
class CompileCosts:
    """What was found; parts that were not asked for are empty."""

    op: str
    formula: str
    options: Mapping[str, Any]
    dtype: str
    shape: tuple[int, ...]
    """Of all parts but the mix and the fallbacks."""
    target: Target
    versions: Mapping[str, str]
    times: tuple[CompileTimes | Refusal, ...] = ()
    mix: Mix | None = None
    surroundings: tuple[Surroundings | Refusal, ...] = ()
    breaks: tuple[Break, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()


def compile_costs(
    op: Op,
    dtype: Any,
    target: Target,
    *,
    shapes: Sequence[tuple[int, ...]] = (),
    names: Sequence[str] | None = None,
    parts: Sequence[str] = PARTS,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CompileCosts:
    """Compiles the paths of `op` in all the ways that cost something.

    Args:
      op: one of `fusejax.ops.OPS`: its compile times are measured in processes that build it anew.
      dtype: float16, bfloat16 or float32.
      target: see `fusejax.compile.targets.resolve`.
      shapes: calls in the order of `op.axes`, with repetitions; by default twenty of
        `fusejax.compile_costs.mix`. The first is the shape of the parts that have one.
      names: which of `fusejax.paths.NAMES`; by default those of the op.
      parts: which of `PARTS`.
      options: what the op was built with.
      progress: told in a few words what is being done.
    """
    calls = tuple(shapes) or mix.calls(op.axes)
    shape = calls[0] if shapes else (8192, 8192, mix.DEPTH)[: len(op.axes)]
    wanted = paths.of(op) if names is None else tuple(names)
    progress(f"preparing the compiler for {target.title}")
    aot.compile_program(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), np.float32),), target)
    return CompileCosts(
        op=op.name,
        formula=op.formula,
        options=dict(options or {}),
        dtype=np.dtype(dtype).name,
        shape=shape,
        target=target,
        versions={
            "fusejax": fusejax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        times=_times(op, shape, dtype, target, wanted, options or {}, progress)
        if "times" in parts
        else (),
        mix=of_mix(op, calls, dtype, target, wanted, progress=progress)
        if "variants" in parts
        else None,
        surroundings=surroundings(
            op,
            shape,
            dtype,
            target,
            names=[name for name in PATHS if name in wanted],
            progress=progress,
        )
        if "kernel" in parts
        else (),
        breaks=breaks(op, shape, dtype, target, progress=progress) if "breaks" in parts else (),
        fallbacks=fallbacks(op, target, progress=progress) if "fallbacks" in parts else (),
    )


def _times(
    op: Op,
    shape: tuple[int, ...],
    dtype: Any,
    target: Target,
    names: Sequence[str],
    options: Mapping[str, Any],
    progress: Callable[[str], None],
) -> tuple[CompileTimes | Refusal, ...]:
    refused = {name: paths.refusal(op, name, "forward", shape, dtype, target) for name in names}
    works = [
        Work(op.name, dict(options), name, shape, np.dtype(dtype).name)
        for name in names
        if refused[name] is None
    ]
    measured = compile_times(works, target, progress)
    return (*measured, *(Refusal(name, why) for name, why in refused.items() if why is not None))
