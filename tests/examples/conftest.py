"""The examples are scripts beside one another, not a package."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def _settings():
    """Compiling takes a third of the time on a CPU, and a GPU does not round products to TF32."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_matmul_precision("highest"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)
