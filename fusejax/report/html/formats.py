"""How the page writes quantities; `templates/formats.js` writes the same."""

from fusejax.report.units import mib

NOT_KNOWN = "–"


def size(value: int | None) -> str:
    """Bytes as "512.0 MiB"."""
    return NOT_KNOWN if value is None else mib(value)


def count(value: int | None) -> str:
    """A whole number with separators."""
    return NOT_KNOWN if value is None else f"{value:,}"


def us(value: float | None) -> str:
    """µs without their unit, which the column's title has."""
    return NOT_KNOWN if value is None else f"{value:,.1f}"


def share(value: float | None) -> str:
    """0 to 1 in percent."""
    return NOT_KNOWN if value is None else f"{value * 100:.0f} %"


def flops(value: float | None) -> str:
    """Operations as "1.2 G"."""
    if value is None:
        return NOT_KNOWN
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f}"


def change(before: int | None, after: int | None, kind: str, *, share: bool = True) -> str:
    """A difference with its sign, in percent too; empty where one side is not known."""
    if before is None or after is None:
        return ""
    delta = after - before
    if delta == 0:
        return "no change"
    sign = "+" if delta > 0 else "−"
    told = mib(abs(delta)) if kind == "bytes" else f"{abs(delta):,}"
    percent = abs(delta) / before * 100 if before and share else None
    return f"{sign}{told}" + (f" ({sign}{percent:,.0f} %)" if percent is not None else "")
