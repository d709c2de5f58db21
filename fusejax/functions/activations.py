"""GELU of a biased array, alone and with the sum of each row, and gated activations.

Computed in f32 and rounded once; in float64 where an argument is. Unlike the usual formulas, GELU
keeps its relative accuracy in the negative tail.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from fusejax.functions import split
from fusejax.functions.arguments import alike, column, rows
from fusejax.functions.call import call
from fusejax.functions.choice import Asked
from fusejax.functions.function import Function
from pallas_kernels import formulas, gated, gelu
from pallas_kernels.arguments import flag


def bias_gelu(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    implementation: Asked = None,
) -> jax.Array:
    """gelu(x + bias).

        z = x + bias
        y = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3)))    # approximate
        y = z / 2 * (1 + erf(z / sqrt(2)))                              # else

    Args:
      x: [..., width], of any floating-point dtype.
      bias: [width], of any floating-point dtype.
      approximate: the tanh form; False is the erf form.
      implementation: None chooses, see `fusejax.explain_choice`; or "pallas", "xla", "split", or
        several of them, of which the first is taken that can run. Where there may be kernels (None,
        "pallas"), only reverse mode is defined, any number of times; `jax.jvp` takes the others.

    Returns:
      y, with the shape and dtype of x.

    Raises:
      ValueError: a shape, dtype or option makes no sense, or what is asked for cannot run.
    """
    return call(BIAS_GELU, (x, bias), {"approximate": approximate}, implementation)


def bias_gelu_rowsum(
    x: jax.Array,
    bias: jax.Array,
    *,
    approximate: bool = True,
    implementation: Asked = None,
) -> tuple[jax.Array, jax.Array]:
    """`bias_gelu`, and `y.sum(-1)` of the y before it is rounded.

    Args:
      x: [..., width], of any floating-point dtype.
      bias: [width], of any floating-point dtype.
      approximate: the tanh form; False is the erf form.
      implementation: as in `bias_gelu`.

    Returns:
      y, with the shape and dtype of x, and the sums [...], f32, or float64 where an argument is.

    Raises:
      ValueError: as in `bias_gelu`.
    """
    return call(BIAS_GELU_ROWSUM, (x, bias), {"approximate": approximate}, implementation)


def swiglu(gate: jax.Array, up: jax.Array, *, implementation: Asked = None) -> jax.Array:
    """silu(gate) * up, where silu(z) = z / (1 + exp(-z)).

    Args:
      gate: [..., width], of any floating-point dtype.
      up: the shape of gate, of any floating-point dtype.
      implementation: as in `bias_gelu`.

    Returns:
      The product, with the shape and dtype of gate.

    Raises:
      ValueError: as in `bias_gelu`.
    """
    return call(SWIGLU, (gate, up), {}, implementation)


def geglu(
    gate: jax.Array, up: jax.Array, *, approximate: bool = True, implementation: Asked = None
) -> jax.Array:
    """gelu(gate) * up, with the GELU of `bias_gelu`.

    Args:
      gate: [..., width], of any floating-point dtype.
      up: the shape of gate, of any floating-point dtype.
      approximate: the tanh form; False is the erf form.
      implementation: as in `bias_gelu`.

    Returns:
      The product, with the shape and dtype of gate.

    Raises:
      ValueError: as in `bias_gelu`.
    """
    return call(GEGLU, (gate, up), {"approximate": approximate}, implementation)


def _check_biased(x: Any, bias: Any) -> None:
    rows("x", x)
    column("bias", bias, x.shape[-1])


def _check_gated(gate: Any, up: Any) -> None:
    alike("gate", gate, "up", up)


BIAS_GELU = Function(
    "bias_gelu",
    ("x", "bias"),
    _check_biased,
    gelu.unsupported,
    gelu.bias_gelu,
    formulas.bias_gelu,
    split.bias_gelu,
    options={"approximate": flag},
    reduces=False,
)
BIAS_GELU_ROWSUM = Function(
    "bias_gelu_rowsum",
    ("x", "bias"),
    _check_biased,
    functools.partial(gelu.unsupported, row_sums=True),
    gelu.bias_gelu_rowsum,
    formulas.bias_gelu_rowsum,
    split.bias_gelu_rowsum,
    options={"approximate": flag},
)
SWIGLU = Function(
    "swiglu",
    ("gate", "up"),
    _check_gated,
    gated.unsupported,
    gated.swiglu,
    formulas.swiglu,
    split.swiglu,
    reduces=False,
)
GEGLU = Function(
    "geglu",
    ("gate", "up"),
    _check_gated,
    gated.unsupported,
    gated.geglu,
    formulas.geglu,
    split.geglu,
    options={"approximate": flag},
    reduces=False,
)
