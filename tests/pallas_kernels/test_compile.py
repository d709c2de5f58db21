"""Compiled for the card without one: what the assembler says that the shipped plans take."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from fusejax.compile import aot
from fusejax.hlo.analyse import analyse
from fusejax.resources import kernel_resources, limits_of, mosaic, ptxas
from pallas_kernels import gelu, layer_norm, row_softmax

OPS = {
    "residual_layer_norm": (pk.residual_layer_norm, layer_norm.plan),
    "bias_gelu": (pk.bias_gelu, gelu.plan),
    "bias_gelu_rowsum": (pk.bias_gelu_rowsum, lambda *a: gelu.plan(*a, row_sums=True)),
    "softmax": (pk.softmax, row_softmax.plan),
}


@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [128, 1024, 4096, 8192, 16384])
def test_no_spills_and_the_planned_launch(op, width, deviceless):
    rows, dtype = 2**26 // width, jnp.bfloat16
    x, v = jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    arguments = {"residual_layer_norm": (x, x, v, v), "softmax": (x,)}.get(op, (x, v))
    function, plan = OPS[op]
    target = deviceless("h200")
    with mosaic.printed_ptx() as printed:
        program = aot.compile_program(function, arguments, target).program
    mosaic.remember(program.hlo, printed.texts)
    limits = limits_of(target.description)
    (found,) = [
        resources
        for resources in kernel_resources(program, analyse(program).kernels, limits).values()
        if resources.registers is not None
    ]
    p = plan(rows, width, dtype)
    assert found.spill_bytes == 0
    assert found.registers <= 65536 // (p.warpgroups * 128)
    assert found.threads == 128 * p.warpgroups
    assert found.grid[0] == p.ctas
    assert found.shared_bytes <= p.shared_bytes
    # every CTA of the launch is resident at once, or the ring of the last ones starts late
    resident = found.occupancy * 2048 / found.threads
    assert resident * 132 >= p.ctas
