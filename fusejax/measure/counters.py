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
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError

# The card counts these two in one pass over a kernel. With the others ncu runs every kernel several
# times and puts back all memory that the kernel wrote before each: minutes for a large program.
_BYTES: Mapping[str, str] = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
}
_EXECUTION: Mapping[str, str] = {
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
# Not every card and every version of ncu has all of these: of several names the first that gives a
# number counts. Where ncu takes an unknown name amiss, it is run again without them.
_DETAILS: Mapping[str, tuple[str, ...]] = {
    "issue": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "dram": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "xu_pipe": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "l2_hits": ("lts__t_sector_hit_rate.pct",),
    "instructions": ("smsp__inst_executed.sum",),
    "local_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",),
    "local_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",),
    "local_load_misses": ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld_lookup_miss.sum",),
    "local_store_misses": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st_lookup_miss.sum",),
}
_PERCENT = frozenset({
    "occupancy", "theoretical_occupancy", "issue", "dram", "xu_pipe", "tensor_pipe", "l2_hits",
})  # fmt: skip
_SECTOR_BYTES = 32
_SCALE = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True)
class Execution:
    """How one launch ran, as the counters saw it."""

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
    """Achieved, 0 to 1: warps on a multiprocessor over those that fit, while it works."""
    theoretical_occupancy: float
    """What registers, shared memory and threads per block allow, 0 to 1."""
    issue: float | None = None
    """Share of the cycles in which a scheduler issued an instruction, 0 to 1. Near 1, arithmetic
    decides the time. This and all below are None where the card or ncu does not have it."""
    dram: float | None = None
    """Throughput of device memory over its peak, 0 to 1, at the clocks under ncu."""
    xu_pipe: float | None = None
    """Use of the pipe for exponentials, square roots, conversions and the like, 0 to 1."""
    tensor_pipe: float | None = None
    """Use of the tensor cores, 0 to 1."""
    l2_hits: float | None = None
    """Share of the sectors looked up in the L2 cache that were in it, 0 to 1."""
    instructions: int | None = None
    """Executed by warps."""
    local_bytes: int | None = None
    """Loads and stores of local memory (spills above all) that reach the L1 cache."""
    local_bytes_past_l1: int | None = None
    """Those of them that miss in L1 and go on to L2, and perhaps to device memory."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """One launch, as the counters saw it."""

    function: str
    """Name of the device function."""
    read_bytes: int
    """From device memory; the cache is cold before every kernel."""
    written_bytes: int
    """To device memory; what is still in the cache when the kernel ends is missing."""
    execution: Execution | None = None
    """None where only bytes were asked for."""


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
    bytes_only: bool = False,
    timeout_s: float = 600,
    environment: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Counted, ...]:
    """Runs a command and counts the kernels that it launches inside `counted()`, in order.

    Args:
      command: the program and its arguments.
      bytes_only: leaves `Counted.execution` out, so that ncu runs every kernel once, not several
        times with all memory saved and put back between.
      timeout_s: for the whole command, after which it is stopped and nothing is known: ncu writes
        its report when the command has ended.
      environment: of the command; by default this process's.
      tell: is given every line that the command writes to its standard output, as it comes.

    Raises:
      UsageError: ncu is missing or may not read the counters, or the command failed or launched
        nothing inside `counted()`.
    """
    ncu = find()
    if ncu is None:
        raise UsageError(
            "Nsight Compute's ncu is not on the PATH: install it (it comes with the CUDA toolkit)"
        )
    metrics = [*_BYTES.values()] if bytes_only else [*_BYTES.values(), *_EXECUTION.values()]
    details = [] if bytes_only else [name for names in _DETAILS.values() for name in names]
    report, output, code = _counted(
        ncu, [*metrics, *details], command, timeout_s, environment, tell
    )
    reason = refusal(report + output)
    if reason is not None and any(name.split(".")[0] in reason for name in details):
        report, output, code = _counted(ncu, metrics, command, timeout_s, environment, tell)
        reason = refusal(report + output)
    if reason is not None:
        raise UsageError(reason)
    found = parse(report, bytes_only=bytes_only)
    if code != 0 or not found:
        lines = (output.strip() or report.strip()).splitlines()
        raise UsageError(
            f"the run under ncu counted {len(found)} kernels and exited with "
            f"{code} ({lines[-1].strip() if lines else 'it wrote nothing'}): "
            "run it without ncu first"
        )
    return found


def _counted(
    ncu: pathlib.Path,
    metrics: Sequence[str],
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None,
    tell: Callable[[str], None],
) -> tuple[str, str, int]:
    """ncu's report, what was written to standard output and then to standard error, exit code."""
    with tempfile.TemporaryDirectory(prefix="fusejax-ncu-") as folder:
        log = pathlib.Path(folder, "counters.csv")
        arguments = [
            str(ncu), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--clock-control", "none", "--profile-from-start", "off",
            "--target-processes", "all", "--metrics", ",".join(metrics),
        ]  # fmt: skip
        code, written, errors = _run([*arguments, *command], timeout_s, environment, tell)
        return log.read_text(errors="replace") if log.exists() else "", written + errors, code


def _run(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None,
    tell: Callable[[str], None],
) -> tuple[int, str, str]:
    """Runs a command; returns its exit code and what it wrote to its two outputs."""
    is_late = threading.Event()
    lines = []
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=None if environment is None else dict(environment),
            start_new_session=True,  # so that what ncu started is stopped with it
        ) as process,
    ):

        def stop() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def stop_late() -> None:
            is_late.set()
            stop()

        timer = threading.Timer(timeout_s, stop_late)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                tell(line.rstrip())
            code = process.wait()
        except BaseException:
            stop()
            raise
        finally:
            timer.cancel()
        if is_late.is_set():
            raise UsageError(
                f"the run under ncu took longer than {timeout_s:.0f} s: give it less to count"
            )
        errors.seek(0)
        return code, "".join(lines), errors.read()


def parse(report: str, *, bytes_only: bool = False) -> tuple[Counted, ...]:
    """Reads `ncu --csv --page raw`: a row per launch, units in the second line.

    Launches without one of the counters are left out, but for those that not every card has.
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
        moved = _fields(_BYTES, row, units)
        ran = None if bytes_only else _fields(_EXECUTION, row, units)
        if moved is None or (ran is None and not bytes_only):
            continue
        execution = None if ran is None else Execution(**ran, **_details(row, units))
        found.append(Counted(_function(row["Kernel Name"]), **moved, execution=execution))
    return tuple(found)


def _fields(
    metrics: Mapping[str, str], row: Mapping[str, str], units: Mapping[str, str]
) -> dict[str, Any] | None:
    """The counters of a row under the names of their fields; None where one is missing."""
    found: dict[str, Any] = {}
    for field, metric in metrics.items():
        value = _number(row.get(metric), units.get(metric))
        if value is None:
            return None
        found[field] = value / 100 if field in _PERCENT else round(value)
    return found


def _details(row: Mapping[str, str], units: Mapping[str, str]) -> dict[str, Any]:
    """The counters that not every card has, under the names of their fields; None for missing."""
    found: dict[str, Any] = {}
    for field, metrics in _DETAILS.items():
        alone = (_fields({field: metric}, row, units) for metric in metrics)
        found[field] = next((one[field] for one in alone if one is not None), None)
    sectors = [found.pop(f"local_{kind}_sectors") for kind in ("load", "store")]
    missed = [found.pop(f"local_{kind}_misses") for kind in ("load", "store")]
    return {**found, "local_bytes": _bytes(sectors), "local_bytes_past_l1": _bytes(missed)}


def _bytes(sectors: Sequence[int | None]) -> int | None:
    known = [number for number in sectors if number is not None]
    return sum(known) * _SECTOR_BYTES if len(known) == len(sectors) else None


def refusal(output: str) -> str | None:
    """Why ncu did not count, as a line for the user, or None."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM): run "
            "as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    error = re.search(r"==ERROR== (.*)", output)
    return f"ncu reports {error[1].strip()!r}: mend that" if error else None


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
    if not math.isfinite(number):  # what ncu writes of a ratio to nothing
        return None
    prefixed = re.match(r"([KMGT])byte", unit or "")
    return number * _SCALE[prefixed[1]] if prefixed else number


def _driver_call(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver refused to mark what is counted (error {status})")
