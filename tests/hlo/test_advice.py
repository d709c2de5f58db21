"""Warnings, compiled live for a card that is not there."""

import jax
import jax.numpy as jnp
import pytest

import fusejax
from fusejax.hlo import advice
from fusejax.hlo.analyse import analyse
from fusejax.program import Program

X = jax.ShapeDtypeStruct((1024, 1024), "float32")
ROWS = jax.ShapeDtypeStruct((2, 1024), "float32")


@pytest.fixture
def warnings(deviceless):
    target = deviceless("h100")
    return lambda function, *arguments: (
        fusejax.inspect(function, *arguments, target=target).modules[0].warnings
    )


def test_the_same_value_written_twice(warnings):
    def function(x):
        y = jnp.exp(x)
        return y, y

    (warning,) = warnings(function, X)
    assert warning.startswith("the same value is written twice: wrapped_exponential (f32[1024,1024")


def test_equal_values_of_two_kernels():
    text = """HloModule m, is_scheduled=true
f { p = f32[4096] parameter(0)
  ROOT n = f32[4096] negate(p) }
g { p = f32[4096] parameter(0)
  n = f32[4096] negate(p)
  ROOT e = f32[4096] exponential(n) }
h { a = f32[4096] parameter(0)
  ROOT n = f32[4096] negate(a), metadata={op_name="other"} }
ENTRY e {
  x = f32[4096] parameter(0)
  one = f32[4096] fusion(x), kind=kLoop, calls=f
  two = f32[4096] fusion(x), kind=kLoop, calls=g
  three = f32[4096] fusion(x), kind=kLoop, calls=h
  ROOT t = (f32[4096], f32[4096], f32[4096]) tuple(one, two, three)
}"""
    (warning,) = analyse(Program("m", text)).warnings
    assert warning == ("the same value is written twice: one (f32[4096]), three (f32[4096])")
    different = text.replace("ROOT n = f32[4096] negate(a)", "ROOT n = f32[4096] sine(a)")
    assert analyse(Program("m", different)).warnings == ()


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_copy_that_donation_would_remove(warnings, in_a_loop):
    def function(x, u):
        if not in_a_loop:
            return jax.lax.dynamic_update_slice(x, u, (3, 0))
        return jax.lax.fori_loop(0, 10, lambda i, c: c.at[i].add(jnp.sin(c[i + 1])), x)

    (warning,) = warnings(function, X, ROWS)
    assert "copies argument x (4,194,304 bytes) before" in warning
    assert "donat" in warning
    assert warnings(jax.jit(function, donate_argnums=0), X, ROWS) == ()


def test_an_update_in_the_background_is_in_place(deviceless):
    def function(x, u):
        return jax.lax.dynamic_update_slice(x, u, (3, 0))

    donated = jax.jit(function, donate_argnums=0)
    (module,) = fusejax.inspect(donated, X, ROWS, target=deviceless("h100")).modules
    assert [k.traffic.total for k in module.kernels] == [2 * 2 * 1024 * 4]


def test_cast_there_and_back(warnings):
    def function(x, cast):
        return jnp.sin(cast(jnp.exp(x)))

    def through_bfloat16(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    (warning,) = warnings(lambda x: function(x, through_bfloat16), X)
    assert "the cast of f32[1024,1024] to bf16 and back" in warning
    assert "test_advice.py:" in warning
    rounded = lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    assert warnings(lambda x: function(x, rounded), X) == ()


def test_must_fuse(warnings):
    from jax.experimental.xla_metadata import must_fuse_call

    inner = must_fuse_call("1")(lambda x: jnp.cumsum(jnp.sort(jnp.exp(x)), -1))
    found = [w for w in warnings(lambda x: inner(x) + 1, X) if "MUST_FUSE" in w]
    (warning,) = found
    assert "MUST_FUSE='1' has no effect on this target (gpu)" in warning


def test_one_of_two_barriers(warnings):
    def function(x):
        y = jax.lax.optimization_barrier(x)
        z = jax.lax.optimization_barrier(jnp.exp(y))
        return z.sum(-1)

    (warning,) = warnings(function, X)
    assert warning.startswith("1 of 2 barriers split nothing")


def test_a_barrier_in_front_of_the_results_is_for_the_caller(warnings):
    assert warnings(lambda x: jax.lax.optimization_barrier(jnp.exp(x)), X) == ()


def test_barriers_of_rematerialisation_are_not_the_users(warnings):
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    assert warnings(jax.grad(lambda x: inner(x).sum()), X) == ()


GEMM = """HloModule m, is_scheduled=true
f { a = f32[64,64] parameter(0)
  ROOT d = f32[64,64] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0} }
ENTRY e {
  a = f32[64,64] parameter(0)
  ROOT d = f32[64,64] fusion(a), kind=kCustom, calls=f,
    backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
}"""


@pytest.mark.parametrize(
    ("deviceless_flag", "expected"),
    [
        (True, (advice.GEMM_NOT_AUTOTUNED,)),
        (None, (advice.GEMM_PERHAPS_NOT_AUTOTUNED,)),
        (False, ()),
    ],
)
def test_gemm_back_end(deviceless_flag, expected):
    assert analyse(Program("m", GEMM, deviceless=deviceless_flag)).warnings == expected


def test_few_of_a_kind_are_listed():
    outputs = "\n".join(f"  y{i} = f32[4096] fusion(x), kind=kLoop, calls=f{i}" for i in range(14))
    bodies = "\n".join(
        f"f{i} {{ p = f32[4096] parameter(0)\n ROOT n = f32[4096] {op}(p) }}"
        for i, op in enumerate(("sine", "cosine", "tan", "tanh", "exponential", "log", "sqrt") * 2)
    )
    tuple_shape = ", ".join(["f32[4096]"] * 14)
    names = ", ".join(f"y{i}" for i in range(14))
    text = (
        f"HloModule m, is_scheduled=true\n{bodies}\nENTRY e {{\n  x = f32[4096] parameter(0)\n"
        f"{outputs}\n  ROOT t = ({tuple_shape}) tuple({names})\n}}"
    )
    found = analyse(Program("m", text)).warnings
    assert len(found) == 6
    assert found[-1] == "2 more values written twice"
