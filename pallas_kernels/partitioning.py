"""A launch over rows whose arrays are split over devices: every device has its own rows.

Leading axes may be split in any way, and every device launches the kernel on what it has; sums over
rows are summed over devices, once for all of them. Where the last axis is split, columns that have
nothing to do with each other stay with the kernel; else the formula takes its place, in which only
numbers per row are exchanged between devices, or it is an error where no fallback is allowed.
Arrays that rows have in common are whole on every device, or split as the columns are.

Under `jax.jit`, with axes of type Auto, it is the compiler that knows how arrays are split, and it
asks for each part of the launch (`jax.experimental.custom_partitioning`). Axes of type Explicit are
in the arrays' types, and `jax.shard_map` does the same with them. Inside `jax.shard_map` arrays are
parts already.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.arguments import explicit_axes
from pallas_kernels.launches import Launch


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes over which the arrays of a launch are split.

    Attributes:
      examples: how many of `leading` are axes of examples.
      leading: the mesh axes of every axis but the last.
      columns: those of the last axis.
    """

    examples: int
    leading: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Mesh axes over which rows of one example are split."""
        return sum(self.leading[self.examples :], ())

    def specs(self, per_row: Any, shared: Any) -> tuple[Any, Any]:
        """Of arrays of every row, and of those in common or sums, arguments or results."""

        def of_rows(array):
            has_columns = len(array.shape) > len(self.leading)
            return PartitionSpec(*self.leading, *([self.columns] if has_columns else []))

        def of_shared(array):
            has_columns = len(array.shape) == self.examples + 1
            examples = self.leading[: self.examples]
            return PartitionSpec(*examples, *([self.columns] if has_columns else []))

        return jax.tree.map(of_rows, per_row), jax.tree.map(of_shared, shared)


def split_of(
    launch: Launch, per_row: Any, spec: Callable[[Any], Sequence[Any]], mesh: Any
) -> Split:
    """How a launch is split, given how its arrays are.

    The first array that says something of an axis is followed; an axis that does not come apart
    evenly is not split.

    Args:
      launch: which.
      per_row: its arrays of every row.
      spec: array -> an entry for each of its axes, or for the first of them.
      mesh: which has the sizes of mesh axes.
    """
    shape = launch.block(per_row).shape
    entries: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    for array in jax.tree.leaves(per_row):
        for i, entry in enumerate(spec(array)):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if not entries[i] and shape[i] % parts == 0 and not used & set(axes):
                entries[i] = tuple(axes)
                used |= set(axes)
    return Split(
        launch.examples, tuple(entries[:-1]), () if launch.operation.whole else entries[-1]
    )


def on_each_device(launch: Launch, per_row: Any, shared: Any) -> tuple[Any, Any]:
    """`launch(per_row, shared)`, of arrays that are split over devices or are not."""
    if launch.mode.interpret:
        return launch(per_row, shared)
    if any(explicit_axes(array) for array in jax.tree.leaves(per_row)):
        return _in_shard_map(launch, per_row, shared)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or not (mesh.empty or mesh.auto_axes):
        return launch(per_row, shared)

    def run(per_row, shared):
        return launch(per_row, shared)

    def partition(concrete, arguments, results):
        if concrete.empty:
            concrete = _mesh_of(mesh, launch.block(arguments[0]))
        split = split_of(launch, arguments[0], functools.partial(_spec, concrete), concrete)
        arguments, results = jax.tree.map(
            lambda spec: NamedSharding(concrete, spec),
            (split.specs(*arguments), split.specs(*results)),
        )
        return concrete, in_no_mesh(_part(launch, split, asked=True)), results, arguments

    def in_no_mesh(part):
        # Types of what one device has name no mesh axes, whatever mesh the program is in.
        def run(per_row, shared):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return part(per_row, shared)

        return run

    partitioned = custom_partitioning(run)
    partitioned.def_partition(partition, sharding_rule=_rule(launch, per_row, shared))
    return partitioned(per_row, shared)


def _mesh_of(context: AbstractMesh, array: Any) -> Mesh:
    """The mesh of a program none of whose arguments is known to be split.

    The compiler then does not tell it, and of arrays only which device has what.
    """
    devices = np.array(list(array.sharding.devices_indices_map(array.shape)))
    if context.empty:
        return Mesh(devices, ("devices",))
    return Mesh(devices.reshape(context.axis_sizes), context.axis_names)


def _spec(mesh: Mesh, array: Any) -> Sequence[Any]:
    """How an array is split over the axes of a mesh, in whichever way the compiler tells it."""
    sharding, shape = array.sharding, array.shape
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec)
    starts = {
        device: [part.start or 0 for part in index]
        for device, index in sharding.devices_indices_map(shape).items()
    }
    first, neighbours = mesh.devices.flat[0], {}
    for number, axis in enumerate(mesh.axis_names):
        if mesh.shape[axis] > 1:
            neighbours[axis] = mesh.devices.take(1, axis=number).flat[0]

    def axes_of(i):
        """Mesh axes along which the index of axis i changes, the slowest first."""
        steps = {axis: starts[device][i] - starts[first][i] for axis, device in neighbours.items()}
        return tuple(sorted(filter(steps.get, steps), key=steps.__getitem__, reverse=True))

    spec = tuple(map(axes_of, range(len(shape))))
    found = NamedSharding(mesh, PartitionSpec(*spec))
    return spec if found.is_equivalent_to(sharding, len(shape)) else ()


def _part(
    launch: Launch, split: Split, *, asked: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """What one device does; `asked` as for a launch.

    Raises:
      ValueError: rows are split, a kernel needs whole ones, and there is no fallback.
    """
    shares_rows = split.columns and not launch.operation.by_column
    if shares_rows and not launch.mode.fallback:
        raise ValueError(
            f"{launch.operation.name} needs whole rows, and the last axis is split over the mesh "
            f"axes {', '.join(split.columns)}: split other axes, take another implementation, or "
            "fallback=True for the same in plain JAX."
        )

    def run(per_row, shared):
        if shares_rows:
            found, sums = launch.formula(per_row, shared, split.columns)
        else:
            found, sums = launch(per_row, shared, asked=asked)
        if split.rows and jax.tree.leaves(sums):
            sums = jax.lax.psum(sums, split.rows)
        return found, sums

    return run


def _rule(launch: Launch, per_row: Any, shared: Any) -> str:
    """Axes of every array by name: the compiler splits those of one name alike.

    Where rows should rather be whole, arrays in common and sums have names of their own, so that
    how they are split is not taken for how rows are.
    """
    block = launch.block(per_row)
    names = [f"d{i}" for i in range(block.ndim - 1)]

    def of_rows(arrays, columns):
        return [
            " ".join([*names, columns] if len(array.shape) == block.ndim else names)
            for array in jax.tree.leaves(arrays)
        ]

    def of_shared(arrays, word):
        def axes(i, array):
            if launch.operation.by_column:
                return ["width"]
            return [f"{word}{i}_{axis}" for axis in range(launch.examples, len(array.shape))]

        return [
            " ".join([*names[: launch.examples], *axes(i, array)])
            for i, array in enumerate(jax.tree.leaves(arrays))
        ]

    found, sums = launch.results(per_row, shared)
    given = of_rows(per_row, "width") + of_shared(shared, "shared")
    columns = "columns" if launch.operation.whole else "width"
    return f"{', '.join(given)} -> {', '.join(of_rows(found, columns) + of_shared(sums, 'sum'))}"


def _in_shard_map(launch: Launch, per_row: Any, shared: Any) -> tuple[Any, Any]:
    """The launch of arrays in whose types it is how they are split."""
    shardings = (jax.typeof(a).sharding for a in jax.tree.leaves(per_row) if explicit_axes(a))
    mesh = next(shardings).mesh
    split = split_of(launch, per_row, lambda array: jax.typeof(array).sharding.spec, mesh)
    arguments = split.specs(per_row, shared)

    def place(array, spec):
        return jax.sharding.reshard(array, NamedSharding(mesh, spec))

    return jax.shard_map(
        _part(launch, split),
        mesh=mesh,
        in_specs=arguments,
        out_specs=split.specs(*launch.results(per_row, shared)),
        axis_names=set(sum(split.leading, split.columns)),
        check_vma=False,
    )(*jax.tree.map(place, (per_row, shared), arguments))
