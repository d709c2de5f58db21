"""The GELU formulas by themselves, before any kernel."""

import jax.numpy as jnp
import numpy as np
import pytest
from references import f64, gelu

from pallas_kernels import gelu_math


@pytest.mark.parametrize(
    ("formula", "approximate"), [(gelu_math.gelu_tanh, True), (gelu_math.gelu_erf, False)]
)
def test_relative_error_down_the_tail(formula, approximate):
    z = jnp.asarray(np.linspace(-12, 12, 200001), jnp.float32)
    want = gelu(z, approximate)
    kept = (np.abs(want) > 1e-37) & (f64(z) != 0)
    error = np.abs(f64(formula(z)) / np.where(kept, want, 1) - 1)[kept]
    # exp2 of a rounded argument: an ulp of the exponent, which is 100 at the far end
    assert error.max() < 2e-5
    near = np.abs(f64(z))[kept] < 5
    assert error[near].max() < 3e-6


def test_upper_tail_polynomial_against_erfc():
    a = np.linspace(0, 14, 20001)
    t = 1 / (1 + gelu_math.PIVOT * a)
    fitted = sum(c * t ** (k + 1) for k, c in enumerate(gelu_math.TAIL))
    exact = gelu(-np.maximum(a, 1e-9), False) / -np.maximum(a, 1e-9) * np.exp(a * a / 2)
    assert np.abs(fitted / exact - 1).max() < 2e-7


def test_ends():
    z = jnp.asarray([jnp.inf, 1e20, 60, 0, -60, -1e20], jnp.float32)
    for formula in (gelu_math.gelu_tanh, gelu_math.gelu_erf):
        assert f64(formula(z)).tolist() == [np.inf, f64(z)[1], 60, 0, 0, 0]
        assert np.isnan(formula(jnp.float32(jnp.nan)))
