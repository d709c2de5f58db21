"""Where two compiled steps differ, kernel by kernel, told by the model's modules.

A kernel counts for the module of the operation that it ends with: where XLA makes one of a residual
addition and the norm behind it, for the norm. Blocks are added up.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fusejax import predict, rates
from fusejax.compile import aot
from fusejax.compile.targets import Target
from fusejax.hlo import scopes
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analyse import analyse
from fusejax.hlo.analysis import Analysis, Kernel
from fusejax.measure import timing


@dataclasses.dataclass(frozen=True)
class Profile:
    """A compiled step: its kernels, and the time of each."""

    analysis: Analysis
    ends: Mapping[str, str]
    """By the name of the kernel, the scope of the operation that it ends with."""
    us: Mapping[str, float | None]
    """By the name of the kernel, µs of one launch: measured on a GPU of this machine, else
    predicted; None where it is not known."""
    total_us: float | None
    """Of all kernels; measured also where some cannot be told apart."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What some kernels cost in a step."""

    launches: int = 0
    bytes: int = 0
    us: float = 0.0
    """Of those whose time is known."""

    def __add__(self, other: "Share") -> "Share":
        return Share(self.launches + other.launches, self.bytes + other.bytes, self.us + other.us)


class Place(NamedTuple):
    """Where in the model a kernel comes from."""

    module: str
    """Such as block_*/mlp/up."""
    part: str
    """fwd, bwd, or nothing for the optimizer."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Kernels that one step has more of than the other, alike but for their block."""

    step: str
    name: str
    emitter: str
    place: Place
    share: Share


def profiles(
    steps: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], target: Target
) -> dict[str, Profile]:
    """Compiles the steps, and on a GPU of this machine times their kernels, in turn.

    Args:
      steps: Python functions of the same arguments. They are compiled without donation, since a
        timed step runs on the same arguments again.
      arguments: arrays, or `jax.ShapeDtypeStruct`s where nothing is to run.
      target: what to compile for.
    """
    # CUDA graphs would hide which kernel took how long.
    options = timing.GRAPHS_OFF if target.kind == "device" else None
    compiled = {
        name: aot.compile_program(step, arguments, target, options) for name, step in steps.items()
    }
    found = {name: analyse(one.program) for name, one in compiled.items()}
    if target.kind == "device":
        programs = {name: one.executable for name, one in compiled.items()}
        measured = timing.device_times(programs, arguments, rounds=4, iterations=4)
        times = {name: _measured(measured[name], one.kernels) for name, one in found.items()}
    else:
        times = {name: _predicted(one.kernels, target) for name, one in found.items()}
    return {
        name: Profile(one, _ends(one.kernels, compiled[name].program.hlo), *times[name])
        for name, one in found.items()
    }


def by_module(profiles: Mapping[str, Profile]) -> dict[str, dict[Place, Share]]:
    """What each module costs, of each step."""
    modules = _common(profiles)
    found: dict[str, dict[Place, Share]] = {}
    for name, profile in profiles.items():
        shares: dict[Place, Share] = defaultdict(Share)
        for kernel in profile.analysis.kernels:
            shares[_place(kernel, profile, modules)] += _share(kernel, profile)
        found[name] = dict(shares)
    return found


def only_in_one(profiles: Mapping[str, Profile]) -> list[Group]:
    """Kernels without a counterpart in the other of two steps, most bytes first.

    A counterpart is of the same module, emitter and bytes: XLA's names are not the same for long.
    """
    modules = _common(profiles)
    kernels = {
        name: [
            (_place(k, profile, modules), k.emitter, _bytes(k), k) for k in profile.analysis.kernels
        ]
        for name, profile in profiles.items()
    }
    counts = {name: Counter(key[:3] for key in keys) for name, keys in kernels.items()}
    first, second = profiles
    found: list[Group] = []
    for step, other in ((first, second), (second, first)):
        surplus = counts[step] - counts[other]
        shares: dict[tuple[str, str, Place], Share] = defaultdict(Share)
        for place, emitter, size, kernel in kernels[step]:
            if surplus[place, emitter, size] > 0:
                surplus[place, emitter, size] -= 1
                name = re.sub(r"([._]\d+)+$", "", kernel.name)
                shares[name, emitter, place] += _share(kernel, profiles[step])
        found += [Group(step, *key, share) for key, share in shares.items()]
    return sorted(found, key=lambda group: -group.share.bytes)


def to_json(profiles: Mapping[str, Profile], target: Target) -> dict[str, Any]:
    """What the tables show, and every kernel."""
    modules = by_module(profiles)
    return {
        "target": target.title,
        "time": _source(target),
        "steps": {
            name: {
                "launches": one.analysis.launches,
                "bytes": one.analysis.traffic.total,
                "us": one.total_us,
                "modules": [
                    place._asdict() | dataclasses.asdict(share)
                    for place, share in modules[name].items()
                ],
                "kernels": [
                    {
                        "name": kernel.name,
                        "emitter": kernel.emitter,
                        "scopes": list(kernel.scopes),
                        "count": kernel.count,
                        "bytes": _bytes(kernel),
                        "us": one.us[kernel.name],
                    }
                    for kernel in one.analysis.kernels
                ],
            }
            for name, one in profiles.items()
        },
        "only_in_one": [
            dataclasses.asdict(group) | {"place": group.place._asdict()}
            for group in only_in_one(profiles)
        ],
    }


def print_tables(
    profiles: Mapping[str, Profile], target: Target, console: Console, most: int = 24
) -> None:
    """The modules that differ most, and the kernels that only one of two steps has."""
    console.print(_modules_table(profiles, target, most))
    console.print()
    console.print(_groups_table(only_in_one(profiles), most))
    unknown = sum(us is None for one in profiles.values() for us in one.us.values())
    if target.kind == "device" and unknown:
        console.print(
            f"{unknown} kernels could not be told apart by their names (library products, mostly): "
            "their times are in those of the whole step only."
        )


def _modules_table(profiles: Mapping[str, Profile], target: Target, most: int) -> Table:
    first, second = profiles
    shares = by_module(profiles)
    pairs = {
        place: (shares[first].get(place, Share()), shares[second].get(place, Share()))
        for place in [*shares[first], *shares[second]]
    }
    differ = {place: (a, b) for place, (a, b) in pairs.items() if a != b}

    def change(place: Place) -> tuple[float, int]:
        a, b = differ[place]
        return abs(b.us - a.us), abs(b.bytes - a.bytes)

    table = _table(
        f"A step on {target.title}: modules that differ ({len(differ)} of {len(pairs)}), "
        "largest difference first",
        ("\nmodule", "left"), ("", "left"),
        (f"launches\n{first}", "right"), (f"\n{second}", "right"),
        (f"MiB moved\n{first}", "right"), (f"\n{second}", "right"),
        (f"µs, {_source(target)}\n{first}", "right"), (f"\n{second}", "right"),
        ("\ndiff", "right"),
    )  # fmt: skip
    for place in sorted(differ, key=change, reverse=True)[:most]:
        table.add_row(*place, *_cells(*differ[place]))
    whole = [
        Share(one.analysis.launches, one.analysis.traffic.total, one.total_us or 0.0)
        for one in profiles.values()
    ]
    table.add_row("whole step", "", *_cells(*whole), style="bold")
    return table


def _cells(a: Share, b: Share) -> list[str]:
    times = [f"{a.us:,.0f}", f"{b.us:,.0f}", f"{b.us - a.us:+,.0f}"] if a.us or b.us else [""] * 3
    return [str(a.launches), str(b.launches), _mib(a.bytes), _mib(b.bytes), *times]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _groups_table(groups: Sequence[Group], most: int) -> Table:
    shown = f", largest {most} of {len(groups)}" if len(groups) > most else ""
    table = _table(
        f"Kernels that only one of them has{shown}",
        ("layers", "left"), ("module", "left"), ("", "left"), ("emitter", "left"),
        ("launches", "right"), ("MiB moved", "right"), ("µs", "right"), ("kernel", "left"),
    )  # fmt: skip
    for group in groups[:most]:
        share = group.share
        table.add_row(
            group.step, *group.place, group.emitter, str(share.launches), _mib(share.bytes),
            f"{share.us:,.0f}" if share.us else "", _shortened(group.name),
        )  # fmt: skip
    return table


def _shortened(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _source(target: Target) -> str:
    return "measured" if target.kind == "device" else "predicted"


def _bytes(kernel: Kernel) -> int:
    return kernel.traffic.total * kernel.count


def _share(kernel: Kernel, profile: Profile) -> Share:
    us = profile.us[kernel.name]
    return Share(kernel.count, _bytes(kernel), (us or 0.0) * kernel.count)


def _common(profiles: Mapping[str, Profile]) -> frozenset[str]:
    """Modules that all steps name: what a layer names inside itself is not among them."""
    return frozenset.intersection(
        *(
            frozenset(
                outer
                for kernel in profile.analysis.kernels
                for scope in (profile.ends[kernel.name], *kernel.scopes)
                for outer in _outwards(scope)
            )
            for profile in profiles.values()
        )
    )


def _place(kernel: Kernel, profile: Profile, modules: frozenset[str]) -> Place:
    end = profile.ends[kernel.name]
    module = next((outer for outer in _outwards(end) if outer in modules), "(none)")
    if module == "optimizer":
        return Place(module, "")
    return Place(module, "fwd" if kernel.direction in (None, "forward") else "bwd")


def _outwards(scope: str) -> Iterator[str]:
    """The module of a scope, then that around it and so on, without the model's own name."""
    # XLA joins the names of operations that it merges by semicolons.
    parts = [part for part in scope.rpartition(";")[2].split("/") if part not in ("", "GPT")]
    path = re.sub(r"(?<=^block_)\d+", "*", "/".join(part for part in parts if "(" not in part))
    while path:
        yield path
        path = path.rpartition("/")[0]


def _ends(kernels: Sequence[Kernel], hlo: str) -> Mapping[str, str]:
    """A fusion is named after its last operation; some are not named at all."""
    named = {
        instruction.name: scopes.scope(instruction.op_name)
        for computation in hlo_text.read_module(hlo).computations.values()
        for instruction in computation.instructions
    }
    return {
        kernel.name: named.get(kernel.name) or next(reversed(kernel.scopes), "")
        for kernel in kernels
    }


def _measured(
    measured: timing.DeviceTime, kernels: Sequence[Kernel]
) -> tuple[Mapping[str, float | None], float]:
    if len(measured.kernels) == len(kernels) and all(kernel.count == 1 for kernel in kernels):
        pairs = zip(kernels, measured.kernels, strict=True)
        return {kernel.name: timed.median_us for kernel, timed in pairs}, measured.median_us
    return timing.kernel_us(measured, kernels), measured.median_us


def _predicted(
    kernels: Sequence[Kernel], target: Target
) -> tuple[Mapping[str, float | None], float | None]:
    known = rates.of(target)
    if known is None:
        return dict.fromkeys((kernel.name for kernel in kernels), None), None
    costs = [cost.kernels_us for cost in predict.kernel_costs(kernels, known)]
    pairs = zip(kernels, costs, strict=True)
    return {kernel.name: us / kernel.count for kernel, us in pairs}, sum(costs)
