"""The PyTorch side: its libraries, by events around a call, in a process that has no JAX in it.

Several such processes, and JAX's, may measure on one card at a time: one benchmarks while the
others compile.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from fusejax import cli
from fusejax.measure.attempts import Failed, attempt
from fusejax.measure.peers import libraries
from fusejax.measure.peers.cells import FORWARD, OPS, Settings, listed
from fusejax.measure.turns import card_turn

_CHECKED_ROWS = 64


def measure(
    file: str, ops: Sequence[str], widths: Sequence[int], until: float, settings: Settings
) -> None:
    """Times PyTorch's libraries; writes what there is after every cell.

    Args:
      file: where to.
      ops: operations.
      widths: elements per row.
      until: by `time.monotonic`, when no further cell is begun.
      settings: of the run.
    """
    import torch._functorch.config
    import triton.testing

    # A gradient is computed many times over here, from the same saved tensors.
    torch._functorch.config.donated_buffer = False
    names = list(libraries.installed())
    document: dict[str, Any] = {"rows": [], "copy_us": None, "ended": None, "at": None}

    def bench(function: Callable[[], Any]) -> float:
        with card_turn():
            return triton.testing.do_bench(function, return_mode="median")

    document["copy_us"] = copy_us(bench, settings)
    cells = [(op, width) for op in ops for width in widths]
    for number, (op, width) in enumerate(cells):
        if time.monotonic() >= until:
            document["ended"] = f"the time was up: not begun were {listed(cells[number:])}"
            break
        print(f"PyTorch: {op}, {width}", flush=True)
        document["at"] = f"{op}, {width}"
        cli.write_json("--torch_to", file, document)
        row: dict[str, Any] = {"op": op, "width": width, "us": {}, "failures": {}}
        for name in names:
            found = attempt(functools.partial(library_us, name, op, width, bench, settings))
            if isinstance(found, Failed):
                row["failures"][name] = found.line
            elif found is not None:
                row["us"][name] = found
        document["rows"].append(row)
    cli.write_json("--torch_to", file, document)


def copy_us(bench: Callable[..., float], settings: Settings) -> float:
    """PyTorch's copy of one array."""
    import torch

    source = torch.randn(settings.elements, device=settings.torch_device).to(
        getattr(torch, settings.dtype)
    )
    sink = torch.empty_like(source)
    return 1e3 * bench(lambda: sink.copy_(source))


def library_us(
    name: str, op: str, width: int, bench: Callable[..., float], settings: Settings
) -> float | None:
    """Median µs of a library at a cell; None where it has no such operation.

    Raises:
      Exception: whatever the library raises; ValueError where its result is wrong.
    """
    import torch

    torch._dynamo.reset()
    built = libraries.function(name, op)
    if built is None:
        return None
    arguments, dy = random_arguments(op, width, settings)
    want = expected(op, arguments, dy)
    if op in FORWARD:
        with torch.no_grad():
            _check(_first(built(*arguments)), want)
            return 1e3 * bench(lambda: built(*arguments))
    gradients = gradients_of(built, arguments, dy)
    _check(gradients()[0], want)
    return 1e3 * bench(gradients)


def random_arguments(op: str, width: int, settings: Settings) -> tuple[list[Any], Any]:
    """Random arguments of an operation, and the cotangent of its (first) result."""
    import torch

    takes, rows = OPS[op], settings.rows_of(width)
    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)

    def array():
        return torch.randn(rows, width, device=settings.torch_device, dtype=torch.float32).to(dtype)

    arguments = [array() for _ in range(takes.arrays)]
    if takes.labels:
        arguments.append(torch.randint(0, width, (rows,), device=settings.torch_device))
        dy = torch.rand(rows, device=settings.torch_device) + 0.5
    else:
        dy = array()
    arguments += [
        torch.rand(width, device=settings.torch_device) + 0.5 for _ in range(takes.parameters)
    ]
    return arguments, dy


def gradients_of(function: Callable[..., Any], arguments: Sequence[Any], dy: Any) -> Any:
    """A function that computes the gradients of all float arguments, and nothing else."""
    import torch

    if hasattr(function, "gradients"):
        return function.gradients(*arguments, dy)
    wanted = [a.requires_grad_() for a in arguments if a.is_floating_point()]
    result = _first(function(*arguments))
    return lambda: torch.autograd.grad(result, wanted, dy, retain_graph=True)


def expected(op: str, arguments: Sequence[Any], dy: Any) -> Any:
    """The first rows of the (first) result, or of the gradient of the first argument, by eager."""
    takes = OPS[op]
    per_row = takes.arrays + takes.labels
    few = [a[:_CHECKED_ROWS].clone() for a in arguments[:per_row]]
    few += [a.clone() for a in arguments[per_row:]]
    function = libraries.formulas()[op.removesuffix("_backward")]
    if op in FORWARD:
        return _first(function(*few))
    return gradients_of(function, few, dy[:_CHECKED_ROWS])()[0]


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _check(got: Any, want: Any) -> None:
    got, want = got[:_CHECKED_ROWS].detach().double(), want.detach().double()
    off = ((got - want).abs().max() / want.abs().max()).item()
    if not off < 0.05:
        raise ValueError(f"its result is off by {off:.2g} of the largest value")
