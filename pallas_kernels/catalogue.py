"""Every launch of this package by name, with arguments of any size: to tune, test and compare."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import column_sums, cross_entropy, gated, gelu, norm_kernels, row_softmax
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import PART, Plan

type Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
      op: its name in `tuned.json`.
      streams: arrays of [rows, width] that it reads.
      outputs: arrays of [rows, width] that it writes.
      row_inputs: dtype of the arrays -> dtypes of the [rows] vectors that it reads.
      parameters: f32 [width] vectors that it reads.
      call: (streams, row inputs, parameters, tuning=) -> arrays.
      plan: (rows, width, dtype, tuning=) -> its launch.
      reduces: whether it reduces along rows.
      part: where it does not, about how many columns a part of a row has.
    """

    op: str
    streams: int
    outputs: int
    row_inputs: Callable[[Any], tuple[str, ...]]
    parameters: int
    call: Callable[..., Any]
    plan: Callable[..., Plan]
    reduces: bool = True
    part: int = PART

    def arguments(self, rows: int, width: int, dtype: Any) -> Shapes:
        """Shapes of the arguments of `function`, in order."""
        return (
            *(jax.ShapeDtypeStruct((rows, width), dtype) for _ in range(self.streams)),
            *(jax.ShapeDtypeStruct((rows,), jnp.dtype(name)) for name in self.row_inputs(dtype)),
            *(jax.ShapeDtypeStruct((width,), jnp.float32) for _ in range(self.parameters)),
        )

    def function(self, *values: jax.Array, tuning: Any = None) -> Any:
        """Runs the kernel on `arguments`."""
        end = len(values) - self.parameters
        streams, numbers, parameters = (
            values[: self.streams],
            values[self.streams : end],
            values[end:],
        )
        return self.call(streams, numbers, parameters, tuning=tuning)

    def array_bytes(self, rows: int, width: int, dtype: Any) -> int:
        """Bytes of the [rows, width] arrays that must move."""
        return (self.streams + self.outputs) * rows * width * jnp.dtype(dtype).itemsize


def launches() -> dict[str, Launch]:
    """All launches by name; forward and backward each."""
    norms = [
        Norm(centred, residual, returns_sum)
        for centred in (True, False)
        for residual, returns_sum in ((False, False), (True, False), (True, True))
    ]
    found = [_norm_forward(norm) for norm in norms]
    found += [_norm_backward(norm) for norm in norms if norm.returns_sum or not norm.residual]
    found += [
        _simple("bias_gelu", 1, 1, gelu.bias_gelu_kernel, gelu.plan, parameters=1, reduces=False),
        _simple(
            "bias_gelu_rowsum",
            1,
            1,
            gelu.bias_gelu_rowsum_kernel,
            functools.partial(gelu.plan, row_sums=True),
            parameters=1,
        ),
        _simple(
            "bias_gelu_backward",
            2,
            1,
            lambda x, dy, bias, **more: gelu.bias_gelu_backward_kernel(x, bias, dy, **more),
            gelu.plan_backward,
            parameters=1,
            reduces=False,
        ),
        _simple(
            "bias_gelu_rowsum_backward",
            2,
            1,
            lambda x, dy, dsums, bias, **more: gelu.bias_gelu_rowsum_backward_kernel(
                x, bias, dy, dsums, **more
            ),
            functools.partial(gelu.plan_backward, row_sums=True),
            row_inputs=("float32",),
            parameters=1,
            reduces=False,
        ),
        _simple("softmax", 1, 1, row_softmax.softmax_kernel, row_softmax.plan),
        _simple(
            "softmax_backward",
            2,
            1,
            row_softmax.softmax_backward_kernel,
            row_softmax.plan_backward,
        ),
        _simple(
            "cross_entropy",
            1,
            0,
            cross_entropy.cross_entropy_kernel,
            cross_entropy.plan,
            row_inputs=("int32",),
        ),
        _simple(
            "cross_entropy_backward",
            1,
            1,
            cross_entropy.cross_entropy_backward_kernel,
            cross_entropy.plan_backward,
            row_inputs=("int32", "float32", "float32", "float32"),
            reduces=False,
        ),
    ]
    found += [
        _simple(
            "bias_gelu_colsum",
            1,
            1,
            column_sums.bias_gelu_colsum_kernel,
            column_sums.plan_bias_gelu_colsum,
            parameters=1,
            reduces=False,
        ),
        _simple(
            "scale_sums",
            1,
            0,
            column_sums.scale_sums_kernel,
            column_sums.plan_scale_sums,
            parameters=1,
        ),
    ]
    for op, forward, backward in (
        ("swiglu", gated.swiglu_kernel, gated.swiglu_backward_kernel),
        ("geglu", gated.geglu_kernel, gated.geglu_backward_kernel),
    ):
        plan = functools.partial(gated.plan, op=op)
        plan_backward = functools.partial(gated.plan_backward, op=op)
        found.append(_simple(op, 2, 1, forward, plan, reduces=False, part=gated.PART))
        found.append(_simple(f"{op}_backward", 3, 2, backward, plan_backward, reduces=False))
    return {launch.op: launch for launch in found}


def _simple(
    op: str,
    streams: int,
    outputs: int,
    kernel: Callable[..., Any],
    plan: Callable[..., Plan],
    *,
    row_inputs: tuple[str, ...] = (),
    parameters: int = 0,
    reduces: bool = True,
    part: int = PART,
) -> Launch:
    def call(given, numbers, vectors, *, tuning):
        return kernel(*given, *numbers, *vectors, tuning=tuning)

    return Launch(op, streams, outputs, lambda _: row_inputs, parameters, call, plan, reduces, part)


def _norm_forward(norm: Norm) -> Launch:
    parameters = 1 + norm.centred

    def call(given, numbers, vectors, *, tuning):
        del numbers
        residual = given[1] if norm.residual else None
        return norm_kernels.forward_kernel(norm, given[0], residual, *vectors, tuning=tuning)

    return Launch(
        norm.name,
        norm.streams,
        1 + norm.returns_sum,
        lambda _: (),
        parameters,
        call,
        functools.partial(norm_kernels.plan_forward, norm, parameters=parameters),
    )


def _norm_backward(norm: Norm) -> Launch:
    def call(given, numbers, vectors, *, tuning):
        h, dy, *ds = given
        return norm_kernels.backward_kernel(
            norm,
            h,
            dy,
            ds[0] if ds else None,
            numbers,
            *vectors,
            bias_dtype=jnp.float32 if norm.centred else None,
            tuning=tuning,
        )

    return Launch(
        norm.backward_name,
        norm.backward_streams,
        1,
        lambda dtype: ("float32",) * norm.statistics(dtype),
        1,
        call,
        functools.partial(norm_kernels.plan_backward, norm, has_bias=norm.centred),
    )
