"""From hidden states to the probabilities of the next token."""

import jax
import jax.numpy as jnp

VOCABULARY = 16384
"""Tokens, padding included: XLA takes the softmax of a row in one kernel up to this length."""


def probabilities(logits: jax.Array) -> jax.Array:
    """Softmax over the vocabulary, f32[tokens, vocabulary]."""
    with jax.named_scope("probabilities"):
        return jax.nn.softmax(logits)


def mask_padding(logits: jax.Array, tokens: int) -> jax.Array:
    """Takes the tokens behind the first `tokens` out of the choice."""
    with jax.named_scope("mask_padding"):
        return jnp.where(jnp.arange(logits.shape[-1]) < tokens, logits, -jnp.inf)
