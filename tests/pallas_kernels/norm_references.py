"""The norms in float64 numpy, independent of the kernels, and arguments for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from references import INTERPRET, assert_close, f64, row_kernels

import pallas_kernels.norms as pk
from pallas_kernels.norm_kernels import Norm

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPSILON = 1e-6
OFFSET = 0.5
NORMS = {
    "layer_norm": Norm(centred=True),
    "rms_norm": Norm(centred=False, scale_offset=OFFSET),
    "residual_layer_norm": Norm(centred=True, residual=True),
    "residual_rms_norm": Norm(centred=False, residual=True, scale_offset=OFFSET),
    "prenorm_layer_norm": Norm(centred=True, residual=True, returns_sum=True),
    "prenorm_rms_norm": Norm(centred=False, residual=True, returns_sum=True, scale_offset=OFFSET),
}


def random(seed, shape, dtype, scale=1.5, mean=0.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale + mean
    return jnp.asarray(values, dtype)


def arguments(name, rows, width, dtype, scale_dtype=F32, bias_dtype=BF16):
    """x, residual, scale and bias, as far as the function has them."""
    norm = NORMS[name]
    given = [random(width, (rows, width), dtype, mean=1.0)]
    if norm.residual:
        given.append(random(width + 1, (rows, width), dtype, mean=2.0))
    given.append(random(width + 2, (width,), scale_dtype))
    if norm.centred:
        given.append(random(width + 3, (width,), bias_dtype))
    return given


def function(name, interpret=INTERPRET):
    offset = {} if NORMS[name].centred else {"scale_offset": OFFSET}
    return functools.partial(getattr(pk, name), epsilon=EPSILON, interpret=interpret, **offset)


def standardised(norm, h):
    """(normalised h, 1 / deviation) in float64."""
    d = f64(h)
    if norm.centred:
        d = d - d.mean(-1, keepdims=True)
    reciprocal = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + EPSILON)
    return d * reciprocal, reciprocal


def forward64(norm, h, scale=None, bias=None):
    factor = 1.0 if scale is None else f64(scale) + norm.scale_offset
    return standardised(norm, h)[0] * factor + (0.0 if bias is None else f64(bias))


def backward64(norm, h, dy, ds=None, scale=None):
    """(dx, dscale, dbias): each output's derivative by each input, summed by hand."""
    n, reciprocal = standardised(norm, h)
    dy = f64(dy)
    w = dy if scale is None else dy * (f64(scale) + norm.scale_offset)
    dx = w - n * (w * n).mean(-1, keepdims=True)
    if norm.centred:
        dx = dx - w.mean(-1, keepdims=True)
    dx = dx * reciprocal + (0.0 if ds is None else f64(ds))
    return dx, (dy * n).sum(0), dy.sum(0)


def assert_rows_close(got, want):
    """Within little more than one rounding of the exact value, f32: within a few."""
    exact = got.dtype == F32
    assert_close(got, want, ulps=8 if exact else 0.51, floor=1.0 if exact else 0.2)


def assert_columns_close(got, want, rows):
    slack = 5e-6 * np.sqrt(rows) + (0.51 * float(jnp.finfo(got.dtype).eps))
    assert got.shape == want.shape
    error = np.abs(f64(got) - want)
    assert (error <= slack * np.maximum(np.abs(want), np.abs(want).mean())).all(), error.max()


def refused(check, *given):
    try:
        check(*given)
    except AssertionError:
        return True
    return False


def shapes(name, rows, width, dtype, scale_dtype=F32, bias_dtype=BF16):
    norm = NORMS[name]
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    parameters = [jax.ShapeDtypeStruct((width,), dt) for dt in (scale_dtype, bias_dtype)]
    return [x] * (1 + norm.residual) + parameters[: 1 + norm.centred]


def value_and_gradients(name):
    def run(*given):
        found, pull = jax.vjp(function(name, None), *given)
        return found, pull(found)

    return run


def lowered_text(f, *given):
    return jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def lowered(f, *given):
    return row_kernels(lowered_text(f, *given))
