"""A document "fusejax.compare/1" as a view."""

from collections.abc import Mapping
from typing import Any

from fusejax.report.html.rows import boundary_rows, kernel_rows
from fusejax.report.html.view import Fact, Program, Times, View
from fusejax.report.units import clock_sentence, mib

type Document = Mapping[str, Any]

_KINDS = {
    "device": "a GPU of the machine that measured",
    "deviceless": "compiled for, not run on",
    "cpu": "no GPU: bytes and times are the CPU's",
}


def comparison_view(document: Document) -> View:
    """The view of a comparison of paths or functions."""
    target = document["target"]
    floor = _floor_us(document["minimum_bytes"], target)
    programs = [
        _program(number, name, path, document, floor)
        for number, (name, path) in enumerate(document["paths"].items())
    ]
    shape = ", ".join(map(str, document["shape"]))
    about = [
        ("target", f"{target['description']} ({_KINDS.get(target['kind'], target['kind'])})"),
        ("versions", ", ".join(f"{name} {value}" for name, value in document["versions"].items())),
    ]
    if document["dtype"]:
        about.insert(0, ("input", f"{document['dtype']}[{shape}], {document['mode']}"))
    if target.get("rates"):
        about.append(("rates", target["rates"]))
    if document["mode"] != "forward" and not document["dtype"]:
        about.append(("mode", document["mode"]))
    about += [(name, str(value)) for name, value in (document.get("options") or {}).items()]
    about += [(name, str(value)) for name, value in (document.get("xla_options") or {}).items()]
    return View(
        kind="comparison",
        title=document["op"],
        subtitle=document.get("formula", ""),
        about=tuple(about),
        facts=tuple(_facts(document, floor)),
        programs=tuple(programs),
        measured_floor_us=document.get("copy_floor_us"),
        verdict=document["verdict"],
        sheet=document.get("traffic_sheet"),
        what_if=tuple(document.get("what_if") or ()),
        notes=tuple(_notes(document)),
    )


def _floor_us(minimum_bytes: int, target: Mapping[str, Any] | None) -> float | None:
    speed = (target or {}).get("effective_bandwidth_bytes_per_s")
    return minimum_bytes / speed * 1e6 if speed else None


def _facts(document: Document, predicted_floor: float | None) -> list[Fact]:
    facts = [
        Fact(
            "Minimum bytes",
            mib(document["minimum_bytes"]),
            "each input read once, each output written once",
        )
    ]
    measured_floor = document.get("copy_floor_us")
    if measured_floor is not None:
        facts.append(
            Fact("Floor, measured", _us(measured_floor), "a copy of these bytes, in the same run")
        )
    elif predicted_floor is not None:
        facts.append(
            Fact("Floor, predicted", _us(predicted_floor), "these bytes at the speed of a copy")
        )
    verdict = document["verdict"]
    if verdict is not None:
        fastest = document["paths"][verdict["fastest"]]
        times = fastest["time_us"]
        basis = verdict["basis"]
        figure = {"measured": times.get("end_to_end"), "predicted": times["predicted"]}.get(basis)
        moved = fastest["bytes"]["modelled"]["total"]
        facts.append(
            Fact(
                f"Fastest, {basis}",
                verdict["fastest"],
                f"{_us(figure)} a call" if figure is not None else f"{mib(moved)} moved",
            )
        )
    return facts


def _program(
    number: int, name: str, path: Mapping[str, Any], document: Document, floor: float | None
) -> Program:
    kernels = kernel_rows(number, path["kernels"])
    times = path["time_us"]
    notes = [*path.get("warnings", ())]
    if path.get("attribution"):
        notes.insert(0, f"kernels take more, or less, than predicted: {path['attribution']}")
    is_on_card = document["target"]["kind"] == "device"
    return Program(
        label=name,
        note="",
        kernels=tuple(kernels),
        boundaries=tuple(boundary_rows(number, path["boundaries"], kernels)),
        launches=path["launches"],
        bytes={"is_bound": False, **path["bytes"]["modelled"]} if path["bytes"] else None,
        minimum_bytes=document["minimum_bytes"],
        times=Times(
            predicted=times["predicted"],
            measured=times["end_to_end"],
            kernels=times["measured"] if is_on_card else None,
            low=times["low"],
            high=times["high"],
        ),
        predicted_floor_us=floor,
        counted=path["bytes"]["measured"] if path["bytes"] else None,
        programs=path.get("programs"),
        compile_s=path["compile_s"],
        executable_bytes=path["executable_bytes"],
        error=path["error"],
        refusal=path["reason"] if path["status"] != "ok" else None,
        notes=tuple(notes),
        target=document["target"],
    )


def _notes(document: Document) -> list[str]:
    notes = list(document.get("notes") or ())
    if document["target"]["kind"] == "deviceless":
        notes.append(
            "Compiled for a card that is not there: times are predicted, none was measured."
        )
    if document.get("clocks"):
        notes.append(clock_sentence(document["clocks"]))
    errors = [path["error"] for path in document["paths"].values() if path["error"]]
    if errors:
        where = ", ".join(dict.fromkeys(error.get("where", "") for error in errors if error))
        notes.append(
            "Relative error: the largest error against float64 over the largest value, "
            f"{errors[0]['rows']} rows, run on: {where}."
        )
    differences = list((document.get("differences") or {}).items())
    if len(differences) > 1:
        told = ", ".join(f"{name} by {value:.1e}" for name, value in differences[1:])
        notes.append(
            f"Results differ from those of {differences[0][0]}, over the largest value: {told}."
        )
    return notes


def _us(time: float) -> str:
    return f"{time:,.1f} µs"
