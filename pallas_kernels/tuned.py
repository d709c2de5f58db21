"""The fastest plans that were measured, from a file that ships with the package.

`tuned.json` has, for each card, operation and size of element, choices by width; `scripts/tune.py`
measures them on a card and writes the file. Cards, operations and sizes that are not in it get
`plan.default_tuning`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax

FILE = pathlib.Path(__file__).with_name("tuned.json")
COPY_BYTES = 16  # what copies start at multiples of, and are multiples of
# What a process without a GPU compiles for, unless it says otherwise.
USUAL_CARD = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was measured to be fastest for rows of at most `width` elements.

    A wish: a plan deviates from it where shared memory or the row's length ask for it.

    Attributes:
      width: the longest row that it is for.
      rows_per_block: above 1 asks for a row per warp; of rows back to back, for so many more as are
        a multiple of 16 bytes together.
      warpgroups: of a CTA.
      ctas_per_sm: CTAs that share a multiprocessor.
      stages: slots of the ring.
      parts: above 1 asks for rows that are cut among the CTAs of a cluster.
      run: above 0 asks for CTAs that take so many neighbouring blocks and end.
    """

    width: int
    rows_per_block: int
    warpgroups: int
    ctas_per_sm: int
    stages: int
    parts: int = 1
    run: int = 0


def lookup(op: str, width: int, itemsize: int, card: str | None = None) -> Tuning | None:
    """The measured choice for rows of `width`, or None.

    Rows that are no multiple of 16 bytes are another matter than those that are: they go by choices
    for such rows, of less than twice their length, where there are any.

    Args:
      op: the kernel.
      width: elements per row.
      itemsize: bytes of an element.
      card: the device kind, as JAX names it; by default that of this process.
    """
    fitting = [choice for choice in choices(op, itemsize, card) if width <= choice.width]
    late = [choice for choice in fitting if choice.width * itemsize % COPY_BYTES]
    if width * itemsize % COPY_BYTES and late and late[0].width < 2 * width:
        return late[0]
    return next((choice for choice in fitting if choice not in late), None)


def choices(op: str, itemsize: int, card: str | None = None) -> tuple[Tuning, ...]:
    """All that was measured for a kernel, by width; arguments as of `lookup`."""
    return _file().get(card or _card(), {}).get(op, {}).get(str(8 * itemsize), ())


@functools.cache
def _card() -> str:
    if jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    return USUAL_CARD


@functools.cache
def _file() -> dict[str, dict[str, dict[str, tuple[Tuning, ...]]]]:
    names = {field.name for field in dataclasses.fields(Tuning)}

    def read(entries: list[dict[str, int]]) -> tuple[Tuning, ...]:
        found = (Tuning(**{k: v for k, v in e.items() if k in names}) for e in entries)
        return tuple(sorted(found, key=lambda choice: choice.width))

    return {
        card: {
            op: {bits: read(entries) for bits, entries in by_size.items()}
            for op, by_size in ops.items()
        }
        for card, ops in json.loads(FILE.read_text())["cards"].items()
    }
