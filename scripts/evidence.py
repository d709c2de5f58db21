"""Makes the pages under evidence/ again: fused against split, with the resource that decides.

Examples:
  python scripts/evidence.py
  python scripts/evidence.py --studies bias_gelu_rowsum_8192 --to /tmp/evidence --target h200

Each study is a folder with README.md and report.json. On a GPU everything is measured, DRAM bytes
and occupancy with Nsight Compute where it is installed; without one the measured columns are blank.
"""

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
ELEMENTS = 2**26
COMMON = (1024, 2048, 4096, 8192, 16384)
TAIL = (769, 1000, 4097, 5000, 16385)

_STUDIES = flags.DEFINE_list("studies", None, "Which; all by default. --list names them.")
_TO = flags.DEFINE_string("to", str(ROOT), "Folder that the studies' folders are made in.")
_TARGET = flags.DEFINE_string("target", "auto", "As of compare.py.")
_COUNTERS = flags.DEFINE_boolean(
    "counters", None, "Count with Nsight Compute; by default on a GPU where ncu is installed."
)
_LIST = flags.DEFINE_boolean("list", False, "List the studies, then stop.")


def _studies() -> dict[str, tuple[str, list[Any]]]:
    """Title and cells by name."""
    from fusejax.sweep.cells import Cell

    chain = [Cell("residual_ln", (ELEMENTS // w, w), "float16") for w in (*COMMON, *TAIL)]
    layers = [Cell("residual_mlp", (rows, 4096, 16384), "float16") for rows in (8192, 1000)]
    return {
        "bias_gelu_rowsum_8192": (
            "bias + GELU + row sum at 8192: does splitting win?",
            [Cell("bias_gelu_rowsum", (8192, 8192), "float16")],
        ),
        "residual_chain": (
            "The residual chain over common and tail widths, and the layer around it",
            chain + layers,
        ),
        "gemm_epilogues": (
            "Matrix products: what belongs into the epilogue?",
            [
                Cell(op, shape, "bfloat16")
                for op in ("gemm_bias_gelu", "gemm_gelu_rowsum", "shared_matmul")
                for shape in ((8192, 8192, 8192), (8192, 8192, 512), (65536, 1024, 1024))
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
    to = pathlib.Path(_TO.value)
    if not to.parent.is_dir():
        raise UsageError(f"--to {_TO.value!r}: there is no folder {str(to.parent)!r}")
    from fusejax.compile import targets
    from fusejax.measure import counters
    from fusejax.report.progress import progress
    from fusejax.sweep import cells as sweep

    target, notice = targets.resolve(_TARGET.value)
    errors = Console(stderr=True)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    counts = _COUNTERS.value
    if counts is None:
        counts = target.kind == "device" and counters.find() is not None
    import dataclasses

    for name in names:
        title, wanted = studies[name]
        wanted = [dataclasses.replace(cell, counters=counts) for cell in wanted]
        jobs = min(len(os.sched_getaffinity(0)), len(wanted))
        with progress(errors) as tell:
            documents = list(sweep.run(wanted, _TARGET.value, jobs, tell))
        _write(to / name, title, documents, f"python scripts/evidence.py --studies {name}")
        print(f"{to / name}: {len(documents)} comparisons")


def _write(folder: pathlib.Path, title: str, documents: list[Any], command: str) -> None:
    from fusejax.report import markdown

    done = [document for document in documents if "failed" not in document]
    failed = [document for document in documents if "failed" in document]
    if not done:
        raise UsageError(f"nothing could be compared: {failed[0]['failed']}")
    parts = [f"# {title}", markdown.origin(done, command)]
    parts += [markdown.comparison_section(document) for document in done]
    parts += [f"Not compared: {one['cell']}: {one['failed']}" for one in failed]
    folder.mkdir(parents=True, exist_ok=True)
    report = {"schema": "fusejax.sweep/1", "cells": documents}
    _replace(folder / "report.json", json.dumps(report, indent=1) + "\n")
    _replace(folder / "README.md", "\n\n".join(parts) + "\n")


def _replace(path: pathlib.Path, text: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fusejax-") as folder:
        aside = pathlib.Path(folder, path.name)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)


if __name__ == "__main__":
    cli.run(main, __doc__)
