"""Boundaries at the ends of the named scopes of any function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fusejax import scope_regions as regions

# A function that is called eagerly is traced at every call; the programs inside stay the same ones.
_PROGRAMS_KEPT = 256


def split_at_scopes[F: Callable[..., Any]](function: F, scopes: Collection[str] | None = None) -> F:
    """The same function with a boundary wherever one of its named scopes ends.

        split = jax.jit(fusejax.split_at_scopes(model))

    What a scope hands to anything outside goes through memory, as if it ended in
    `fusejax.stage`, and what comes after waits for it: no kernel holds work from before and from
    after a scope's end, constants apart. The values do not change. A function without named scopes
    stays as it is.

    Scopes are found in the traced function: under jit, vmap and grad, in the bodies of scan,
    while_loop and cond, in jax.checkpoint, custom_jvp, custom_vjp, custom_vmap and shard_map, but
    not inside Pallas kernels. Nested scopes end one by one. Forward and backward pass of a scope
    are two. Scopes of the same name that follow each other without an operation in between are one.

    Differentiate first where custom derivatives have scopes of their own:
    `split_at_scopes(jax.grad(f))` has boundaries in their rules, and
    `jax.grad(split_at_scopes(f))` runs the rules as they are.

    Args:
      function: what JAX can trace; jitted or not. Arguments that are no arrays stay as they are.
        Jit the result: without it every call traces the function again.
      scopes: names of the scopes to split at, "mlp" or "block/mlp"; all by default.

    Raises:
      ValueError: at the first call, one of `scopes` is none of the function's; the message names
        those.
    """
    wanted = None if scopes is None else as_tuple(scopes)
    if not all(isinstance(scope, str) for scope in wanted or ()):
        raise ValueError(f"scopes must be names, such as ['mlp'], not {scopes!r}")
    rewritten = _rewriter(wanted)
    name = getattr(function, "__name__", type(function).__name__)

    # Not what jit keeps in its functions' __dict__: their `lower` would lower the original.
    @functools.wraps(function, updated=())
    def split(*args: Any, **kwargs: Any) -> Any:
        program, arrays, out_tree = traced(function, args, kwargs)
        regions.checked(wanted, program, name)
        in_memory = (True,) * len(arrays)
        is_used = (True,) * len(program.outvars)
        changed = rewritten.__wrapped__(program, (), is_used, in_memory)  # new at every call
        results = core.jaxpr_as_fun(changed)(*arrays)
        return jax.tree.unflatten(out_tree, map(_as_array, results, changed.out_avals))

    return split  # type: ignore[return-value]


def traced(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], Any]:
    """The program of a function, the arrays among its arguments, and the tree of its results.

    What is no array, such as a Python number, is what it is to the function itself.
    """
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        given = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        args, kwargs = jax.tree.unflatten(tree, given)
        return function(*args, **kwargs)

    arrays = [leaves[place] for place in places]
    program, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    return program, arrays, jax.tree.structure(shapes)


def _as_array(result: Any, aval: Any) -> jax.Array:
    """A result; a constant comes out of a program as what JAX has for it inside, no array."""
    if isinstance(result, jax.Array):
        return result
    if aval.weak_type:
        return jnp.asarray(np.asarray(result).item())
    return jnp.asarray(result, aval.dtype)


def is_array(leaf: Any) -> bool:
    """Whether an argument is an array, or the shape of one: not a dtype, which has both too."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


@dataclasses.dataclass(frozen=True)
class _End:
    """Where scopes end that hand something to what comes after them."""

    index: int
    """Of the first equation behind."""
    region: regions.Region
    """The outermost of the scopes that end, and those around it."""
    leaving: tuple[Any, ...]
    """The arrays that were made inside and are read behind."""


def _rewriter(wanted: tuple[str, ...] | None) -> Any:
    """A function that gives a program its boundaries, and knows the results for some."""

    @functools.lru_cache(_PROGRAMS_KEPT)
    def rewritten(
        jaxpr: Any,
        outer: tuple[str, ...],
        is_used: tuple[bool, ...],
        in_memory: tuple[bool, ...],
        is_recomputed: bool = False,
    ) -> Any:
        """The program with boundaries.

        Args:
          jaxpr: the program.
          outer: names of the scopes around it.
          is_used: for each result, whether anything reads it.
          in_memory: for each operand, whether it is sure to be in memory.
          is_recomputed: whether derivatives will run it again, but for what they do not need: each
            array then has a boundary of its own, and nothing waits.
        """
        where = regions.regions(jaxpr.eqns)
        uses = regions.last_uses(jaxpr, is_used)
        ends = _ends(jaxpr.eqns, where, uses, outer, wanted)
        free = regions.made_of_nothing(jaxpr.eqns)
        stored = {*jaxpr.constvars, *itertools.compress(jaxpr.invars, in_memory)}
        shared: set[Any] = set()  # with a scope that has ended
        now: dict[Any, Any] = {}  # what each variable is called behind the last boundary

        def changed(equation: Any, region: regions.Region) -> Any:
            path = (*outer, *regions.names(region)) if wanted else ()

            def inside(program: Any) -> Any:
                again = is_recomputed or equation.params.get("differentiated") is False
                return rewritten(program, path, *_flags(equation, program, uses, stored), again)

            return _renamed(regions.with_inner_programs(equation, inside), now)

        equations: list[Any] = []
        done = 0
        following = [*(end.index for end in ends[1:]), len(jaxpr.eqns)]
        for end, next_end in zip(ends, following, strict=False):
            equations += map(changed, jaxpr.eqns[done : end.index], where[done : end.index])
            done = end.index
            shared |= _read_by(jaxpr.eqns[end.region[-1][2] : done], uses).keys() - free
            # Readers have to wait as well. Else XLA would merge equal operations before and behind
            # the boundary, and put readers of the same array into one kernel.
            read = _read_by(jaxpr.eqns[done:next_end], uses)
            waiting = (v for v in read if v in stored or v in shared)
            passing = dict.fromkeys((*end.leaving, *waiting))
            together = [[v] for v in end.leaving] if is_recomputed else [passing]
            last = jaxpr.eqns[done - 1]
            equations += [_barrier(last, end.region, some, now) for some in together]
            stored.update(*together)
        equations += map(changed, jaxpr.eqns[done:], where[done:])
        if all(a is b for a, b in itertools.zip_longest(equations, jaxpr.eqns)):
            return jaxpr
        # An operand that is a result too stays itself: whoever calls may know that it is.
        leaving = {v for end in ends for v in end.leaving}
        results = [
            now[v] if not isinstance(v, core.Literal) and v in leaving else v for v in jaxpr.outvars
        ]
        return jaxpr.replace(eqns=equations, outvars=results)

    return rewritten


def _ends(
    equations: Sequence[Any],
    where: Sequence[regions.Region],
    uses: dict[Any, int],
    outer: tuple[str, ...],
    wanted: tuple[str, ...] | None,
) -> list[_End]:
    found = []
    for index, (region, behind) in enumerate(itertools.pairwise([*where, ()]), start=1):
        for depth in range(regions.shared(region, behind) + 1, len(region) + 1):
            if not regions.is_wanted((*outer, *regions.names(region[:depth])), wanted):
                continue
            made = (v for e in equations[region[depth - 1][2] : index] for v in e.outvars)
            leaving = tuple(v for v in made if uses.get(v, -1) >= index and _is_shaped(v))
            if leaving:
                found.append(_End(index, region[:depth], leaving))
            break
    return found


def _read_by(equations: Sequence[Any], uses: dict[Any, int]) -> dict[Any, None]:
    """The arrays that equations read.

    No scalars: the counter of a loop must stay one that XLA can count, and they cost nothing.
    """
    return {
        operand: None
        for equation in equations
        if regions.is_live(equation, uses)
        for operand in equation.invars
        if not isinstance(operand, core.Literal) and _is_shaped(operand) and operand.aval.ndim
    }


def _barrier(
    last: Any, region: regions.Region, variables: Collection[Any], now: dict[Any, Any]
) -> Any:
    """The boundary behind the last equation of a region, named like what is around the region.

    Brings up to date what the variables are called.
    """
    before = [now.get(v, v) for v in variables]
    now.update((v, core.Var(v.aval)) for v in variables)
    around = last.source_info.name_stack[: regions.names_around(region)]
    return last.replace(
        primitive=_primitive(),
        params={},
        invars=before,
        outvars=[now[v] for v in variables],
        effects=core.no_effects,
        source_info=last.source_info.replace(name_stack=around),
    )


@functools.cache
def _primitive() -> Any:
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


def _renamed(equation: Any, now: dict[Any, Any]) -> Any:
    operands = [v if isinstance(v, core.Literal) else now.get(v, v) for v in equation.invars]
    if all(a is b for a, b in zip(operands, equation.invars, strict=True)):
        return equation
    return equation.replace(invars=operands)


def _flags(
    equation: Any, jaxpr: Any, uses: dict[Any, int], stored: set[Any]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """`is_used` and `in_memory` of a program that an equation runs."""
    if equation.primitive.name in regions.CALLS:
        return (
            tuple(result in uses for result in equation.outvars),
            tuple(not isinstance(v, core.Literal) and v in stored for v in equation.invars),
        )
    in_memory = (True,) * len(jaxpr.invars)
    if equation.primitive.name == "scan":  # but not a slice of what is scanned
        pairs = zip(equation.invars, jaxpr.invars, strict=True)
        in_memory = tuple(given.aval.shape == taken.aval.shape for given, taken in pairs)
    return (True,) * len(jaxpr.outvars), in_memory


def _is_shaped(variable: Any) -> bool:
    aval = variable.aval
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype != jax.dtypes.float0


def as_tuple(scopes: Collection[str]) -> tuple[str, ...]:
    """Several names; a single one may come alone."""
    return (scopes,) if isinstance(scopes, str) else tuple(scopes)
