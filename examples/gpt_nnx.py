"""A small GPT in Flax nnx whose layers are Flax's own or fusejax's.

Pre-norm: a block hands on what it would add, and the next norm adds it. So the residual addition
and the norm are one layer, `PrenormLayerNorm`, and with fusejax one kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gpt_config import Config


class Attention(nnx.Module):
    """Causal self-attention, all heads' projections in one product."""

    def __init__(self, config: Config, layers: Any, *, rngs: nnx.Rngs):
        options = {"use_bias": False, **config.dtypes, "rngs": rngs}
        self.config = config
        self.qkv = nnx.Linear(config.hidden, 3 * config.hidden, **options)
        self.softmax = layers.Softmax()
        self.out = nnx.Linear(config.hidden, config.hidden, **options)

    def __call__(self, x):
        """Of [batch, length, hidden]."""
        heads, (batch, length, hidden) = self.config.heads, x.shape
        qkv = self.qkv(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, hidden // heads), 2, 0)
        if self.config.attention != "softmax":
            mixed = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=self.config.attention
            )
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
            causal = jnp.tril(jnp.ones((length, length), bool))
            weights = self.softmax(scores, where=causal)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(mixed.reshape(x.shape))


class MLP(nnx.Module):
    """Up, a GELU or a gate, and down."""

    def __init__(self, config: Config, layers: Any, *, rngs: nnx.Rngs):
        sizes = config.hidden, config.mlp_width
        options = {**config.dtypes, "rngs": rngs}
        first = layers.DenseBiasGelu if config.mlp == "gelu" else layers.SwiGLU
        self.up = first(*sizes, **options)
        self.down = nnx.Linear(*reversed(sizes), use_bias=False, **options)

    def __call__(self, x):
        """Of [batch, length, hidden]."""
        return self.down(self.up(x))


class Block(nnx.Module):
    """x is what comes to be added to the residual stream, and so is the result."""

    def __init__(self, config: Config, layers: Any, *, rngs: nnx.Rngs):
        norm = layers.PrenormLayerNorm if config.norm == "layer" else layers.PrenormRMSNorm
        options = {**config.dtypes, "rngs": rngs}
        self.attention_norm = norm(config.hidden, **options)
        self.attention = Attention(config, layers, rngs=rngs)
        self.mlp_norm = norm(config.hidden, **options)
        self.mlp = MLP(config, layers, rngs=rngs)

    def __call__(self, x, residual):
        """Of two arrays [batch, length, hidden]."""
        y, residual = self.attention_norm(x, residual)
        x = self.attention(y)
        y, residual = self.mlp_norm(x, residual)
        return self.mlp(y), residual


class GPT(nnx.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary].

    Args:
      layers: `plain_nnx`, `fusejax.flax.nnx`, or what else has their names.
    """

    def __init__(self, config: Config, layers: Any, *, rngs: nnx.Rngs):
        options = {**config.dtypes, "rngs": rngs}
        norm = layers.ResidualLayerNorm if config.norm == "layer" else layers.ResidualRMSNorm
        self.tokens = nnx.Embed(config.vocabulary, config.hidden, **options)
        self.positions = nnx.Embed(config.length, config.hidden, **options)
        self.block = nnx.List(Block(config, layers, rngs=rngs) for _ in range(config.blocks))
        self.norm = norm(config.hidden, **options)
        self.head = nnx.Linear(config.hidden, config.vocabulary, use_bias=False, **options)

    def __call__(self, tokens):
        """Of whole numbers below the vocabulary's size."""
        x = self.tokens(tokens)
        positions = self.positions(jnp.arange(tokens.shape[-1]))
        residual = jnp.broadcast_to(positions, x.shape)
        for block in self.block:
            x, residual = block(x, residual)
        return self.head(self.norm(x, residual))
