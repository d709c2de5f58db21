"""Operations counted in small modules written by hand."""

import jax
import jax.numpy as jnp
import pytest

from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.program import Program

ELEMENTS = 64 * 128


def work(entry, computations=""):
    text = f"HloModule m, is_scheduled=true\n{computations}\nENTRY e {{\n{entry}\n}}\n"
    (kernel,) = analyse(Program("m", text)).kernels
    return kernel.work


def test_every_operation_of_a_fusion_is_counted_by_its_own_elements():
    found = work(
        """p = bf16[64,128] parameter(0) q = bf16[128] parameter(1)
        ROOT f = bf16[64,128] fusion(p, q), kind=kLoop, calls=c""",
        """c {
        a = bf16[64,128] parameter(0) b = bf16[128] parameter(1)
        wide = f32[64,128] convert(a) w = f32[128] convert(b)
        s = f32[128] exponential(w) spread = f32[64,128] broadcast(s), dimensions={1}
        m = f32[64,128] multiply(wide, spread) t = f32[64,128] tanh(m)
        ROOT r = bf16[64,128] convert(t) }""",
    )
    assert found.operations == {
        "convert:bf16>f32": ELEMENTS + 128,
        "exponential:f32": 128,
        "multiply:f32": ELEMENTS,
        "tanh:f32": ELEMENTS,
        "convert:f32>bf16": ELEMENTS,
    }
    assert (found.dtype, found.width, found.matmul_flops) == ("bf16", 128, 0)


@pytest.mark.parametrize(("dimension", "result", "columns"), [(1, 64, False), (0, 128, True)])
def test_a_reduction_runs_its_computation_once_per_element(dimension, result, columns):
    found = work(
        f"""p = f32[64,128] parameter(0)
        ROOT f = f32[{result}] fusion(p), kind=kInput, calls=c""",
        f"""add {{ x = f32[] parameter(0) y = f32[] parameter(1) ROOT z = f32[] add(x, y) }}
        c {{ a = f32[64,128] parameter(0) zero = f32[] constant(0)
        ROOT r = f32[{result}] reduce(a, zero), dimensions={{{dimension}}}, to_apply=add }}""",
    )
    assert found.operations == {"add:f32": ELEMENTS}
    assert found.sums_columns is columns


def test_a_library_product_has_its_multiplications():
    found = work(
        """p = bf16[64,256] parameter(0) q = bf16[256,128] parameter(1)
        ROOT f = (bf16[64,128], s8[32]) custom-call(p, q),
          custom_call_target="__cublas$gemm",
          backend_config={"gemm_backend_config":{"dot_dimension_numbers":{
            "lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}"""
    )
    assert found.matmul_flops == 2 * 64 * 128 * 256


def test_a_compiled_product_has_them_too(deviceless):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 512), (512, 128))]
    program = aot.compile_program(lambda x, w: jnp.tanh(x @ w), shapes, deviceless("h200")).program
    kernels = analyse(program).kernels
    assert sum(kernel.work.matmul_flops for kernel in kernels) == 2 * 256 * 512 * 128
    assert sum(kernel.work.operations.get("tanh:bf16", 0) + kernel.work.operations.get(
        "tanh:f32", 0) for kernel in kernels) == 256 * 128  # fmt: skip
