"""fusejax.split_at_scopes: same values, and a boundary at the end of every scope."""

import contextlib
import functools
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scoped_functions as functions
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from scoped_functions import F32, X, assert_same, quick_jit, scope, together

import fusejax
from fusejax.compile import aot
from fusejax.hlo import scopes
from fusejax.hlo.analyse import analyse
from fusejax.split_scopes import split_at_scopes

SIMPLE = tuple(functions.SIMPLE)
OPS = tuple(f"op_{name}" for name in functions.OPS)
MIXED = (
    "linen_mlp", "nnx_model", "grad_steps", "grad_siblings", "grad_scanned", "grad_rematerialised",
    "grad_custom_gradient", "grad_nnx_model", "vmap_steps", "vmap_custom_gradient",
)  # fmt: skip
GROUPS = {"simple": SIMPLE, "ops": OPS, "mixed": MIXED}
# On the CPU; their kernels are like those of the others.
MORE = ("linen_stack", "grad_linen_mlp", "grad_branches", "vmap_scanned", "vmap_branches")
OPENED = (
    "jit", "closed_call", "remat2", "checkpoint", "scan", "while", "cond", "custom_jvp_call",
    "custom_vjp_call", "custom_vmap_call", "shard_map",
)  # fmt: skip


def unguarded(jaxpr, outer="", is_used=None):
    """Values that something outside of their scope reads without a boundary in between."""
    used = set()
    for place, result in enumerate(jaxpr.outvars):
        if isinstance(result, jax.extend.core.Var) and (is_used is None or is_used[place]):
            used.add(result)
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or used.intersection(equation.outvars):
            live.append(equation)
            used.update(v for v in equation.invars if isinstance(v, jax.extend.core.Var))
    made, found = {}, []

    def read(variables, path):
        for variable in variables:
            above = made.get(variable) if isinstance(variable, jax.extend.core.Var) else None
            if above and not f"{path}/".startswith(f"{above}/"):
                found.append((above, path))

    for equation in reversed(live):
        name = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        path = scopes.scope(f"{name}/_")
        primitive = equation.primitive.name
        if primitive == "optimization_barrier":
            continue
        read(equation.invars, path)
        made.update((v, path) for v in equation.outvars)
        if primitive in OPENED:
            flags = [v in used for v in equation.outvars]
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                found += unguarded(inner, name, flags if len(flags) == len(inner.outvars) else None)
    read([v for v in jaxpr.outvars if v in used or is_used is None], scopes.scope(f"{outer}/_"))
    return found


def crossing(kernels):
    """Scopes of each kernel that holds work of two, neither of which is inside the other."""

    def apart(a, b):
        return not (f"{a}/".startswith(f"{b}/") or f"{b}/".startswith(f"{a}/"))

    return [k.scopes for k in kernels if any(apart(a, b) for a in k.scopes for b in k.scopes)]


def barriers(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text().count("optimization_barrier")


@pytest.mark.parametrize("names", [*GROUPS.values(), MORE], ids=[*GROUPS, "more"])
def test_values_are_those_of_the_function(names):
    program, arguments = together(names)
    wanted = quick_jit(program)(arguments)
    assert_same(quick_jit(split_at_scopes(program))(arguments), wanted)
    assert barriers(split_at_scopes(program), arguments) > barriers(program, arguments)


def test_every_scope_ends_in_a_boundary():
    bare = []
    for name, (function, arguments) in functions.everything().items():
        split = jax.make_jaxpr(split_at_scopes(function))(*arguments)
        assert not unguarded(split), name
        if not unguarded(jax.make_jaxpr(function)(*arguments)):
            bare.append(name)
    assert not bare  # without the boundaries each of them has such values


@pytest.mark.parametrize("group", GROUPS)
def test_no_kernel_reaches_across_a_boundary(group, deviceless):
    program, arguments = together(GROUPS[group])
    target = deviceless("h100")
    fused, split = (
        analyse(aot.compile_program(f, (arguments,), target).program).kernels
        for f in (program, split_at_scopes(program))
    )
    within = {
        path.split("/")[0]
        for paths in crossing(fused)
        for path in paths
        if sum(other.split("/")[0] == path.split("/")[0] for other in paths) > 1
    }
    # Of its stages XLA fuses no two into one kernel anyway.
    assert set(GROUPS[group]) - within <= {"op_shared_matmul"}
    # A constant that two scopes broadcast is one, and has the first one's name in both kernels.
    assert {paths[0].split("/")[0] for paths in crossing(split)} <= {"op_masked_softmax"}
    assert len(split) > len(fused)


def test_nested_scopes_end_one_by_one(deviceless):
    kernels = [
        fusejax.inspect(f, X, target=deviceless("h100")).modules[0].kernels
        for f in (functions.nested, split_at_scopes(functions.nested))
    ]
    assert [k.scopes for k in kernels[1]] == [
        ("outer/first",), ("outer/second",), ("outer",), ("next",),
    ]  # fmt: skip
    assert len(kernels[0]) == 1


@pytest.mark.parametrize("name", ["steps", "scanned", "branches", "rematerialised", "repeated"])
def test_the_split_function_is_differentiated_and_vectorised(name):
    function = functions.SIMPLE[name]
    split = split_at_scopes(function)

    def derived(f):
        def run(x):
            g = functions.gradient(f)
            return g(x), jax.vmap(g)(x[None]), jax.jvp(functions.loss(f), (x,), (x,))

        return run

    assert_same(quick_jit(derived(split))(X), quick_jit(derived(function))(X))
    assert barriers(functions.gradient(split), X) > barriers(functions.gradient(function), X)


def test_functions_with_derivatives_of_their_own_keep_them():
    for name in ("custom_gradient", "custom_tangent"):
        function = functions.SIMPLE[name]
        wanted = quick_jit(functions.gradient(function))(X)
        assert_same(jax.jit(functions.gradient(split_at_scopes(function)))(X), wanted)
        assert_same(jax.jit(split_at_scopes(functions.gradient(function)))(X), wanted)
    # The rule's 7 is in it, which no derivative of the function would bring.
    function = functions.SIMPLE["custom_gradient"]
    text = str(jax.make_jaxpr(functions.gradient(split_at_scopes(function)))(X))
    assert "7.0" in text


def test_custom_vmap_keeps_its_rule():
    @jax.custom_batching.custom_vmap
    def sine(x):
        with scope("sine"):
            y = jnp.sin(x)
        return y * 3

    sine.def_vmap(lambda size, is_batched, x: (jnp.cos(x), True))
    function = split_at_scopes(lambda x: sine(x))
    assert_same(quick_jit(jax.vmap(function))(X), quick_jit(jnp.cos)(X))
    assert_same(quick_jit(function)(X), quick_jit(sine)(X))
    assert not unguarded(jax.make_jaxpr(function)(X))


@pytest.mark.parametrize("policy", [None, "dots_saveable", "names", "everything_saveable"])
def test_checkpoint_keeps_its_policy(policy):
    policies = jax.checkpoint_policies
    chosen = (
        policies.save_only_these_names("kept")
        if policy == "names"
        else getattr(policies, policy)
        if policy
        else None
    )

    @functools.partial(jax.checkpoint, policy=chosen)
    def block(x):
        with scope("up"):
            y = jnp.sin(x @ x.T)
        y = checkpoint_name(y, "kept")
        with scope("down"):
            return jnp.exp(y * 0.1) @ x

    def gradient(f):
        return jax.grad(lambda x: f(f(x)).sum())

    def counts(f):
        text = jax.jit(f).lower(X).as_text()
        return [text.count(f"stablehlo.{name}") for name in ("dot_general", "sine", "exponential")]

    wanted = counts(gradient(block))
    assert counts(split_at_scopes(gradient(block))) == wanted
    assert counts(gradient(split_at_scopes(block))) == wanted


def test_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        with scope("sine"):
            y = jnp.sin(x)
        with scope("total"):
            return lax.psum(y, "rows")

    spec = PartitionSpec("rows")
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    for f in (function, functions.gradient(function)):
        assert_same(quick_jit(split_at_scopes(f))(X), quick_jit(f)(X))
        assert not unguarded(jax.make_jaxpr(split_at_scopes(f))(X))


def test_kernels_of_pallas_stay_whole():
    from jax.experimental import pallas as pl

    def kernel(x, y):
        with scope("inside"):
            z = x[...] * 2
        y[...] = z + 1

    def function(x):
        with scope("sine"):
            x = jnp.sin(x)
        return pl.pallas_call(kernel, out_shape=x, interpret=True)(x)

    assert_same(quick_jit(split_at_scopes(function))(X), quick_jit(function)(X))
    assert str(jax.make_jaxpr(split_at_scopes(function))(X)).count("optimization_barrier") == 1


def shapes_and_types(x, k):
    with scope("a"):
        rows = {"sine": jnp.sin(x), "same": x, "none": None}
        k, one = jax.random.split(k)
    with scope("b"):
        place, mask = jnp.argmax(jnp.atleast_1d(x), -1), x > 0
        noise = jax.random.normal(one, x.shape, x.dtype)
    return rows, k, [], (place + 1, ~mask, noise * 2, jnp.fft.fft(jnp.atleast_1d(noise)), 3.0)


@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (2, 0, 3)])
def test_trees_integers_keys_and_sizes(shape):
    if 0 in shape:
        function = functions.steps
        arguments = (jnp.ones(shape),)
    else:
        function, arguments = shapes_and_types, (functions.array(*shape), jax.random.key(0))
    split = split_at_scopes(function)
    wanted = quick_jit(function)(*arguments)
    assert_same(quick_jit(split)(*arguments), wanted)
    described = jax.eval_shape(split, *arguments)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), described) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )


def test_weak_types_float64_and_new_shapes():
    split = split_at_scopes(functions.steps)
    assert split(2.0).weak_type == functions.steps(2.0).weak_type
    assert jax.jit(split)(2.0).weak_type == jax.jit(functions.steps)(2.0).weak_type
    assert split(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        x = jnp.asarray(np.linspace(0.0, 1.0, 5))
        assert_same(quick_jit(split)(x), quick_jit(functions.steps)(x), 1e-15)


def test_what_is_no_array_stays_what_it_is():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode")
    def function(x, count, *, mode="sin"):
        for _ in range(count):
            with scope("turn"):
                x = getattr(jnp, mode)(x)
            x = x * 2
        return x

    assert_same(split_at_scopes(function)(X, 3, mode="cos"), function(X, 3, mode="cos"))

    def plain(x, is_on, options):
        with scope("sine"):
            x = options["f"](x) if is_on else x
        return x.astype(options["dtype"]) * 2

    options = {"f": jnp.sin, "n": None, "dtype": jnp.bfloat16}
    assert_same(split_at_scopes(plain)(X, True, options), plain(X, True, options))


def test_jitted_functions_are_compiled_once_and_donate():
    split = split_at_scopes(jax.jit(functions.steps, donate_argnums=0))
    given = X + 0
    wanted = quick_jit(functions.steps)(X)
    assert_same(split(given), wanted)
    assert given.is_deleted()
    again = X + 0
    compiled = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    try:
        with jax.log_compiles(True):
            split(again)
    finally:
        logger.removeHandler(handler)
    assert not [text for text in compiled if "Compiling" in text]


def test_what_is_handed_through_stays_the_argument():
    def function(x, y):
        with scope("a"):
            z = jnp.sin(x)
        with scope("b"):
            return x, z + x, y

    jaxpr = jax.make_jaxpr(split_at_scopes(function))(X, X)
    assert [jaxpr.outvars[0], jaxpr.outvars[2]] == list(jaxpr.invars)
    assert_same(quick_jit(split_at_scopes(function))(X, X), quick_jit(function)(X, X))

    def around_nothing(x):
        with scope("nothing"):
            pass
        with scope("only an input"):
            y = x
        return jnp.sin(y), y

    assert barriers(split_at_scopes(around_nothing), X) == 0
    assert_same(split_at_scopes(around_nothing)(X), around_nothing(X))


def test_constants_are_arrays_too():
    given = split_at_scopes(lambda x: (jnp.int32(3), 2.5, x))(jnp.ones(3))
    assert all(isinstance(result, jax.Array) for result in given)
    assert [(r.dtype, r.weak_type) for r in given[:2]] == [(jnp.int32, False), (jnp.float32, True)]
    assert (int(given[0]), float(given[1])) == (3, 2.5)


def test_effects_keep_their_order():
    def function(x):
        with scope("a"):
            jax.debug.print("one {}", x[0, 0], ordered=True)
            y = jnp.sin(x)
        with scope("b"):
            jax.debug.print("two {}", y[0, 0], ordered=True)
            return jnp.cos(y)

    printed = []
    for f in (function, split_at_scopes(function)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            jax.block_until_ready(quick_jit(f)(X))
            jax.effects_barrier()
        printed.append(out.getvalue())
    assert printed[0] == printed[1]
    assert [line.split()[0] for line in printed[1].splitlines()] == ["one", "two"]


def test_a_split_function_inside_another():
    def outer(split):
        def run(x):
            y = jnp.sin(x)  # closed over, and traced where the split function is not

            def inner(z):
                with scope("a"):
                    z = z * y
                with scope("b"):
                    return jnp.exp(z) * y

            with scope("outer"):
                return split(inner)(x).sum()

        return run

    def derived(f):
        return jax.jit(jax.vmap(jax.value_and_grad(f)))

    assert_same(derived(outer(split_at_scopes))(X), derived(outer(lambda f: f))(X))
    text = jax.jit(outer(split_at_scopes)).lower(X).as_text(debug_info=True)
    assert "outer/a/mul" in text
    assert "outer/outer" not in text
    twice = split_at_scopes(split_at_scopes(functions.steps))
    assert_same(quick_jit(twice)(X), quick_jit(functions.steps)(X))


def test_scopes_in_vmap_in_scan_in_checkpoint_in_grad():
    def function(x):
        def body(carry, _):
            with scope("body"):
                carry = carry * 1.1
            return jax.vmap(functions.steps)(carry), None

        return lax.scan(jax.checkpoint(body), x, None, length=2)[0].sum()

    for f, x in ((jax.grad(function), X), (jax.vmap(jax.grad(jax.jit(function))), X[None])):
        assert_same(quick_jit(split_at_scopes(f))(x), quick_jit(f)(x))
        assert not unguarded(jax.make_jaxpr(split_at_scopes(f))(x))


def test_scopes_that_are_entered_again():
    def function(x):
        with scope("a"):
            y, kept = jnp.sin(x), jnp.cos(x)
        z = y * 2
        with scope("a"):
            return jnp.exp(z) + kept

    jaxpr = jax.make_jaxpr(split_at_scopes(function))(X)
    assert [e.primitive.name for e in jaxpr.eqns] == [
        "sin", "cos", "optimization_barrier", "mul", "exp", "add", "optimization_barrier",
    ]  # fmt: skip
    assert jaxpr.eqns[5].invars[1] in jaxpr.eqns[2].outvars

    def recursive(x, depth=3):
        with scope("level"):
            x = jnp.sin(x)
            return jnp.cos(recursive(x, depth - 1) if depth else x)

    assert barriers(split_at_scopes(recursive), X) == 4
    assert_same(quick_jit(split_at_scopes(recursive))(X), quick_jit(recursive)(X))


def test_what_nothing_depends_on_is_not_kept_alive():
    def function(x):
        with scope("dead"):
            unused = jnp.exp(x)
        unused = unused * 2
        both = jax.jit(lambda x: (scope("sine")(jnp.sin)(x), scope("unused")(jnp.cosh)(x)))
        with scope("used"):
            return both(x)[0] * 2

    text = jax.jit(split_at_scopes(function)).lower(X).compile().as_text()
    assert "sine(" in text
    assert "exponential(" not in text


@pytest.mark.parametrize(
    "name", ["with (brackets)", "a(b", ")", "ünï", "x.y-z:1", "a b", '"', "a;b", "vmap", "l[0]"]
)
def test_any_name(name):
    def function(x):
        with scope(name):
            y = jnp.sin(x)
        with scope("next"):
            return jnp.cos(y)

    assert barriers(split_at_scopes(function), X) == 2


def test_some_scopes_only():
    def count(*names):
        return barriers(split_at_scopes(functions.nested, names), X)

    assert [count("outer"), count("first"), count("outer/first"), count("first", "next")] == [
        1, 1, 1, 2,
    ]  # fmt: skip
    assert barriers(split_at_scopes(functions.scanned, "turn"), X) == 1
    assert barriers(split_at_scopes(functions.nested), X) == 4


def test_unknown_scopes_are_named_with_those_there_are():
    for wanted in ("zip", ["a", "zip"], ("a/b",)):
        name = wanted if isinstance(wanted, str) else wanted[-1]
        with pytest.raises(ValueError, match=r"^steps has no scope") as caught:
            split_at_scopes(functions.steps, wanted)(X)
        assert str(caught.value) == f"steps has no scope {name!r}: give one of a, b, c"
    with pytest.raises(ValueError, match="sin has no scope 'a': it has no named scopes"):
        split_at_scopes(jnp.sin, "a")(X)


def test_a_function_without_scopes_stays_as_it_is():
    def function(x):
        return jnp.sin(x) * lax.scan(lambda c, y: (c + y, c), x[0], x)[0]

    plain, split = jax.make_jaxpr(function)(X), jax.make_jaxpr(split_at_scopes(function))(X)
    assert str(plain) == str(split)


def test_dtypes_of_a_larger_step_on_bfloat16():
    x = X.astype(jnp.bfloat16)
    found, wanted = (
        quick_jit(f)(x) for f in (split_at_scopes(functions.softmax_loss), functions.softmax_loss)
    )
    assert found.dtype == wanted.dtype
    assert np.abs(found.astype(F32) - wanted.astype(F32)).max() < 0.1
