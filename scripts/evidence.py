"""Makes the pages under evidence/ again: fused against split, with the resource that decides.

Examples:
  python scripts/evidence.py
  python scripts/evidence.py --studies bias_gelu_rowsum_8192 --to /tmp/evidence --target h200
  python scripts/evidence.py --studies ownership --read sweep.json

Each study is a folder with README.md and report.json. On a GPU everything is measured, DRAM bytes
and occupancy with Nsight Compute where it is installed; without one the measured columns are blank.
"""

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

ROOT = pathlib.Path(__file__).parents[1] / "evidence"
REPORT = "report.json"
ELEMENTS = 2**26
COMMON = (1024, 2048, 4096, 8192, 16384)
DEEP = (8192, 8192, 32768)  # so deep a product that its epilogue is next to nothing
FEW_ROWS = (256, 8192, 8192)  # so few rows that whole tiles of outputs leave multiprocessors idle
COUNTED_SHAPES = ((8192, 8192, 512), FEW_ROWS)  # of products, which take long to count
TAIL = (769, 1000, 4097, 5000, 16385)

_STUDIES = flags.DEFINE_list("studies", None, "Which; all by default. --list names them.")
_TO = flags.DEFINE_string(
    "to", None, "Folder that the studies' folders are made in; by default this project's evidence/."
)
_TARGET = flags.DEFINE_string("target", "auto", "As of compare.py.")
_COUNTERS = flags.DEFINE_boolean(
    "counters", None, "Count with Nsight Compute; by default on a GPU where ncu is installed."
)
_READ = flags.DEFINE_list(
    "read", [], "Take the comparisons from these files of sweep.py --json instead of making them."
)
_LIST = flags.DEFINE_boolean("list", False, "List the studies, then stop.")


def _studies() -> dict[str, tuple[str, list[Any]]]:
    """Title and cells by name."""
    from fusejax.sweep.cells import PRODUCT_SHAPES, Cell

    chain = [Cell("residual_ln", (ELEMENTS // w, w), "bfloat16") for w in (*COMMON, *TAIL)]
    layers = [
        Cell("residual_mlp", shape, "bfloat16")
        for shape in (*PRODUCT_SHAPES, (8192, 4096, 16384), (1000, 4096, 16384))
    ]
    return {
        "bias_gelu_rowsum_8192": (
            "bias + GELU + row sum at 8192: does splitting win?",
            [Cell("bias_gelu_rowsum", (8192, 8192), "float16")],
        ),
        "residual_chain": (
            "The residual chain over widths, and the layer around it",
            chain + layers,
        ),
        "gemm_epilogues": (
            "Matrix products: what belongs into the epilogue?",
            [
                Cell(op, shape, "bfloat16")
                for op in ("gemm_bias_gelu", "gemm_gelu_rowsum", "shared_matmul")
                for shape in (*PRODUCT_SHAPES, DEEP, FEW_ROWS)
            ],
        ),
        "ownership": (
            "One producer, consumers that want another ownership",
            [
                Cell(op, (8192, 8192), "bfloat16")
                for op in ("shared_scale", "bias_gelu_colsum", "bias_gelu_transpose")
            ]
            + [Cell("masked_softmax", (8192, 8192), "bfloat16")],
        ),
    }


def main() -> None:
    """Compares, writes the pages."""
    platform.prepare_process()
    from rich.console import Console

    studies = _studies()
    if _LIST.value:
        for name, (title, cells) in studies.items():
            print(f"{name:24} {title} ({len(cells)} comparisons)")
        return
    names = list(studies) if _STUDIES.value is None else _STUDIES.value
    for name in names:
        if name not in studies:
            raise UsageError(f"--studies {name!r} is unknown: give some of {', '.join(studies)}")
    if not names:
        raise UsageError(f"--studies is empty: give some of {', '.join(studies)}")
    to = ROOT if _TO.value is None else pathlib.Path(_TO.value)
    for name in names:
        _check_folder(to, name)
    for name in names:
        title, cells = studies[name]
        command = f"python scripts/evidence.py --studies {name}"
        if _READ.value:
            documents = _found(cells, _READ.value)
            names_of_files = {pathlib.Path(file).name for file in _READ.value}
            if names_of_files != {REPORT}:  # else it is the study's own page that is written again
                listed = ",".join(sorted(names_of_files))
                command = f"python scripts/sweep.py --json {listed}` and `{command} --read {listed}"
        else:
            documents = _compared(cells, to / name, Console(stderr=True))
        if not _was_counted(documents):
            command = command.replace(f"--studies {name}", f"--studies {name} --nocounters")
        _write(to / name, title, documents, command)
        print(f"{to / name}: {len(documents)} comparisons")


def _check_folder(to: pathlib.Path, name: str) -> None:
    """Refuses before the work is done what could not be written, or should not be replaced."""
    if not to.parent.is_dir():
        raise UsageError(f"--to {str(to)!r}: there is no folder {str(to.parent)!r}")
    for folder in (to, to / name):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--to {str(to)!r}: {str(folder)!r} is a file, not a folder")
    existing = next(folder for folder in (to / name, to, to.parent) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"--to {str(to)!r}: {str(existing)!r} cannot be written to")


def _compared(cells: list[Any], folder: pathlib.Path, errors: Any) -> list[Any]:
    from fusejax.compile import targets
    from fusejax.measure import counters
    from fusejax.report.progress import progress
    from fusejax.sweep.cells import run

    target, notice = targets.resolve(_TARGET.value)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    if target.kind != "device" and _is_measured(folder / REPORT):
        raise UsageError(
            f"{folder} has a page that was measured, and this one would be predicted: give "
            "another --to"
        )
    counts = _COUNTERS.value
    if counts and target.kind != "device":
        raise UsageError(
            f"--counters needs a GPU of this machine, and --target is {target.name!r}: "
            "give --target device"
        )
    if counts is None:
        counts = target.kind == "device" and counters.find() is not None
    wanted = [dataclasses.replace(cell, counters=counts and _is_counted(cell)) for cell in cells]
    jobs = min(len(os.sched_getaffinity(0)), len(wanted))
    with progress(errors) as tell:
        return list(run(wanted, _TARGET.value, jobs, tell))


def _is_counted(cell: Any) -> bool:
    return len(cell.shape) == 2 or (
        cell.op in ("gemm_bias_gelu", "gemm_gelu_rowsum") and cell.shape in COUNTED_SHAPES
    )


def _found(cells: list[Any], names: list[str]) -> list[Any]:
    """The study's comparisons among those of earlier sweeps."""
    from fusejax.sweep import files

    known = {
        (one["op"], tuple(one["shape"]), one["dtype"], one["mode"]): one
        for one in files.read("--read", names)
        if "failed" not in one
    }
    missing = {"failed": f"not in {', '.join(names)}"}
    return [
        known.get((cell.op, cell.shape, cell.dtype, cell.mode))
        or {"cell": dataclasses.asdict(cell), **missing}
        for cell in cells
    ]


def _write(folder: pathlib.Path, title: str, documents: list[Any], command: str) -> None:
    from fusejax.report import markdown
    from fusejax.sweep import files

    done = [document for document in documents if "failed" not in document]
    failed = [document for document in documents if "failed" in document]
    if not done:
        raise UsageError(f"{folder.name}: nothing could be compared: {failed[0]['failed']}")
    parts = [f"# {title}", markdown.origin(done, command)]
    parts += [markdown.comparison_section(document) for document in done]
    for one in failed:
        cell = one["cell"]
        shape = "x".join(map(str, cell["shape"]))
        parts.append(f"Not compared: {cell['op']}, {cell['dtype']} {shape}: {one['failed']}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    _replace(folder / REPORT, json.dumps(files.document(documents)) + "\n")
    _replace(folder / "README.md", "\n\n".join(parts) + "\n")


def _was_counted(documents: list[Any]) -> bool:
    """Whether some path was; of pages without a card, whose command has no say in it, too."""
    done = [document for document in documents if "failed" not in document]
    return any(document["target"]["kind"] != "device" for document in done) or any(
        path["bytes"] and path["bytes"]["measured"]
        for document in done
        for path in document["paths"].values()
    )


def _is_measured(report: pathlib.Path) -> bool:
    from fusejax.sweep import files

    if not report.is_file():
        return False
    cells = files.read("--to", [str(report)])
    return any("failed" not in cell and cell["target"]["kind"] == "device" for cell in cells)


def _replace(path: pathlib.Path, text: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fusejax-") as folder:
        aside = pathlib.Path(folder, path.name)
        # Places in the source are told from this project's folder on.
        aside.write_text(text.replace(f"{ROOT.parent}/", ""), encoding="utf-8")
        aside.replace(path)


if __name__ == "__main__":
    cli.run(main, __doc__)
