"""A function cut at its scopes into programs that are dispatched apart."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scoped_functions as functions
from jax import lax
from scoped_functions import F32, X, assert_same, quick_jit, scope

import fusejax
from fusejax.paths import Path
from fusejax.scope_stages import stages_of


def run(found, programs):
    flat = Path("eager", found.chain).run(programs, found.arguments)
    return jax.tree.unflatten(found.out_tree, flat)


def run_apart(function, *arguments, scopes=None):
    found = stages_of(function, arguments, scopes)
    return run(found, [quick_jit(stage.function) for stage in found.chain.stages])


def names(function, *arguments, scopes=None):
    return [stage.name for stage in stages_of(function, arguments, scopes).chain.stages]


def test_the_chain_computes_the_function():
    gradients = ("grad_steps", "grad_scanned", "grad_rematerialised", "grad_nnx_model")
    chosen = {
        name: case
        for name, case in functions.everything().items()
        if name in gradients or not name.startswith(("grad_", "vmap_"))
    }
    found = {name: stages_of(*case) for name, case in chosen.items()}

    def chains(arguments):
        return {
            name: jax.tree.unflatten(
                one.out_tree,
                Path("eager", one.chain).run(
                    [stage.function for stage in one.chain.stages], arguments[name]
                ),
            )
            for name, one in found.items()
        }

    wanted = quick_jit(lambda given: {n: f(*given[n]) for n, (f, _) in chosen.items()})(
        {name: arguments for name, (_, arguments) in chosen.items()}
    )
    flat = {name: one.arguments for name, one in found.items()}
    assert_same(quick_jit(chains)(flat), wanted)
    assert all(len(one.chain.stages) > 1 for name, one in found.items() if "op_" in name)


@pytest.mark.parametrize("name", ["steps", "grad_nested", "nnx_model", "op_masked_softmax"])
def test_the_stages_run_apart(name):
    function, arguments = functions.everything()[name]
    assert_same(run_apart(function, *arguments), quick_jit(function)(*arguments))


def test_names_inputs_and_outputs():
    def function(x, parameters):
        shifted = x + parameters["bias"]
        with scope("sine"):
            y = jnp.sin(shifted)
        with scope("cosine"):
            y, kept = jnp.cos(y), y * 2
        z = y * parameters["scale"]
        with scope("sine"):
            z = jnp.sin(z)
        return z + kept, x

    chain = stages_of(function, (X, {"bias": X, "scale": X})).chain
    assert chain.arguments == ("x", "parameters/bias", "parameters/scale")
    assert [(stage.name, stage.inputs, stage.outputs) for stage in chain.stages] == [
        ("(before)", ("x", "parameters/bias"), ("(before)",)),
        ("sine", ("(before)",), ("sine",)),
        ("cosine", ("sine",), ("cosine[0]", "cosine[1]")),
        ("(between)", ("cosine[0]", "parameters/scale"), ("(between)",)),
        ("sine.2", ("(between)",), ("sine.2",)),
        ("(after)", ("sine.2", "cosine[1]"), ("(after)",)),
    ]
    assert chain.results == ("(after)", "x")


def test_each_stage_has_a_program_of_its_scope():
    chain = stages_of(functions.nested, (X,)).chain
    assert [stage.name for stage in chain.stages] == ["outer", "next"]
    shapes = chain.shapes((jax.ShapeDtypeStruct(X.shape, X.dtype),))
    texts = [
        jax.jit(s.function).lower(*(shapes[v] for v in s.inputs)).as_text(debug_info=True)
        for s in chain.stages
    ]
    assert all(f"module @jit_{s.name}" in text for s, text in zip(chain.stages, texts, strict=True))
    assert "outer/first/sin" in texts[0]
    assert "exponential" not in texts[0]
    assert "stablehlo.sine" not in texts[1]


def test_the_backward_pass_has_stages_of_its_own():
    assert names(functions.gradient(functions.SIMPLE["steps"]), X) == [
        "a", "b", "c", "c backward", "b backward", "a backward",
    ]  # fmt: skip
    under_checkpoint = names(functions.gradient(functions.SIMPLE["rematerialised"]), X)
    assert under_checkpoint[2:6] == [
        "up recomputed", "down recomputed", "down backward", "up backward",
    ]  # fmt: skip


def test_loops_stay_with_the_stage_that_holds_them():
    def function(x):
        with scope("first"):
            x = jnp.sin(x)
        x = lax.fori_loop(0, 2, lambda i, x: functions.steps(x), x)
        with scope("last"):
            return lax.cond(x[0, 0] > 0, functions.steps, functions.nested, x)

    assert names(function, X) == ["first", "(scan)", "last"]
    assert_same(run_apart(function, X), quick_jit(function)(X), 1e-5)
    assert names(functions.SIMPLE["branches"], X) == ["branches"]


def test_calls_are_looked_into():
    steps = ["a", "b", "c"]
    assert names(jax.jit(functions.steps), X) == steps
    assert names(jax.checkpoint(functions.steps), X) == steps
    assert names(jax.jit(lambda x: jax.jit(functions.steps)(x) + 1), X) == [*steps, "(after)"]
    twice = names(lambda x: jax.jit(functions.steps)(jax.jit(functions.steps)(x)), X)
    assert twice == [*steps, "a.2", "b.2", "c.2"]
    assert names(functions.custom_gradient, X) == ["before", "(after)"]


def test_a_scope_around_everything_does_not_count():
    def function(x):
        with scope("Model"):
            return functions.nested(functions.steps(x)) * 2

    assert names(function, X) == [
        "Model/a",
        "Model/b",
        "Model/c",
        "Model/outer",
        "Model/next",
        "(after)",
    ]
    assert names(scope("Model")(jnp.sin), X) == ["Model"]


def test_the_boundary_of_a_stage_is_no_stage_of_its_own():
    def function(x):
        y = fusejax.stage("sine")(jnp.sin)(x)
        return fusejax.stage("cosine")(jnp.cos)(y * 2)

    assert names(function, X) == ["sine", "(between)", "cosine"]
    backward = names(functions.gradient(function), X)
    assert backward == [
        "sine",
        "(between)",
        "cosine",
        "cosine backward",
        "(between).2",
        "sine backward",
    ]
    assert_same(
        run_apart(functions.gradient(function), X), quick_jit(functions.gradient(function))(X)
    )


def test_some_scopes_only():
    assert names(functions.nested, X, scopes="second") == ["(before)", "outer/second", "(after)"]
    assert names(functions.nested, X, scopes=["next"]) == ["(before)", "next"]
    assert_same(run_apart(functions.nested, X, scopes=["second"]), quick_jit(functions.nested)(X))
    with pytest.raises(ValueError, match="nested has no scope 'zip': give one of outer, outer/fi"):
        stages_of(functions.nested, (X,), "zip")


def test_without_scopes_it_is_one_stage():
    def plain(x):
        return jnp.sin(x) * 2, 3.0, np.arange(4), x

    found = stages_of(plain, (X,))
    assert [stage.name for stage in found.chain.stages] == ["plain"]
    assert_same(run_apart(plain, X), quick_jit(plain)(X))
    assert_same(run_apart(lambda x: x, X), X)
    assert_same(run_apart(lambda: jnp.arange(3) * 2), jnp.arange(3) * 2)


def test_constants_keys_and_what_is_no_array():
    table = functions.array(64, 64, seed=3)

    def function(key, x, power, options):
        with scope("noise"):
            key, one = jax.random.split(key)
            noise = jax.random.normal(one, x.shape)
        with scope("product"):
            return key, (noise + x) @ table**power, options["scale"] * x.sum()

    arguments = jax.random.key(0), X, 2, {"scale": 3, "name": "none"}
    wanted = jax.jit(lambda key, x: function(key, x, *arguments[2:]))(*arguments[:2])
    assert_same(run_apart(function, *arguments), wanted, 1e-5)
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments[:2])
    assert names(function, *shapes, *arguments[2:]) == ["noise", "product", "(after)"][:2]


def test_what_is_made_of_nothing_is_no_stage():
    def function(x):
        mask = jnp.arange(64) < 10
        with scope("a"):
            y = jnp.where(mask, x, 0.0)
        ones = jnp.ones((16, 64))
        with scope("b"):
            return jnp.where(mask, y * 2, x), ones

    found = stages_of(function, (X,))
    assert [stage.inputs for stage in found.chain.stages] == [("x",), ("a", "x")]
    assert_same(run_apart(function, X), quick_jit(function)(X))


def test_effects_keep_their_order():
    def function(x):
        with scope("a"):
            jax.debug.print("one {}", x[0, 0], ordered=True)
            y = jnp.sin(x)
        with scope("b"):
            jax.debug.print("two", ordered=True)
        jax.debug.print("three {}", y[0, 0], ordered=True)
        return y

    printed = []
    for call in (lambda: quick_jit(function)(X), lambda: run_apart(function, X)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            jax.block_until_ready(call())
            jax.effects_barrier()
        printed.append(out.getvalue())
    assert printed[0] == printed[1]
    assert [line.split()[0] for line in printed[1].splitlines()] == ["one", "two", "three"]


def test_bfloat16_between_stages():
    x = X.astype(jnp.bfloat16)
    found = run_apart(functions.softmax_loss, x)
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x.astype(F32), np.float64)
    wanted = np.log(np.exp(exact).sum(-1)) - exact[:, 0]
    assert np.abs(np.asarray(found.astype(F32)) - wanted).max() < 0.1
