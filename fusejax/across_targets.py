"""Ops, or a function, compiled for several cards that are not there, and held against one another.

Every generation of GPUs has a process of its own: JAX 0.11 assembles Pallas kernels for one only,
and compiling keeps little more than one core busy. Each path is compiled once, and nothing is run.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusejax.errors import UsageError

SCHEMA = "fusejax.targets/1"


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be compared on every card, in values that JSON knows."""

    ops: tuple[str, ...] = ()
    """Names of ops; or else `fn` is given."""
    shape: tuple[int, ...] = ()
    """Sizes in the order of an op's axes; an op with fewer axes takes the first."""
    dtype: str = "float16"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What those of the ops that have such options are built with."""
    fn: str = ""
    """ "module:name", see `fusejax.user_function`."""
    arguments: str = ""
    """Of `fn`, as text."""
    scopes: tuple[str, ...] | None = None
    mode: str = "forward"
    names: tuple[str, ...] | None = None
    """Paths; by default all there are."""
    xla_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def subjects(self) -> tuple[str, ...]:
        """Names of what is compared."""
        return (self.fn,) if self.fn else self.ops


def compare_targets(
    work: Work, targets: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Compares on each target, as many at a time as there are cores.

    Args:
      work: what to compare.
      targets: names of cards, or files of descriptions.
      progress: told in a few words what is being done.

    Returns:
      The document of the "fusejax.targets/1" schema: by target, then by op, the documents of the
      "fusejax.compare/1" schema in "comparisons", or the reason why there is none in "refused".

    Raises:
      UsageError: what a target's process was refused for, or the first reason where nothing could
        be compared on any.
    """
    total, done = len(targets) * len(work.subjects), 0

    def tell(target: str, subject: str) -> None:
        nonlocal done
        done += 1
        progress(f"{subject} for {target} ({done} of {total})")

    groups = _by_generation(targets)
    found: dict[str, dict[str, dict[str, Any]]] = {
        kind: {target: {} for target in targets} for kind in ("comparisons", "refused")
    }
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        running = [pool.submit(_in_a_process, work, group, tell) for group in groups]
        for lines in running:
            for kind, target, subject, value in lines.result():
                found[kind][target][subject] = value
    refused = [reason for reasons in found["refused"].values() for reason in reasons.values()]
    if refused and not any(found["comparisons"].values()):
        raise UsageError(refused[0])
    return {"schema": SCHEMA, **found}


def _by_generation(targets: Sequence[str]) -> list[list[str]]:
    """The targets of each generation, those with most to compile first."""
    from fusejax.compile.targets import resolve

    groups: dict[int | None, list[str]] = {}
    for target in targets:
        groups.setdefault(resolve(target)[0].figure("major"), []).append(target)
    # Generations before Hopper have no Pallas kernels, which take longest.
    return sorted(groups.values(), key=len, reverse=True)


def _in_a_process(
    work: Work, targets: Sequence[str], tell: Callable[[str, str], None]
) -> list[tuple[str, str, str, Any]]:
    """What `main` prints for these targets."""
    command = [sys.executable, "-P", "-m", "fusejax.across_targets"]
    found = []
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(work)), *targets],
            stdout=subprocess.PIPE, stderr=said, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            kind, target, subject, value = json.loads(line)
            if kind == "usage":
                raise UsageError(value)
            found.append((kind, target, subject, value))
            tell(target, subject)
        if process.wait():
            said.seek(0)
            raise RuntimeError(f"comparing for {', '.join(targets)} fails:\n{said.read()}")
    return found


def _comparer(work: Work, target: Any) -> Callable[[str], Any]:
    """Compares one subject, without what only a closer look needs."""
    import inspect

    import jax.numpy as jnp

    from fusejax.compare_fn import NAMES, compare_fn
    from fusejax.compare_ops import compare_op
    from fusejax.ops import OPS
    from fusejax.user_function import load, read_arguments

    brief: dict[str, Any] = {"mode": work.mode, "xla_options": work.xla_options, "is_brief": True}
    brief["known"] = {}
    if work.fn:
        function, arguments = load(work.fn), read_arguments(work.arguments)
        return functools.partial(
            compare_fn,
            function=function, arguments=arguments, target=target,
            names=work.names or NAMES, scopes=work.scopes, **brief,
        )  # fmt: skip

    def compare(name: str) -> Any:
        known = inspect.signature(OPS[name]).parameters
        options = {key: value for key, value in work.options.items() if key in known}
        op = OPS[name](**options)
        shape = work.shape[: len(op.axes)]
        return compare_op(
            op, shape, jnp.dtype(work.dtype), target, names=work.names, options=options, **brief
        )

    return compare


def main(text: str, *names: str) -> None:
    """Compares everything on each target; prints a line for each: kind, target, subject, value.

    Kinds are "comparisons" with a document, "refused" with a reason, and "usage" with what is
    wrong with all of it.
    """
    from fusejax.compile import platform, targets
    from fusejax.processes import end_with_parent

    end_with_parent()
    # Simulated kernels alone need more threads, and here none is.
    os.environ.setdefault("NPROC", str(os.cpu_count()))
    platform.prepare_process()
    # The lines go where nothing that a user's module prints can get in between.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(*line: Any) -> None:
        print(json.dumps(line, allow_nan=False), file=lines)

    from fusejax.report.document import comparison_json
    from fusejax.what_if import check_options

    fields = json.loads(text)
    for name in ("ops", "shape", "names", "scopes"):
        fields[name] = fields[name] and tuple(fields[name])
    work = Work(**fields)
    for name in names:
        try:
            target, _ = targets.resolve(name)
            compare = _comparer(work, target)
            check_options(work.xla_options, target)
        except UsageError as error:
            tell("usage", name, "", str(error))
            return
        for subject in work.subjects:
            try:
                tell("comparisons", name, subject, comparison_json(compare(subject)))
            except UsageError as error:
                tell("refused", name, subject, str(error))


def cards(text: str) -> tuple[str, ...]:
    """The cards that a flag lists, "h100,b200".

    Raises:
      UsageError: one is no card, or is listed twice; or none is.
    """
    from fusejax.compile.cards import CARDS

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in CARDS and not pathlib.Path(name).is_file():
            raise UsageError(
                f"--targets {text!r}: {name!r} is no card: give some of {', '.join(CARDS)}, or "
                "files of GPU target descriptions"
            )
        if names.count(name) > 1:
            raise UsageError(f"--targets {text!r} lists {name!r} twice: give it once")
    return names


if __name__ == "__main__":
    main(*sys.argv[1:])
