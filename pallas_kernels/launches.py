"""One launch over rows as a JAX primitive that is traced where it is lowered, and not before.

Until then neither the platform nor, of arrays that devices share, the part that a kernel sees is
known. A launch that is lowered for CUDA is the kernel; elsewhere it is the same formula in plain
JAX, or an error. Equal launches of a program are lowered once. There is no rule for `jax.vmap` and
no derivative here, see `batching` for those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from pallas_kernels.formulas import Across
from pallas_kernels.plan import COPY_BYTES, MAX_ELEMENTS, NARROW, unsupported_rows


@dataclasses.dataclass(frozen=True)
class RowOperation:
    """What is computed for every row of [..., width] arrays, as a kernel and as a formula.

    Both return (arrays of every row, sums over rows) from (arrays of every row, arrays that rows
    have in common), each any structure of arrays. Those of every row are [..., width], or [...] for
    a number per row, the first one among the arguments [..., width]; the others are [width], where
    rows need not be whole.

    Attributes:
      name: for messages.
      kernel: (options, of every row, in common, interpret=) -> results, where ... is one axis.
      formula: (options, of every row, in common, across=) -> results in plain JAX, of the same
        structure and dtypes, for any axes.
      options: what else there is to know.
      by_column: whether columns have nothing to do with each other, wherever they are.
      whole: whether rows are never split over devices.
    """

    name: str
    kernel: Callable[..., tuple[Any, Any]]
    formula: Callable[..., tuple[Any, Any]]
    options: Hashable = None
    by_column: bool = False
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a launch is executed.

    Attributes:
      fallback: whether the formula is taken where the kernel cannot be, instead of an error.
      interpret: None, False, True or `plgpu.InterpretGPUParams()`, for a simulation.
    """

    fallback: bool = False
    interpret: Any = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """An operation for several examples at once, each with arrays in common of its own.

    Attributes:
      operation: which.
      mode: how.
      examples: axes of examples, with which all arrays and results begin.
    """

    operation: RowOperation
    mode: Mode
    examples: int = 0

    def __call__(self, per_row: Any, shared: Any, *, asked: bool = False) -> tuple[Any, Any]:
        """The results, from the kernel where this is lowered for CUDA.

        Args:
          per_row: arrays of every row.
          shared: arrays in common.
          asked: whether the compiler asks for it, while it splits a program among devices. It asks
            for equal launches one by one, so that they are kept.
        """
        if self.mode.interpret:
            return self._kernel(per_row, shared)
        given, tree = jax.tree.flatten((per_row, shared))
        shapes, out_tree = jax.tree.flatten(self.results(per_row, shared))
        found = row_launch_p.bind(*given, launch=self, tree=tree, shapes=tuple(shapes), asked=asked)
        return jax.tree.unflatten(out_tree, found)

    def results(self, per_row: Any, shared: Any) -> tuple[Any, Any]:
        """Shapes and dtypes of the results."""
        given, tree = jax.tree.flatten((per_row, shared))
        types = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given)
        return _results(self, tree, tuple(types))

    def formula(self, per_row: Any, shared: Any, axes: tuple[str, ...] = ()) -> tuple[Any, Any]:
        """The results in plain JAX, for rows that may be split over mesh axes."""
        width = self.block(per_row).shape[-1] * math.prod(map(jax.lax.axis_size, axes))
        run = functools.partial(
            self.operation.formula, self.operation.options, across=Across(width, axes)
        )
        for _ in range(self.examples):
            run = jax.vmap(run)
        return run(per_row, shared)

    def refusal(self, per_row: Any) -> str | None:
        """Why these are too many elements for one kernel, or None."""
        block = self.block(per_row)
        shape = block.shape[self.examples + self._splits_rows(per_row) :]
        return unsupported_rows(jax.ShapeDtypeStruct(shape, block.dtype), reduces=False)

    def elsewhere(self, per_row: Any, shared: Any) -> tuple[Any, Any]:
        """The results on a platform that has no such kernels.

        Raises:
          ValueError: there is no fallback.
        """
        if not self.mode.fallback:
            raise ValueError(
                f"{self.operation.name} is a kernel for NVIDIA GPUs from Hopper on, and this is "
                "lowered for another platform: take another implementation, fallback=True for the "
                "same in plain JAX, or interpret=True to simulate it."
            )
        return self.formula(per_row, shared)

    def on_cuda(self, per_row: Any, shared: Any) -> tuple[Any, Any]:
        """The results on an NVIDIA GPU.

        Raises:
          ValueError: a kernel cannot take that many elements, and there is no fallback.
        """
        refusal = self.refusal(per_row)
        if refusal is None:
            return self._kernel(per_row, shared)
        if not self.mode.fallback:
            raise ValueError(refusal)
        return self.formula(per_row, shared)

    def block(self, per_row: Any) -> Any:
        """The first array, [examples, leading axes, width]."""
        return jax.tree.leaves(per_row)[0]

    def _splits_rows(self, per_row: Any) -> bool:
        """Whether what is too much for one example is taken as several, of equal arrays in common.

        One more axis in a kernel's grid does not count against the elements of an array.
        """
        block = self.block(per_row)
        elements = math.prod(block.shape[self.examples :])
        return self.examples == 0 and block.ndim > 2 and elements > MAX_ELEMENTS

    def _kernel(self, per_row: Any, shared: Any) -> tuple[Any, Any]:
        if self._splits_rows(per_row):
            count = self.block(per_row).shape[0]
            every = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), shared)
            one_more = dataclasses.replace(self, examples=1)
            found, sums = one_more._kernel(per_row, every)
            return found, jax.tree.map(lambda total: total.sum(0), sums)
        operation = self.operation
        run = functools.partial(
            operation.kernel, operation.options, interpret=self.mode.interpret or None
        )
        block, n = self.block(per_row), self.examples
        examples, leads = block.shape[:n], block.shape[n:-1]
        merged = (math.prod(examples),) if n else ()
        rows = math.prod(leads)
        flat = jax.tree.map(lambda a: a.reshape(*merged, rows, *a.shape[block.ndim - 1 :]), per_row)
        if not n:
            found, sums = run(flat, shared)
        else:
            of_each = jax.tree.map(lambda a: a.reshape(*merged, *a.shape[n:]), shared)
            blocks = [leaf for leaf in jax.tree.leaves(flat) if leaf.ndim > 2]
            if all(map(_aligned, blocks)):
                found, sums = jax.vmap(run)(flat, of_each)
            else:
                found, sums = jax.lax.map(lambda given: run(*given), (flat, of_each))
        rank = len(merged)
        found = jax.tree.map(lambda a: a.reshape(*examples, *leads, *a.shape[rank + 1 :]), found)
        return found, jax.tree.map(lambda a: a.reshape(*examples, *a.shape[rank:]), sums)


@functools.lru_cache(maxsize=1024)
def _results(launch: Launch, tree: Any, types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    found = jax.eval_shape(launch.formula, *jax.tree.unflatten(tree, types))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), found)


def _aligned(block: jax.Array) -> bool:
    """Whether a kernel can be given [examples, rows, width] with one more axis in its grid.

    Copies want the strides of such an axis to be multiples of 16 bytes, which rows of 31 or 769
    elements do not give, and those of the narrowest rows want the whole array.
    """
    bytes_of_example = math.prod(block.shape[1:]) * block.dtype.itemsize
    return bytes_of_example % COPY_BYTES == 0 and block.shape[-1] >= NARROW


row_launch_p = Primitive("row_launch")
row_launch_p.multiple_results = True


@row_launch_p.def_abstract_eval
def _types(*given, launch, tree, shapes, asked):
    del given, launch, tree, asked
    return [jax.core.ShapedArray(found.shape, found.dtype) for found in shapes]


@functools.partial(jax.jit, static_argnames=("launch", "tree", "shapes", "asked"))
def _run(*given, **parameters):
    return row_launch_p.bind(*given, **parameters)


@row_launch_p.def_impl
def _execute(*given, **parameters):
    with jax.disable_jit(False):  # it is what executes a primitive
        return _run(*given, **parameters)


def _elsewhere(*given, launch, tree, shapes, asked):
    del shapes, asked
    return jax.tree.leaves(launch.elsewhere(*jax.tree.unflatten(tree, given)))


def _on_cuda(*given, launch, tree, shapes, asked):
    del shapes
    if asked:
        types = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given)
        return _lowered_on_cuda(launch, tree, tuple(types)).call(*given)
    return jax.tree.leaves(launch.on_cuda(*jax.tree.unflatten(tree, given)))


@functools.lru_cache(maxsize=256)
def _lowered_on_cuda(launch: Launch, tree: Any, types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    def run(*given):
        return jax.tree.leaves(launch.on_cuda(*jax.tree.unflatten(tree, given)))

    # Of one device, whatever mesh the whole program has.
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=checks)(*types)


mlir.register_lowering(row_launch_p, mlir.lower_fun(_elsewhere, multiple_results=True))
mlir.register_lowering(
    row_launch_p, mlir.lower_fun(_on_cuda, multiple_results=True), platform="cuda"
)
