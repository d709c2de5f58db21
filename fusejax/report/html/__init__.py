"""Reports as one self-contained page: `index.html` in a folder of its own.

A page is made from a document alone, "fusejax.compare/1" or "fusejax.inspect/1", so that one that
was kept as JSON can be shown as well. It loads nothing: no script, style, font or picture from
anywhere else.
"""

from fusejax.report.html.folder import check_folder, save

__all__ = ["check_folder", "save"]
