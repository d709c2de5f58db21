"""Functions of the same arguments, compiled for a target and held against one another.

    print(fusejax.compare({"flax": theirs, "ours": ours}, parameters, x, target="h200"))

Whole models are functions too: their kernels and boundaries are told by module path.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusejax import (
    accuracy,
    float64_run,
    over_fused,
    predict,
    rates,
    residual,
    resources,
    verdict,
    what_if,
)
from fusejax.compare_ops import versions
from fusejax.comparison import Comparison, PathResult, Refusal, Timing
from fusejax.compile import aot, platform, targets
from fusejax.compile.targets import Target
from fusejax.errors import first_line
from fusejax.hlo.analyse import analyse
from fusejax.measure import host, on_machine, timing
from fusejax.measure.turns import card_turn
from fusejax.ops.op import hlo_dtype, nbytes
from fusejax.report.units import tensor

_SHOWN_ARGUMENTS = 6


@dataclasses.dataclass(frozen=True)
class FunctionComparison:
    """What `compare` found; print it, or take its document."""

    comparison: Comparison
    """One path for each function, in order."""
    differences: Mapping[str, float]
    """By function, how far its results are from the first one's: the largest difference over the
    largest value. Empty where nothing was run."""

    def to_json(self) -> dict[str, Any]:
        """The document of the "fusejax.compare/1" schema, and "differences", null for infinite."""
        from fusejax.report.document import comparison_json

        known = {
            name: value if math.isfinite(value) else None
            for name, value in self.differences.items()
        }
        return comparison_json(self.comparison) | {"differences": known}

    def save_html(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the comparison as one page, `index.html` in a folder of its own; returns its path.

        Needs the extra `report`. An earlier report in the folder is replaced.

        Raises:
          UsageError: the folder holds other files or cannot be written to, or the extra is missing.
        """
        from fusejax.report import html

        return html.save(self.to_json(), folder, flag="save_html")

    def __str__(self) -> str:
        from fusejax.report.console import functions_as_text

        return functions_as_text(self.comparison, self.differences)


def compare(
    functions: Mapping[str, Callable[..., Any]],
    *arguments: Any,
    target: str | Target = "auto",
    xla_options: Mapping[str, Any] | None = None,
) -> FunctionComparison:
    """Compiles functions of the same arguments and results, and says which is fastest, and why.

    Where the target is this machine's and all arguments are arrays, the functions are run in turn:
    times are measured and results compared. Elsewhere times are predicted.

    Args:
      functions: by name, jitted or not.
      *arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them. Bind static arguments with
        `functools.partial`.
      target: as of `fusejax.inspect`.
      xla_options: options of XLA by name that every function is compiled with, such as
        {"xla_gpu_enable_triton_gemm": False}.

    Raises:
      ValueError: there is no function, a name is no text, they return different shapes or dtypes,
        or one donates arguments that it would have to be called with again.
      UsageError: the target is unknown, or cannot be compiled for here.
      Whatever tracing a function raises.
    """
    if not isinstance(functions, Mapping) or not all(isinstance(name, str) for name in functions):
        raise ValueError(
            f"functions is {type(functions).__name__}: give a dict of functions by name, as in "
            "{'mine': f, 'other': g}"
        )
    if not functions:
        raise ValueError("functions is empty: give them by name, as in {'mine': f, 'other': g}")
    platform.prepare_process()
    chosen = targets.resolve(target)[0] if isinstance(target, str) else target
    returned = _returned(functions, arguments)
    options = dict(xla_options or {})
    if options:
        what_if.check_options(options, chosen)
    paths: dict[str, PathResult | Refusal] = {}
    executables = {}
    for name, function in functions.items():
        try:
            paths[name], executables[name] = _compiled(name, function, arguments, chosen, options)
        except Exception as error:  # one that does not compile is a row, and the others stay
            paths[name] = Refusal(name, f"does not compile: {first_line(error)}")
    differences: dict[str, float] = {}
    served = {name: path for name, path in paths.items() if isinstance(path, PathResult)}
    if chosen.kind != "deviceless" and served and all(map(_is_array, jax.tree.leaves(arguments))):
        for name in served:
            if any(leaf.donated for leaf in jax.tree.leaves(executables[name].args_info)):
                raise ValueError(
                    f"{name} donates arguments, and is to be called more than once: give it "
                    "without donate_argnums"
                )
        calls = {name: _call(executables[name], arguments) for name in served}
        differences = _differences(calls)
        times = _times(functions, served, calls, arguments, chosen, options)
        served = {
            name: residual.attributed(dataclasses.replace(path, timing=times[name]), chosen)
            for name, path in served.items()
        }
    comparison = Comparison(
        op=", ".join(functions),
        formula=_listed(jax.tree.leaves(arguments)),
        mode="forward",
        shape=(),
        dtype="",
        target=chosen,
        versions=versions(),
        sheet=None,
        minimum_bytes=sum(map(nbytes, [*_shapes(arguments), *returned])),
        floor_us=None,
        paths={**paths, **served},
        verdict=verdict.judge(list(served.values()), chosen),
        xla_options=options,
    )
    return FunctionComparison(comparison, differences)


def _compiled(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: Target,
    options: Mapping[str, Any],
) -> tuple[PathResult, Any]:
    compilation = aot.compile_program(function, arguments, target, options)
    found = analyse(compilation.program)
    used = resources.of_program(compilation.program, found, target)
    rate = rates.of(target)
    result = PathResult(
        name=name,
        kernels=found.kernels,
        boundaries=found.boundaries,
        programs=1,
        cost=None if rate is None else predict.path_cost(found.kernels, 1, rate),
        compile_cold_s=compilation.cold_s,
        compile_warm_s=None,
        executable_bytes=compilation.executable_bytes,
        warnings=found.warnings,
        resources=used,
    )
    return over_fused.flags(result), compilation.executable


def _returned(
    functions: Mapping[str, Callable[..., Any]], arguments: Sequence[Any]
) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the results, which all functions must agree on."""
    found = {name: jax.eval_shape(function, *arguments) for name, function in functions.items()}
    first, *others = found
    for other in others:
        leaves = [_listed(jax.tree.leaves(found[name]), None) for name in (first, other)]
        if leaves[0] != leaves[1]:
            raise ValueError(
                f"{first} returns {leaves[0] or 'nothing'}, and {other} {leaves[1] or 'nothing'}: "
                "compare functions of the same results"
            )
    return jax.tree.leaves(found[first])


def _call(executable: Any, arguments: Sequence[Any]) -> Callable[[], Any]:
    return lambda: executable(*arguments)


def _differences(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    results = {name: list(map(_real, jax.tree.leaves(call()))) for name, call in calls.items()}
    wanted = next(iter(results.values()))
    return {
        name: accuracy.compare(leaves, wanted, rows=0, where="").max_rel
        for name, leaves in results.items()
    }


def _real(leaf: Any) -> np.ndarray:
    """float64; of complex numbers both parts, of random keys what they are made of."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return float64_run.as_real(np.asarray(leaf))


def _times(
    functions: Mapping[str, Callable[..., Any]],
    served: Mapping[str, PathResult],
    calls: Mapping[str, Callable[[], Any]],
    arguments: Sequence[Any],
    target: Target,
    options: Mapping[str, Any],
) -> dict[str, Timing]:
    if target.kind == "cpu":
        return host.wall_times(calls)
    with card_turn(shared=True):
        # CUDA graphs would hide which kernel took how long.
        one_by_one = {
            name: _call(
                aot.compile_program(
                    functions[name], arguments, target, {**options, **timing.GRAPHS_OFF}
                ).executable,
                arguments,
            )
            for name in served
        }
    with card_turn():
        return on_machine.card_times(served, calls, one_by_one)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _shapes(arguments: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(jax.eval_shape(lambda *given: given, *arguments))


def _listed(leaves: Sequence[Any], most: int | None = _SHOWN_ARGUMENTS) -> str:
    """As HLO writes them, and how many more there are."""
    shapes = _shapes(leaves)
    shown = [tensor(hlo_dtype(one.dtype), one.shape) for one in shapes[:most]]
    more = len(shapes) - len(shown)
    return ", ".join([*shown, f"and {more} more"] if more else shown)
