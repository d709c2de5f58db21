"""Compile times of a path in processes that have compiled nothing of it before.

Three processes, one after another, each with its compiler up and one tiny program compiled:

    1. cold, then warm; neither sees a persistent cache
    2. cold, into JAX's persistent compilation cache, which is an empty folder
    3. cold, with that cache

A hit is counted by JAX's own event, never told from a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fusejax.comparison import Refusal
from fusejax.compile.targets import Target
from fusejax.errors import first_line

_HIT = "/jax/compilation_cache/cache_hits"
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_TINY = "fusejax_tiny"
_NO_ENTRY = "the cache was asked and gave nothing"


@dataclasses.dataclass(frozen=True)
class Work:
    """What to compile: one path of an op, by names, so that another process can build it."""

    op: str
    options: Mapping[str, Any]
    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Cold:
    """What the first process saw."""

    programs: int
    cold_s: float
    """Seconds to trace, lower and compile all programs of the path."""
    warm_s: float
    """The same again: new functions, so that JAX's caches of traces and executables have nothing;
    what the process keeps below them (of Mosaic kernels, say) stays."""
    executable_bytes: int | None
    """Serialised executables; None where the back end cannot serialise them."""


@dataclasses.dataclass(frozen=True)
class Cached:
    """What a process with the persistent cache saw."""

    seconds: float
    """To trace, lower, and compile or load, all programs of the path."""
    requests: int
    """Programs that JAX looked up in the cache."""
    hits: int
    problem: str | None
    """What JAX warned of."""


@dataclasses.dataclass(frozen=True)
class CompileTimes:
    """Compile times of one path. Seconds, programs of the path together."""

    path: str
    programs: int
    cold_s: float
    warm_s: float
    executable_bytes: int | None
    fill_s: float
    """Cold, and writing the cache."""
    cached_s: float | None
    """In another process, with the cache that was filled; None where nothing was hit."""
    requests: int
    hits: int
    entry_bytes: int
    """Size of the cache's entries."""
    no_hit: str | None
    """Why not all requests were hits; None where they were."""


def compile_times(
    works: Sequence[Work], target: Target, progress: Callable[[str], None] = lambda _: None
) -> tuple[CompileTimes | Refusal, ...]:
    """Measures each path, one process at a time, so that none takes another's processor."""
    context = multiprocessing.get_context("spawn")
    found: list[CompileTimes | Refusal] = []
    for work in works:
        progress(f"compiling {work.path} in fresh processes")
        with (
            tempfile.TemporaryDirectory(prefix="fusejax-cache-") as folder,
            concurrent.futures.ProcessPoolExecutor(
                1, mp_context=context, max_tasks_per_child=1
            ) as pool,
        ):
            try:
                cold = pool.submit(measure_cold, work, target).result()
                fill = pool.submit(measure_cached, work, target, folder).result()
                size = _entry_bytes(pathlib.Path(folder))
                cached = pool.submit(measure_cached, work, target, folder).result()
            except BrokenProcessPool:
                found.append(Refusal(work.path, "the process that compiled it died"))
                continue
            except Exception as error:
                found.append(Refusal(work.path, f"does not compile: {first_line(error)}"))
                continue
        found.append(_times(work.path, cold, fill, cached, size))
    return tuple(found)


def _times(path: str, cold: Cold, fill: Cached, cached: Cached, size: int) -> CompileTimes:
    all_hit = cached.requests and cached.hits == cached.requests
    return CompileTimes(
        path=path,
        programs=cold.programs,
        cold_s=cold.cold_s,
        warm_s=cold.warm_s,
        executable_bytes=cold.executable_bytes,
        fill_s=fill.seconds,
        cached_s=cached.seconds if cached.hits else None,
        requests=cached.requests,
        hits=cached.hits,
        entry_bytes=size,
        no_hit=None if all_hit else cached.problem or fill.problem or _NO_ENTRY,
    )


def measure_cold(work: Work, target: Target) -> Cold:
    """Compiles without a persistent cache. Call it in a process of its own."""
    import jax

    from fusejax.compile import aot

    jax.config.update("jax_enable_compilation_cache", False)
    _prepare(target)
    programs = _programs(work)
    cold, warm = (
        sum(aot.warm_compile_s(function, arguments, target) for function, arguments in programs)
        for _ in range(2)
    )
    sizes = [
        aot.compile_program(function, arguments, target).executable_bytes
        for function, arguments in programs
    ]
    whole = None if None in sizes else sum(size for size in sizes if size)
    return Cold(len(programs), cold, warm, whole)


def measure_cached(work: Work, target: Target, folder: str) -> Cached:
    """Compiles with the persistent cache in `folder`. Call it in a process of its own."""
    import jax

    from fusejax.compile import aot

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _prepare(target)
    programs = _programs(work)
    with _events() as events, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seconds = sum(aot.warm_compile_s(f, arguments, target) for f, arguments in programs)
    said = [str(one.message) for one in told if "compilation cache" in str(one.message)]
    problem = said[0].splitlines()[0].partition("': ")[2] if said else None
    return Cached(seconds, events.count(_REQUEST), events.count(_HIT), problem or None)


def _entry_bytes(folder: pathlib.Path) -> int:
    """Bytes of the cache's entries for programs, without that of the tiny one before them.

    XLA keeps what it autotuned in files beside them.
    """
    return sum(file.stat().st_size for file in folder.glob("*-cache") if _TINY not in file.name)


def _prepare(target: Target) -> None:
    """Brings the compiler up, which is not part of any program's compile time."""
    import jax
    import numpy as np

    from fusejax.compile import aot

    def tiny(x: Any) -> Any:
        return x + 1

    tiny.__name__ = _TINY
    jitted = jax.jit(tiny)
    aot.compile_program(jitted, (jax.ShapeDtypeStruct((8,), np.float32),), target)


def _programs(work: Work) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    import jax.numpy as jnp

    from fusejax import paths
    from fusejax.ops import OPS

    op = OPS[work.op](**work.options)
    chain = paths.build(op, work.path, "forward").chain
    values = chain.shapes(op.argument_shapes(work.shape, jnp.dtype(work.dtype)))
    return [
        (stage.function, tuple(values[name] for name in stage.inputs)) for stage in chain.stages
    ]


@contextlib.contextmanager
def _events() -> Iterator[list[str]]:
    """Collects the names of JAX's events."""
    import jax

    seen: list[str] = []

    def listen(event: str, **_: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_listener(listen)
