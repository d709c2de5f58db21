"""What a function is: its arguments, and what computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Function:
    """A function over the rows of arrays; arrays are passed in order, options by name.

    Attributes:
      name: what it is called in `fusejax`.
      arrays: names of its arrays; the first one's last axis are the rows.
      optional: those that may be None.
      options: how the value of each option is checked: (name, value) -> value.
      check: (*arrays): raises ValueError where no implementation makes sense of them.
      unsupported: (*arrays, split=) -> why the kernels refuse them, as one sentence, or None.
      kernel: (*arrays, fallback=, **options): of `pallas_kernels`.
      xla: (*arrays, **options): the same in plain JAX.
      split: (*arrays, **options): likewise, in stages that are kept apart.
      reduces: whether an element of its results depends on a whole row.
    """

    name: str
    arrays: tuple[str, ...]
    check: Callable[..., None]
    unsupported: Callable[..., str | None]
    kernel: Callable[..., Any]
    xla: Callable[..., Any]
    split: Callable[..., Any]
    optional: tuple[str, ...] = ()
    options: Mapping[str, Callable[[str, Any], Any]] = dataclasses.field(default_factory=dict)
    reduces: bool = True
