"""A document "fusejax.inspect/1" as a view, of modules or of what differs between two reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusejax.report.html.differences import differences, modules_before
from fusejax.report.html.rows import boundary_rows, kernel_rows
from fusejax.report.html.view import Fact, Program, Times, View
from fusejax.report.units import counted, mib

type Document = Mapping[str, Any]


def inspection_view(document: Document) -> View:
    """The view of an inspection."""
    modules = document["modules"]
    pairs = document["diff"]["modules"] if document["diff"] else []
    before = modules_before(pairs)
    programs = [
        _program(number, module, _label(number, modules, before if pairs else None))
        for number, module in enumerate(modules)
    ]
    is_difference = document["diff"] is not None
    name = modules[0]["name"] if modules else "no module"
    names = list(dict.fromkeys(module["name"] for module in modules))
    return View(
        kind="difference" if is_difference else "inspection",
        title=name if len(names) <= 1 else f"{name} and {len(names) - 1} more",
        subtitle="",
        about=tuple(_about(document, before if is_difference else None)),
        facts=tuple([] if is_difference or len(modules) != 1 else _facts(modules[0], programs[0])),
        programs=tuple(programs),
        differences=differences(pairs, modules, programs),
    )


def _label(number: int, modules: Sequence[Document], before: int | None) -> str:
    name = modules[number]["name"]
    if before is not None:
        side = "before" if number < before else "after"
        return side if len(modules) == 2 and before == 1 else f"{side}: {name}"
    same = [place for place, module in enumerate(modules) if module["name"] == name]
    return name if len(same) == 1 else f"{name} ({same.index(number) + 1})"


def _about(document: Document, before: int | None) -> list[tuple[str, str]]:
    modules = document["modules"]
    about = []
    if before is not None:
        for side, part in (("before", modules[:before]), ("after", modules[before:])):
            files = dict.fromkeys(module["file"] for module in part if module["file"])
            about.append((side, ", ".join(files) or "no module"))
    targets = dict.fromkeys(m["target"]["description"] for m in modules if m.get("target"))
    backends = dict.fromkeys(module["backend"] for module in modules)
    if targets:
        about.append(("target", ", ".join(targets)))
    elif backends:
        about.append(("back end", ", ".join(backends)))
    versions = document.get("versions")
    if versions:
        listed = ", ".join(f"{name} {value}" for name, value in versions.items())
        about.append(("versions", listed))
    rates = dict.fromkeys(m["target"]["rates"] for m in modules if m.get("target"))
    if any(rates):
        about.append(("rates", "; ".join(filter(None, rates))))
    if len(modules) == 1 and modules[0]["file"]:
        about.append(("file", modules[0]["file"]))
    return about


def _facts(module: Document, program: Program) -> list[Fact]:
    moved = module["bytes"]
    bound = "≤ " if moved.get("is_bound") else ""
    ratio = f"{module['ratio']:.2f} × the minimum" if module["ratio"] else "read and written"
    facts = [
        Fact(
            "Minimum bytes",
            mib(module["minimum_bytes"]),
            "each input read once, each output written once",
        ),
        Fact("Moved", bound + mib(moved["total"]), ratio),
        Fact("Launches", f"{module['launches']:,}", _boundaries(len(program.boundaries))),
    ]
    if program.predicted_floor_us is not None:
        facts.insert(
            1,
            Fact(
                "Floor, predicted",
                f"{program.predicted_floor_us:,.1f} µs",
                "the minimum at the speed of a copy",
            ),
        )
    if program.times.predicted is not None:
        facts.append(Fact("Time, predicted", f"{program.times.predicted:,.1f} µs", "a run"))
    selected = module.get("selected")
    if selected:
        facts.append(
            Fact(
                f"In scope {selected['scope']}",
                mib(selected["bytes"]["total"]),
                counted(selected["launches"], "launch"),
            )
        )
    return facts


def _program(number: int, module: Document, label: str) -> Program:
    kernels = kernel_rows(number, module["kernels"])
    target = module.get("target")
    speed = (target or {}).get("effective_bandwidth_bytes_per_s")
    return Program(
        label=label,
        note=module["file"] or "",
        kernels=tuple(kernels),
        boundaries=tuple(boundary_rows(number, module["boundaries"], kernels)),
        launches=module["launches"],
        bytes={"is_bound": False, **module["bytes"]},
        minimum_bytes=module["minimum_bytes"],
        times=Times(predicted=(module.get("time_us") or {}).get("predicted")),
        predicted_floor_us=module["minimum_bytes"] / speed * 1e6 if speed else None,
        notes=tuple(module["warnings"]),
        folded=tuple(s["name"] for s in module["scopes"] if s["status"] == "folded"),
        target=target,
    )


def _boundaries(number: int) -> str:
    return f"{number:,} {'boundary' if number == 1 else 'boundaries'}"
