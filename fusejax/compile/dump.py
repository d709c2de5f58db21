"""Has a compile write down what it decided, in a folder of its own, and reads such folders."""

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from fusejax.errors import UsageError
from fusejax.program import Program
from fusejax.resources import mosaic

# Together these add nothing measurable to a compile; dumping every emitter stage costs 8 times it.
_BRIEF = {"xla_dump_hlo_pass_re": "priority-fusion"}
OPTIONS = {**_BRIEF, "xla_dump_emitter_re": "^ptx$"}
# module_0012.jit_f.sm_9.0a_gpu_after_optimizations.txt; older and other back ends write
# ...gpu_after_optimizations.txt, ...cpu_after_optimizations.txt, ...after_optimizations.txt.
_FINAL = re.compile(r"(.+?)\.(?:(?:(?:sm_|gfx)[\w.]*?_)?[a-z]+_)?after_optimizations\.txt")


_BACKEND = re.compile(r"\.(?:\S*_)?([cgt]pu)_after_optimizations\.txt$")


def backend_of(file_name: str) -> str | None:
    """The back end that wrote a file of this name in a dump folder; None where it does not tell."""
    found = _BACKEND.search(file_name)
    return found[1] if found else None


def compile_with_dump(
    lowered: Any, options: Mapping[str, Any] | None = None, *, with_ptx: bool = True
) -> tuple[Any, Program]:
    """Compiles a `jax.stages.Lowered`; gives the executable and what the compiler wrote.

    Args:
      options: further compiler options.
      with_ptx: whether the kernels' PTX, which tells registers, is wanted.

    The folder is unlike any other's, and so are the compile options: JAX's persistent cache, whose
    hits write no dump, cannot answer.
    """
    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        dump = {"xla_dump_to": folder, **OPTIONS} if with_ptx else {"xla_dump_to": folder, **_BRIEF}
        printing = mosaic.printed_ptx() if with_ptx else contextlib.nullcontext()
        with printing as printed:
            executable = lowered.compile(compiler_options={**dump, **(options or {})})
        dumped = read_folder(pathlib.Path(folder))
    hlo = executable.as_text()
    if printed is not None:
        mosaic.remember(hlo, printed.texts)
    header = hlo.split(None, 2)
    name = header[1].rstrip(",") if len(header) > 1 else ""
    program = next((p for _, p in dumped if p.name == name), Program(name, hlo))
    # What was compiled for a card that is not there cannot be run on any device.
    deviceless = not hasattr(executable.runtime_executable(), "local_devices")
    return executable, dataclasses.replace(program, hlo=hlo, deviceless=deviceless)


def read_folder(folder: pathlib.Path) -> list[tuple[pathlib.Path, Program]]:
    """The modules of an --xla_dump_to folder, each with the file of its final HLO, in file order.

    Raises:
      UsageError: a file cannot be read.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        return [
            (path, _program(path, found[1], files))
            for path in files
            if (found := _FINAL.fullmatch(path.name))
        ]
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read ({error.strerror})") from error


def _program(final: pathlib.Path, prefix: str, files: list[pathlib.Path]) -> Program:
    own = [path for path in files if path.name.startswith(f"{prefix}.")]

    def file(suffix: str) -> pathlib.Path | None:
        return next((path for path in own if path.name.endswith(suffix)), None)

    def text(suffix: str) -> str | None:
        found = file(suffix)
        return found.read_text(errors="replace") if found else None

    decisions = file(".priority_fusion_dump.txt")
    hlo = final.read_bytes().decode(errors="surrogateescape")
    header = re.match(r"\s*HloModule\s+([^\s,]+)", hlo)
    return Program(
        name=header[1] if header else prefix,
        hlo=hlo,
        unoptimised=text(".before_optimizations.txt"),
        decisions=text(".priority_fusion_dump.txt"),
        decisions_file=decisions.name if decisions else None,
        launch_order=text(".thunk_sequence.txt"),
        target_config=text(".gpu_target_config.pbtxt"),
        backend=backend_of(final.name),
        ptx=tuple(p.read_text(errors="replace") for p in own if p.name.endswith(".ptx")),
    )
