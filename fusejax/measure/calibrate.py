"""What this card really reaches: copy bandwidth, and the time lost between launches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fusejax.measure.timing import GRAPHS_OFF, device_times, end_to_end_times

# So long (some 80 µs on an H200) that the host, which needs some 35 µs per dispatch, stays ahead.
_CHAINED_BYTES = 128 << 20
_CHAINED = 9


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Figures of the card at hand, measured now."""

    copied_bytes: int
    """Bytes read plus bytes written by the copy that was timed."""
    copy_us: float
    """Median time of that copy."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written per second: the floor of a program that only moves data."""
    launch_us: float
    """Gap between two kernels of one program."""
    launch_in_graph_us: float
    """The same where XLA may use CUDA graphs."""
    dispatch_us: float
    """Gap between the kernels of two programs that are dispatched one after another, the host being
    ahead."""
    host_dispatch_us: float
    """Time per call of a program that does next to nothing: what the host needs to dispatch."""


def copy_time_us(nbytes: int, *, rounds: int = 10) -> float:
    """Median µs for a device-to-device copy that moves `nbytes`: half are read, half written."""
    source = _random(nbytes // 2)
    # A copy by the driver is no kernel, so CUPTI's kernel times miss it; back to back the device is
    # never idle between copies, and the host's clock sees the device's time.
    copy = jax.jit(jnp.copy)
    calls = max(20, int(20e9 / nbytes))
    return end_to_end_times({"copy": copy}, (source,), rounds=rounds, calls=calls)["copy"].median_us


def calibrate(nbytes: int = 268_435_456, *, rounds: int = 10) -> Calibration:
    """Measures the card in about a second.

    Args:
      nbytes: bytes read plus bytes written by the copy: of the order of what is compared with it,
        and several times the L2 cache.
      rounds: repetitions of which the median is taken.

    Raises:
      UsageError: there is no GPU.
    """
    copy_us = copy_time_us(nbytes, rounds=rounds)
    values = _random(_CHAINED_BYTES)
    shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
    lowered = {
        "chain": jax.jit(_chain).lower(shape),
        "single": jax.jit(_step).lower(shape),
    }
    plain: dict[str, Any] = {
        name: one.compile(compiler_options=GRAPHS_OFF) for name, one in lowered.items()
    }
    device = device_times(plain, (values,), rounds=rounds, iterations=5)
    plain["graph"] = lowered["chain"].compile()
    wall = end_to_end_times(plain, (values,), rounds=rounds, calls=20)
    dispatch = wall["single"].median_us - device["single"].median_us
    in_chain = wall["chain"].median_us - device["chain"].median_us
    in_graph = wall["graph"].median_us - device["chain"].median_us
    tiny = jnp.ones((128,), jnp.float32)
    host = end_to_end_times({"tiny": jax.jit(_step)}, (tiny,), rounds=rounds, calls=500)["tiny"]
    return Calibration(
        copied_bytes=nbytes,
        copy_us=copy_us,
        copy_bytes_per_s=nbytes / copy_us * 1e6,
        launch_us=max(0.0, (in_chain - dispatch) / (_CHAINED - 1)),
        launch_in_graph_us=max(0.0, (in_graph - dispatch) / (_CHAINED - 1)),
        dispatch_us=max(0.0, dispatch),
        host_dispatch_us=host.median_us,
    )


def _step(x: jax.Array) -> jax.Array:
    return x * 0.5 + 0.25


def _chain(x: jax.Array) -> jax.Array:
    for _ in range(_CHAINED):
        x = jax.lax.optimization_barrier(_step(x))
    return x


def _random(nbytes: int) -> jax.Array:
    elements = nbytes // 2
    return jax.random.normal(jax.random.key(0), (elements // 1024, 1024), jnp.bfloat16)
