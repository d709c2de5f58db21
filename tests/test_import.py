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


def seconds():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    return float(done.stdout)


def test_import_adds_little():
    assert min(seconds() for _ in range(3)) < 0.15
