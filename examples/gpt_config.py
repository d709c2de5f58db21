"""The sizes of the GPT of gpt_linen.py and gpt_nnx.py."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and dtypes. Parameters are float32; activations are of `dtype`."""

    vocabulary: int = 256
    hidden: int = 128
    blocks: int = 2
    heads: int = 4
    length: int = 128
    """Most tokens of a sequence."""
    norm: str = "layer"
    """"layer" or "rms"."""
    mlp: str = "gelu"
    """"gelu" (4 x hidden wide) or "swiglu" (8/3 x hidden, so that there are as many parameters)."""
    attention: str = "xla"
    """"xla" or "cudnn" (`jax.nn.dot_product_attention` by that; cuDNN is for GPUs and 16 bits), or
    "softmax" (two products around the layer)."""
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @property
    def dtypes(self) -> dict[str, Any]:
        """What every layer is given."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def mlp_width(self) -> int:
        """Of the hidden activations of the MLP, a multiple of 64."""
        return 4 * self.hidden if self.mlp == "gelu" else -(-8 * self.hidden // 3 // 64) * 64
