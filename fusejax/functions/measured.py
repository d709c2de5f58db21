"""Where XLA was measured to be faster than the kernels, from a file that ships with the package.

`measured.json` has, for each card, function and size of element, µs of both by the size of the
arrays and the length of their rows; `scripts/choices.py` writes it from what `scripts/peers.py`
measures. Of what is not in it nothing is claimed.

    {"cards": {CARD: {FUNCTION: {BITS: [{"elements", "width", "pallas_us", "xla_us"}, ...]}}}}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

FILE = pathlib.Path(__file__).with_name("measured.json")

# Less than that is within what two runs of the same kernel differ by.
MARGIN = 0.03
_COPY_BYTES = 16  # rows of a multiple of this are laid out alike for the kernels and for XLA

_NAMES = {"ours", "XLA"}  # of the kernels and of XLA in scripts/peers.py
# Names there of what is called otherwise here.
_FUNCTIONS = {"cross_entropy": "softmax_cross_entropy"}
# A norm of a residual sum has the gradient of the norm alone: the sum is saved.
_GRADIENTS = {
    "residual_layer_norm": "layer_norm_backward",
    "residual_rms_norm": "rms_norm_backward",
}

type Table = dict[str, dict[str, dict[str, list[dict[str, float]]]]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Device time of a function and its gradient together.

    Attributes:
      elements: of each array.
      width: of a row.
      pallas_us: of the kernels.
      xla_us: of XLA.
    """

    elements: int
    width: int
    pallas_us: float
    xla_us: float

    @property
    def prefers_xla(self) -> bool:
        """Whether XLA is faster by more than measurements differ."""
        return self.pallas_us > (1 + MARGIN) * self.xla_us


def lookup(
    card: str, function: str, bits: int, elements: int, width: int, table: Table | None = None
) -> Measured | None:
    """What was measured of rows like these, or None.

    A measurement speaks for rows from half its own length up to it; rows of a multiple of 16 bytes
    and others are not alike. Of those that do, the size of the arrays is to be the nearest (by
    their ratio), then the row the shortest.

    Args:
      card: the device kind, as JAX names it.
      function: the name of the function.
      bits: of an element.
      elements: of each array.
      width: of a row.
      table: instead of the package's.
    """
    entries = (_file() if table is None else table).get(card, {}).get(function, {})
    alike = [
        entry
        for entry in map(_measured, entries.get(str(bits), ()))
        if entry.width / 2 < width <= entry.width
        and _is_aligned(entry.width, bits) == _is_aligned(width, bits)
    ]

    def distance(entry: Measured) -> tuple[float, int]:
        return abs(math.log(entry.elements / max(1, elements))), entry.width

    return min(alike, key=distance, default=None)


def from_peers(*documents: Mapping[str, Any]) -> Table:
    """The table of documents that `scripts/peers.py --json` wrote, by one run or several.

    Only what was measured forward and backward, of the kernels and of XLA, is in it.

    Raises:
      ValueError: one of them is none of peers.py.
    """
    runs: dict[tuple[str, str, int], dict[tuple[str, int], Mapping[str, float]]] = {}
    for document in documents:
        if document.get("schema") != "fusejax.peers/1":
            raise ValueError(f"expected the schema fusejax.peers/1, not {document.get('schema')!r}")
        bits = str({"float32": 32}.get(document["dtype"], 16))
        cells = runs.setdefault((document["card"], bits, document["elements"]), {})
        cells |= {(cell["op"], cell["width"]): cell["us"] for cell in document["cells"]}
    table: Table = {}
    for (card, bits, elements), cells in runs.items():
        _require_numbers(elements, *(width for _, width in cells))
        for (op, width), forward in cells.items():
            backward = cells.get((f"{op}_backward", width))
            if backward is None and op in _GRADIENTS:
                backward = cells.get((_GRADIENTS[op], width))
            if backward is None or not all(us.keys() >= _NAMES for us in (forward, backward)):
                continue
            ours, xla = (round(forward[name] + backward[name], 1) for name in ("ours", "XLA"))
            _require_numbers(ours, xla)
            sizes = table.setdefault(card, {}).setdefault(_FUNCTIONS.get(op, op), {})
            _put(sizes.setdefault(bits, []), Measured(elements, width, ours, xla))
    return table


def _require_numbers(*values: Any) -> None:
    for value in values:
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"expected a number above 0, not {value!r}")


def merged(old: Table, new: Table) -> Table:
    """Both tables; where they speak of the same, the new one's word."""
    table: Table = json.loads(json.dumps(old))
    for card, functions in new.items():
        for function, sizes in functions.items():
            for bits, entries in sizes.items():
                kept = table.setdefault(card, {}).setdefault(function, {}).setdefault(bits, [])
                for entry in entries:
                    _put(kept, _measured(entry))
    return table


def read(file: pathlib.Path) -> Table:
    """The table of a file."""
    return json.loads(file.read_text())["cards"]


def told(table: Table) -> list[str]:
    """A line for each function and size of element: how often XLA is faster, and where."""
    lines = []
    for card, functions in table.items():
        for function, sizes in functions.items():
            for bits, entries in sizes.items():
                found = [_measured(entry) for entry in entries]
                faster = [one for one in found if one.prefers_xla]
                where = ", ".join(f"{one.elements}/{one.width}" for one in faster)
                lines.append(
                    f"{card}: {function}, {bits} bits: XLA at {len(faster)} of {len(found)} sizes"
                    + (f" (elements/width {where})" if faster else "")
                )
    return lines


def _put(entries: list[dict[str, float]], found: Measured) -> None:
    """Adds a measurement, in the place of that of the same size."""
    same = (found.elements, found.width)
    others = [entry for entry in entries if (entry["elements"], entry["width"]) != same]
    entries[:] = sorted(
        [*others, dataclasses.asdict(found)], key=lambda entry: (entry["elements"], entry["width"])
    )


def _measured(entry: Mapping[str, Any]) -> Measured:
    return Measured(entry["elements"], entry["width"], entry["pallas_us"], entry["xla_us"])


def _is_aligned(width: int, bits: int) -> bool:
    return width * bits // 8 % _COPY_BYTES == 0


@functools.cache
def _file() -> Table:
    return read(FILE)
