"""A traced function as a chain of programs, one for each of its named scopes, to be run apart."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from fusejax import scope_regions as regions
from fusejax.ops.op import Chain, Stage
from fusejax.split_scopes import as_tuple, is_array, traced

# Calls whose program can stand in their place. Of others, derivatives would be lost.
_WRITTEN_OUT = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint")

_Cut = Callable[[regions.Region], regions.Region | None]


@dataclasses.dataclass(frozen=True)
class ScopeStages:
    """A function cut where its outermost named scopes end; compiled and dispatched stage by stage.

    `fusejax.paths.Path("eager", found.chain)` runs it like a path of an op:

        found = stages_of(function, arguments)
        programs = [jax.jit(stage.function) for stage in found.chain.stages]
        flat = Path("eager", found.chain).run(programs, found.arguments)
        results = jax.tree.unflatten(found.out_tree, flat)
    """

    chain: Chain
    """Its stages have unique names: "gelu", "gelu.2" where the scope is entered again, "gelu
    backward" for its transpose, "gelu recomputed" under `jax.checkpoint`; "(before)", "(between)",
    "(after)" for what no scope holds, and "(scan)", "(while)", "(cond)" where a loop is in that.
    All return tuples. Its arguments name the arrays in `arguments` here, its results the leaves of
    what the function returns."""
    arguments: tuple[Any, ...]
    """The arrays, or their shapes, among the leaves of the function's arguments."""
    out_tree: Any
    """Tree of the function's results."""


def stages_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    scopes: Collection[str] | None = None,
) -> ScopeStages:
    """Cuts a function into stages, one for each time that one of its scopes is entered.

    The outermost scopes count, also those in functions that it calls jitted or under
    `jax.checkpoint`; where a single one holds all others, as a model's class does, those inside it.
    Scopes in the body of a scan, while_loop or cond belong to the stage that holds the loop, and
    those in calls with derivatives of their own to the stage of the call. What stands between two
    scopes is a stage too. A function without scopes is one, of its own name.

    Args:
      function: jitted or not.
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them, and whatever else the function
        takes, which stays as it is.
      scopes: names of the scopes to cut at; all by default.

    Raises:
      ValueError: one of `scopes` is none of the function's; the message names those.
      Whatever tracing `function` raises.
    """
    wanted = None if scopes is None else as_tuple(scopes)
    name = getattr(function, "__name__", type(function).__name__)
    program, arrays, out_tree = traced(function, arguments, {})
    regions.checked(wanted, program, name)
    cut = _cutter(program, wanted)
    program = _written_out(program, cut)
    parts = _parts(program, cut)
    unique = _Unique()
    names = [unique(one) for one in _argument_names(function, arguments)]
    values = dict(zip(program.invars, names, strict=True))
    stages = []
    for place, part in enumerate(parts):
        title = unique(_title(part, place, len(parts), name))
        later = {v for other in parts[place + 1 :] for v in other.reads}.union(program.outvars)
        inputs = [v for v in part.reads if v in values]
        outputs = [v for v in part.makes if v in later and v not in values]
        labels = [f"{title}[{i}]" for i in range(len(outputs))] if len(outputs) > 1 else [title]
        values.update(zip(outputs, labels, strict=False))
        stages.append(
            Stage(
                name=title,
                function=_function(title, program, part, inputs, outputs),
                inputs=tuple(values[v] for v in inputs),
                outputs=tuple(values[v] for v in outputs),
            )
        )
    results = tuple(values[v] for v in program.outvars)
    return ScopeStages(Chain(tuple(names), tuple(stages), results), tuple(arrays), out_tree)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Equations that follow one another in the same outermost scope, or in none."""

    region: regions.Region | None
    equations: tuple[Any, ...]

    @functools.cached_property
    def reads(self) -> dict[Any, None]:
        """Variables that are not made here."""
        read = (v for equation in self.equations for v in equation.invars)
        return {v: None for v in read if not isinstance(v, core.Literal) and v not in self.makes}

    @functools.cached_property
    def makes(self) -> dict[Any, None]:
        return dict.fromkeys(v for equation in self.equations for v in equation.outvars)


def _parts(program: Any, cut: _Cut) -> list[_Part]:
    """The live equations of a program, in parts.

    What is made of nothing outside of scopes is made in every part that reads it.
    """
    uses = regions.last_uses(program)
    where = [cut(region) for region in regions.regions(program.eqns)]
    for place, equation in enumerate(program.eqns[1:], start=1):
        # A boundary, as fusejax.stage puts it behind a scope, belongs to what it ends.
        if where[place] is None and equation.primitive.name == "optimization_barrier":
            where[place] = where[place - 1]
    outside = [e for region, e in zip(where, program.eqns, strict=True) if region is None]
    nothing = regions.made_of_nothing(outside)
    anywhere = [e for e in outside if not nothing.isdisjoint(e.outvars)]
    members = [
        (region, equation)
        for region, equation in zip(where, program.eqns, strict=True)
        if regions.is_live(equation, uses) and nothing.isdisjoint(equation.outvars)
    ]
    parts = [
        _Part(region, tuple(equation for _, equation in group))
        for region, group in itertools.groupby(members, key=lambda pair: pair[0])
    ] or [_Part(None, ())]
    *others, last = parts
    return [
        *(_complete(part, anywhere, ()) for part in others),
        _complete(last, anywhere, program.outvars),
    ]


def _complete(part: _Part, anywhere: Sequence[Any], results: Sequence[Any]) -> _Part:
    """The part with those equations in front that it, or one of some results, depends on."""
    needed = {*part.reads, *results}
    added: list[Any] = []
    for equation in reversed(anywhere):
        if not needed.isdisjoint(equation.outvars):
            added.insert(0, equation)
            needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
    return _Part(part.region, (*added, *part.equations))


def _cutter(program: Any, wanted: tuple[str, ...] | None) -> _Cut:
    """What reduces a region to the scope of it that is a stage, and those around that."""
    lengths = [len(path) for path in regions.paths(program, _WRITTEN_OUT)]
    outermost = 1
    while lengths.count(outermost) == 1 and max(lengths) > outermost:
        outermost += 1

    def cut(region: regions.Region) -> regions.Region | None:
        for depth in range(1, len(region) + 1):
            if wanted is None and depth < outermost:
                continue
            if regions.is_wanted(regions.names(region[:depth]), wanted):
                return region[:depth]
        return None

    return cut


def _written_out(program: Any, cut: _Cut) -> Any:
    """The program with calls that hold scopes written out.

    Its results are arguments and what equations make: a constant is copied, and so is everything
    where there is nothing but results.
    """
    equations: list[Any] = []
    constants: dict[Any, Any] = {}

    def add(jaxpr: Any, operands: Iterable[Any], outer: Any) -> list[Any]:
        known = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            known[variable] = core.Var(variable.aval)
            constants[known[variable]] = value

        def here(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            stack = equation.source_info.name_stack
            stack = stack if outer is None else outer + stack
            equation = equation.replace(
                invars=[here(v) for v in equation.invars],
                source_info=equation.source_info.replace(name_stack=stack),
            )
            inner = _to_write_out(equation, cut)
            if inner is None:
                made = [core.Var(v.aval) for v in equation.outvars]
                equations.append(equation.replace(outvars=made))
            else:
                if "name" in equation.params:
                    stack = stack.extend(f"jit({equation.params['name']})")
                made = add(inner, equation.invars, stack)
            known.update(zip(equation.outvars, made, strict=True))
        return [here(v) for v in jaxpr.outvars]

    results = add(program, program.invars, None)
    only_results = not equations
    for place, result in enumerate(results):
        if only_results or isinstance(result, core.Literal) or result in constants:
            results[place] = core.Var(result.aval)
            equations.append(
                core.new_jaxpr_eqn(
                    [result], [results[place]], primitives.copy_p, {}, core.no_effects
                )
            )
    return program.replace(
        constvars=list(constants), consts=list(constants.values()), eqns=equations, outvars=results
    )


def _to_write_out(equation: Any, cut: _Cut) -> Any | None:
    """The program of a call that stands in no stage, if it has scopes inside."""
    (region,) = regions.regions([equation])
    if equation.primitive.name not in _WRITTEN_OUT or cut(region) is not None:
        return None
    (inner,) = regions.inner_programs(equation)
    return inner if regions.paths(inner, _WRITTEN_OUT) else None


def _function(
    title: str, program: Any, part: _Part, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    constants = {
        variable: value
        for variable, value in zip(program.constvars, program.consts, strict=True)
        if variable in part.reads
    }
    run = core.jaxpr_as_fun(
        program.replace(
            constvars=list(constants),
            consts=list(constants.values()),
            invars=list(inputs),
            outvars=list(outputs),
            eqns=list(part.equations),
            effects=frozenset().union(*(equation.effects for equation in part.equations)),
        )
    )

    def stage(*arrays: Any) -> tuple[Any, ...]:
        return tuple(run(*arrays))

    stage.__name__ = re.sub(r"\W+", "_", title).strip("_") or "stage"
    return stage


def _title(part: _Part, place: int, count: int, function: str) -> str:
    if part.region is not None:
        return f"{'/'.join(regions.names(part.region))} {regions.passes(part.region)}".strip()
    if count == 1:
        return function
    loops = [e.primitive.name for e in part.equations if e.primitive.name in regions.LOOPS]
    if loops:
        return f"({loops[0]})"
    return "(before)" if place == 0 else "(after)" if place == count - 1 else "(between)"


class _Unique:
    """Tells names that were given before from one another: "gelu", "gelu.2"."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, name: str) -> str:
        numbered = (f"{name}.{number}" for number in itertools.count(2))
        found = next(n for n in itertools.chain((name,), numbered) if n not in self._given)
        self._given.add(found)
        return found


def _argument_names(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    """Of each array: "x", "params/kernel"."""
    try:
        parameters = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # of some callables that are not written in Python
        parameters = []
    parameters += [f"arg{place}" for place in range(len(parameters), len(arguments))]
    return [
        "/".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator="/"))))
        for name, argument in zip(parameters, arguments, strict=False)
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument)
        if is_array(leaf)
    ]
