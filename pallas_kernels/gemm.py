"""A matrix product with GELU, a bias and row sums in its epilogue, for Hopper's tensor cores.

What XLA leaves behind a product costs [M, N] bytes several times over: the product is written,
read again by the fusion that adds the bias and applies GELU, and once more where rows are summed.
Here all of it is done to the f32 accumulators before they leave their registers. Bytes at 16 bits,
beside x and weight: 2 MN written, against 6 MN (bias and GELU) or up to 10 MN (with row sums).

A tile has only a part of each row, so that row sums leave the kernel as one partial sum for each
row and column of tiles, which a small reduction after it adds up, always in the same order.
`gemm_plan` tells how the work is laid out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formulas
from pallas_kernels.arguments import arrays, flag, mode_of
from pallas_kernels.batching import over_rows
from pallas_kernels.forward_only import forward_only
from pallas_kernels.gemm_kernels import Epilogue, Sums, gemm_kernel
from pallas_kernels.gemm_plan import unsupported
from pallas_kernels.launches import RowOperation

__all__ = [
    "expected_bytes",
    "gemm_bias_gelu",
    "gemm_gelu_rowsum",
    "gemm_shared",
    "unsupported",
]


def expected_bytes(
    m: int, n: int, k: int, dtype: Any, bias_dtype: Any = None, *, row_sums: bool = False
) -> int:
    """The bytes that must move: x, weight (and the bias) read, y (and the f32 sums) written.

    Args:
      m: rows of x.
      n: columns of weight.
      k: columns of x.
      dtype: of x, weight and y.
      bias_dtype: of the bias; None where there is none.
      row_sums: whether rows are summed.
    """
    moved = (m * k + k * n + m * n) * jnp.dtype(dtype).itemsize
    if bias_dtype is not None:
        moved += n * jnp.dtype(bias_dtype).itemsize
    return moved + (4 * m if row_sums else 0)


def gemm_bias_gelu(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
) -> jax.Array:
    """gelu(x @ weight + bias), accumulated and computed in f32 and rounded once.

    Args:
      x: [M, K], float16 or bfloat16; M a multiple of 8, K of 64.
      weight: [K, N], the dtype of x; N a multiple of 64.
      bias: [N], float16, bfloat16 or float32, not necessarily x's dtype.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y [M, N], with the dtype of x.

    Raises:
      ValueError: with the sentence of `unsupported`.
      TypeError: the call is differentiated.
    """
    return _run(Epilogue(True, flag("approximate", approximate)), interpret, x, weight, bias)[0]


def gemm_gelu_rowsum(
    x: jax.Array, weight: jax.Array, *, approximate: bool = True, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """gelu(x @ weight), and the sum of each row of it before rounding.

    Args:
      x: [M, K], float16 or bfloat16; M a multiple of 8, K of 64.
      weight: [K, N], the dtype of x; N a multiple of 64.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y [M, N], with the dtype of x, and f32 sums [M] of the unrounded GELU.

    Raises:
      ValueError: with the sentence of `unsupported`.
      TypeError: the call is differentiated.
    """
    epilogue = Epilogue(approximate=flag("approximate", approximate), sums=Sums.OF_GELU)
    return _run(epilogue, interpret, x, weight)


def gemm_shared(
    x: jax.Array, weight: jax.Array, *, approximate: bool = True, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """gelu(h) and the sum of each row of h, for h = x @ weight, which is not stored.

    Args:
      x: [M, K], float16 or bfloat16; M a multiple of 8, K of 64.
      weight: [K, N], the dtype of x; N a multiple of 64.
      approximate: the tanh form; False is the erf form.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y [M, N], with the dtype of x, and f32 sums [M] of the unrounded product.

    Raises:
      ValueError: with the sentence of `unsupported`.
      TypeError: the call is differentiated.
    """
    epilogue = Epilogue(approximate=flag("approximate", approximate), sums=Sums.OF_PRODUCT)
    return _run(epilogue, interpret, x, weight)


def _run(epilogue: Epilogue, interpret: Any, x: Any, weight: Any, *bias: Any) -> Any:
    named = {"x": x, "weight": weight, **({"bias": bias[0]} if bias else {})}
    x, *others = arrays(**named)
    if reason := unsupported(x, *others):
        raise ValueError(reason)

    def call(x, *others):
        operation = RowOperation(epilogue.name, _kernel, _formula, epilogue, whole=True)
        return over_rows(operation, mode_of(False, interpret), x, others)[0]

    return forward_only(epilogue.name, call)(x, *others)


def _kernel(epilogue, x, others, *, interpret):
    return gemm_kernel(epilogue, x, *others, interpret=interpret), ()


def _formula(epilogue, x, others, *, across):
    del across
    weight, *bias = others
    product = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    y = formulas.gelu(sum((b.astype(jnp.float32) for b in bias), product), epilogue.approximate)
    summed = {Sums.OF_GELU: [y.sum(-1)], Sums.OF_PRODUCT: [product.sum(-1)]}
    return (y.astype(x.dtype), *summed.get(epilogue.sums, [])), ()
