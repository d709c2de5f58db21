"""What a page shows, told the same way for either kind of document."""

import dataclasses
from typing import Any

from fusejax.report.html.rows import Row


@dataclasses.dataclass(frozen=True)
class Fact:
    """A figure of the headline."""

    label: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Times:
    """µs of a program. What was predicted and what was measured are never the same figure."""

    predicted: float | None = None
    measured: float | None = None
    """Per call, gaps between launches included."""
    kernels: float | None = None
    """Of the measured time, the kernels' own."""
    low: float | None = None
    high: float | None = None
    """10th and 90th percentile."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A path of a comparison, or a module."""

    label: str
    note: str
    kernels: tuple[Row, ...]
    """In launch order."""
    boundaries: tuple[Row, ...]
    """Dearest first."""
    launches: int | None
    bytes: dict[str, Any] | None
    """Modelled: "read", "written", "total", and "is_bound", whether they are an upper bound."""
    minimum_bytes: int
    times: Times = Times()
    predicted_floor_us: float | None = None
    """The minimum bytes at the speed of a copy."""
    counted: dict[str, Any] | None = None
    """Bytes that the card's counters saw."""
    programs: int | None = None
    compile_s: dict[str, float | None] | None = None
    executable_bytes: int | None = None
    error: dict[str, Any] | None = None
    refusal: str | None = None
    """Why it could not serve; then nothing else is known of it."""
    notes: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    """Scopes of which no instruction is left."""
    target: dict[str, Any] | None = None

    @property
    def ratio(self) -> float | None:
        """Bytes over the minimum."""
        if self.bytes is None or not self.minimum_bytes:
            return None
        return self.bytes["total"] / self.minimum_bytes


@dataclasses.dataclass(frozen=True)
class Change:
    """Of a difference: one thing that appeared, went or changed bytes."""

    sign: str
    """+, - or ~."""
    what: str
    anchor: str | None
    """Id of its row."""
    scopes: tuple[str, ...]
    source: str | None
    before: int | None
    after: int | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two modules, before and after."""

    title: str
    figures: tuple[tuple[str, str, int | None, int | None], ...]
    """Name, kind of the figure ("count" or "bytes"), before, after."""
    kernels: tuple[Change, ...]
    boundaries: tuple[Change, ...]
    same_kernels: int
    same_boundaries: int


@dataclasses.dataclass(frozen=True)
class View:
    """A page."""

    kind: str
    """comparison, inspection or difference."""
    title: str
    subtitle: str
    about: tuple[tuple[str, str], ...]
    """Target, versions and so on: what and value."""
    facts: tuple[Fact, ...]
    programs: tuple[Program, ...]
    measured_floor_us: float | None = None
    """A copy of the minimum bytes, timed in the same run."""
    verdict: dict[str, Any] | None = None
    sheet: dict[str, Any] | None = None
    differences: tuple[Difference, ...] = ()
    what_if: tuple[dict[str, Any], ...] = ()
    """What XLA's options change, a path each, as the document has it."""
    notes: tuple[str, ...] = ()
