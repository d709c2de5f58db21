"""Assertions on what a function compiles to, for test-suites. No GPU is needed.

from fusejax.testing import assert_fused

def test_softmax_is_one_kernel():
    assert_fused(jax.nn.softmax, jax.ShapeDtypeStruct((2048, 16384), jnp.float32))
"""

import pathlib
from collections.abc import Callable
from typing import Any

from fusejax.errors import UsageError
from fusejax.gates import budget, held, text
from fusejax.report.units import counted


def assert_fused(
    function: Callable[..., Any],
    *arguments: Any,
    target: str | Any = "h100",
    max_kernels: int | None = 1,
    max_boundary_bytes: int | None = 0,
    max_bytes: int | None = None,
    scope: str | None = None,
) -> None:
    """Compiles a function for a target and asserts that it stays within limits.

    Args:
      function, arguments, target: as `fusejax.inspect` takes them.
      max_kernels: most launches per run; None for no limit, as everywhere here.
      max_boundary_bytes: most bytes that kernels write for one another and read again, at all
        boundaries together, per run.
      max_bytes: most bytes that all kernels read and write per run.
      scope: counts only kernels and boundaries with instructions of this named scope.

    Raises:
      AssertionError: a limit is exceeded. The message names the kernels, and the boundaries with
        their tensors, bytes, scopes, source lines and XLA's reasons.
      UsageError: the target is unknown or cannot be compiled for here, a limit is no whole number,
        or there is no such scope.
      Whatever tracing, lowering or compiling `function` raises.
    """
    __tracebackhide__ = True
    limits = {
        "max_kernels": max_kernels,
        "max_bytes": max_bytes,
        "max_boundary_bytes": max_boundary_bytes,
    }
    for name, limit in limits.items():
        if limit is not None and (type(limit) is not int or limit < 0):
            raise UsageError(f"{name}={limit!r}: give a whole number, 0 or more, or None")
    found = held.compiled(function, arguments, target, scope, pathlib.Path.cwd())
    uses = budget.of(found)
    quantities = (
        ("max_kernels", uses.launches, counted(uses.launches, "launch")),
        ("max_bytes", uses.bytes, f"{uses.bytes:,} bytes read and written"),
        (
            "max_boundary_bytes",
            uses.boundary_bytes,
            f"{uses.boundary_bytes:,} bytes written and read again at boundaries",
        ),
    )
    over = [
        f"{words}, {used - limit:,} over {name}={limit:,}"
        for name, used, words in quantities
        if (limit := limits[name]) is not None and used > limit
    ]
    if not over:
        return
    where = found.target + ("" if scope is None else f", scope {scope}")
    raise AssertionError(
        "\n".join(
            (
                f"{found.name} on {where}, JAX {found.jax}: {'; '.join(over)}",
                *text.boundaries("boundaries, largest first:", uses.boundaries),
                *text.kernels("kernels in launch order:", uses.kernels),
            )
        )
    )
