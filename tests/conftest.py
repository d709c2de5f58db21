"""Runs the tests on the CPU where there is no GPU, and skips what needs what is not here."""

from fusejax.compile import platform

platform.prepare_process()

import pytest  # noqa: E402

from fusejax.compile import targets  # noqa: E402

collect_ignore = ["sample_project"]  # test_pytest_plugin.py runs its tests


def pytest_collection_modifyitems(items):
    if platform.gpu_present() and platform.cuda_backend_works():
        return
    skip = pytest.mark.skip(reason="needs a GPU that JAX can use")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def deviceless():
    """A function from a card's name to its target; skips where the compiler is missing."""
    missing = platform.missing_compiler()
    if missing is not None:
        pytest.skip(f"cannot compile without a device: {missing}")
    return targets.deviceless
