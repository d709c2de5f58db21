"""The GPU that a program is for, as far as choosing an implementation needs to know it.

A function is traced before anyone says what it will be lowered for, so the card is looked up while
tracing: what fusejax compiles for just now; else the GPU of this process; else the usual one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator

import jax

CUDA = "cuda"
# The plans of the kernels count on 227 KiB of shared memory for a CTA, on clusters and on TMA.
OLDEST = (9, 0)
FIRST_TOO_SMALL = (12, 0)


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: its name, as JAX has it in `device_kind`, and its compute capability."""

    name: str
    capability: tuple[int, int]

    def unsupported(self) -> str | None:
        """Why the kernels do not run on it, as one sentence, or None."""
        if OLDEST <= self.capability < FIRST_TOO_SMALL:
            return None
        has = f"{self.name} has {self.capability[0]}.{self.capability[1]}"
        if self.capability < OLDEST:
            return f"Kernels need compute capability 9.0 (Hopper) or newer, and {has}."
        return f"Kernels need the shared memory of compute capability 9 to 11, and {has}."


# Part of the keys of JAX's caches of traced, lowered and compiled functions.
_target = jax.make_user_context(None)


@contextlib.contextmanager
def compiling_for(card: Card) -> Iterator[None]:
    """While a function is traced and lowered for a card that need not be this process's."""
    with _target(card):
        yield


def current() -> Card:
    """The card that a function traced now is for."""
    from pallas_kernels.tuned import USUAL_CARD  # slow, and of no use to who only compiles

    return _target.value or _of_this_process() or Card(USUAL_CARD, OLDEST)


def platform() -> str:
    """What a function traced now is lowered for unless its caller says otherwise: "cuda", "cpu"."""
    if _target.value is not None:
        return CUDA
    device = jax.config.jax_default_device
    if device is None:
        device = jax.devices()[0]
    if isinstance(device, str):
        return CUDA if device == "gpu" and _of_this_process() else device
    return CUDA if _capability(device) else device.platform


@functools.cache
def _of_this_process() -> Card | None:
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    capability = _capability(device)
    return Card(device.device_kind, capability) if capability else None


def _capability(device: jax.Device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; AMD's are named otherwise ("gfx942")."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None
