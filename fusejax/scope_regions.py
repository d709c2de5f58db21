"""Which named scopes the equations of a traced program lie in, and where each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.extend import source_info_util as source_info

from fusejax.hlo import scopes

Level = tuple[str, Any, int]
"""One scope that is entered once: its name, its place in the name stack, its first equation."""
Region = tuple[Level, ...]
"""The scopes around an equation, outermost first."""

# Of the two kinds of elements of a name stack, scopes and transforms, the first.
_SCOPE = type(source_info.new_name_stack("name").stack[0])

LOOPS = ("scan", "while", "cond")
CALLS = (
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "remat", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "shard_map",
)  # fmt: skip
"""Calls of one program with the operands of the call; of others, a kernel's say, nothing is known
that would allow a boundary inside."""


def regions(equations: Sequence[Any]) -> list[Region]:
    """The region of each equation.

    A scope is entered anew where an equation outside of it lies in between; without one, two
    scopes of the same name are one. What a transform makes of a scope, such as its backward pass,
    is a scope of its own.
    """
    found: list[Region] = []
    region: Region = ()
    for index, equation in enumerate(equations):
        levels = _levels(equation.source_info.name_stack.stack)
        kept = 0
        while kept < min(len(region), len(levels)) and region[kept][:2] == levels[kept]:
            kept += 1
        region = (*region[:kept], *((*level, index) for level in levels[kept:]))
        found.append(region)
    return found


def shared(a: Region, b: Region) -> int:
    """How many of the outermost scopes two regions share."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def names(region: Region) -> tuple[str, ...]:
    """Names of a region's scopes."""
    return tuple(level[0] for level in region)


def names_around(region: Region) -> int:
    """How many elements of the name stack come before those of the innermost scope."""
    return sum(len(level[1]) for level in region[:-1])


def passes(region: Region) -> str:
    """What transforms made of a scope: "recomputed" by jax.checkpoint, "backward", or ""."""
    elements = {element for level in region for element in level[1]}
    if (True, "rematted_computation") in elements:
        return "recomputed"
    return "backward" if (False, "transpose") in elements else ""


def paths(jaxpr: Any, entered: Collection[str] = (*CALLS, *LOOPS)) -> list[tuple[str, ...]]:
    """The scopes in a program, each once and with those around it first.

    Args:
      jaxpr: the program.
      entered: names of the primitives whose programs are searched too.
    """
    found: dict[tuple[str, ...], None] = {}
    seen: set[tuple[int, tuple[str, ...]]] = set()

    def visit(jaxpr: Any, outer: tuple[str, ...]) -> None:
        if (id(jaxpr), outer) in seen:
            return
        seen.add((id(jaxpr), outer))
        for equation, region in zip(jaxpr.eqns, regions(jaxpr.eqns), strict=True):
            path = (*outer, *names(region))
            found.update((path[:end], None) for end in range(len(outer) + 1, len(path) + 1))
            if equation.primitive.name in entered:
                for inner in inner_programs(equation):
                    visit(inner, path)

    visit(jaxpr, ())
    return list(found)


def inner_programs(equation: Any) -> Iterator[Any]:
    """The programs that an equation runs and that can hold boundaries."""
    if equation.primitive.name in (*CALLS, *LOOPS):
        for value in equation.params.values():
            yield from (one for one in _listed(value) if isinstance(one, core.Jaxpr))


def with_inner_programs(equation: Any, changed: Callable[[Any], Any]) -> Any:
    """The equation with each of those programs changed; itself where none is."""
    if equation.primitive.name not in (*CALLS, *LOOPS):
        return equation

    def replaced(value: Any) -> Any:
        if isinstance(value, core.Jaxpr):
            return changed(value)
        if isinstance(value, tuple) and any(isinstance(one, core.Jaxpr) for one in value):
            return tuple(map(replaced, value))
        return value

    params = {name: replaced(value) for name, value in equation.params.items()}
    if all(
        a is b
        for name, value in params.items()
        for a, b in zip(_listed(value), _listed(equation.params[name]), strict=True)
    ):
        return equation
    return equation.replace(params=params)


def checked(scopes_wanted: Collection[str] | None, jaxpr: Any, function: str) -> None:
    """Raises ValueError where a program has no scope of a name that is wanted."""
    if scopes_wanted is None:
        return
    there = paths(jaxpr)
    for wanted in scopes_wanted:
        if not any(is_wanted(path, (wanted,)) for path in there):
            listed = ", ".join(map("/".join, there[:12])) + (", ..." if len(there) > 12 else "")
            raise ValueError(
                f"{function} has no scope {wanted!r}: "
                + (f"give one of {listed}" if there else "it has no named scopes")
            )


def is_wanted(path: Sequence[str], wanted: Collection[str] | None) -> bool:
    """Whether a scope is one of those wanted: "mlp" and "block/mlp" both name "model/block/mlp"."""
    if wanted is None:
        return True
    text = "/" + "/".join(path)
    return any(text.endswith(f"/{name.strip('/')}") for name in wanted)


def last_uses(jaxpr: Any, is_used: Sequence[bool] | None = None) -> dict[Any, int]:
    """For each variable that something depends on, the last equation to read it.

    Args:
      jaxpr: the program.
      is_used: for each result, whether anything reads it; the "equation" that does is the one
        behind the last.
    """
    found: dict[Any, int] = {}
    for index, result in enumerate(jaxpr.outvars):
        if (is_used is None or is_used[index]) and not isinstance(result, core.Literal):
            found[result] = len(jaxpr.eqns)
    for index in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[index]
        if is_live(equation, found):
            for operand in equation.invars:
                if not isinstance(operand, core.Literal):
                    found.setdefault(operand, index)
    return found


def is_live(equation: Any, uses: dict[Any, int]) -> bool:
    """Whether anything depends on an equation."""
    return bool(equation.effects) or any(result in uses for result in equation.outvars)


def made_of_nothing(equations: Sequence[Any]) -> set[Any]:
    """Variables that equations make of no operand, as iota does: cheaper made again than read.

    Random numbers are not cheap, and of calls nobody knows.
    """
    found: set[Any] = set()
    for equation in equations:
        name = equation.primitive.name
        if name.startswith(("random_", "threefry")) or any(core.jaxprs_in_params(equation.params)):
            continue
        if not equation.effects and all(
            isinstance(v, core.Literal) or v in found for v in equation.invars
        ):
            found.update(equation.outvars)
    return found


def _levels(stack: Sequence[Any]) -> list[tuple[str, Any]]:
    levels: list[tuple[str, Any]] = []
    above: list[tuple[bool, str]] = []
    for element in stack:
        is_scope = isinstance(element, _SCOPE)
        above.append((is_scope, element.name))
        if is_scope and (name := _name(element.name)):
            levels.append((name, tuple(above)))
            above = []
    return levels


def _name(scope: str) -> str:
    """The scope as reports name it; "" for one that JAX made."""
    unbalanced = any(scope.count(a) != scope.count(b) for a, b in ("()", "[]", "{}"))
    return scope if unbalanced else scopes.scope(f"{scope}/_")


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
