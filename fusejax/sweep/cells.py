"""The cells of a sweep, and how they are compared side by side."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fusejax.errors import UsageError, first_line
from fusejax.processes import end_with_parent

# Shapes of products: square; shallow, so that its result dwarfs it; tall, as of a model's layers.
PRODUCT_SHAPES = ((8192, 8192, 8192), (8192, 8192, 512), (65536, 1024, 1024))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison of a sweep."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    mode: str = "forward"
    paths: tuple[str, ...] | None = None
    """None for all that the op has."""
    counters: bool = False


def grid(
    ops: Sequence[str],
    widths: Sequence[int],
    elements: int,
    dtypes: Sequence[str],
    modes: Sequence[str] = ("forward",),
    shapes: Sequence[tuple[int, ...]] = (),
    paths: tuple[str, ...] | None = None,
) -> list[Cell]:
    """Cells of every op: at `shapes` with as many sizes as it has, else as many rows of each width
    as make `elements`; products at PRODUCT_SHAPES."""
    from fusejax.ops import OPS

    cells = []
    for name in ops:
        axes = OPS[name]().axes
        given: list[tuple[int, ...]] = [shape for shape in shapes if len(shape) == len(axes)]
        if not given and not shapes:
            given = list(PRODUCT_SHAPES)
            if len(axes) == 2:
                given = [(max(1, elements // width), width) for width in widths]
        cells += [
            Cell(name, shape, dtype, mode, paths)
            for mode in modes
            for dtype in dtypes
            for shape in given
        ]
    return cells


def run(
    cells: Sequence[Cell], target: str, jobs: int, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Compares every cell, `jobs` at once, in processes of their own.

    On a card they compile side by side and measure one by one.

    Yields:
      For each cell in order a document "fusejax.compare/1", or {"cell", "failed": why}.
    """
    # Each process would else keep most of the card's memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_follow_parent
    ) as pool:
        futures = [pool.submit(_compare, cell, target) for cell in cells]
        try:
            for number, (cell, future) in enumerate(zip(cells, futures, strict=True), 1):
                where = f"{cell.op} {'x'.join(map(str, cell.shape))} {cell.dtype}"
                tell(f"{number} of {len(cells)}: {where}")
                yield _result(cell, future)
        except BaseException:
            # Nobody is to wait for what is being compiled.
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _follow_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's
    end_with_parent()


def _result(cell: Cell, future: "concurrent.futures.Future[dict[str, Any]]") -> dict[str, Any]:
    try:
        return future.result()
    except BrokenProcessPool:
        return _failed(cell, "a process of the sweep died")
    except UsageError as error:
        return _failed(cell, str(error))
    except Exception as error:
        return _failed(cell, f"{type(error).__name__}: {first_line(error)}")


def _failed(cell: Cell, why: str) -> dict[str, Any]:
    return {"cell": dataclasses.asdict(cell), "failed": why[:300]}


def _compare(cell: Cell, target_name: str) -> dict[str, Any]:
    from fusejax.compile import platform

    platform.prepare_process()
    import jax.numpy as jnp

    from fusejax.compare_ops import compare_op
    from fusejax.compile import targets
    from fusejax.ops import OPS
    from fusejax.report.document import comparison_json

    target, _ = targets.resolve(target_name)
    comparison = compare_op(
        OPS[cell.op](),
        cell.shape,
        jnp.dtype(cell.dtype),
        target,
        mode=cell.mode,
        names=cell.paths,
        counters=cell.counters,
    )
    return comparison_json(comparison)
