"""Bytes, registers and occupancy as the card's counters see them, by way of Nsight Compute (ncu).

ncu runs a command of its own choosing clock and cache state, kernel by kernel: its bytes, registers
and occupancy hold, its times do not. The command marks what is to be counted with `counted()`, so
that compiling, autotuning and warming up stay out.
"""

import contextlib
import csv
import ctypes
import dataclasses
import glob
import io
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError

_METRICS: Mapping[str, str] = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
    "local_stores": "smsp__inst_executed_op_local_st.sum",
    "static_shared_bytes": "launch__shared_mem_per_block_static",
    "dynamic_shared_bytes": "launch__shared_mem_per_block_dynamic",
    "threads": "launch__block_size",
    "blocks": "launch__grid_size",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "theoretical_occupancy": "sm__maximum_warps_per_active_cycle_pct",
}
_PERCENT = frozenset({"occupancy", "theoretical_occupancy"})
_SCALE = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LEAVE_OUT = "or leave --counters out"


@dataclasses.dataclass(frozen=True)
class Counted:
    """One launch, as the counters saw it."""

    function: str
    """Name of the device function."""
    read_bytes: int
    """From device memory; the cache is cold before every kernel."""
    written_bytes: int
    """To device memory; what is still in the cache when the kernel ends is missing."""
    registers: int
    """Per thread, as allocated."""
    local_loads: int
    local_stores: int
    """Instructions that touch local memory, spills above all."""
    static_shared_bytes: int
    dynamic_shared_bytes: int
    """Per block."""
    threads: int
    """Per block."""
    blocks: int
    occupancy: float
    """Achieved, 0 to 1."""
    theoretical_occupancy: float


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Marks what `run_under_ncu` is to count, in the command that it runs. Elsewhere, no effect.

    Wait for the device (`jax.block_until_ready`) before the block and at its end.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    # The profiler's switch belongs to a context, and this thread may have none yet: JAX uses the
    # device's primary one.
    _driver_call(driver.cuInit(0))
    _driver_call(driver.cuDeviceGet(ctypes.byref(device), 0))
    _driver_call(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _driver_call(driver.cuCtxPushCurrent_v2(context))
    try:
        _driver_call(driver.cuProfilerStart())
        try:
            yield
        finally:
            _driver_call(driver.cuProfilerStop())
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)


def run_under_ncu(
    command: Sequence[str],
    *,
    timeout_s: float = 600,
    environment: Mapping[str, str] | None = None,
) -> tuple[Counted, ...]:
    """Runs a command and counts the kernels that it launches inside `counted()`, in order.

    Args:
      command: the program and its arguments.
      timeout_s: for the whole command; ncu runs every counted kernel several times.
      environment: of the command; by default this process's.

    Raises:
      UsageError: ncu is missing or may not read the counters, or the command failed or launched
        nothing inside `counted()`.
    """
    ncu = find()
    if ncu is None:
        raise UsageError(
            "--counters needs Nsight Compute's ncu, which is not on the PATH: install it (it comes "
            f"with the CUDA toolkit) {_LEAVE_OUT}"
        )
    with tempfile.TemporaryDirectory(prefix="fusejax-ncu-") as folder:
        log = pathlib.Path(folder, "counters.csv")
        arguments = [
            str(ncu), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--clock-control", "none", "--profile-from-start", "off",
            "--target-processes", "all", "--metrics", ",".join(_METRICS.values()),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                [*arguments, *command],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=None if environment is None else dict(environment),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"--counters: the run under ncu took longer than {timeout_s:.0f} s: "
                f"take a smaller --shape {_LEAVE_OUT}"
            ) from error
        report = log.read_text(errors="replace") if log.exists() else ""
    reason = refusal(report + done.stdout + done.stderr)
    if reason is not None:
        raise UsageError(reason)
    found = parse(report)
    if done.returncode != 0 or not found:
        lines = (done.stderr or done.stdout or report).strip().splitlines()
        raise UsageError(
            f"--counters: the run under ncu counted {len(found)} kernels and exited with "
            f"{done.returncode} ({lines[-1].strip() if lines else 'it wrote nothing'}): "
            f"run it without ncu first {_LEAVE_OUT}"
        )
    return found


def parse(report: str) -> tuple[Counted, ...]:
    """Reads `ncu --csv --page raw`: a row per launch, units in the second line.

    Launches without one of the counters are left out.
    """
    lines = [line for line in report.splitlines() if not line.startswith("==")]
    header = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    if header is None:
        return ()
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[header:]))))
    if not rows:
        return ()
    units, *launches = rows
    found = []
    for row in launches:
        values = {
            field: _number(row.get(metric), units.get(metric)) for field, metric in _METRICS.items()
        }
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) != len(_METRICS):
            continue
        fields: dict[str, Any] = {
            name: value / 100 if name in _PERCENT else round(value) for name, value in known.items()
        }
        found.append(Counted(function=_function(row["Kernel Name"]), **fields))
    return tuple(found)


def refusal(output: str) -> str | None:
    """Why ncu did not count, as a line for the user, or None."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "--counters: the driver lets only administrators read the GPU's counters "
            "(ERR_NVGPUCTRPERM): run as root, load the driver with "
            f"NVreg_RestrictProfilingToAdminUsers=0, {_LEAVE_OUT}"
        )
    error = re.search(r"==ERROR== (.*)", output)
    return (
        f"--counters: ncu reports {error[1].strip()!r}: mend that {_LEAVE_OUT}" if error else None
    )


def split(
    found: Sequence[Counted], lengths: Sequence[int]
) -> tuple[tuple[Counted, ...], ...] | None:
    """The launches of several runs that were counted one after another, run by run.

    Args:
      found: all launches in order.
      lengths: launches per run, as timed or compiled.

    Returns:
      None where the lengths do not add up to the launches, since then none can be told apart.
    """
    if sum(lengths) != len(found):
        return None
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return tuple(
        tuple(found[end - length : end]) for end, length in zip(ends, lengths, strict=True)
    )


def find() -> pathlib.Path | None:
    """ncu on the PATH or where NVIDIA's packages put it; the newest where there are several."""
    if on_path := shutil.which("ncu"):
        return pathlib.Path(on_path)
    usual = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
    found = [path for pattern in usual for path in sorted(glob.glob(pattern), reverse=True)]
    return next((pathlib.Path(path) for path in found if os.access(path, os.X_OK)), None)


def _function(name: str) -> str:
    """The device function's name without the parameter list that ncu appends to C++ names."""
    return name.split("(")[0].strip()


def _number(text: str | None, unit: str | None) -> float | None:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        return None
    prefixed = re.match(r"([KMGT])byte", unit or "")
    return number * _SCALE[prefixed[1]] if prefixed else number


def _driver_call(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver refused to mark what is counted (error {status})")
