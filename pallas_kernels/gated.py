"""Gated activations, silu(gate) * up and gelu(gate) * up, and their gradients, one pass each.

Unfused, the activation is written and read again: 2 read + 2 written + 4 read + 2 written = 10
bytes per element at 16 bits, and 4 read + 2 written = 6 here. A gradient reads gate, up and dy and
writes both gradients, 6 read + 4 written = 10 bytes; nothing but the arguments is saved for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import formulas, gelu_math
from pallas_kernels.arguments import flag, mode_of, placed, present
from pallas_kernels.batching import over_rows
from pallas_kernels.launches import Mode, RowOperation
from pallas_kernels.plan import Plan, plan_rows, unsupported_rows
from pallas_kernels.rows import Result, run_rows
from pallas_kernels.tuned import Tuning

# Two arrays at a time ran faster in longer parts: 95.3 µs against 99.1 (swiglu, bfloat16, 2^26
# elements, H200); three, in the gradient, did not.
PART = 2048


def plan(
    rows: int, width: int, dtype: Any, *, op: str = "swiglu", tuning: Tuning | None = None
) -> Plan:
    """The launch of `swiglu` or `geglu` on [rows, width] of `dtype`."""
    return plan_rows(
        rows, width, dtype, streams=2, held=2, op=op, reduces=False, part=PART, tuning=tuning
    )


def plan_backward(
    rows: int, width: int, dtype: Any, *, op: str = "swiglu", tuning: Tuning | None = None
) -> Plan:
    """The launch of the gradient of `swiglu` or `geglu`."""
    op = f"{op}_backward"
    return plan_rows(rows, width, dtype, streams=3, held=3, op=op, reduces=False, tuning=tuning)


def expected_bytes(rows: int, width: int, dtype: Any) -> int:
    """The bytes that the kernel must move: gate and up read, y written."""
    return 3 * rows * width * jnp.dtype(dtype).itemsize


def expected_bytes_backward(rows: int, width: int, dtype: Any) -> int:
    """The same of the gradient: gate, up and dy read, dgate and dup written."""
    return 5 * rows * width * jnp.dtype(dtype).itemsize


def unsupported(gate: Any, up: Any, *, split: bool = False) -> str | None:
    """Why the kernels refuse these arguments, as one sentence, or None.

    Only shape and dtype are read, so `jax.ShapeDtypeStruct` will do.

    Args:
      gate: the first argument.
      up: the second.
      split: whether devices may share the rows, so that gate can have more elements than a kernel.
    """
    if reason := unsupported_rows(gate, 2, reduces=False, split=split):
        return reason
    if tuple(gate.shape) != tuple(up.shape) or gate.dtype != up.dtype:
        return (
            f"gate and up must be alike, not {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}."
        )
    return None


def swiglu(
    gate: jax.Array, up: jax.Array, *, fallback: bool = False, interpret: Any = None
) -> jax.Array:
    """silu(gate) * up, computed in f32 and rounded once; differentiable in reverse.

    The same as `(jax.nn.silu(gate.astype(f32)) * up.astype(f32)).astype(gate.dtype)`.

    Args:
      gate: [..., width], float16, bfloat16 or float32.
      up: the shape and dtype of gate.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of gate.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    return _run("silu", mode_of(fallback, interpret), gate, up)


def geglu(
    gate: jax.Array,
    up: jax.Array,
    *,
    approximate: bool = True,
    fallback: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """gelu(gate) * up, computed in f32 and rounded once; differentiable in reverse.

    The same as `(jax.nn.gelu(gate.astype(f32), approximate) * up.astype(f32)).astype(gate.dtype)`,
    and accurate relative to the result in the negative tail, where that one is not.

    Args:
      gate: [..., width], float16, bfloat16 or float32.
      up: the shape and dtype of gate.
      approximate: the tanh form; False is the erf form.
      fallback: whether platforms without the kernels get the formula in plain JAX, not an error.
      interpret: None compiles for the GPU; True or `plgpu.InterpretGPUParams()` simulates.

    Returns:
      y, with the shape and dtype of gate.

    Raises:
      ValueError: with the sentence of `unsupported`.
    """
    activation = _gelu(flag("approximate", approximate))
    return _run(activation, mode_of(fallback, interpret), gate, up)


@dataclasses.dataclass(frozen=True)
class _Activation:
    op: str
    value: Callable[[jax.Array], jax.Array]
    value_and_slope: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    formula: Callable[[jax.Array, jax.Array], jax.Array]
    flops: int  # of the value, roughly


_ACTIVATIONS = {
    "silu": _Activation("swiglu", gelu_math.silu, gelu_math.silu_and_slope, formulas.swiglu, 6),
    "gelu_tanh": _Activation(
        "geglu",
        gelu_math.gelu_tanh,
        gelu_math.gelu_tanh_and_slope,
        functools.partial(formulas.geglu, approximate=True),
        8,
    ),
    "gelu_erf": _Activation(
        "geglu",
        gelu_math.gelu_erf,
        gelu_math.gelu_erf_and_slope,
        functools.partial(formulas.geglu, approximate=False),
        20,
    ),
}


def _gelu(approximate: bool) -> str:
    return "gelu_tanh" if approximate else "gelu_erf"


def _run(activation: str, mode: Mode, gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = present(gate=gate, up=up)
    if reason := unsupported(gate, up, split=True):
        raise ValueError(reason)
    return _gated(activation, mode, *placed((gate, up)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(activation, mode, gate, up):
    return _launched(activation, mode, gate, up)


def _launched(activation, mode, gate, up):
    op = _ACTIVATIONS[activation].op
    operation = RowOperation(op, _kernel, _formula, activation, by_column=True)
    return over_rows(operation, mode, (gate, up))[0]


def _gated_forward(activation, mode, gate, up):
    return _launched(activation, mode, gate, up), (gate, up)


def _gated_backward(activation, mode, saved, dy):
    op = f"{_ACTIVATIONS[activation].op}_backward"
    operation = RowOperation(op, _backward_kernel, _backward_formula, activation, by_column=True)
    return over_rows(operation, mode, (*saved, dy))[0]


_gated.defvjp(_gated_forward, _gated_backward)


def _kernel(activation, per_row, shared, *, interpret):
    gate, up = per_row
    return _launch(activation, gate, up, interpret, None), shared


def _formula(activation, per_row, shared, *, across):
    del across
    return _ACTIVATIONS[activation].formula(*per_row), shared


def _backward_kernel(activation, per_row, shared, *, interpret):
    gate, up, dy = per_row
    return _launch_backward(activation, gate, up, dy, interpret, None), shared


def _backward_formula(activation, per_row, shared, *, across):
    del across
    return formulas.gated_backward(_ACTIVATIONS[activation].formula, *per_row), shared


def swiglu_kernel(
    gate: jax.Array, up: jax.Array, *, interpret: Any = None, tuning: Tuning | None = None
) -> jax.Array:
    """The launch behind `swiglu`, on [rows, width] arrays."""
    return _launch("silu", gate, up, interpret, tuning)


def geglu_kernel(
    gate: jax.Array,
    up: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """The launch behind `geglu`, on [rows, width] arrays."""
    return _launch(_gelu(approximate), gate, up, interpret, tuning)


def _launch(name: str, gate, up, interpret: Any, tuning: Tuning | None) -> jax.Array:
    activation = _ACTIVATIONS[name]
    rows, width = gate.shape

    def transform(blocks, parameters, row_inputs, row):
        del parameters, row_inputs, row
        gate, up = (block.astype(jnp.float32) for block in blocks)
        return Result((activation.value(gate) * up,))

    found = run_rows(
        transform,
        plan(rows, width, gate.dtype, op=activation.op, tuning=tuning),
        [gate, up],
        name=activation.op,
        cost=pl.CostEstimate(
            flops=(activation.flops + 1) * gate.size,
            transcendentals=2 * gate.size,
            bytes_accessed=expected_bytes(rows, width, gate.dtype),
        ),
        interpret=interpret,
    )
    return found.outputs[0]


def swiglu_backward_kernel(
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
    *,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind the gradient of `swiglu`, on three alike [rows, width] arrays.

    s = sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    """
    return _launch_backward("silu", gate, up, dy, interpret, tuning)


def geglu_backward_kernel(
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
    *,
    approximate: bool = True,
    interpret: Any = None,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The launch behind the gradient of `geglu`, on three alike [rows, width] arrays.

    dgate = dy * up * gelu'(gate)
    dup = dy * gelu(gate)
    """
    return _launch_backward(_gelu(approximate), gate, up, dy, interpret, tuning)


def _launch_backward(
    name: str, gate, up, dy, interpret: Any, tuning: Tuning | None
) -> tuple[jax.Array, jax.Array]:
    activation = _ACTIVATIONS[name]
    rows, width = gate.shape

    def transform(blocks, parameters, row_inputs, row):
        del parameters, row_inputs, row
        gate, up, dy = (block.astype(jnp.float32) for block in blocks)
        value, slope = activation.value_and_slope(gate)
        return Result((dy * up * slope, dy * value))

    found = run_rows(
        transform,
        plan_backward(rows, width, gate.dtype, op=activation.op, tuning=tuning),
        [gate, up, dy],
        name=f"{activation.op}_backward",
        outputs=2,
        cost=pl.CostEstimate(
            flops=(activation.flops + 8) * gate.size,
            transcendentals=2 * gate.size,
            bytes_accessed=expected_bytes_backward(rows, width, gate.dtype),
        ),
        interpret=interpret,
    )
    dgate, dup = found.outputs
    return dgate, dup
