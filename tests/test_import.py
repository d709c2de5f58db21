"""Importing fusejax costs next to nothing."""

import subprocess
import sys

CODE = """
import time
import jax, flax
start = time.perf_counter()
import fusejax
print(time.perf_counter() - start)
"""

NAMES = """
import sys
import fusejax
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("jax", "pallas_kernels")))
print(*(name for name in fusejax.__all__ if name not in dir(fusejax)))
for name in fusejax.__all__:
    getattr(fusejax, name)
print(fusejax.layer_norm.__name__, fusejax.flax.__name__)
"""


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    return done.stdout


def seconds():
    return float(run(CODE))


def test_import_adds_little():
    assert min(seconds() for _ in range(3)) < 0.15


def test_names_are_imported_when_they_are_used():
    assert run(NAMES).splitlines() == ["", "", "layer_norm fusejax.flax"]
