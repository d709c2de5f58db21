"""The tables of stack frames that newer HLO text begins with."""

from collections.abc import Mapping

from fusejax.hlo import grammar
from fusejax.hlo.module import Frame


def join(tables: Mapping[str, Mapping[int, str]]) -> dict[int, Frame]:
    """Joins the raw rows of FileNames, FunctionNames, FileLocations and StackFrames.

    Rows that a table lacks become empty names and line 0.
    """

    def fields(text: str) -> dict[str, int]:
        return {key: int(value) for key, value in grammar.FIELD.findall(text)}

    def string(table: str, row: int) -> str:
        return tables.get(table, {}).get(row, "").strip('"')

    frames = {}
    for row, text in tables.get("StackFrames", {}).items():
        frame = fields(text)
        place = fields(tables.get("FileLocations", {}).get(frame.get("file_location_id", 0), ""))
        frames[row] = Frame(
            file=string("FileNames", place.get("file_name_id", 0)),
            line=place.get("line", 0),
            function=string("FunctionNames", place.get("function_name_id", 0)),
            # XLA prints the parent's row plus one.
            parent=frame.get("parent_frame_id", 1) - 1,
        )
    return frames
