"""Compiles quickly: what LLVM makes of a program is not what is tested here."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compiles(request):
    """For the CPU only: a card's program stays as users get it."""
    name = "jax_disable_most_optimizations"
    previous = jax.config.read(name)
    jax.config.update(name, "deviceless" not in request.fixturenames)
    yield
    jax.config.update(name, previous)
