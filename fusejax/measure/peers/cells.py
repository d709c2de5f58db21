"""Our row kernels beside XLA and other libraries: targets, table cells and verdict, with no card.

The floor of a cell is the time of a copy of as many bytes as the operation's arrays have. Our share
is floor / ours: 1 is the speed of that copy.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OURS = "ours"
XLA = "XLA"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What an operation takes, in this order: arrays, labels, parameters.

    Attributes:
      arrays: of [rows, width].
      labels: whether there is a vector of a column's number for each row.
      parameters: f32 vectors of [width].
    """

    arrays: int = 1
    labels: bool = False
    parameters: int = 0


FORWARD = {
    "residual_layer_norm": Arguments(arrays=2, parameters=2),
    "prenorm_rms_norm": Arguments(arrays=2, parameters=1),
    "bias_gelu_rowsum": Arguments(parameters=1),
    "softmax": Arguments(),
    "cross_entropy": Arguments(labels=True),
    "swiglu": Arguments(arrays=2),
    "bias_gelu": Arguments(parameters=1),
}
BACKWARD = {
    "layer_norm_backward": Arguments(parameters=2),
    "rms_norm_backward": Arguments(parameters=1),
    "softmax_backward": Arguments(),
    "cross_entropy_backward": Arguments(labels=True),
    "bias_gelu_backward": Arguments(parameters=1),
    "swiglu_backward": Arguments(arrays=2),
}
"""With the arguments of the function whose gradient it is."""
OPS = FORWARD | BACKWARD

WIDTHS = tuple(sorted([*(2**power for power in range(8, 18)), 769, 2560, 5120, 12288, 16385]))
"""Rows as they are in models, and some that no power of two, no 16 bytes and no XLA kernel fit."""
PEER_WIDTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
"""Those at which slow-to-compile libraries are measured too."""

# Widest row that a target is for, and the share of the copy's speed; None is any width.
_FORWARD_TARGETS = ((1023, 0.90), (2047, 0.95), (16384, 0.97), (None, 0.95))
_BACKWARD_TARGETS = ((1023, None), (16384, 0.85), (None, 0.75))


def target(op: str, width: int) -> float | None:
    """The share of the copy's speed that our kernel is to reach; None where nothing is promised."""
    targets = _BACKWARD_TARGETS if op in BACKWARD else _FORWARD_TARGETS
    return next(share for widest, share in targets if widest is None or width <= widest)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the cells of a run have in common.

    Attributes:
      elements: of each array.
      dtype: of the arrays.
      only_ours: our kernels and the floor, nobody else.
      rounds: turns of each variant of a cell on JAX.
      iterations: timed calls per turn.
      torch_device: where PyTorch computes.
    """

    elements: int = 2**26
    dtype: str = "bfloat16"
    only_ours: bool = False
    rounds: int = 4
    iterations: int = 10
    torch_device: str = "cuda"

    def rows_of(self, width: int) -> int:
        """Rows of the arrays of that width."""
        return max(1, self.elements // width)


@dataclasses.dataclass(frozen=True)
class Cell:
    """An operation at a width.

    Attributes:
      op: the operation.
      width: elements per row.
      rows: how many.
      floor_us: a copy of the same bytes, measured in turn with what follows; None without it.
      us: median µs of a call, by who computes it.
      details: anything else about the times, for the JSON.
      failures: why there is no time, by who.
    """

    op: str
    width: int
    rows: int
    floor_us: float | None = None
    us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Of the floor's speed, for ours."""
        if self.floor_us is None or OURS not in self.us:
            return None
        return self.floor_us / self.us[OURS]

    @property
    def target(self) -> float | None:
        """Of the share."""
        return target(self.op, self.width)

    @property
    def is_below(self) -> bool:
        """Whether ours misses its target."""
        return self.share is not None and self.target is not None and self.share < self.target

    @property
    def faster(self) -> dict[str, float]:
        """Who is faster than ours, with the µs."""
        if OURS not in self.us:
            return {}
        return {name: us for name, us in self.us.items() if us < self.us[OURS]}

    def with_peers(self, us: Mapping[str, float], failures: Mapping[str, str]) -> "Cell":
        """The same cell with more times and failures."""
        return dataclasses.replace(
            self, us={**self.us, **us}, failures={**self.failures, **failures}
        )

    def to_json(self) -> dict[str, Any]:
        """For the document."""
        return {
            **dataclasses.asdict(self),
            "share": self.share,
            "target": self.target,
            "is_below": self.is_below,
            "faster": sorted(self.faster),
        }


def listed(cells: Sequence[tuple[str, int]]) -> str:
    """Operations with their widths, in a line."""
    widths: dict[str, list[str]] = {}
    for op, width in cells:
        widths.setdefault(op, []).append(str(width))
    return "; ".join(f"{op} {', '.join(found)}" for op, found in widths.items())


def joined(
    cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]], settings: Settings
) -> list[Cell]:
    """The cells with what PyTorch's side told, and new cells for what JAX had no time for."""
    found = {(cell.op, cell.width): cell for cell in cells}
    for row in rows:
        key = row["op"], row["width"]
        cell = found.get(key, Cell(*key, settings.rows_of(row["width"])))
        found[key] = cell.with_peers(row["us"], row["failures"])
    order = list(OPS)
    return sorted(found.values(), key=lambda cell: (order.index(cell.op), cell.width))


def table(cells: Sequence[Cell], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of one operation's table; columns without any time are left out.

    Args:
      cells: of the operation.
      names: who else can have a time, in the order of the columns.
    """
    shown = [name for name in names if any(name in cell.us for cell in cells)]
    rows = [
        [
            str(cell.width),
            _number(cell.floor_us, 1),
            _number(cell.us.get(OURS), 1),
            _truncated(cell.share),
            *(_number(cell.us.get(name), 1) for name in shown),
        ]
        for cell in cells
    ]
    return ["width", "floor", OURS, "share", *shown], rows


def verdict(cells: Sequence[Cell]) -> list[str]:
    """In words: which cells miss their target, and where somebody else is faster."""
    judged = [cell for cell in cells if cell.share is not None and cell.target is not None]
    below = [cell for cell in cells if cell.is_below]
    compared = [cell for cell in cells if OURS in cell.us and len(cell.us) > 1]
    faster = [cell for cell in cells if cell.faster]
    lines = []
    if judged:
        lines.append(f"{len(judged) - len(below)} of {len(judged)} cells reach their target.")
    else:
        lines.append("No cell that has a target was measured.")
    if below:
        lines.append("Below it (share of the copy's speed < target):")
        lines += _grouped(
            below, lambda cell: f"{cell.width} {_truncated(cell.share)} < {cell.target:.2f}"
        )
    if not compared:
        lines.append("Nobody else was measured beside ours.")
    elif not faster:
        lines.append(f"Nobody is faster than ours in any of {len(compared)} cells.")
    else:
        lines.append(
            f"Somebody is faster than ours in {len(faster)} of {len(compared)} cells (µs):"
        )
        lines += _grouped(
            faster,
            lambda cell: (
                f"{cell.width} "
                + ", ".join(f"{name} {us:.1f}" for name, us in sorted(cell.faster.items()))
                + f" (ours {cell.us[OURS]:.1f})"
            ),
        )
    return lines


def failures(cells: Sequence[Cell]) -> list[str]:
    """A line for each operation and reason why somebody has no time."""
    widths: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for name, reason in cell.failures.items():
            widths.setdefault((cell.op, name, reason), []).append(str(cell.width))
    return [
        f"{op}, {name}, at {', '.join(where)}: {reason}"
        for (op, name, reason), where in widths.items()
    ]


def _grouped(cells: Sequence[Cell], told: Any) -> Iterator[str]:
    for op in dict.fromkeys(cell.op for cell in cells):
        yield f"  {op}: " + "; ".join(told(cell) for cell in cells if cell.op == op)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _truncated(share: float | None) -> str:
    """Cut off, not rounded: what is below a target must not look as if it were not."""
    return "" if share is None else f"{int(share * 1000) / 1000:.3f}"
