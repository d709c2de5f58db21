"""Comparisons, as documents "fusejax.compare/1", in Markdown: for pages that stay."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.units import clock_sentence, mib, tensor

type Document = Mapping[str, Any]


def comparison_section(document: Document) -> str:
    """One comparison: its paths, its kernels, its boundaries, and what they say."""
    shape = "x".join(map(str, document["shape"]))
    parts = [
        f"## {document['op']}, {document['dtype']} {shape}, {document['mode']}",
        f"`{document['formula']}`",
        _paths_table(document),
        _kernels_table(document),
        _boundaries_table(document),
        _does_splitting_win(document),
        _conclusion(document),
    ]
    return "\n\n".join(part for part in parts if part)


def origin(documents: Sequence[Document], command: str) -> str:
    """Which card and versions, and the command that makes the page again."""
    target, versions = documents[0]["target"], documents[0]["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = "measured on" if target["kind"] == "device" else "compiled, not run, for"
    return f"Made by `{command}`: {where} {target['description']}, {listed}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _served(document: Document) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, path) for name, path in document["paths"].items() if path["status"] == "ok"]


def _paths_table(document: Document) -> str:
    rows = []
    for name, path in _served(document):
        times, error = path["time_us"], path["error"]
        rows.append(
            [
                name,
                str(path["launches"]),
                _megabytes(path["bytes"]["modelled"]),
                _megabytes(path["bytes"]["measured"]),
                _number(times["predicted"]),
                _number(times["measured"]),
                _number(times["end_to_end"]),
                f"{path['compile_s']['cold']:.2f}",
                f"{error['max_rel']:.1e}" if error else "",
            ]
        )
    head = [
        "path", "launches", "MB read + written, modelled", "counted", "µs predicted",
        "µs kernels", "µs end to end", "s compile, cold", "relative error",
    ]  # fmt: skip
    text = table(head, rows)
    for name, path in document["paths"].items():
        if path["status"] != "ok":
            text += f"\n\n{name}: {path['reason']}"
    if document["copy_floor_us"] is not None:
        text += (
            f"\n\nA copy of the bytes that must move ({document['minimum_bytes'] / 1e6:,.1f} MB) "
            f"took {document['copy_floor_us']:,.1f} µs in the same run."
        )
    if document.get("clocks"):
        text += f"\n\n{clock_sentence(document['clocks'])}"
    return text


def _kernels_table(document: Document) -> str:
    rows = [
        [
            name,
            kernel["name"],
            kernel["emitter"],
            ", ".join(kernel["scopes"]),
            _number(kernel["time_us"]),
            _whole(kernel["registers"]),
            _whole(kernel["spill_bytes"]),
            _whole(kernel["shared_bytes"]),
            _share(kernel["occupancy"]),
            _share(kernel.get("measured_occupancy")),
            _share(kernel.get("measured_dram")),
            _share(kernel.get("measured_issue")),
            _share(kernel.get("measured_tensor_pipe")),
        ]
        for name, path in _served(document)
        for kernel in path["kernels"]
    ]
    head = [
        "path", "kernel", "emitter", "scopes", "µs", "registers", "spilled B", "shared B",
        "occupancy", "achieved", "DRAM", "issue", "tensor",
    ]  # fmt: skip
    return table(head, rows)


def _boundaries_table(document: Document) -> str:
    rows = [
        [
            name,
            tensor(boundary["dtype"], boundary["shape"]),
            mib(boundary["written_bytes"]) if boundary["written_bytes"] else "(a result)",
            mib(boundary["read_bytes"]),
            f"{boundary['producer']} to {', '.join(boundary['consumers'])}",
            f"{boundary['reason']['kind']}: {boundary['reason']['text']}",
        ]
        for name, path in _served(document)
        for boundary in path["boundaries"]
    ]
    head = ["path", "boundary", "written", "read again", "kernels", "why"]
    return table(head, rows) if rows else ""


def _does_splitting_win(document: Document) -> str:
    """A paragraph: split against fused, by time, bytes, launches and what the kernels wait for."""
    served = dict(_served(document))
    sentences = [
        _split_against(split, served[split], fused, served[fused])
        for split, fused in (("split", "xla"), ("split", "pallas"), ("pallas_split", "pallas"))
        if split in served and fused in served
    ]
    return f"**Does splitting win?** {' '.join(sentences)}" if sentences else ""


def _split_against(
    name: str, split: Mapping[str, Any], other: str, fused: Mapping[str, Any]
) -> str:
    times = [path["time_us"] for path in (split, fused)]
    measured = all(time["end_to_end"] is not None for time in times)
    field = "end_to_end" if measured else "predicted"
    before, after = (time[field] for time in times)
    if before is None or after is None:
        return ""
    answer = "Yes" if before < after else "No"
    basis = "measured end to end" if measured else "predicted"
    told = f"{answer}, {name} against {other}: {before:,.1f} against {after:,.1f} µs ({basis})."
    differences = [
        _more(split["bytes"][kind]["total"] - fused["bytes"][kind]["total"], word)
        for kind, word in (("modelled", "by the model"), ("measured", "by the card's counters"))
        if split["bytes"][kind] and fused["bytes"][kind]
    ]
    launches = split["launches"] - fused["launches"]
    told += f" Splitting moves {', '.join(differences)}, and launches "
    told += f"{abs(launches)} {'more' if launches > 0 else 'fewer'}." if launches else "as often."
    waits = [
        f"{owner}'s longest kernel {busy}"
        for owner, path in ((name, split), (other, fused))
        if (busy := _busy(path))
    ]
    return f"{told} {'; '.join(waits)}." if waits else told


def _more(size: int, source: str) -> str:
    return (
        f"{mib(abs(size))} {'more' if size > 0 else 'less'} {source}"
        if size
        else f"as much {source}"
    )


def _busy(path: Mapping[str, Any]) -> str:
    """What the kernel that takes longest keeps busy, as the counters saw it."""
    timed = [kernel for kernel in path["kernels"] if kernel["time_us"] is not None]
    if not timed:
        return ""
    longest = max(timed, key=lambda kernel: kernel["time_us"])
    if longest.get("measured_dram") is None or longest.get("measured_issue") is None:
        return ""
    memory, issue = longest["measured_dram"], longest["measured_issue"]
    spilled = f"{longest['spill_bytes']} B spilled" if longest["spill_bytes"] else "no spills"
    return (
        f"({longest['time_us']:,.1f} µs) keeps the memory {memory:.0%} and the issue slots "
        f"{issue:.0%} busy, with {longest['measured_occupancy']:.0%} of the warps, {spilled}"
    )


def _conclusion(document: Document) -> str:
    verdict = document["verdict"]
    if verdict is None:
        return ""
    lines = [f"**{verdict['summary']}**"]
    lines += [
        f"- {step['from']} to {step['to']}: {step['explanation']}."
        for step in verdict["comparisons"]
    ]
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _megabytes(moved: Mapping[str, int] | None) -> str:
    return f"{moved['read'] / 1e6:,.1f} + {moved['written'] / 1e6:,.1f}" if moved else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _whole(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
