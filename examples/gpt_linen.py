"""A small GPT in Flax linen whose layers are Flax's own or fusejax's.

Pre-norm: a block hands on what it would add, and the next norm adds it. So the residual addition
and the norm are one layer, `PrenormLayerNorm`, and with fusejax one kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from gpt_config import Config


class Attention(nn.Module):
    """Causal self-attention, all heads' projections in one product."""

    config: Config
    layers: Any

    @nn.compact
    def __call__(self, x):
        """Of [batch, length, hidden]."""
        c = self.config
        batch, length, hidden = x.shape
        qkv = nn.Dense(3 * hidden, use_bias=False, name="qkv", **c.dtypes)(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, c.heads, hidden // c.heads), 2, 0)
        if c.attention != "softmax":
            mixed = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=c.attention
            )
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
            causal = jnp.tril(jnp.ones((length, length), bool))
            weights = self.layers.Softmax(name="softmax")(scores, where=causal)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(hidden, use_bias=False, name="out", **c.dtypes)(mixed.reshape(x.shape))


class MLP(nn.Module):
    """Up, a GELU or a gate, and down."""

    config: Config
    layers: Any

    @nn.compact
    def __call__(self, x):
        """Of [batch, length, hidden]."""
        c = self.config
        first = self.layers.DenseBiasGelu if c.mlp == "gelu" else self.layers.SwiGLU
        y = first(c.mlp_width, name="up", **c.dtypes)(x)
        return nn.Dense(c.hidden, use_bias=False, name="down", **c.dtypes)(y)


class Block(nn.Module):
    """x is what comes to be added to the residual stream, and so is the result."""

    config: Config
    layers: Any

    @nn.compact
    def __call__(self, x, residual):
        """Of two arrays [batch, length, hidden]."""
        c = self.config
        norm = self.layers.PrenormLayerNorm if c.norm == "layer" else self.layers.PrenormRMSNorm
        y, residual = norm(name="attention_norm", **c.dtypes)(x, residual)
        x = Attention(c, self.layers, name="attention")(y)
        y, residual = norm(name="mlp_norm", **c.dtypes)(x, residual)
        return MLP(c, self.layers, name="mlp")(y), residual


class GPT(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    config: Config
    layers: Any
    """`plain_linen`, `fusejax.flax.linen`, or what else has their names."""

    @nn.compact
    def __call__(self, tokens):
        """Of whole numbers below the vocabulary's size."""
        c = self.config
        x = nn.Embed(c.vocabulary, c.hidden, name="tokens", **c.dtypes)(tokens)
        positions = nn.Embed(c.length, c.hidden, name="positions", **c.dtypes)
        residual = jnp.broadcast_to(positions(jnp.arange(tokens.shape[-1])), x.shape)
        for number in range(c.blocks):
            x, residual = Block(c, self.layers, name=f"block_{number}")(x, residual)
        norm = self.layers.ResidualLayerNorm if c.norm == "layer" else self.layers.ResidualRMSNorm
        y = norm(name="norm", **c.dtypes)(x, residual)
        return nn.Dense(c.vocabulary, use_bias=False, name="head", **c.dtypes)(y)
