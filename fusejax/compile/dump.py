"""Has a compile write down what it decided, in a folder of its own, and reads that."""

import pathlib
import tempfile
from typing import Any

from fusejax.program import Program
from fusejax.resources import mosaic

# Together these add nothing measurable to a compile; dumping every emitter stage costs 8 times it.
_OPTIONS = {"xla_dump_hlo_pass_re": "priority-fusion", "xla_dump_emitter_re": "^ptx$"}


def compile_with_dump(lowered: Any) -> tuple[Any, Program]:
    """Compiles a `jax.stages.Lowered`; gives the executable and what the compiler wrote.

    The folder is unlike any other's, and so are the compile options: JAX's persistent cache, whose
    hits write no dump, cannot answer.
    """
    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        with mosaic.printed_ptx() as printed:
            executable = lowered.compile(compiler_options={"xla_dump_to": folder, **_OPTIONS})
        hlo = executable.as_text()
        mosaic.remember(hlo, printed.texts)
        return executable, _read(pathlib.Path(folder), hlo)


def _read(folder: pathlib.Path, hlo: str) -> Program:
    def text(pattern: str) -> str | None:
        found = sorted(folder.glob(pattern))
        return found[0].read_text() if found else None

    header = hlo.split(None, 2)
    return Program(
        name=header[1].rstrip(",") if len(header) > 1 else "",
        hlo=hlo,
        unoptimised=text("*.before_optimizations.txt"),
        decisions=text("*.priority_fusion_dump.txt"),
        launch_order=text("*.thunk_sequence.txt"),
        target_config=text("*.gpu_target_config.pbtxt"),
        ptx=tuple(path.read_text() for path in sorted(folder.glob("*.ptx"))),
    )
