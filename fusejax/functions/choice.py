"""Which implementation computes a function, and why.

- "pallas": the Mosaic GPU kernels of `pallas_kernels`, one launch each.
- "xla": the formula in plain JAX, which XLA fuses as it likes.
- "split": the formula in stages that are kept apart.

Without a name it is the kernels where there are any for the platform, the card, shapes and dtypes,
unless XLA was measured to be faster on that card; else "xla", which takes everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fusejax.functions import card as cards
from fusejax.functions import measured
from fusejax.functions.card import Card
from fusejax.functions.function import Function
from fusejax.functions.measured import Measured
from pallas_kernels.plan import MAX_ELEMENTS

NAMES = ("pallas", "xla", "split")
_TOO_MANY = "A device that has more than 2**31-1 of the elements computes them in plain JAX."

type Asked = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What computes a function for some arguments.

    Attributes:
      function: the function's name.
      platform: what it is lowered for.
      card: the GPU, where the platform is CUDA; None elsewhere.
      implementation: "pallas", "xla" or "split".
      reason: why that one, as one sentence.
      refused: by name, why those before it are not.
    """

    function: str
    platform: str
    card: str | None
    implementation: str
    reason: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        where = self.platform if self.card is None else f"{self.platform}, {self.card}"
        lines = [f"{self.function} ({where}): {self.implementation}. {self.reason}"]
        others = {name: why for name, why in self.refused.items() if why != self.reason}
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in others.items())])


def choose(function: Function, arrays: Sequence[Any], asked: Asked, platform: str) -> Choice:
    """The first implementation of those that are asked for that can, and by default should, run.

    Args:
      function: the function.
      arrays: its arrays, which may be tracers.
      asked: None, a name or several.
      platform: what the function is lowered for.

    Raises:
      ValueError: a name is unknown, or none of those can run; with the reasons.
    """
    card = cards.current() if platform == cards.CUDA else None
    known = None if card is None else _measured(function, arrays[0], card)
    times = None if card is None or known is None else _times(known, card)
    refused: dict[str, str] = {}
    for name in names(asked):
        reason = None
        if name == "pallas":
            reason = _refusal(function, arrays, platform, card)
            if reason is None and asked is None and known is not None and known.prefers_xla:
                reason = times
        if reason is None:
            on = None if card is None else card.name
            why = _why(asked, name, refused, times, arrays[0].size)
            return Choice(function.name, platform, on, name, why, refused)
        refused[name] = reason
    told = " ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise ValueError(f"implementation={asked!r} cannot compute {function.name}. {told}")


def names(asked: Asked) -> tuple[str, ...]:
    """The implementations that are asked for, in order.

    Raises:
      ValueError: a name is unknown, or there is none.
    """
    if asked is None:
        return ("pallas", "xla")
    known = f"give None, or some of {', '.join(map(repr, NAMES))}."
    if not isinstance(asked, Sequence):
        raise ValueError(f"implementation {asked!r} is no name, nor a sequence of names: {known}")
    found = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in found:
        if name not in NAMES:
            raise ValueError(f"implementation {name!r} is unknown: {known}")
    if not found:
        raise ValueError(f"implementation {asked!r} is empty: {known}")
    return tuple(dict.fromkeys(found))


def _refusal(
    function: Function, arrays: Sequence[Any], platform: str, card: Card | None
) -> str | None:
    """Why the kernels cannot compute it, as one sentence, or None."""
    if card is None:
        return f"The kernels are for NVIDIA GPUs, and this is lowered for {platform}."
    # Devices may share the rows: how many elements one kernel has is known when it is lowered.
    if reason := function.unsupported(*arrays, split=True) or card.unsupported():
        return reason
    split = _axis_of_columns(arrays[0])
    if split is not None and function.reduces:
        return (
            f"The last axis of {function.arrays[0]} is split over the mesh axis {split!r}, and a "
            "kernel needs whole rows."
        )
    return None


def _measured(function: Function, rows: Any, card: Card) -> Measured | None:
    if not isinstance(rows.size, int):  # symbolic
        return None
    bits = 8 * rows.dtype.itemsize
    return measured.lookup(card.name, function.name, bits, rows.size, rows.shape[-1])


def _times(found: Measured, card: Card) -> str:
    return (
        f"On {card.name}, forward and backward together, XLA took {found.xla_us:g} µs and the "
        f"kernels {found.pallas_us:g} µs, for {found.elements} elements in rows of {found.width}."
    )


def _why(
    asked: Asked, name: str, refused: Mapping[str, str], times: str | None, elements: int
) -> str:
    if isinstance(asked, str):
        return "It was asked for by name."
    if asked is not None:
        return "Of those that were asked for it is the first that can run."
    if name == "pallas":
        why = times or "The kernels take this, and no times of rows like these were measured."
        return f"{why} {_TOO_MANY}" if elements > MAX_ELEMENTS else why
    return refused["pallas"]


def _axis_of_columns(array: Any) -> Any:
    """The explicit mesh axis over which an array's last axis is split, or None."""
    spec = jax.typeof(array).sharding.spec
    return spec[-1] if len(spec) == array.ndim else None
