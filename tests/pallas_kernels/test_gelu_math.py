"""The formulas of the activations by themselves, before any kernel."""

import jax.numpy as jnp
import numpy as np
import pytest
from references import f64, gelu, gelu_slope, silu, silu_slope

from pallas_kernels import gelu_math

# Name: f32 value, f32 value and slope, float64 value, float64 slope, |z| to which f32 holds them.
FORMULAS = {
    "gelu tanh": (
        gelu_math.gelu_tanh,
        gelu_math.gelu_tanh_and_slope,
        lambda z: gelu(z, True),
        lambda z: gelu_slope(z, True),
        10,
    ),
    "gelu erf": (
        gelu_math.gelu_erf,
        gelu_math.gelu_erf_and_slope,
        lambda z: gelu(z, False),
        lambda z: gelu_slope(z, False),
        13,
    ),
    "silu": (gelu_math.silu, gelu_math.silu_and_slope, silu, silu_slope, 87),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_relative_error_of_values_down_the_tail(name):
    value, both, exact, _, end = FORMULAS[name]
    z = jnp.asarray(np.linspace(-end, 12, 200001), jnp.float32)
    want = exact(z)
    kept = f64(z) != 0
    for got in (value(z), both(z)[0]):
        error = np.abs(f64(got) / np.where(kept, want, 1) - 1)[kept]
        # exp2 of a rounded argument: an ulp of the exponent, which is 100 at the far end
        assert error.max() < 2e-5
        near = np.abs(f64(z))[kept] < 5
        assert error[near].max() < 3e-6


@pytest.mark.parametrize("name", FORMULAS)
def test_relative_error_of_slopes_down_the_tail(name):
    _, both, _, exact, end = FORMULAS[name]
    z = jnp.asarray(np.linspace(-end, 12, 200001), jnp.float32)
    got, want, at = f64(both(z)[1]), exact(z), f64(z)
    # every slope has a zero between -1.3 and -0.7, where only the absolute error is small
    assert np.abs(got - want)[at > -2].max() < 5e-7
    assert np.abs(got / want - 1)[at < -2].max() < 2e-5
    assert np.abs(got / want - 1)[(at < -2) & (at > -5)].max() < 4e-6
    # the check sees what it is for: the slope as 1 - f'(-z), as f32 has it, is lost in the tail
    mirrored = 1 - f64(both(-z)[1])
    assert np.abs(mirrored / want - 1)[at < -6].max() > 1e-2


@pytest.mark.parametrize("name", FORMULAS)
def test_reference_slopes_are_those_of_the_reference_values(name):
    _, _, exact, slope, _ = FORMULAS[name]
    z = np.linspace(-8, 8, 33)
    differences = (exact(z + 1e-5) - exact(z - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope(z), differences, rtol=1e-7, atol=1e-9)


def test_upper_tail_polynomial_against_erfc():
    a = np.linspace(0, 14, 20001)
    t = 1 / (1 + gelu_math.PIVOT * a)
    fitted = sum(c * t ** (k + 1) for k, c in enumerate(gelu_math.TAIL))
    exact = gelu(-np.maximum(a, 1e-9), False) / -np.maximum(a, 1e-9) * np.exp(a * a / 2)
    assert np.abs(fitted / exact - 1).max() < 2e-7


@pytest.mark.parametrize("name", FORMULAS)
def test_ends(name):
    value, both, *_ = FORMULAS[name]
    z = jnp.asarray([jnp.inf, 1e38, 1e20, 200, 0, -200, -1e20, -1e38], jnp.float32)
    values, slopes = both(z)
    for got in (value(z), values):
        assert f64(got).tolist() == [np.inf, *f64(z)[1:4], 0, 0, 0, 0]
    np.testing.assert_allclose(f64(slopes), [1, 1, 1, 1, 0.5, 0, 0, 0], rtol=3e-7)
    assert [f64(found)[()] for found in both(jnp.float32(-jnp.inf))] == [0, 0]
    for found in (value(jnp.float32(jnp.nan)), *both(jnp.float32(jnp.nan))):
        assert np.isnan(found)
