"""The GPT of the examples learns, with Flax's layers and with ours alike."""

import dataclasses
import functools

import corpus
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from gpt_config import Config

SMALL = Config(hidden=32, blocks=1, heads=2, length=24)
OTHER = {"norm": "rms", "mlp": "swiglu", "attention": "softmax"}


@pytest.mark.parametrize("framework", models.FRAMEWORKS)
@pytest.mark.parametrize("changes", [{}, OTHER])
def test_both_kinds_have_the_same_parameters(framework, changes):
    config = dataclasses.replace(SMALL, **changes)
    inits = [models.build(framework, kind, config).init for kind in models.KINDS]
    shapes = [jax.eval_shape(init, jax.random.key(0)) for init in inits]
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


@functools.cache
def _gradient(framework, kind, config):
    model = models.build(framework, kind, config)

    def loss(parameters, tokens):
        return model.loss(model.logits(parameters, tokens[:, :-1]), tokens[:, 1:]).mean()

    return jax.jit(jax.value_and_grad(loss))


def _parameters(model, seed):
    """Random ones: at the initial values, scales are 1 and biases 0."""
    random = np.random.default_rng(seed)

    def leaf(shape):
        if len(shape) == 1:
            return random.uniform(0.3, 1, shape).astype(np.float32)
        return random.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda given: leaf(given.shape), shapes)


def _in_float64(framework, config, parameters, tokens):
    """Loss and gradient with Flax's layers, checked by differences of the loss."""
    with jax.enable_x64(True):
        # jax.nn.dot_product_attention has its softmax in float32 whatever comes in.
        wide = dataclasses.replace(
            config, attention="softmax", dtype=jnp.float64, param_dtype=jnp.float64
        )
        gradient = _gradient(framework, "flax", wide)
        parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
        loss, found = gradient(parameters, tokens)
        step = jax.tree.map(lambda leaf: 1e-6 * np.asarray(leaf), found)
        ahead = gradient(jax.tree.map(np.add, parameters, step), tokens)[0]
        behind = gradient(jax.tree.map(np.subtract, parameters, step), tokens)[0]
        slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, found, step)))
        np.testing.assert_allclose(float(ahead - behind) / 2, slope, rtol=1e-6)
        return float(loss), jax.tree.map(np.asarray, found)


def _errors(found, expected):
    """Of each parameter's gradient, relative to its length."""

    def error(got, right):
        return np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right)

    return np.array(jax.tree.leaves(jax.tree.map(error, found, expected)))


@pytest.mark.parametrize(("framework", "changes"), [("linen", {}), ("nnx", OTHER)])
def test_gradients_and_losses(framework, changes):
    config = dataclasses.replace(SMALL, **changes)
    check_gradients(framework, config)
    check_losses(framework, config, 2e-5)
    check_losses(framework, dataclasses.replace(config, dtype=jnp.bfloat16), 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("framework", "changes"), [("linen", {}), ("nnx", OTHER)])
def test_gradients_on_a_card(framework, changes):
    config = dataclasses.replace(SMALL, hidden=256, blocks=2, length=100, **changes)
    check_gradients(framework, config)


def check_gradients(framework, config):
    """Against Flax's in float64: not worse than Flax's own in the same dtype."""
    for seed in range(2):
        parameters = _parameters(models.build(framework, "flax", config), seed)
        tokens = corpus.batch(0, size=4, length=config.length, seed=seed)
        loss, expected = _in_float64(framework, config, parameters, tokens)
        for dtype, most in ((jnp.float32, 5e-6), (jnp.bfloat16, 0.1)):
            given = dataclasses.replace(config, dtype=dtype)
            flax, fused = (
                _gradient(framework, kind, given)(parameters, tokens) for kind in models.KINDS
            )
            assert fused[0].dtype == jnp.float32
            assert abs(float(fused[0]) - loss) < most
            limits, errors = _errors(flax[1], expected), _errors(fused[1], expected)
            assert errors.max() < most
            assert (errors < 1.5 * limits + 0.1 * most).all(), (errors, limits)


def check_losses(framework, config, tolerance):
    """They fall, and those of both kinds of layers agree."""
    losses = {}
    for kind in models.KINDS:
        parameters = _parameters(models.build(framework, "flax", config), seed=3)
        gradient, losses[kind] = _gradient(framework, kind, config), []
        for step in range(25):
            tokens = corpus.batch(step, size=4, length=config.length, seed=3)
            loss, slopes = gradient(parameters, tokens)
            parameters = jax.tree.map(lambda p, s: p - 0.1 * np.asarray(s), parameters, slopes)
            losses[kind].append(float(loss))
    found = np.array(list(losses.values()))
    assert abs(found[:, 0] - np.log(256)).max() < 1.2  # it knows nothing yet
    assert (found[:, -5:].mean(1) < found[:, :5].mean(1) - 1).all()
    np.testing.assert_allclose(*found, atol=tolerance)
