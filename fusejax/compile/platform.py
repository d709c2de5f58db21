"""What this machine and this installation can compile for, found out without noise."""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator

from fusejax.errors import UsageError

_PLUGIN = "jax-cuda13-plugin"
_INSTALL = "pip install 'fusejax[aot]'"


@functools.cache
def gpu_present() -> bool:
    """Whether the NVIDIA driver is loaded and shows a device. Does not import JAX."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def prepare_process() -> None:
    """Sets the environment that the scripts need. Call before importing JAX.

    On a machine without a GPU, JAX is kept from looking for one.

    Without this, JAX logs a traceback about cuDNN when it finds the CUDA plugin but no GPU, and the
    plugin refuses to register its compiler.

    Raises:
      UsageError: JAX_PLATFORMS asks for what this machine does not have.
    """
    # The Pallas simulation runs every warpgroup of a cluster (8 CTAs of 8 at most) on a thread of
    # XLA's CPU pool, and they wait for one another: with fewer threads they would hang for ever.
    os.environ.setdefault("NPROC", "80")
    # XLA logs what it then raises as well; what ends the process it still tells.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if gpu_present():
        return
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked and "cpu" not in asked.split(","):
        raise UsageError(
            f"JAX_PLATFORMS={asked!r} is set, and this machine has no NVIDIA GPU: unset it, or "
            "make it cpu"
        )
    if not asked:
        os.environ["JAX_PLATFORMS"] = "cpu"


def cuda_backend_works() -> bool:
    """Whether this process's JAX can run programs on a GPU."""
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def missing_compiler() -> str | None:
    """What compiling without a device lacks here, in words, or None where it lacks nothing."""
    try:
        plugin = importlib.metadata.version(_PLUGIN)
    except importlib.metadata.PackageNotFoundError:
        return f"the extra 'aot' is not installed ({_INSTALL})"
    jaxlib = importlib.metadata.version("jaxlib")
    if plugin != jaxlib:
        return (
            f"{_PLUGIN} {plugin} does not belong to jaxlib {jaxlib} "
            f"(pip install '{_PLUGIN}=={jaxlib}')"
        )
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return f"{_PLUGIN} is installed but cannot be imported ({_INSTALL})"
    return None


def require_compiler(target: str) -> None:
    """Raises UsageError where programs cannot be compiled for a card that is not there."""
    missing = missing_compiler()
    if missing is not None:
        raise UsageError(f"--target {target!r} cannot be compiled for: {missing}")


def register_cuda_compiler() -> None:
    """Registers the CUDA plugin in a process whose JAX came up without it; else does nothing."""
    import jax
    import jax_plugins.xla_cuda13

    previous = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        with silent_stderr():
            jax_plugins.xla_cuda13.initialize()
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    finally:
        if previous is None:
            del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
        else:
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = previous


def discover_backends_quietly() -> None:
    """Has JAX find its back ends, without its report that a GPU-less machine has no cuDNN."""
    import jax

    logger = logging.getLogger("jax._src.xla_bridge")
    previous = logger.disabled
    logger.disabled = previous or not gpu_present()
    try:
        jax.devices()
    finally:
        logger.disabled = previous


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards what native code writes to stderr; what went wrong is in the exception."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
