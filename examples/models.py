"""The GPT as pure functions: of either framework, with either kind of layers."""

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from gpt_config import Config

import fusejax

FRAMEWORKS = ("linen", "nnx")
KINDS = ("flax", "fusejax")


@dataclasses.dataclass(frozen=True)
class Model:
    """What training needs. The parameters are the same for both kinds of layers."""

    init: Callable[[jax.Array], Any]
    """From a key to parameters."""
    logits: Callable[[Any, jax.Array], jax.Array]
    """From parameters and tokens [batch, length] to [batch, length, vocabulary]."""
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    """From logits and labels [batch, length] to the loss of each token, float32."""


def build(framework: str, kind: str, config: Config) -> Model:
    """The model in "linen" or "nnx", with the layers of "flax" or "fusejax"."""
    init, logits = {"linen": _linen, "nnx": _nnx}[framework](kind, config)
    return Model(init, logits, _flax_loss if kind == "flax" else _fusejax_loss)


def _linen(kind: str, config: Config) -> tuple[Any, Any]:
    from gpt_linen import GPT

    model = GPT(config, _layers("linen", kind))
    return lambda key: model.init(key, jnp.zeros((1, config.length), jnp.int32)), model.apply


def _nnx(kind: str, config: Config) -> tuple[Any, Any]:
    from flax import nnx
    from gpt_nnx import GPT

    from fusejax.flax.nnx import named_scopes

    layers = _layers("nnx", kind)

    def new(key: jax.Array) -> GPT:
        # nnx names no scopes, by which kernels are told in a compiled program.
        return named_scopes(GPT(config, layers, rngs=nnx.Rngs(key)))

    graph = nnx.graphdef(nnx.eval_shape(new, jax.random.key(0)))
    return (
        lambda key: nnx.state(new(key), nnx.Param),
        lambda parameters, tokens: nnx.merge(graph, parameters)(tokens),
    )


def _layers(framework: str, kind: str) -> ModuleType:
    name = f"plain_{framework}" if kind == "flax" else f"fusejax.flax.{framework}"
    return importlib.import_module(name)


def _flax_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels)


def _fusejax_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return fusejax.softmax_cross_entropy(logits, labels)
