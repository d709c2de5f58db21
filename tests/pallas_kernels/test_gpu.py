"""The kernels on a card: simulation shows neither races nor approximate instructions."""

import jax.numpy as jnp
import numpy as np
import pytest
from references import assert_close, f64, gelu, layer_norm, softmax

import pallas_kernels as pk

pytestmark = pytest.mark.gpu
WIDTHS = (128, 256, 640, 1024, 1152, 2560, 4096, 8192, 12288, 16256, 16384)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_against_float64(width, dtype):
    rng = np.random.default_rng(width)
    rows = max(700, 2**20 // width) + 3
    x = jnp.asarray(rng.normal(size=(rows, width)) * 1.5, dtype)
    residual = jnp.asarray(rng.normal(size=(rows, width)) + 3, dtype)
    scale, bias = (jnp.asarray(rng.normal(size=width), jnp.float32) for _ in range(2))
    y = pk.residual_layer_norm(x, residual, scale, bias)
    assert_close(y, layer_norm(x + residual, scale, bias), ulps=0.51, floor=0.1)
    y, sums = pk.bias_gelu_rowsum(x, bias)
    want = gelu(f64(x) + f64(bias), True)
    # The approximate instructions flush results below float32's smallest normal number to zero.
    flushed = 2 * float(jnp.finfo(jnp.float32).tiny / jnp.finfo(dtype).eps)
    assert_close(y, want, ulps=0.52, floor=flushed)
    assert (np.abs(f64(sums) - want.sum(-1)) < 1e-6 * np.abs(want).sum(-1)).all()
    assert (f64(pk.bias_gelu(x, bias)) == f64(y)).all()
    assert (f64(pk.bias_gelu_rowsum(x, bias)[1]) == f64(sums)).all(), "bits differ between runs"
    assert_close(pk.softmax(x), softmax(x), ulps=0.52)


@pytest.mark.parametrize(("rows", "width"), [(70001, 128), (65537, 384), (1, 8192), (131, 16384)])
def test_row_counts(rows, width):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, width)), jnp.bfloat16)
    assert_close(pk.softmax(x), softmax(x), ulps=0.52)
