"""What a run of tests found: written to the record files, and summed up."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusejax.gates import budget, record_file, text
from fusejax.gates.budget import Budget


@dataclasses.dataclass(frozen=True)
class Checked:
    """What one check found."""

    name: str
    now: Budget
    recorded: Budget | None

    def to_json(self) -> dict[str, Any]:
        """Plain values, which pytest-xdist can send from process to process."""
        return {
            "name": self.name,
            "now": self.now.to_json(),
            "recorded": None if self.recorded is None else self.recorded.to_json(),
        }


def checked_from_json(entry: Mapping[str, Any]) -> Checked:
    """What `Checked.to_json` gave."""
    recorded = entry["recorded"]
    return Checked(
        entry["name"],
        budget.from_json(entry["now"]),
        None if recorded is None else budget.from_json(recorded),
    )


@dataclasses.dataclass(frozen=True)
class Tested:
    """The checks of a test that ran."""

    name: str
    """Without the file's name."""
    passed: bool
    """Else it may have ended before its last check."""
    checks: tuple[Checked, ...]


def update(path: pathlib.Path, tests: Sequence[Tested]) -> list[str]:
    """Records what tests of one file found.

    Entries of tests that did not run stay; of a test that passed, those of checks that it no longer
    does are removed.

    Returns:
      What changed, a line each.

    Raises:
      UsageError: the file cannot be read or written.
    """
    budgets = record_file.read(path)
    lines = []
    for test in tests:
        before = budgets.get(test.name, {})
        after = {check.name: check.now for check in test.checks}
        lines += [
            f"{test.name}, {name}: {change}"
            for name, entry in after.items()
            if (change := _change(before.get(name), entry))
        ]
        gone = [name for name in before if name not in after]
        if test.passed:
            lines += [f"{test.name}, {name}: removed, no longer checked" for name in gone]
        else:
            after |= {name: before[name] for name in gone}
        if after:
            budgets[test.name] = after
    if lines:
        record_file.write(path, budgets)
    return lines


def kept(path: pathlib.Path, tests: Sequence[Tested]) -> list[str]:
    """Tests with budgets in a file that were not among those that ran."""
    ran = {test.name for test in tests}
    return [name for name in record_file.read(path) if name not in ran]


def _change(recorded: Budget | None, now: Budget) -> str | None:
    if recorded is None:
        return f"new, {text.summary(now)}"
    if recorded.to_json() == now.to_json():
        return None
    found = budget.compare(recorded, now)
    parts = [str(quantity) for quantity in (*found.worse, *found.better)]
    for noun, then, here in (
        ("target", recorded.target, now.target),
        ("scope", recorded.scope, now.scope),
        ("JAX", recorded.jax, now.jax),
    ):
        if then != here:
            parts.append(f"{noun} {then} -> {here}")
    return "; ".join(parts) or "the same quantities, other kernels, boundaries or source lines"


def tighter(tests: Sequence[Tested]) -> Iterator[str]:
    """A line for each check that needs less than its budget and nowhere more."""
    for test, check, recorded in _recorded(tests):
        found = budget.compare(recorded, check.now)
        if found.better and not found.worse:
            yield f"{test.name}, {check.name}: {'; '.join(map(str, found.better))}"


def versions(tests: Sequence[Tested]) -> list[str]:
    """A line for each version of JAX, other than the one that ran, that recorded budgets."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    for _, check, recorded in _recorded(tests):
        if recorded.jax != check.now.jax:
            found = budget.compare(recorded, check.now)
            verdict = "worse" if found.worse else "better" if found.better else "the same"
            pair = (recorded.jax, check.now.jax)
            counts.setdefault(pair, collections.Counter())[verdict] += 1
    return [
        f"recorded with JAX {then}, run with JAX {now}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counter.items()))
        for (then, now), counter in sorted(counts.items())
    ]


def _recorded(tests: Sequence[Tested]) -> Iterator[tuple[Tested, Checked, Budget]]:
    """The checks with a budget that they can be held against."""
    for test in tests:
        for check in test.checks:
            then = check.recorded
            if then and (then.target, then.scope) == (check.now.target, check.now.scope):
                yield test, check, then
