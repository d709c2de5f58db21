"""GELU and SiLU in f32 that keep their relative accuracy in the negative tail, and their slopes.

The textbook z / 2 * (1 + tanh(u)) loses the tail: the hardware's tanh has an absolute error of
5e-4, and even an exact tanh cancels there. The forms below are products of accurate factors.
Each takes two special-function instructions per element (exp2 and rsqrt); a reciprocal is taken
as a squared rsqrt, because division has no approximate form in Mosaic GPU.

Slopes: every activation here is z * G(z) with G(z) + G(-z) = 1, so that with a = |z|

    f(z)  = max(z, 0) - a G(-a)
    f'(z) = t(a) for z < 0, 1 - t(a) otherwise, where t(a) = f'(-a)

and everything comes from the tail at -a, where exponentials neither overflow nor cancel. `a` is
held below an end at which the exponential is 0 already, which keeps inf * 0 out of the products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# tanh form: z * sigmoid(2 u), u = sqrt(2 / pi) * (z + 0.044715 z^3), sigmoid through exp2:
# exp(-2 u) = exp2(z * (LINEAR + CUBIC * z^2)).
LINEAR = -2.302208198
CUBIC = -0.1029432397
# 2 u' = FLAT + STEEP * z^2
FLAT = 1.595769122
STEEP = 0.2140644488

# erf form: the upper tail Q(a) = erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) * P(1 / (1 + PIVOT a)).
# P has degree 8 and no constant term, so it decays like Q's own asymptotic 1 / a. Fitted on
# 0 <= a <= 14 (below which f32 holds no Q) at 4001 Chebyshev points by reweighted least squares
# of the *relative* error against `math.erfc`: at most 1.5e-7. The tests repeat that comparison.
PIVOT = 0.3
TAIL = (
    0.119629299,
    0.120753953,
    0.0999135083,
    0.128561573,
    -0.0536835436,
    0.206353398,
    -0.15720302,
    0.0356747593,
)
HALF_LOG2E = 0.7213475204
INVERSE_ROOT_TAU = 0.3989422804
TAIL_END = 30.0  # exp(-30^2 / 2), and the tanh form's exponential, are 0 in f32

LOG2E = 1.442695041
SILU_END = 110.0  # exp(-110) is 0 in f32


def gelu_tanh(z: jax.Array) -> jax.Array:
    """0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) for f32 z."""
    root = lax.rsqrt(1.0 + jnp.exp2(z * (LINEAR + CUBIC * (z * z))))
    return z * root * root


def gelu_tanh_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`gelu_tanh` and s + z s (1 - s) 2 u', where s = sigmoid(2 u), for f32 z."""
    a = jnp.minimum(jnp.abs(z), TAIL_END)
    square = a * a
    tail = jnp.exp2(a * (LINEAR + CUBIC * square))
    return _logistic(z, a, tail, a * (FLAT + STEEP * square))


def gelu_erf(z: jax.Array) -> jax.Array:
    """0.5 z (1 + erf(z / sqrt(2))) for f32 z, as max(z, 0) - |z| Q(|z|)."""
    return gelu_erf_and_slope(z)[0]


def gelu_erf_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`gelu_erf` and Phi(z) + z phi(z), of the normal distribution, for f32 z."""
    a = jnp.minimum(jnp.abs(z), TAIL_END)
    root = lax.rsqrt(1.0 + PIVOT * a)
    t = root * root
    polynomial = TAIL[-1] * t + TAIL[-2]
    for coefficient in TAIL[-3::-1]:
        polynomial = polynomial * t + coefficient
    polynomial = polynomial * t
    bell = jnp.exp2(-HALF_LOG2E * (a * a))
    return _mirrored(z, a * polynomial * bell, bell * (polynomial - INVERSE_ROOT_TAU * a))


def silu(z: jax.Array) -> jax.Array:
    """z sigmoid(z) for f32 z."""
    root = lax.rsqrt(1.0 + jnp.exp2(-LOG2E * z))
    return z * root * root


def silu_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`silu` and s (1 + z (1 - s)), where s = sigmoid(z), for f32 z."""
    a = jnp.minimum(jnp.abs(z), SILU_END)
    return _logistic(z, a, jnp.exp2(-LOG2E * a), a)


def _logistic(z, a, tail, growth):
    """Value and slope of z * sigmoid(v(z)), v odd: `tail` is exp(-v(a)), `growth` a * v'(a)."""
    root = lax.rsqrt(1.0 + tail)
    above = root * root  # sigmoid(v(a))
    below = tail * above  # 1 - sigmoid(v(a))
    return _mirrored(z, a * below, below * (1.0 - growth * above))


def _mirrored(z, lost, slope):
    """Value and slope at z from a G(-a) and the slope at -a, see the module."""
    return jnp.maximum(z, 0.0) - lost, jnp.where(z < 0.0, slope, 1.0 - slope)
