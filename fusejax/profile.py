"""What a card was measured to reach: the figures that predictions use.

`scripts/calibrate.py` measures a card and writes its profile, JSON with the schema below. `load`
finds it again: the user's own first, else the one that this package brings along for the card.
"""

import bisect
import dataclasses
import json
import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError

SCHEMA = "fusejax.profile/1"
# What predictions divide by.
_ABOVE_ZERO = frozenset(("bytes", "us", "width", "m", "n", "k", "bytes_per_s", "l2_bytes"))
_SHIPPED = pathlib.Path(__file__).parent / "profiles"


@dataclasses.dataclass(frozen=True)
class Point:
    """Kernels that move as many bytes, timed one by one."""

    bytes: int
    """Read plus written."""
    us: float
    """Median."""
    low_us: float
    high_us: float
    """10th and 90th percentile."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """How long a kernel takes that moves so and so many bytes."""

    points: tuple[Point, ...]
    """Of increasing bytes."""
    fixed_us: float
    """What a kernel takes however little it moves: its start and its end."""
    bytes_per_s: float
    """Beyond that. Both are fitted to the points: us = fixed_us + bytes / bytes_per_s."""

    def us(self, nbytes: float) -> float:
        """Between two measured points, the line through them; outside, the fitted line."""
        sizes = [point.bytes for point in self.points]
        above = bisect.bisect_left(sizes, nbytes)
        if above < len(sizes) and sizes[above] == nbytes:
            return self.points[above].us
        if not 0 < above < len(sizes):
            return self.fixed_us + nbytes / self.bytes_per_s * 1e6
        left, right = self.points[above - 1], self.points[above]
        share = (nbytes - left.bytes) / (right.bytes - left.bytes)
        return left.us + share * (right.us - left.us)


@dataclasses.dataclass(frozen=True)
class EmitterSpeed:
    """What one of XLA's kinds of kernel reaches on data that no cache holds."""

    kind: str
    """The emitter, or the emitter and what is special: "reduction_columns" sums over the rows;
    "loop" reads as much as it writes, "loop_two_inputs" twice that, "loop_write" nothing."""
    emitter: str
    """As `fusejax.hlo.analysis.Kernel.emitter` names it."""
    dtype: str
    """HLO's name, such as "bf16", of the data in memory."""
    width: int
    """Elements of a row: of the contiguous dimension."""
    bytes: int
    """Read plus written by the kernel that was timed."""
    us: float
    """Median."""
    low_us: float
    high_us: float
    """10th and 90th percentile."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes read plus bytes written per second."""
        return self.bytes / self.us * 1e6


@dataclasses.dataclass(frozen=True)
class OpCost:
    """What one elementwise HLO operation adds to a kernel that is busy with arithmetic."""

    op: str
    """HLO's opcode, such as "tanh". A "compare" and a "select" were measured together, and so were
    the "convert"s to and from a 16-bit type: each has half of what both cost."""
    dtype: str
    """Of the result: "f32", "bf16", "f16"; "pred" for a compare; the 16-bit type of a convert."""
    ps: float
    """Picoseconds per element, the whole card at work."""
    short_chain: int
    short_us: float
    long_chain: int
    long_us: float
    """Length and time of the two kernels whose difference this is, with their helper operations."""


@dataclasses.dataclass(frozen=True)
class MatmulTime:
    """A product [m, k] x [k, n] by cuBLAS."""

    m: int
    n: int
    k: int
    dtype: str
    """Of the operands and the result; f32 in JAX's default precision."""
    us: float
    """Median over all kernels of the product together."""
    low_us: float
    high_us: float
    """10th and 90th percentile."""

    @property
    def flop_per_s(self) -> float:
        """Floating-point operations per second: two for every multiplication with its addition."""
        return 2 * self.m * self.n * self.k / self.us * 1e6


@dataclasses.dataclass(frozen=True)
class Launches:
    """What is lost between kernels. Times in µs."""

    launch_us: float
    """Time per further kernel of one program, less its own time as the profiler has it; CUDA graphs
    off."""
    launch_in_graph_us: float
    """The same where XLA may pack them into CUDA graphs."""
    dispatch_us: float
    """Device idle between the kernels of two programs that are dispatched one after another, the
    host being ahead."""
    dispatch_by_profiler_us: float
    """The same, measured another way: time per program less its kernel's own time."""
    batch_us: float
    """What a batch of calls costs once, however many they are: the way to the first kernel, and the
    host's waiting for the last. Not in the figures above, which are slopes."""
    host_dispatch_us: float
    """What the host needs to dispatch a compiled program (`jax.stages.Compiled`) of one kernel.
    Programs that take the device less time than this leave it idle."""
    tiny_kernel_us: float
    """Time per kernel in a program of kernels that do next to nothing, CUDA graphs off: no program
    launches faster."""
    tiny_kernel_in_graph_us: float
    """The same where XLA may pack them into CUDA graphs."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """A card, measured."""

    card: str
    """Its own name, such as "NVIDIA H200"."""
    jax: str
    jaxlib: str
    cuda: str | None
    """Of the driver, such as "13.0.0"; None where it does not say."""
    driver: str | None
    """Release of the driver."""
    date: str
    """ISO 8601, UTC."""
    command: str
    """The command that measured it."""
    l2_bytes: int
    """Size of the L2 cache by the card's own description."""
    memory: Mapping[str, Curve]
    """Kernels whose data come from and go to device memory: "copy" (an elementwise kernel), "read"
    (row sums), "write" (a scalar broadcast), "triad" (a * s + b), and "driver_copy" (`jnp.copy`,
    which the driver makes; gaps between copies included)."""
    l2: Mapping[str, Curve]
    """"copy" and "read" of arrays that stay in the L2 cache."""
    emitters: tuple[EmitterSpeed, ...]
    arithmetic: tuple[OpCost, ...]
    matmuls: tuple[MatmulTime, ...]
    launches: Launches
    left_out: tuple[str, ...] = ()
    """What could not be measured, a line each with the reason."""

    def op_ps(self, op: str, dtype: str) -> float | None:
        """`OpCost.ps` of an operation; None where it was not measured."""
        return next((c.ps for c in self.arithmetic if (c.op, c.dtype) == (op, dtype)), None)

    def emitter_speed(self, kind: str, dtype: str, width: int) -> EmitterSpeed | None:
        """The measurement of that kind whose width is nearest by ratio; None where there is none.

        Args:
          kind: see `EmitterSpeed.kind`.
          dtype: HLO's name. Without a measurement of it, one of the same number of bits serves.
          width: elements of a row.
        """
        of_kind = [speed for speed in self.emitters if speed.kind == kind]
        alike = [speed for speed in of_kind if speed.dtype == dtype] or [
            speed for speed in of_kind if _bits(speed.dtype) == _bits(dtype)
        ]
        return min(alike, key=lambda s: abs(math.log(s.width / max(1, width))), default=None)

    def to_json(self) -> dict[str, Any]:
        """The document of schema "fusejax.profile/1"."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def from_json(document: Any, source: str) -> Profile:
    """The inverse of `Profile.to_json`. Keys that are not known are passed over.

    Args:
      source: where the document comes from, for the error.

    Raises:
      UsageError: it is no such document; the message names what is wrong in it.
    """
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        raise UsageError(
            f"{source} is no profile of a card: expected JSON with schema {SCHEMA!r}, as "
            "scripts/calibrate.py writes it"
        )
    try:
        found = _read(Profile, document, "profile")
        _check(found)
        return found
    except ValueError as error:
        raise UsageError(
            f"{source} is a damaged profile ({error}): measure again with scripts/calibrate.py, or "
            "remove it"
        ) from None


def from_file(path: pathlib.Path) -> Profile:
    """Reads a profile.

    Raises:
      UsageError: it cannot be read or is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path} is no profile of a card: it is not JSON ({error})") from error
    return from_json(document, str(path))


def load(card: str) -> Profile | None:
    """The profile of a card by its own name, such as "NVIDIA H200"; None where none is known.

    The user's (`user_file`) goes before the shipped one.

    Raises:
      UsageError: its file is damaged.
    """
    for path in (user_file(card), _SHIPPED / f"{slug(card)}.json"):
        if path.is_file():
            found = from_file(path)
            if found.card != card:
                raise UsageError(
                    f"{path} is the profile of {found.card!r}, not of {card!r}: move it"
                )
            return found
    return None


def user_file(card: str) -> pathlib.Path:
    """Where the user's own profile of a card is kept.

    In $FUSEJAX_PROFILE_DIR; else in fusejax/profiles of $XDG_CACHE_HOME or ~/.cache.
    """
    if own := os.environ.get("FUSEJAX_PROFILE_DIR"):
        return pathlib.Path(own, f"{slug(card)}.json")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is to be ignored.
    base = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path("~/.cache").expanduser()
    return base / "fusejax" / "profiles" / f"{slug(card)}.json"


def slug(card: str) -> str:
    """A card's name as the name of a file: "NVIDIA H200" is "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") or "card"


def _check(found: Profile) -> None:
    """Raises ValueError where a curve of a profile is none."""
    for name, curve in (*found.memory.items(), *found.l2.items()):
        if not curve.points:
            raise ValueError(f"the curve {name!r} has no points")


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def _read(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as what a type says. Raises ValueError with the place of what does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{where} is no list")
        return tuple(_read(inner[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if (dataclasses.is_dataclass(kind) or origin is Mapping) and not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")
    if origin is Mapping:
        return {key: _read(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        found = {}
        for field in dataclasses.fields(kind):
            place = f"{where}.{field.name}"
            if field.name in value:
                found[field.name] = _read(hints[field.name], value[field.name], place)
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{place} is missing")
        return kind(**found)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} is no text")
        return value
    least = 0 if where.rpartition(".")[2] not in _ABOVE_ZERO else 1e-300
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not is_number
        or not math.isfinite(value)
        or value < least
        or (kind is int and value != int(value))
    ):
        wanted = "count" if kind is int else "number"
        raise ValueError(
            f"{where} is no {wanted} {'above' if least else 'from'} 0{'' if least else ' up'}"
        )
    return kind(value)
