"""Makes simulated kernels cheaper to compile."""

import jax
import pytest
from references import INTERPRET


@pytest.fixture(autouse=True)
def xla_optimises_little_for_the_cpu(request):
    """A simulated kernel is compiled for seconds and runs once; kernels for cards stay as is."""
    name = "jax_disable_most_optimizations"
    previous = jax.config.read(name)
    simulated = INTERPRET is not None and "deviceless" not in request.fixturenames
    jax.config.update(name, simulated)
    yield
    jax.config.update(name, previous)
