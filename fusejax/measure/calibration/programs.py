"""The small programs that a calibration times, and what the compiler made of them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusejax.hlo.analyse import analyse
from fusejax.hlo.analysis import Kernel
from fusejax.measure.attempts import Failed, attempt
from fusejax.measure.peers import compiling
from fusejax.measure.timing import GRAPHS_OFF, DeviceTime, percentile
from fusejax.profile import Point
from fusejax.program import Program

_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Probe:
    """A program to be timed."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(GRAPHS_OFF))
    """For the compiler. By default launches stay apart, so that the card reports each."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled probe."""

    run: Callable[..., Any]
    kernels: tuple[Kernel, ...]
    """In launch order, by our own analysis."""

    @property
    def main(self) -> int:
        """Which kernel moves the most bytes."""
        return max(range(len(self.kernels)), key=lambda i: self.kernels[i].traffic.total)

    @property
    def bytes(self) -> int:
        """Read plus written by the main kernel."""
        return self.kernels[self.main].traffic.total


def build(
    probes: Mapping[str, Probe], leave_out: Callable[[str], None], *, at_once: bool = True
) -> dict[str, Built]:
    """Compiles every probe; tells of those that do not compile, and goes on without them.

    Args:
      at_once: several at a time. Not for matrix products: their algorithms are chosen by timing.
    """

    def lowered(probe: Probe) -> Any:
        return jax.jit(probe.function).lower(*probe.arguments)

    def built(lowered: Any, probe: Probe) -> Any:
        if isinstance(lowered, Failed):
            return lowered
        return attempt(lambda: _analysed(lowered.compile(compiler_options=dict(probe.options))))

    traced = {name: attempt(functools.partial(lowered, probe)) for name, probe in probes.items()}
    if at_once:
        with compiling.pool() as pool:
            pending = {
                name: pool.submit(built, traced[name], probe) for name, probe in probes.items()
            }
        found = {name: future.result() for name, future in pending.items()}
    else:
        found = {name: built(traced[name], probe) for name, probe in probes.items()}
    for name, one in found.items():
        if isinstance(one, Failed):
            leave_out(f"{name}: {one.line}")
    return {name: one for name, one in found.items() if not isinstance(one, Failed)}


def _analysed(compiled: Any) -> Built:
    return Built(compiled, analyse(Program("", compiled.as_text())).kernels)


def random_values(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    """An array per shape on the device: standard normal, repeated after so many elements that no
    kernel can tell. Many shapes are wanted, and a generator would have to be compiled for each."""
    block = _block()
    return tuple(_repeated(block, shape.shape, shape.dtype) for shape in shapes)


@functools.cache
def _block() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (_BLOCK,), "float32")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _repeated(block: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    size = math.prod(shape)
    return jnp.tile(block, math.ceil(size / _BLOCK))[:size].reshape(shape).astype(dtype)


def spread(nbytes: int, us: Sequence[float]) -> Point:
    """Median and spread of kernels that move as many bytes."""
    return Point(nbytes, percentile(us, 0.5), percentile(us, 0.1), percentile(us, 0.9))


def main_kernel_us(program: Built, timed: DeviceTime) -> list[float]:
    """Times of the main kernel in each of the runs that one timed call made.

    Raises:
      ValueError: the card reported other launches than the analysis has.
    """
    per_run = len(program.kernels)
    if not timed.kernels or len(timed.kernels) % per_run:
        raise ValueError(f"{len(timed.kernels)} launches where {per_run} kernels are known")
    return [kernel.median_us for kernel in timed.kernels[program.main :: per_run]]
