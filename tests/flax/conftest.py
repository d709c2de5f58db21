"""Compiles quickly: what LLVM makes of a program is not what is tested here."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
