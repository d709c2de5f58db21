import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import backward64
from references import INTERPRET, f64

import pallas_kernels as pk
from pallas_kernels.norm_kernels import Norm

X = jnp.ones((2, 5))
CALLS = {
    "x must be an array, not list": lambda: pk.softmax([[1.0]]),
    "residual must be an array, not NoneType": lambda: pk.residual_layer_norm(X, None),
    "scale must be an array, not float": lambda: pk.layer_norm(X, 1.0),
    "bias must be an array, not NoneType": lambda: pk.bias_gelu(X, None),
    "up must be an array, not int": lambda: pk.swiglu(X, 2),
    "where must be an array, not bool": lambda: pk.softmax(X, where=True),
    "labels must be an array, not int": lambda: pk.softmax_cross_entropy(X, 1),
    "epsilon must be a finite number of at least 0, not -1": lambda: pk.rms_norm(X, epsilon=-1),
    "epsilon must be a finite number of at least 0, not nan": lambda: pk.rms_norm(
        X, epsilon=float("nan")
    ),
    "epsilon must be a finite number of at least 0, not 'a'": lambda: pk.rms_norm(X, epsilon="a"),
    "scale_offset must be a finite number, not inf": lambda: pk.rms_norm(
        X, scale_offset=float("inf")
    ),
    "epsilon must be a Python number": lambda: jax.jit(lambda e: pk.rms_norm(X, epsilon=e))(1.0),
    "approximate must be True or False": lambda: pk.geglu(X, X, approximate="none"),
    "interpret must be None, True or": lambda: pk.softmax(X, interpret="yes"),
    "fallback must be True or False": lambda: pk.softmax(X, fallback=None),
}


@pytest.mark.parametrize("words", CALLS)
def test_refusals_name_the_argument(words):
    with pytest.raises(ValueError) as caught:
        CALLS[words]()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpy_arrays_are_arrays():
    x = np.ones((2, 5), np.float32)
    y = pk.layer_norm(x, np.ones(5, np.float32), interpret=INTERPRET)
    assert (f64(y) == 0).all()


def test_vmap_of_gradients_of_norms_without_parameters():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 32)), jnp.float32)
    dx = jax.vmap(jax.grad(lambda x: (pk.layer_norm(x, interpret=INTERPRET) ** 2).sum()))(x)
    y = pk.layer_norm(x, interpret=INTERPRET)
    for one in range(3):
        want, _, _ = backward64(Norm(centred=True), x[one], 2 * y[one])
        np.testing.assert_allclose(f64(dx[one]), want, atol=1e-5)
