"""A budget: the launches and bytes of a compiled function, accepted by someone, and what for."""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError
from fusejax.gates.held import Held
from fusejax.hlo import diff as hlo_diff
from fusejax.hlo.analysis import Analysis, Boundary, Kernel, Reason, Traffic
from fusejax.hlo.diff import Matching, boundary_bytes, kernel_bytes
from fusejax.report.units import tensor

_TENSOR = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a function may do. The three quantities bind; the rest tells what they are made of."""

    target: str
    scope: str | None
    """The scope that everything else is limited to."""
    jax: str
    """Version that it was recorded with."""
    launches: int
    """Per run."""
    bytes: int
    """That all kernels read and write per run."""
    boundary_bytes: int
    """Written and read again at all boundaries together, per run."""
    minimum_bytes: int
    """Of the whole function: inputs read once and outputs written once."""
    kernels: tuple[Kernel, ...]
    """In launch order. Without names and directions where they come from a file."""
    boundaries: tuple[Boundary, ...]
    """Largest first. Without kernels and the words of the reason where they come from a file."""

    def to_json(self) -> dict[str, Any]:
        """What is kept of it: nothing that differs from machine to machine."""
        return {
            "target": self.target,
            **({} if self.scope is None else {"scope": self.scope}),
            "jax": self.jax,
            "launches": self.launches,
            "bytes": self.bytes,
            "boundary_bytes": self.boundary_bytes,
            "minimum_bytes": self.minimum_bytes,
            "kernels": [
                {
                    "emitter": kernel.emitter,
                    "count": kernel.count,
                    "bytes": kernel_bytes(kernel),
                    "scopes": list(kernel.scopes),
                    "source": kernel.source,
                }
                for kernel in self.kernels
            ],
            "boundaries": [
                {
                    "tensor": tensor(boundary.dtype, boundary.shape),
                    "bytes": boundary_bytes(boundary),
                    "reason": boundary.reason.kind,
                    "scopes": list(boundary.scopes),
                    "source": boundary.source,
                }
                for boundary in self.boundaries
            ],
        }


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One of the quantities that bind, recorded and now."""

    name: str
    recorded: int
    now: int

    def __str__(self) -> str:
        return f"{self.name} {self.recorded:,} -> {self.now:,}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two budgets of one function for one target."""

    quantities: tuple[Quantity, ...]
    kernels: Matching[Kernel]
    """Of those alone that differ in more than their line, as `boundaries`."""
    boundaries: Matching[Boundary]

    @property
    def worse(self) -> tuple[Quantity, ...]:
        """Quantities that are larger now."""
        return tuple(q for q in self.quantities if q.now > q.recorded)

    @property
    def better(self) -> tuple[Quantity, ...]:
        """Quantities that are smaller now."""
        return tuple(q for q in self.quantities if q.now < q.recorded)


def of(held: Held) -> Budget:
    """The budget that what was compiled just keeps."""
    module = held.module
    return Budget(
        target=held.target,
        scope=module.scope,
        jax=held.jax,
        launches=module.launches,
        bytes=module.bytes,
        boundary_bytes=sum(map(boundary_bytes, module.boundaries)),
        minimum_bytes=module.analysis.minimum_bytes,
        kernels=module.kernels,
        boundaries=tuple(
            sorted(
                module.boundaries, key=lambda b: (-boundary_bytes(b), b.dtype, b.shape, b.scopes)
            )
        ),
    )


def compare(recorded: Budget, now: Budget) -> Difference:
    """What differs between a recorded budget and what a function does now."""
    names = {"launches": "launches", "bytes": "bytes read and written",
             "boundary_bytes": "bytes at boundaries"}  # fmt: skip
    kernels = _unlike(recorded.kernels, now.kernels, _KERNEL_KEYS)
    boundaries = _unlike(recorded.boundaries, now.boundaries, _BOUNDARY_KEYS)
    before, after = zip(kernels, boundaries, strict=True)
    (found,) = hlo_diff.compare([_as_analysis(*before)], [_as_analysis(*after)])
    return Difference(
        tuple(Quantity(name, getattr(recorded, f), getattr(now, f)) for f, name in names.items()),
        found.kernels,
        found.boundaries,
    )


def from_json(entry: Any) -> Budget:
    """A budget as `to_json` gave it.

    Raises:
      UsageError: a field is missing or is not what it should be; the message names it.
    """
    scope = entry.get("scope") if isinstance(entry, dict) else None
    return Budget(
        target=_field(entry, "target", str),
        scope=scope if scope is None else _field(entry, "scope", str),
        jax=_field(entry, "jax", str),
        launches=_field(entry, "launches", int),
        bytes=_field(entry, "bytes", int),
        boundary_bytes=_field(entry, "boundary_bytes", int),
        minimum_bytes=_field(entry, "minimum_bytes", int),
        kernels=tuple(map(_kernel, _field(entry, "kernels", list))),
        boundaries=tuple(map(_boundary, _field(entry, "boundaries", list))),
    )


# Line numbers come first, to tell likes apart, but do not count: code above may have been edited.
_KERNEL_KEYS: Sequence[Callable[[Kernel], Hashable]] = (
    lambda k: (k.emitter, k.count, kernel_bytes(k), k.scopes, k.source),
    lambda k: (k.emitter, k.count, kernel_bytes(k), k.scopes),
)
_BOUNDARY_KEYS: Sequence[Callable[[Boundary], Hashable]] = (
    lambda b: (b.dtype, b.shape, boundary_bytes(b), b.scopes, b.source),
    lambda b: (b.dtype, b.shape, boundary_bytes(b), b.scopes),
)


def _unlike[T](
    before: Sequence[T], after: Sequence[T], keys: Sequence[Callable[[T], Hashable]]
) -> tuple[Sequence[T], Sequence[T]]:
    """What is left of both where likes are taken away in pairs."""
    for key in keys:
        common = collections.Counter(map(key, before)) & collections.Counter(map(key, after))
        before, after = (_without(things, common, key) for things in (before, after))
    return before, after


def _without[T](
    things: Sequence[T], taken: collections.Counter[Hashable], key: Callable[[T], Hashable]
) -> Sequence[T]:
    left = taken.copy()
    rest = []
    for thing in things:
        if left[key(thing)]:
            left[key(thing)] -= 1
        else:
            rest.append(thing)
    return rest


def _as_analysis(kernels: Sequence[Kernel], boundaries: Sequence[Boundary]) -> Analysis:
    # Records hold no directions, and a forward kernel is not to be taken for a new one.
    undirected = tuple(dataclasses.replace(kernel, direction=None) for kernel in kernels)
    return Analysis("", "", undirected, tuple(boundaries), 0, ())


def _kernel(entry: Any) -> Kernel:
    count, total = _field(entry, "count", int), _field(entry, "bytes", int)
    return Kernel(
        name="",
        emitter=_field(entry, "emitter", str),
        scopes=_scopes(entry),
        source=_source(entry),
        count=count,
        traffic=Traffic(total // max(count, 1), 0),
    )


def _boundary(entry: Any) -> Boundary:
    described = _field(entry, "tensor", str)
    parts = _TENSOR.fullmatch(described)
    if parts is None:
        raise UsageError(f'"tensor" is {described!r}, not like "f32[8,8]"')
    return Boundary(
        producer="",
        consumers=(),
        dtype=parts[1],
        shape=tuple(map(int, filter(None, parts[2].split(",")))),
        written_bytes=_field(entry, "bytes", int),
        read_bytes=0,
        scopes=_scopes(entry),
        source=_source(entry),
        reason=Reason(_field(entry, "reason", str), ""),
    )


def _scopes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    scopes = _field(entry, "scopes", list)
    if not all(isinstance(scope, str) for scope in scopes):
        raise UsageError('"scopes" holds something else than text')
    return tuple(scopes)


def _source(entry: Mapping[str, Any]) -> str | None:
    return None if entry.get("source") is None else _field(entry, "source", str)


def _field(entry: Any, name: str, kind: type) -> Any:
    if not isinstance(entry, dict):
        raise UsageError(f"{entry!r} is no table")
    value = entry.get(name)
    if type(value) is kind and not (type(value) is int and value < 0):
        return value
    words = {str: "text", int: "a whole number, 0 or more", list: "a list"}
    found = f"is {value!r}" if name in entry else "is missing"
    raise UsageError(f'"{name}" {found}: expected {words[kind]}')
