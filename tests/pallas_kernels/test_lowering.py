"""The whole Mosaic pipeline short of the assembler, with no GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk


def lowered(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("mosaic_gpu_v2")


def arguments(op, rows, width, dtype, parameter=jnp.float32):
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    v = jax.ShapeDtypeStruct((width,), parameter)
    return {"residual_layer_norm": (x, x, v, v), "softmax": (x,)}.get(op, (x, v))


OPS = {
    "residual_layer_norm": pk.residual_layer_norm,
    "bias_gelu": pk.bias_gelu,
    "bias_gelu_rowsum": pk.bias_gelu_rowsum,
    "bias_gelu_rowsum_erf": functools.partial(pk.bias_gelu_rowsum, approximate=False),
    "softmax": pk.softmax,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [128, 640, 1024, 1152, 4096, 8192, 16256, 16384])
def test_lowers_to_one_kernel(op, dtype, width):
    assert lowered(OPS[op], *arguments(op, 5000, width, dtype)) == 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 3, 65537])
def test_any_row_count_lowers(op, rows):
    assert lowered(OPS[op], *arguments(op, rows, 384, jnp.bfloat16)) == 1


@pytest.mark.parametrize("op", OPS)
def test_lowers_in_x64_mode(op):
    with jax.enable_x64(True):
        assert lowered(OPS[op], *arguments(op, 300, 256, jnp.bfloat16)) == 1
        assert lowered(OPS[op], *arguments(op, 300, 8192, jnp.bfloat16)) == 1


def test_parameters_of_another_dtype_lower():
    for parameter in (jnp.float16, jnp.bfloat16, jnp.float32):
        for width in (256, 4096):
            given = arguments("residual_layer_norm", 64, width, jnp.bfloat16, parameter)
            assert lowered(pk.residual_layer_norm, *given) == 1


def test_lowers_under_vmap():
    x = jax.ShapeDtypeStruct((3, 64, 512), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((3, 512), jnp.bfloat16)
    assert lowered(jax.vmap(pk.bias_gelu_rowsum), x, v) == 1
    assert lowered(jax.vmap(pk.softmax), x) == 1
