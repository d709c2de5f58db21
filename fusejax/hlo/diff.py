"""What changed between two modules, matched by scope and source line rather than by name.

Names of kernels change with every version of XLA; where a kernel's instructions come from does not.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fusejax.hlo.analyse import boundary_json, kernel_json
from fusejax.hlo.analysis import Analysis, Boundary, Kernel
from fusejax.hlo.decisions import stem


@dataclasses.dataclass(frozen=True)
class Matching[T]:
    """Things of two modules, paired where they are the same."""

    appeared: tuple[T, ...]
    """Only in the second module."""
    went: tuple[T, ...]
    """Only in the first."""
    pairs: tuple[tuple[T, T], ...]

    def changed(self, size: Callable[[T], int]) -> tuple[tuple[T, T], ...]:
        """Pairs that differ in size."""
        return tuple((a, b) for a, b in self.pairs if size(a) != size(b))


@dataclasses.dataclass(frozen=True)
class ModuleDiff:
    """Two modules side by side; None where only the other report has one of that name."""

    a: Analysis | None
    b: Analysis | None
    kernels: Matching[Kernel]
    boundaries: Matching[Boundary]

    @property
    def is_empty(self) -> bool:
        """True where nothing appeared, went or changed bytes."""
        return not (
            self.kernels.appeared
            or self.kernels.went
            or self.boundaries.appeared
            or self.boundaries.went
            or self.kernels.changed(kernel_bytes)
            or self.boundaries.changed(boundary_bytes)
        )


def kernel_bytes(kernel: Kernel) -> int:
    """Bytes of all launches of a kernel."""
    return kernel.traffic.total * kernel.count


def boundary_bytes(boundary: Boundary) -> int:
    """What a boundary costs: bytes written and bytes read again."""
    return boundary.written_bytes + boundary.read_bytes


def compare(a: Sequence[Analysis], b: Sequence[Analysis]) -> tuple[ModuleDiff, ...]:
    """Compares the modules of two reports: by name, or the one with the one where each has one."""
    if len(a) == len(b) == 1:
        return (_compare(a[0], b[0]),)
    modules = _match(a, b, [lambda m: m.name, lambda m: stem(m.name)])
    return (
        *(_compare(one, other) for one, other in modules.pairs),
        *(_compare(one, None) for one in modules.went),
        *(_compare(None, other) for other in modules.appeared),
    )


def diff_json(diffs: Sequence[ModuleDiff]) -> dict[str, Any]:
    """The "diff" of the "fusejax.inspect/1" schema."""
    return {"modules": [_module_json(diff) for diff in diffs]}


def _compare(a: Analysis | None, b: Analysis | None) -> ModuleDiff:
    return ModuleDiff(
        a,
        b,
        _match(a.kernels if a else (), b.kernels if b else (), _KERNEL_KEYS),
        _match(a.boundaries if a else (), b.boundaries if b else (), _BOUNDARY_KEYS),
    )


def _place(source: str | None) -> str | None:
    """File and line without the folder: the two modules may come from different machines."""
    return pathlib.PurePath(source).name if source else None


def _known(*parts: Any) -> Hashable | None:
    """A key, or None where nothing in it tells one thing from another."""
    return parts if any(parts) else None


# From the surest sign that two things are the same to the weakest; the next is only tried on what
# is left. None means that the sign says nothing about the thing.
_KERNEL_KEYS: Sequence[Callable[[Kernel], Hashable | None]] = (
    lambda k: (k.scopes, _place(k.source), k.direction, k.emitter, kernel_bytes(k)),
    lambda k: (where, k.direction) if (where := _known(k.scopes, _place(k.source))) else None,
    lambda k: (k.scopes, k.direction) if k.scopes else None,
    lambda k: (_place(k.source), k.direction) if k.source else None,
    lambda k: (stem(k.name), k.emitter) if not k.scopes and not k.source else None,
)
_BOUNDARY_KEYS: Sequence[Callable[[Boundary], Hashable | None]] = (
    lambda b: (b.scopes, _place(b.source), b.dtype, b.shape, boundary_bytes(b)),
    lambda b: (b.scopes, _place(b.source), b.dtype, b.shape),
    lambda b: (b.scopes, _place(b.source), b.shape),
    lambda b: (b.scopes, b.shape) if b.scopes else None,
    lambda b: (_place(b.source), b.shape) if b.source else None,
    lambda b: _known(b.scopes, _place(b.source)),
)


def _match[T](
    a: Sequence[T], b: Sequence[T], keys: Sequence[Callable[[T], Hashable | None]]
) -> Matching[T]:
    left, right = dict(enumerate(a)), dict(enumerate(b))
    pairs: dict[int, tuple[T, T]] = {}
    for key in keys:
        waiting: dict[Hashable, list[int]] = {}
        for number, thing in reversed(right.items()):
            if (found := key(thing)) is not None:
                waiting.setdefault(found, []).append(number)
        for number, thing in list(left.items()):
            candidates = waiting.get(key(thing) or (), [])
            if candidates:
                pairs[number] = (left.pop(number), right.pop(candidates.pop()))
    ordered = tuple(pair for _, pair in sorted(pairs.items(), key=lambda item: item[0]))
    return Matching(tuple(right.values()), tuple(left.values()), ordered)


def _module_json(diff: ModuleDiff) -> dict[str, Any]:
    def sides(figure: Callable[[Analysis], Any]) -> dict[str, Any]:
        return {"a": figure(diff.a) if diff.a else None, "b": figure(diff.b) if diff.b else None}

    kernels, boundaries = diff.kernels, diff.boundaries
    changed_kernels = kernels.changed(kernel_bytes)
    changed_boundaries = boundaries.changed(boundary_bytes)
    return {
        **sides(lambda m: m.name),
        "launches": sides(lambda m: m.launches),
        "bytes": sides(lambda m: m.traffic.total),
        "boundary_bytes": sides(lambda m: sum(map(boundary_bytes, m.boundaries))),
        "kernels": {
            "appeared": [kernel_json(k) for k in kernels.appeared],
            "went": [kernel_json(k) for k in kernels.went],
            "changed": [
                {
                    "a": a.name,
                    "b": b.name,
                    "scopes": list(b.scopes),
                    "source": b.source,
                    "bytes": {"a": kernel_bytes(a), "b": kernel_bytes(b)},
                }
                for a, b in changed_kernels
            ],
            "same": len(kernels.pairs) - len(changed_kernels),
        },
        "boundaries": {
            "appeared": [boundary_json(b) for b in boundaries.appeared],
            "went": [boundary_json(b) for b in boundaries.went],
            "changed": [
                {
                    "a": {"producer": a.producer, "consumers": list(a.consumers)},
                    "b": {"producer": b.producer, "consumers": list(b.consumers)},
                    "scopes": list(b.scopes),
                    "source": b.source,
                    "dtype": {"a": a.dtype, "b": b.dtype},
                    "shape": list(b.shape),
                    "bytes": {"a": boundary_bytes(a), "b": boundary_bytes(b)},
                }
                for a, b in changed_boundaries
            ],
            "same": len(boundaries.pairs) - len(changed_boundaries),
        },
    }
