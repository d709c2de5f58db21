"""A Pallas kernel for Mosaic GPU in a compiled module: one launch that moves what it is given."""

import jax
import jax.numpy as jnp
import pytest

import fusejax
import pallas_kernels
from fusejax.hlo.analyse import analyse
from fusejax.hlo.analysis import Traffic
from fusejax.program import Program

X = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)


@pytest.mark.parametrize(
    ("function", "arguments", "results"),
    [
        (pallas_kernels.residual_layer_norm, (X, X, ROW, ROW), (X,)),
        (pallas_kernels.bias_gelu_rowsum, (X, ROW), (X, jax.ShapeDtypeStruct((8192,), "float32"))),
    ],
    ids=["one result", "two results"],
)
def test_bytes_are_those_of_operands_and_results(deviceless, function, arguments, results):
    report = fusejax.inspect(lambda *a: function(*a), *arguments, target=deviceless("h200"))
    (module,) = report.modules
    (kernel,) = module.kernels
    assert (kernel.emitter, kernel.count) == ("mosaic_gpu", 1)
    assert kernel.scopes == (function.__name__,)
    traffic = kernel.traffic
    assert traffic.read == sum(a.size * a.dtype.itemsize for a in arguments)
    assert traffic.written == sum(a.size * a.dtype.itemsize for a in results)
    assert not traffic.is_bound
    assert module.boundaries == module.warnings == ()


MODULE = """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[4096] parameter(0)
  zero = s32[1] constant({0})
  lock = s32[1] copy(zero)
  c = (f32[4096], RESULT) custom-call(x, lock), custom_call_target="mosaic_gpu_v2"ALIASING
  ROOT r = f32[4096] get-tuple-element(c), index=0
}"""


def test_semaphores_are_four_bytes_and_make_nothing_a_bound():
    aliasing = ", output_to_operand_aliasing={{1}: (1, {})}"
    text = MODULE.replace("RESULT", "s32[1]").replace("ALIASING", aliasing)
    kernel = analyse(Program("m", text)).kernels[-1]
    assert kernel.traffic == Traffic(4 * 4096 + 4, 4 * 4096 + 4)


def test_scratch_that_nobody_reads_is_not_traffic():
    text = MODULE.replace("RESULT", "u8[1024]").replace("ALIASING", "")
    assert analyse(Program("m", text)).kernels[-1].traffic == Traffic(4 * 4096 + 4, 4 * 4096)
