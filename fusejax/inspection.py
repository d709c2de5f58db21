"""Kernels, boundaries and warnings of compiled programs: of a function, of files, of dump folders.

report = fusejax.inspect(f, x, target="h100")
print(report)
report.modules[0].boundaries[0].reason.text
"""

import dataclasses
import itertools
import os
import pathlib
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fusejax.compile import targets
from fusejax.compile.targets import Target
from fusejax.errors import UsageError
from fusejax.hlo import diff as hlo_diff
from fusejax.hlo import scopes
from fusejax.hlo import text as hlo_text
from fusejax.hlo.analyse import analyse, analyse_module, to_json
from fusejax.hlo.analysis import Analysis, Boundary, Kernel, total_launches
from fusejax.program import Program

SCHEMA = "fusejax.inspect/1"

# Names of scopes inside a Pallas kernel never come out of it.
_KERNELS = frozenset(("pallas_call", "core_map", "mpmd_map"))
_MLIR = re.compile(r"\s*+(?:#[^\n]*+\s*+)*+module(?:\s++@|\s*+\{|\s++attributes\b)")


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One module: what was found in it and where it came from."""

    analysis: Analysis
    file: str | None = None
    """Path of the text, "-" for standard input, None for what was compiled here."""
    resources: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Per kernel name what is known of registers, shared memory, grid and occupancy."""
    target: Target | None = None
    """What it was compiled for; None where neither the text nor a file beside it tells."""
    scope: str | None = None
    """The scope that `kernels`, `boundaries` and `scopes` are limited to."""

    @property
    def name(self) -> str:
        """Name of the module."""
        return self.analysis.name

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In launch order."""
        return tuple(k for k in self.analysis.kernels if self._holds(k.scopes))

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """Largest cost first."""
        return tuple(b for b in self.analysis.boundaries if self._holds(b.scopes))

    @property
    def launches(self) -> int:
        """Launches per run of the kernels in `kernels`."""
        return total_launches(self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that the kernels in `kernels` read and write per run."""
        return sum(map(hlo_diff.kernel_bytes, self.kernels))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is worth acting on."""
        return self.analysis.warnings

    def selected(self) -> Analysis:
        """The analysis with only what belongs to the scope."""
        if self.scope is None:
            return self.analysis
        return dataclasses.replace(
            self.analysis,
            kernels=self.kernels,
            boundaries=self.boundaries,
            scopes=tuple(s for s in self.analysis.scopes if self._holds((s.name,))),
        )

    def to_json(self) -> dict[str, Any]:
        """One entry of "modules". Totals stay the module's where a scope limits the lists."""
        from fusejax import predict, rates
        from fusejax.report.predictions import predicted_us, target_json

        rate = rates.of(self.target) if self.target else None
        predicted = predicted_us(self.analysis.kernels, rate)
        known = {
            kernel.name: {**self.resources.get(kernel.name, {}), "predicted_us": time}
            for kernel, time in zip(self.analysis.kernels, predicted, strict=True)
        }
        document = to_json(self.selected(), file=self.file, resources=known)
        cost = None if rate is None else predict.path_cost(self.analysis.kernels, 1, rate)
        document["target"] = target_json(self.target) if self.target else None
        document["time_us"] = {
            "predicted": cost.total_us if cost else None,
            "predicted_terms": dataclasses.asdict(cost) if cost else None,
        }
        if self.scope is not None:
            whole = to_json(self.analysis)
            document["selected"] = {
                "scope": self.scope,
                "launches": document["launches"],
                "bytes": document["bytes"],
            }
            document |= {key: whole[key] for key in ("launches", "bytes", "ratio")}
        return document

    def _holds(self, paths: Sequence[str]) -> bool:
        return self.scope is None or any(scopes.holds(path, self.scope) for path in paths)


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was inspected, in order, and what differs where two things were compared."""

    modules: tuple[Inspected, ...]
    diff: tuple[hlo_diff.ModuleDiff, ...] | None = None
    before: int = 0
    """Of two things that were compared: how many of the modules are the first's."""

    def to_json(self) -> dict[str, Any]:
        """The document of the "fusejax.inspect/1" schema."""
        return {
            "schema": SCHEMA,
            "versions": _versions(compiled_here=any(m.file is None for m in self.modules)),
            "modules": [module.to_json() for module in self.modules],
            "diff": None if self.diff is None else hlo_diff.diff_json(self.diff),
        }

    def save_html(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the report as one page, `index.html` in a folder of its own, and returns its path.

        Needs the extra `report`. An earlier report in the folder is replaced.

        Raises:
          UsageError: the folder holds other files or cannot be written to, or the extra is missing.
        """
        from fusejax.report import html

        return html.save(self.to_json(), folder, flag="save_html")

    def __str__(self) -> str:
        from fusejax.report.inspection_console import as_text

        return as_text(self)


def _versions(*, compiled_here: bool) -> dict[str, str]:
    """Who says so. Which JAX made a text is not in it."""
    from fusejax import __version__

    found = {"fusejax": __version__}
    if compiled_here:
        import jax
        import jaxlib

        found |= {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return found


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a module may do; None for no limit."""

    kernels: int | None = None
    """Launches per run."""
    bytes: int | None = None
    """Bytes that all kernels read and write per run."""
    boundary_bytes: int | None = None
    """Bytes written and read again at all boundaries together, per run."""


def inspect(function: Callable[..., Any], *arguments: Any, target: str | Any = "h100") -> Report:
    """Compiles a function for a target and shows its kernels and boundaries.

    Args:
      function: jitted or not.
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them, and static arguments of a
        jitted function; bind those that go by name with `functools.partial`. It is compiled for
        one device: arrays that are split over several are taken whole.
      target: "h100", "a100", "h200", "b200", "cpu", "device", "auto" or a description's file.

    Raises:
      UsageError: the target is unknown, or cannot be compiled for here.
      Whatever tracing, lowering or compiling `function` raises.
    """
    from fusejax.compile import aot, platform

    platform.prepare_process()
    chosen = targets.resolve(target)[0] if isinstance(target, str) else target
    program = aot.compile_program(function, arguments, chosen).program
    lowered_for = "cpu" if chosen.kind == "cpu" else "cuda"
    with aot.compiling_for(chosen):
        expected = traced_scopes(function, arguments, lowered_for)
    found = analyse(program, expected_scopes=expected)
    used = _resources(program, found, chosen.description)
    return Report((Inspected(found, None, used, chosen),))


def traced_scopes(
    function: Callable[..., Any], arguments: Sequence[Any], platform: str
) -> tuple[str, ...]:
    """The named scopes in which a function has operations, in order of their first one.

    Args:
      platform: what it is lowered for, "cuda" for example. Of `jax.lax.platform_dependent` only
        that platform's branch counts, although all are traced.
    """
    import jax

    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*arguments)
    traced = getattr(traced, "traced", traced)  # of nnx.jit, which keeps JAX's inside its own
    found: dict[str, None] = {}
    seen: set[tuple[int, str]] = set()

    def visit(jaxpr: Any, outer: str) -> None:
        if (id(jaxpr), outer) in seen:
            return
        seen.add((id(jaxpr), outer))
        for equation in jaxpr.eqns:
            name = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
            is_kernel = equation.primitive.name in _KERNELS
            inner = [] if is_kernel else list(inner_programs(_lowered(equation.params, platform)))
            if not inner and (scope := scopes.scope(f"{name}/{equation.primitive.name}")):
                found[scope] = None
            for jaxpr_inside in inner:
                visit(jaxpr_inside, name)

    visit(traced.jaxpr.jaxpr, "")
    return tuple(found)


def _lowered(params: Mapping[str, Any], platform: str) -> tuple[Any, ...]:
    """An equation's parameters without the branches that are for other platforms."""
    platforms = params.get("branches_platforms")
    if platforms is None:
        return tuple(params.values())
    fitting = (
        branch
        for branch, names in zip(params["branches"], platforms, strict=True)
        if names is None or platform in names
    )
    return tuple(itertools.islice(fitting, 1))


def inner_programs(values: Iterable[Any]) -> Iterator[Any]:
    """The programs among the parameters of an equation, those in tuples and lists too."""
    for value in values:
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value.jaxpr
        elif isinstance(value, tuple | list):
            yield from inner_programs(value)


def inspect_paths(
    paths: Sequence[str], *, scope: str | None = None, compare: bool = False
) -> Report:
    """Inspects HLO texts and dump folders.

    Args:
      paths: files, folders or "-" for standard input.
      scope: limits kernels and boundaries to those with instructions of this scope.
      compare: whether to tell what differs; takes two paths.

    Raises:
      UsageError: something cannot be read. The message names the file, the line and what was
        expected there.
    """
    groups = [tuple(_inspect_path(path)) for path in paths]
    modules = tuple(
        dataclasses.replace(module, scope=scope) for group in groups for module in group
    )
    if scope is not None and not any(m.kernels or m.selected().scopes for m in modules):
        names = dict.fromkeys(s.name for m in modules for s in m.analysis.scopes)
        known = ", ".join(list(names)[:12]) + (", ..." if len(names) > 12 else "")
        raise UsageError(
            f"--scope {scope!r} is in no module: "
            + (f"give one of {known}" if names else "the modules name no scopes")
        )
    if not compare:
        return Report(modules)
    before = len(groups[0])
    a, b = ([m.selected() for m in part] for part in (modules[:before], modules[before:]))
    return Report(modules, hlo_diff.compare(a, b), before)


def exceeded(report: Report, limits: Limits) -> tuple[str, ...]:
    """What is over a limit, a line each: which module, by how much, and what is to blame.

    Each module is held against the limits on its own; where a scope was asked for, only what
    belongs to the scope counts; where two things were compared, only the second is held.
    """
    held = report.modules[report.before :]
    return tuple(line for module in held for line in _exceeded(module, limits))


def _exceeded(module: Inspected, limits: Limits) -> Iterator[str]:
    where = f"{module.name}" + (f" ({module.file})" if module.file else "")
    if module.scope is not None:
        where += f", scope {module.scope}"
    if limits.kernels is not None and module.launches > limits.kernels:
        names = [k.name + (f" x{k.count}" if k.count > 1 else "") for k in module.kernels]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        yield (
            f"{where}: {module.launches} launches, {module.launches - limits.kernels} over "
            f"--max-kernels {limits.kernels}: {shown}"
        )
    if limits.bytes is not None and module.bytes > limits.bytes:
        most = max(module.kernels, key=hlo_diff.kernel_bytes)
        yield (
            f"{where}: {module.bytes:,} bytes read and written, {module.bytes - limits.bytes:,} "
            f"over --max-bytes {limits.bytes:,}: most by {most.name} "
            f"({hlo_diff.kernel_bytes(most):,})"
        )
    crossing = sum(map(hlo_diff.boundary_bytes, module.boundaries))
    if limits.boundary_bytes is not None and crossing > limits.boundary_bytes:
        most_crossing = module.boundaries[0]
        yield (
            f"{where}: {crossing:,} bytes written and read again at boundaries, "
            f"{crossing - limits.boundary_bytes:,} over --max-boundary-bytes "
            f"{limits.boundary_bytes:,}: most at {most_crossing.dtype}"
            f"[{','.join(map(str, most_crossing.shape))}] from {most_crossing.producer} to "
            f"{', '.join(most_crossing.consumers)} ({hlo_diff.boundary_bytes(most_crossing):,})"
        )


def _inspect_path(path: str) -> Iterator[Inspected]:
    if path == "-":
        yield from _inspect_text(path, sys.stdin.buffer.read(), Program("", ""))
        return
    place = pathlib.Path(path)
    from fusejax.compile.dump import backend_of, read_folder

    if place.is_dir():
        found = read_folder(place)
        if not found:
            below = [f.name for f in sorted(place.iterdir()) if f.is_dir() and read_folder(f)]
            hint = f"; give one of its folders: {', '.join(below[:8])}" if below else ""
            raise UsageError(
                f"{path}: this folder holds no module: expected *after_optimizations.txt, as "
                f"XLA_FLAGS=--xla_dump_to=FOLDER writes it{hint}"
            )
        for file, program in found:
            text = program.hlo.encode(errors="surrogateescape")
            yield from _inspect_text(str(file), text, program)
        return
    try:
        mode = place.stat().st_mode
        is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        data = b"" if is_device else place.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): expected an HLO text file, a dump folder "
            "or - for standard input"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path!r} is not the name of a file ({error})") from error
    if is_device:
        raise UsageError(f"{path} is a device: expected a file, a folder or -")
    yield from _inspect_text(path, data, Program("", "", backend=backend_of(place.name)))


def _inspect_text(file: str, data: bytes, program: Program) -> Iterator[Inspected]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{file}: line {line}: expected HLO text, found the byte 0x{data[error.start]:02x}, "
            "which is not UTF-8"
        ) from error
    if _MLIR.match(text):
        raise UsageError(
            f"{file}: line 1: expected HLO text, found MLIR (StableHLO): give "
            "lowered.as_text('hlo'), or compiled.as_text() for what is launched in the end"
        )
    try:
        modules = hlo_text.read_modules(text)
        for module in modules:
            # Side files and the text's own payloads belong to the only module of a text.
            own = text if len(modules) == 1 else ""
            source = dataclasses.replace(program, name=module.name, hlo=own)
            found = analyse_module(module, source)
            used = _resources(source, found, source.target_config)
            card = targets.from_description(source.target_config) if source.target_config else None
            yield Inspected(found, file, used, card)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _resources(
    program: Program, analysis: Analysis, description: str | None
) -> dict[str, dict[str, Any]]:
    from fusejax.resources import kernel_resources, limits_of

    if not program.launch_order and not program.ptx and "mosaic_gpu" not in program.hlo:
        return {}
    limits = limits_of(description) if description else None
    try:
        found = kernel_resources(program, analysis.kernels, limits)
    except ValueError:  # a damaged thunk sequence or PTX counts as none
        return {}
    return {name: resources.to_json() for name, resources in found.items()}
