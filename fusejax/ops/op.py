"""What an op is: named stages over named values, with a reference and a Pallas kernel."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

_SHORT = {
    "bool": "pred", "uint": "u", "int": "s", "bfloat": "bf", "float": "f", "complex": "c"
}  # fmt: skip


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
    constants: tuple[str, ...] = ()
    """Arguments that have no gradient, such as masks."""

    def program(
        self,
        name: str,
        boundaries_after: Sequence[str] = (),
        recomputed: Sequence[str] = (),
    ) -> Callable[..., tuple[Any, ...]]:
        """All stages as one function of the arguments, each in its named scope.

        Args:
          name: what the function, and so the HLO module, is called.
          boundaries_after: names of stages whose outputs are to be materialised.
          recomputed: names of stages that every other stage and every result has a run of its own
            of, one after another.
        """
        shared = tuple(stage for stage in self.stages if stage.name not in recomputed)
        repeated = tuple(stage for stage in self.stages if stage.name in recomputed)

        def run(*arguments: Any) -> tuple[Any, ...]:
            values = dict(zip(self.arguments, arguments, strict=True))

            done: list[Any] = []  # what consumers of recomputed stages have made so far

            def known(names: Sequence[str]) -> dict[str, Any]:
                missing = set(names) - values.keys()
                return values | (_again(repeated, values, missing, done) if missing else {})

            for stage in shared:
                with jax.named_scope(stage.name):
                    outputs = apply(stage, known(stage.inputs))
                if stage.name in boundaries_after:
                    outputs = _materialised(outputs)
                if not set(stage.inputs) <= values.keys():
                    done += outputs.values()
                values.update(outputs)
            results = []
            for name in self.results:
                results.append(known([name])[name])
                if name not in values:
                    done.append(results[-1])
            return tuple(results)

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
    """A chain of stages over arrays whose sizes have names."""

    name: str
    formula: str
    dimensions: Mapping[str, tuple[str, ...]]
    """Names of the sizes of every argument, in the order of the chain's arguments."""
    chain: Chain
    split_after: tuple[str, ...]
    """Stages behind which the split path puts a boundary."""
    reference: Callable[..., tuple[np.ndarray, ...]]
    """`reference(*arguments, dtype)`: NumPy, float64 in and out. `dtype` is what the op rounds to
    where rounding is part of its definition."""
    reference_gradient: Callable[..., tuple[np.ndarray, ...]]
    """`reference_gradient(arguments, cotangents, dtype)`: a gradient per argument that has one,
    float64."""
    kernel: Callable[..., Any]
    """The Pallas kernel; takes the arguments and `interpret`."""
    kernel_refusal: Callable[..., str | None]
    """`kernel_refusal(*arguments)`: why the kernel cannot serve such arguments, or None."""
    kernel_modes: tuple[str, ...] = ("forward", "backward")
    """What the kernel is there for."""
    kernel_is_for_hopper: bool = False
    """Whether the kernel needs instructions that later GPUs do not have."""
    split_kernel: Callable[..., Any] | None = None
    """The library's matrix product, then one Pallas kernel; takes the arguments and `interpret`."""
    recomputed: tuple[str, ...] = ()
    """Stages that the recompute path runs once per consumer instead of storing what they make."""
    mixes_rows: bool = False
    """Whether a result depends on more than one row, or does not have the rows first."""
    axes: tuple[str, ...] = ("rows", "width")
    """Names of the sizes that a shape of the op is made of."""

    @property
    def row_arguments(self) -> tuple[str, ...]:
        """Arguments that have a row for each row of the op."""
        return tuple(name for name, axes in self.dimensions.items() if axes[0] == "rows")

    def argument_shapes(self, shape: Sequence[int], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of every argument, for sizes in the order of `axes`."""
        sizes = dict(zip(self.axes, shape, strict=True))
        return tuple(
            jax.ShapeDtypeStruct(
                tuple(sizes[axis] for axis in self.dimensions[name]),
                np.bool_ if name in self.chain.constants else dtype,
            )
            for name in self.chain.arguments
        )


def _materialised(outputs: dict[str, Any]) -> dict[str, Any]:
    """The same behind a barrier, rows first: XLA would else write what is transposed next so."""
    return {
        name: with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        for name, value in jax.lax.optimization_barrier(outputs).items()
    }


def _again(
    stages: Sequence[Stage], values: Mapping[str, Any], wanted: Collection[str], done: Sequence[Any]
) -> dict[str, Any]:
    """The values `wanted`, by a run of `stages` that starts when `done` is there.

    Without something to wait for the compiler would merge the runs: equal barriers are merged too.
    """
    names = [name for stage in stages for name in stage.inputs if name in values]
    inputs = {name: values[name] for name in names}
    if done:
        waited, _ = jax.lax.optimization_barrier((tuple(inputs.values()), tuple(done)))
        inputs = dict(zip(inputs, waited, strict=True))
    for stage in stages:
        with jax.named_scope(stage.name):
            inputs.update(apply(stage, inputs))
    return {name: inputs[name] for name in wanted}


def apply(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    """The outputs of one stage, by name."""
    outputs = stage.function(*(values[name] for name in stage.inputs))
    if len(stage.outputs) == 1 and not isinstance(outputs, tuple):
        outputs = (outputs,)
    return dict(zip(stage.outputs, outputs, strict=True))


def hlo_dtype(dtype: Any) -> str:
    """HLO's name of a dtype: "bf16", "f32", "s32", "pred"; JAX's where HLO has none (keys)."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    name = np.dtype(dtype).name
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def nbytes(value: Any) -> int:
    """Bytes of an array or a `jax.ShapeDtypeStruct`."""
    return math.prod(value.shape) * value.dtype.itemsize
