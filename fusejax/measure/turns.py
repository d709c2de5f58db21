"""Turns of processes that share a card: one measures while the others compile."""

import contextlib
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def card_turn(*, shared: bool = False) -> Iterator[None]:
    """This process alone among those of this machine that measure, whatever their cards are.

    It waits as long as another measures. Not to be entered twice by the same thread.

    Args:
      shared: for work that would disturb who measures, without measuring itself, such as
        compiling: it keeps the host busy, and the card where products are tuned. Beside others that
        do so, but not while one measures.
    """
    with turn(pathlib.Path(tempfile.gettempdir(), "fusejax-card.lock"), shared=shared):
        yield


@contextlib.contextmanager
def counting_turn() -> Iterator[None]:
    """This process alone among those that run something under Nsight Compute.

    ncu lets one at a time count, too, and keeps it for as long as the command lasts: with the turn
    at the card in the hands of a command that waits for that, nobody would get on.
    """
    with turn(pathlib.Path(tempfile.gettempdir(), "fusejax-ncu.lock")):
        yield


@contextlib.contextmanager
def turn(lock: pathlib.Path, *, shared: bool = False) -> Iterator[None]:
    """One process, and one of its threads, at a time; or any number of those that share.

    Args:
      lock: a file that is made where there is none. Whoever has the turn may remove it.
      shared: beside others that share, but with nobody who does not.
    """
    while True:
        try:
            held = lock.open("w")
        except PermissionError:  # another user's
            held = lock.open()
        with held:
            fcntl.flock(held, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if _is_at(held.fileno(), lock):
                yield
                return


def _is_at(descriptor: int, file: pathlib.Path) -> bool:
    """Whether the open file is still the one of that name: it may be removed while one waits."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
