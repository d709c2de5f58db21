"""A document as the text of a page."""

import base64
import functools
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from fusejax.report.html import columns, data, formats, rows
from fusejax.report.html.comparison import comparison_view
from fusejax.report.html.inspection import inspection_view
from fusejax.report.html.roofline import roofline
from fusejax.report.html.view import View

MARKER = '<meta name="generator" content="fusejax report">'
"""What tells that a page is one of ours."""

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_SCRIPTS = (
    "elements.js", "formats.js", "data.js", "cells.js", "tables.js", "tree.js", "graph.js",
    "filters.js", "theme.js", "start.js",
)  # fmt: skip
_VIEWS = {"fusejax.compare/1": comparison_view, "fusejax.inspect/1": inspection_view}
# Rows of a table that are in the page itself; of longer tables the first few, for those who read
# it without its script.
_MOST_ROWS, _FEW_ROWS = 100, 40  # as in tables.js


def page(document: Mapping[str, Any]) -> str:
    """The page of a document "fusejax.compare/1" or "fusejax.inspect/1".

    Raises:
      ValueError: it is neither.
    """
    if document.get("schema") not in _VIEWS:
        raise ValueError(
            f"the document's schema is {document.get('schema')!r}: pages are made of "
            f"{' and '.join(_VIEWS)}"
        )
    view = _VIEWS[document["schema"]](document)
    script = _script()
    return _template().render(
        marker=MARKER,
        policy=_policy(script),
        style=_read("style.css"),
        script=script,
        data=data.block(view),
        view=view,
        roofline=roofline(view.programs),
        boundaries=_dearest(view),
        kernels=[row for program in view.programs for row in program.kernels],
        boundary_columns=columns.boundary_columns(view.programs),
        kernel_columns=columns.kernel_columns(view.programs),
        scopes=rows.scope_sums([row for program in view.programs for row in program.kernels]),
        scales=_scales(view),
    )


def _dearest(view: View) -> list[rows.Row]:
    found = [row for program in view.programs for row in program.boundaries]
    return sorted(found, key=lambda row: -row["cost"])


def _scales(view: View) -> dict[str, float]:
    """What the longest bars stand for."""
    served = [program for program in view.programs if program.bytes]
    times = [t for p in served for t in (p.times.predicted, p.times.measured) if t is not None]
    counted = [program.counted["total"] for program in served if program.counted]
    return {
        "bytes": max([*(p.bytes["total"] for p in served if p.bytes), *counted], default=0) or 1,
        "us": max(times, default=0) or 1,
    }


def _policy(script: str) -> str:
    """Nothing is fetched from anywhere, and no script runs but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _script() -> str:
    parts = "".join(_read(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@functools.cache
def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": formats.size,
        "count": formats.count,
        "us": formats.us,
        "share": formats.share,
        "flops": formats.flops,
        "short_source": rows.short_source,
    }
    environment.globals |= {
        "change": formats.change,
        "formats": formats,
        "is_number": columns.is_number,
        "launch_columns": columns.launch_columns,
        "static_rows": _static_rows,
    }
    return environment.get_template("page.html.j2")


def _static_rows(found: list[rows.Row]) -> list[rows.Row]:
    return found if len(found) <= _MOST_ROWS else found[:_FEW_ROWS]
