"""The "diff" of a document "fusejax.inspect/1": what appeared, went or changed bytes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.html.rows import Row
from fusejax.report.html.view import Change, Difference, Program
from fusejax.report.units import tensor

type Pair = Mapping[str, Any]

_FIGURES = (
    ("Launches", "count", "launches"),
    ("Read and written", "bytes", "bytes"),
    ("At boundaries", "bytes", "boundary_bytes"),
)


def modules_before(pairs: Sequence[Pair]) -> int:
    """How many of the modules are the first report's: each is in one pair, and in one only."""
    return sum(pair["a"] is not None for pair in pairs)


def differences(
    pairs: Sequence[Pair], modules: Sequence[Mapping[str, Any]], programs: Sequence[Program]
) -> tuple[Difference, ...]:
    """The pairs. Rows of the programs are marked with what became of them."""
    before = modules_before(pairs)
    olds, news = list(range(before)), list(range(before, len(modules)))

    def taken(left: list[int], name: str | None) -> Program | None:
        found = next((place for place in left if modules[place]["name"] == name), None)
        if found is None:
            return None
        left.remove(found)
        return programs[found]

    return tuple(
        _difference(pair, taken(olds, pair["a"]), taken(news, pair["b"])) for pair in pairs
    )


def _difference(pair: Pair, old: Program | None, new: Program | None) -> Difference:
    kernels, boundaries = pair["kernels"], pair["boundaries"]
    names = dict.fromkeys(filter(None, (pair["a"], pair["b"])))
    return Difference(
        title=" → ".join(names),
        figures=tuple(
            (title, kind, pair[key]["a"], pair[key]["b"]) for title, kind, key in _FIGURES
        ),
        kernels=_by_size(
            [_one_sided("+", _kernel_row(new, kernel["name"])) for kernel in kernels["appeared"]]
            + [_one_sided("-", _kernel_row(old, kernel["name"])) for kernel in kernels["went"]]
            + [_changed_kernel(change, old, new) for change in kernels["changed"]]
        ),
        boundaries=_by_size(
            [_one_sided("+", _boundary_row(new, one)) for one in boundaries["appeared"]]
            + [_one_sided("-", _boundary_row(old, one)) for one in boundaries["went"]]
            + [_changed_boundary(change, old, new) for change in boundaries["changed"]]
        ),
        same_kernels=kernels["same"],
        same_boundaries=boundaries["same"],
    )


def _by_size(changes: Sequence[Change | None]) -> tuple[Change, ...]:
    """The largest first."""
    known = [change for change in changes if change is not None]
    return tuple(sorted(known, key=lambda change: -abs((change.after or 0) - (change.before or 0))))


def _kernel_row(program: Program | None, name: str) -> Row | None:
    return next((row for row in program.kernels if row["name"] == name), None) if program else None


def _boundary_row(program: Program | None, boundary: Mapping[str, Any]) -> Row | None:
    """The first row of that boundary that is not marked yet: some are alike in all that is told."""
    rows = program.boundaries if program else ()
    wanted = (boundary["producer"], list(boundary["consumers"]))
    shown = tensor(boundary["dtype"], boundary["shape"]) if "producer" in boundary else None
    fitting = [row for row in rows if (row["producer"], row["consumers"]) == wanted]
    exact = [row for row in fitting if row["tensor"] == shown and row["change"] is None]
    return next(iter(exact or fitting), None)


def _one_sided(sign: str, row: Row | None) -> Change | None:
    if row is None:
        return None
    row["change"] = sign
    size = row["bytes"] if "bytes" in row else row["cost"]
    change = _change(sign, row, None, None)
    return dataclasses.replace(change, **{"after" if sign == "+" else "before": size})


def _changed_kernel(
    change: Mapping[str, Any], old: Program | None, new: Program | None
) -> Change | None:
    sides = _kernel_row(old, change["a"]), _kernel_row(new, change["b"])
    return _two_sided(*sides, change["bytes"])


def _changed_boundary(
    change: Mapping[str, Any], old: Program | None, new: Program | None
) -> Change | None:
    def side(key: str) -> Mapping[str, Any]:
        return {**change[key], "dtype": change["dtype"][key], "shape": change["shape"]}

    sides = _boundary_row(old, side("a")), _boundary_row(new, side("b"))
    return _two_sided(*sides, change["bytes"])


def _two_sided(old: Row | None, new: Row | None, size: Mapping[str, int]) -> Change | None:
    for row in (old, new):
        if row is not None:
            row["change"] = "~"
    row = new or old
    return None if row is None else _change("~", row, size["a"], size["b"])


def _change(sign: str, row: Row, before: int | None, after: int | None) -> Change:
    is_boundary = "tensor" in row
    return Change(
        sign=sign,
        what=row["tensor"] if is_boundary else row["name"],
        anchor=row["id"],
        scopes=tuple(row["scopes"]),
        source=row["source"],
        before=before,
        after=after,
        why=f"{row['kind']}: {row['why']}" if is_boundary else row["emitter"],
    )
