import os
import subprocess
import sys

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


SHARDED = """
import jax, jax.numpy as jnp
import pallas_kernels as pk
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
x = jax.ShapeDtypeStruct((16, 769), jnp.float32)
g = jax.ShapeDtypeStruct((769,), jnp.float32)
labels = jax.ShapeDtypeStruct((16,), jnp.int32)
D = P("d")

def check(f, specs, out, kernels, reductions, *arguments):
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))
    text = mapped.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    found = [text.count(word) for word in ("mosaic_gpu_v2", "all_reduce", "all_gather")]
    assert found == [kernels, reductions, 0], found

check(lambda x, g: pk.prenorm_rms_norm(x, x, g), (D, P()), D, 1, 0, x, g)
check(jax.grad(lambda x: pk.softmax(x).sum()), (D,), D, 2, 0, x)
check(jax.grad(lambda x: pk.swiglu(x, x).sum()), (D,), D, 1, 0, x)
check(jax.grad(lambda x, i: pk.softmax_cross_entropy(x, i).sum()), (D, D), D, 2, 0, x, labels)
norm = jax.grad(lambda x, g: pk.layer_norm(x, g, g).sum(), argnums=(0, 1))
check(norm, (D, P()), (D, P()), 2, 2, x, g)
gelu = jax.grad(lambda x, g: pk.bias_gelu(x, g).sum(), argnums=(0, 1))
check(gelu, (D, P()), (D, P()), 1, 1, x, g)

explicit = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    split = jax.device_put(jnp.ones((16, 8)), jax.NamedSharding(explicit, D))
    try:
        pk.softmax(split)
    except ValueError as error:
        assert "inside jax.shard_map" in str(error), error
    else:
        raise AssertionError("an array that is split was taken")
print("done")
"""


def test_rows_over_devices():
    """Inside shard_map: no gather, and a sum over devices for each gradient of a parameter."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
