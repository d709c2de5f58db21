"""Registers, spills and static shared memory of kernels, as ptxas reports them for their PTX."""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence

_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel uses, per thread (registers, spills, stack) or per block (shared memory)."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def parse(report: str) -> dict[str, Usage]:
    """Reads what `ptxas -v` writes; keys are the names of entry functions."""
    entries = re.findall(r"Compiling entry function '([^']+)'", report)
    fields: dict[str, dict[str, int]] = {name: {} for name in entries}
    current = ""
    for line in report.splitlines():
        if heading := re.search(r"Function properties for '?([^\s':]+)", line):
            current = heading[1]
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            names = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
            numbers = map(int, frame.groups())
            fields.get(current, {}).update(zip(names, numbers, strict=True))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
            fields.get(current, {}).update(
                registers=int(used[1]), static_shared_bytes=int(shared[1]) if shared else 0
            )
    return {
        name: Usage(**found)
        for name, found in fields.items()
        if len(found) == len(Usage.__match_args__)
    }


def usages(ptx: Sequence[str], architecture: str | None = None) -> tuple[dict[str, Usage], ...]:
    """What each PTX text's kernels use, by the names of their entry functions.

    Args:
      ptx: PTX texts. Their order is that of the answer.
      architecture: "sm_90a" and the like; by default what each text's own `.target` says.

    Returns:
      One dict per text, empty where ptxas is missing (see `missing`) or refuses the text.
    """
    program = find()
    if program is None:
        return ({},) * len(ptx)
    run = functools.partial(_run, str(program), architecture)
    distinct = list(dict.fromkeys(ptx))
    # One process per text: in one process the texts would share a space of names and clash.
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        reports = dict(zip(distinct, pool.map(run, distinct), strict=True))
    return tuple(parse(reports[text]) for text in ptx)


def missing() -> str | None:
    """What is missing to read registers and spills, in words, or None."""
    if find() is None:
        return "registers and spills need ptxas (pip install 'fusejax[aot]')"
    return None


@functools.cache
def find() -> pathlib.Path | None:
    """ptxas: the one of the nvidia-cuda-nvcc package, else of the PATH or the CUDA toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(pathlib.Path(root).glob("*/bin/ptxas"), reverse=True):
            if os.access(found, os.X_OK):
                return found
    on_path = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    return pathlib.Path(on_path) if on_path else None


@functools.lru_cache(maxsize=128)
def _run(program: str, architecture: str | None, text: str) -> str:
    target = re.search(r"^\.target\s+(sm_\w+)", text, re.MULTILINE)
    arch = architecture or (target[1] if target else None)
    if arch is None:
        return ""
    command = [program, "-v", f"-arch={arch}", "-o", os.devnull, "-"]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
