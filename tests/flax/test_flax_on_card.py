"""The layers' kernels on a card, values and gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_layers import (
    BF16,
    LIBRARIES,
    NORMS,
    RESIDUAL_NORMS,
    dense,
    f64,
    make,
    norm64,
    pullback64,
    random,
    randomized,
    values,
)

pytestmark = pytest.mark.gpu

ROWS = 64


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", NORMS + RESIDUAL_NORMS)
@pytest.mark.parametrize("width", [769, 4096])
def test_norms(library, name, width):
    parameters, apply = make(library, name, width, dtype=BF16, implementation="pallas")
    # Exact in bfloat16, so that it makes no difference where nnx rounds them.
    parameters = jax.tree.map(lambda p: p.astype(BF16).astype(p.dtype), randomized(parameters))
    inputs = [random(n, (2, ROWS, width), BF16) for n in range(1 + (name not in NORMS))]
    h = f64(sum(inputs[1:], inputs[0]))
    dy = random(9, h.shape, BF16)

    @jax.jit
    def run(parameters, inputs):
        outs, pull = jax.vjp(apply, parameters, *inputs)
        return outs, pull((dy, jnp.zeros_like(dy)) if isinstance(outs, tuple) else dy)

    outs, (dparameters, *dinputs) = run(parameters, inputs)
    y = outs[0] if isinstance(outs, tuple) else outs
    given = {key: f64(value) for key, value in values(parameters).items()}
    np.testing.assert_allclose(f64(y), norm64(name, h, **given), rtol=2.0**-8, atol=2.0**-8)
    dx, *sums = pullback64(name, h, given["scale"], given.get("bias"), f64(dy))
    for found in dinputs:
        np.testing.assert_allclose(f64(found), dx, rtol=2.0**-7, atol=2.0**-7)
    for key, found in values(dparameters).items():
        wanted = sums[key == "bias"]
        # Of 128 rows; nnx rounds the sum to bfloat16.
        np.testing.assert_allclose(f64(found), wanted, rtol=2.0**-7, atol=0.02)


@pytest.mark.parametrize("library", LIBRARIES)
def test_products(library):
    sizes, x = (512, 1536), random(0, (2, ROWS, 512), BF16)
    for name in ("DenseBiasGelu", "SwiGLU"):
        results = []
        for implementation in ("pallas", "xla"):
            options = {"dtype": BF16, "implementation": implementation}
            parameters, apply = make(library, name, *sizes, **options)

            def loss(parameters, x, apply=apply):
                return jnp.sin(apply(parameters, x).astype(jnp.float32)).sum()

            results.append((apply(parameters, x), jax.jit(jax.grad(loss, (0, 1)))(parameters, x)))
        for one, other in zip(*map(jax.tree.leaves, results), strict=True):
            bound = 2.0**-6 * np.abs(f64(other)).max()
            np.testing.assert_allclose(f64(one), f64(other), atol=bound)


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_flax_in_float32(library):
    x = random(0, (2, ROWS, 1024))
    for name, flax, sizes in (
        ("LayerNorm", "LayerNorm", (1024,)),
        ("RMSNorm", "RMSNorm", (1024,)),
        ("DenseBiasGelu", dense(library), (1024, 256)),
    ):
        parameters, ours = make(library, name, *sizes)
        _, theirs = make(library, flax, *sizes, ours=False)
        wanted = jax.jit(theirs)(parameters, x)
        wanted = jax.nn.gelu(wanted) if name == "DenseBiasGelu" else wanted
        np.testing.assert_allclose(jax.jit(ours)(parameters, x), wanted, rtol=2e-3, atol=2e-3)
