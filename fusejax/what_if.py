"""What XLA's options change: each path of a comparison compiled without them and with them."""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fusejax.comparison import Comparison, PathResult
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.errors import UsageError, first_line
from fusejax.hlo.analysis import Boundary

# "a=1,b=x,y" are two options: a comma belongs to a value unless a name and "=" follow it.
_BETWEEN = re.compile(r",(?=\s*\w+\s*=)")
_BOOLEANS = {"true": True, "false": False}
_KINDS = {
    "bool": "true or false", "int32": "a whole number", "int64": "a whole number",
    "float": "a number", "double": "a number", "enum": "names of its own",
}  # fmt: skip


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Options from texts "NAME=VALUE" or "NAME=VALUE,NAME=VALUE"; "--" before a name is dropped.

    Raises:
      UsageError: a text is not of that form, or names an option twice.
    """
    options: dict[str, Any] = {}
    for text in given:
        for part in _BETWEEN.split(text):
            name, equals, value = part.strip().partition("=")
            name = name.strip().removeprefix("--")
            if not equals or not name:
                raise UsageError(
                    f"--xla-option {text!r} is not NAME=VALUE: give an option of XLA, such as "
                    "xla_gpu_enable_triton_gemm=false"
                )
            if name == "xla_dump_to":
                raise UsageError(
                    "--xla-option xla_dump_to: XLA's reasons are read from a dump of our own: set "
                    "it in XLA_FLAGS for scripts/inspect_hlo.py"
                )
            if name in options:
                raise UsageError(f"--xla-option {name!r} is given twice: leave one out")
            options[name] = _BOOLEANS.get(value.strip().lower(), value.strip())
    return options


def check_options(options: Mapping[str, Any], target: Target) -> None:
    """Compiles next to nothing with each option.

    Raises:
      UsageError: XLA knows no option of that name, or does not take the value.
    """
    probe = (jax.ShapeDtypeStruct((8,), np.float32),)
    for name, value in options.items():
        try:
            aot.compile_program(lambda x: x + 1, probe, target, {name: value})
        except jax.errors.JaxRuntimeError as error:
            given = f"{name}={_text(value)}"
            said = first_line(error).partition(": ")[2] or first_line(error)
            if "No such compile option" in said:
                raise UsageError(
                    f"--xla-option {given!r}: XLA has no option {name!r} in this version (jaxlib "
                    f"{jax.lib.__version__})"
                ) from error
            kind = re.search(r"is not a valid (\w+) value", said)
            takes = _KINDS.get(kind[1], kind[1]) if kind else ""
            raise UsageError(
                f"--xla-option {given!r}: "
                + (f"XLA takes {takes} for {name}" if kind else f"XLA refuses it: {said}")
            ) from error


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclasses.dataclass(frozen=True)
class Change:
    """One path without options and with some."""

    path: str
    options: str
    """As they were given: "NAME=VALUE", "NAME=VALUE,NAME=VALUE"."""
    before: PathResult | None
    """None where the path cannot be served."""
    after: PathResult | None

    @property
    def is_one(self) -> bool:
        """Whether the options change what is launched, moved or handed over."""
        if self.before is None or self.after is None:
            return self.before is not self.after
        return _facts(self.before) != _facts(self.after)

    def new_boundaries(self) -> list[Boundary]:
        """Boundaries that are there with the options alone."""
        return _beyond(self.after, self.before)

    def gone_boundaries(self) -> list[Boundary]:
        """Boundaries that are there without the options alone."""
        return _beyond(self.before, self.after)


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """A comparison with options, and what they change."""

    comparison: Comparison
    """With all of them."""
    changes: tuple[Change, ...]
    """Per path: with all options, then with each alone where there are several."""

    def to_json(self) -> list[dict[str, Any]]:
        """The field "what_if" of the document: a list of changes."""
        return [
            {
                "path": change.path,
                "xla_options": change.options,
                "changes": change.is_one,
                "without": _numbers(change.before),
                "with": _numbers(change.after),
            }
            for change in self.changes
        ]


def compare_options(
    compare: Callable[[Mapping[str, Any], bool], Comparison], options: Mapping[str, Any]
) -> WhatIf:
    """Compares with options and without, and with each alone where there are several.

    Args:
      compare: makes a comparison, given XLA's options and whether it may be brief.
      options: at least one.
    """
    with_all = compare(options, False)
    # What is measured is measured both ways.
    without = compare({}, with_all.target.kind == "deviceless")
    variants = {_listed(options): with_all}
    if len(options) > 1:
        for name, value in options.items():
            variants[_listed({name: value})] = compare({name: value}, True)
    changes = tuple(
        Change(name, listed, _result(without, name), _result(variant, name))
        for name in with_all.paths
        for listed, variant in variants.items()
    )
    return WhatIf(with_all, changes)


def _listed(options: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={_text(value)}" for name, value in options.items())


def _result(comparison: Comparison, name: str) -> PathResult | None:
    path = comparison.paths[name]
    return path if isinstance(path, PathResult) else None


def _facts(path: PathResult) -> tuple[Any, ...]:
    kernels = [(kernel.emitter, kernel.count, kernel.traffic) for kernel in path.kernels]
    return kernels, sorted((b.dtype, b.shape, b.read_bytes) for b in path.boundaries)


def _numbers(path: PathResult | None) -> dict[str, Any] | None:
    if path is None:
        return None
    return {
        "launches": path.launches,
        "bytes": path.traffic.total,
        "boundaries": len(path.boundaries),
        "boundary_bytes": sum(b.written_bytes + b.read_bytes for b in path.boundaries),
        "predicted_us": path.predicted_us,
        "measured_us": path.timing.end_to_end_us if path.timing else None,
    }


def _beyond(path: PathResult | None, other: PathResult | None) -> list[Boundary]:
    known = collections.Counter((b.dtype, b.shape) for b in (other.boundaries if other else ()))
    found = []
    for boundary in path.boundaries if path else ():
        if known[boundary.dtype, boundary.shape]:
            known[boundary.dtype, boundary.shape] -= 1
        else:
            found.append(boundary)
    return found
