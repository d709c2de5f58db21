"""What an op is: named stages over named values, with a reference and a Pallas kernel."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step: a pure JAX function from named values to named values."""

    name: str
    function: Callable[..., Any]
    """Takes `inputs` in order; returns one array, or a tuple where there are several outputs."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Stages in order, from named arguments to named results."""

    arguments: tuple[str, ...]
    stages: tuple[Stage, ...]
    results: tuple[str, ...]

    def program(
        self, name: str, boundaries_after: Sequence[str] = ()
    ) -> Callable[..., tuple[Any, ...]]:
        """All stages as one function of the arguments, each in its named scope.

        Args:
          name: what the function, and so the HLO module, is called.
          boundaries_after: names of stages whose outputs are to be materialised.
        """

        def run(*arguments: Any) -> tuple[Any, ...]:
            values = dict(zip(self.arguments, arguments, strict=True))
            for stage in self.stages:
                with jax.named_scope(stage.name):
                    outputs = apply(stage, values)
                if stage.name in boundaries_after:
                    outputs = jax.lax.optimization_barrier(outputs)
                values.update(outputs)
            return tuple(values[result] for result in self.results)

        run.__name__ = name
        return run

    def shapes(self, arguments: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every value, from those of the arguments."""
        values = dict(zip(self.arguments, arguments, strict=True))
        for stage in self.stages:
            values.update(jax.eval_shape(lambda known, stage=stage: apply(stage, known), values))
        return values

    def readers(self, value: str) -> tuple[str, ...]:
        """Names of the stages that read a value."""
        return tuple(stage.name for stage in self.stages if value in stage.inputs)


@dataclasses.dataclass(frozen=True)
class Op:
    """A chain of stages over [rows, width] tensors and [width] parameters."""

    name: str
    formula: str
    tensors: tuple[str, ...]
    """Arguments of shape [rows, width]; they come first in the chain's arguments."""
    chain: Chain
    split_after: tuple[str, ...]
    """Stages behind which the split path puts a boundary."""
    reference: Callable[..., tuple[np.ndarray, ...]]
    """`reference(*arguments, dtype)`: NumPy, float64 in and out. `dtype` is what the op rounds to
    where rounding is part of its definition."""
    reference_gradient: Callable[..., tuple[np.ndarray, ...]]
    """`reference_gradient(arguments, cotangents, dtype)`: a gradient per argument, float64."""
    kernel: Callable[..., Any]
    """The Pallas kernel; takes the arguments and `interpret`."""
    kernel_refusal: Callable[..., str | None]
    """`kernel_refusal(*arguments)`: why the kernel cannot serve such arguments, or None."""

    def argument_shapes(self, shape: Sequence[int], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of every argument for tensors of `shape`."""
        return tuple(
            jax.ShapeDtypeStruct(tuple(shape) if name in self.tensors else (shape[-1],), dtype)
            for name in self.chain.arguments
        )


def apply(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    """The outputs of one stage, by name."""
    outputs = stage.function(*(values[name] for name in stage.inputs))
    if len(stage.outputs) == 1 and not isinstance(outputs, tuple):
        outputs = (outputs,)
    return dict(zip(stage.outputs, outputs, strict=True))


def hlo_dtype(dtype: Any) -> str:
    """HLO's name of a floating-point dtype: "bf16", "f32"."""
    name = np.dtype(dtype).name
    return name.replace("bfloat", "bf").replace("float", "f")


def nbytes(value: Any) -> int:
    """Bytes of an array or a `jax.ShapeDtypeStruct`."""
    return math.prod(value.shape) * np.dtype(value.dtype).itemsize
