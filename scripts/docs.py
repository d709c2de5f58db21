"""Makes the API pages from the docstrings, with pdoc (extra 'docs').

Usage: docs.py OUT

Example:
  python scripts/docs.py /tmp/api

OUT gets index.html and a page for each public module. It must not be there yet, be empty, or hold
pages of pdoc, which are replaced.

Exit code: 0; 2 where pdoc is missing or OUT cannot be written to.
"""

import importlib
import importlib.util
import pathlib
import warnings

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

MODULES = (
    "fusejax",
    "fusejax.flax",
    "fusejax.flax.linen",
    "fusejax.flax.nnx",
    "fusejax.testing",
    "fusejax.inspection",
    "fusejax.compare_functions",
    "fusejax.hlo.analysis",
    "pallas_kernels",
    "pallas_kernels.gemm",
    "pallas_kernels.transposed",
    "pallas_kernels.column_sums",
)
"""Those whose names are public, and what they return; all others are inner."""


def main(arguments: list[str]) -> None:
    """Makes the pages."""
    if len(arguments) != 1:
        raise UsageError("give one folder, OUT, for the pages; see --help")
    out = pathlib.Path(arguments[0])
    if importlib.util.find_spec("pdoc") is None:
        raise UsageError("pdoc is not installed (pip install 'fusejax[docs]')")
    _check_folder(out)
    platform.prepare_process()
    import pdoc

    for name in MODULES:
        _resolve(importlib.import_module(name))
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        # Of fields that layers inherit from Flax, whose modules import their types for type checks.
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        # A package brings the modules that it names; a checkout lies beside what is installed.
        warnings.filterwarnings("ignore", "The module specification")
        warnings.filterwarnings("ignore", ".* may refer to either the installed")
        try:
            pdoc.pdoc(*MODULES, output_directory=out)
        except OSError as error:
            raise UsageError(f"OUT {str(out)!r} cannot be written: {error.strerror}") from error
    print(out / "index.html")


def _check_folder(out: pathlib.Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"OUT {str(out)!r} is a file: give a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    index = out / "index.html"
    if not index.is_file() or 'content="pdoc' not in index.read_text(errors="replace"):
        raise UsageError(f"OUT {str(out)!r} holds other files: give another folder")


def _resolve(module) -> None:
    """Puts names that a module imports on first use where pdoc looks for them."""
    for name in getattr(module, "__all__", ()):
        setattr(module, name, getattr(module, name))


if __name__ == "__main__":
    cli.run(main, __doc__, takes_arguments=True)
