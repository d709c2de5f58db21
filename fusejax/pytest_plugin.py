"""pytest plugin: fusion gates with budgets that are recorded next to the tests. No GPU is needed.

@pytest.mark.fusion(target="h100")
def test_block(fusion):
    fusion.check(block, x, w)

`test_model.fusion.json` beside `test_model.py` keeps launches, bytes and boundary bytes of every
check, and the kernels and boundaries that they are made of. A check fails where one of the three
grew, and tells what appeared and why XLA put it there. `pytest --fusion-update` records.

Nothing but pytest is imported before a test uses the fixture: the plugin is loaded in every
test-suite of an environment that has fusejax.
"""

import pathlib
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusejax.gates.records import Checked, Tested
    from fusejax.inspection import Report

_MARKER = "fusion"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds flags and settings."""
    group = parser.getgroup("fusejax", "fusion budgets (fusejax)")
    group.addoption(
        "--fusion-update", action="store_true", dest="fusion_update",
        help="record what the checks that run find as their budgets",
    )  # fmt: skip
    group.addoption(
        "--fusion-strict", action="store_true", dest="fusion_strict",
        help="fail where another version of JAX recorded the budget (as the setting fusion_strict)",
    )  # fmt: skip
    parser.addini("fusion_target", "what the fixture `fusion` compiles for", default="h100")
    parser.addini("fusion_strict", "as --fusion-strict", type="bool", default=False)
    parser.addini(
        "fusion_skip_without_compiler",
        "skip, where the extra 'aot' is not installed, what would fail without it",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker; and the collector, once, where tests run in several processes."""
    config.addinivalue_line(
        "markers", f'{_MARKER}(target="h100"): what the fixture `fusion` compiles for'
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config), "fusejax-collector")


_GATE = pytest.StashKey["Fusion"]()


@pytest.fixture
def fusion(request: pytest.FixtureRequest) -> "Fusion":
    """Holds functions against recorded budgets: `fusion.check(function, *arguments)`."""
    gate = request.node.stash[_GATE] = Fusion(request.node)
    return gate


class Fusion:
    """The checks of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.checked: dict[str, Checked] = {}
        self.is_over = False  # what is checked after the test is in no report
        self.file = item.path.with_name(f"{item.path.stem}.fusion.json")
        self._config = item.config
        self.test = _test_name(item)
        self._target = _target(item)

    def check(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        name: str | None = None,
        target: str | Any = None,
        scope: str | None = None,
    ) -> "Report":
        """Compiles a function, and fails where it is worse than its recorded budget.

        Worse is one of: more launches, more bytes read and written, more bytes written and read
        again at boundaries. With --fusion-update, what is found becomes the budget.

        Args:
          function, arguments: as `fusejax.inspect` takes them.
          name: of the check in the record file; the function's own by default.
          target: as `fusejax.inspect` takes it; the marker's, else the setting's, by default.
          scope: counts only kernels and boundaries with instructions of this named scope.

        Returns:
          The report of `fusejax.inspect`.
        """
        __tracebackhide__ = True
        from fusejax.errors import UsageError

        try:
            return self._check(function, arguments, name, target, scope)
        except UsageError as error:
            mistake = str(error).removeprefix("--")
        pytest.fail(mistake, pytrace=False)

    def _check(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        name: str | None,
        target: str | Any,
        scope: str | None,
    ) -> "Report":
        __tracebackhide__ = True
        from fusejax.errors import UsageError
        from fusejax.gates import budget, held, record_file, records, verdict
        from fusejax.inspection import Report

        name = held.name_of(function) if name is None else name
        target = self._target if target is None else target
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(f"name={name!r}: give a text of printable characters")
        if self.is_over:
            raise UsageError(f"{name!r} is checked after the test: check it in the test itself")
        if name in self.checked:
            raise UsageError(f"{name!r} is checked before in this test: give one another name=")
        if self._config.getini("fusion_skip_without_compiler"):
            _skip_without_compiler(target)
        shown = _shown(self.file, self._config)
        try:
            recorded = record_file.read(self.file).get(self.test, {}).get(name)
            if self._config.option.fusion_update:
                record_file.check_writable(self.file)
        except UsageError as error:
            raise UsageError(f"{shown}: {error}") from None
        found = held.compiled(function, arguments, target, scope, self._config.rootpath)
        now = budget.of(found)
        self.checked[name] = records.Checked(name, now, recorded)
        if not self._config.option.fusion_update:
            is_strict = self._config.option.fusion_strict or self._config.getini("fusion_strict")
            failure = verdict.failure(name, shown, recorded, now, is_strict=is_strict)
            if failure is not None:
                pytest.fail(failure, pytrace=False)
        return Report((found.module,))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses a marked test that checks nothing, for lack of the fixture."""
    own = (mark for mark in item.own_markers if mark.name == _MARKER)
    is_ours = any("target" in mark.kwargs for mark in own)
    if is_ours and "fusion" not in getattr(item, "fixturenames", ()):
        pytest.fail(
            "marked fusion(target=...), but the test does not take the fixture 'fusion', so "
            "nothing would be checked",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts into a test's report what its checks found: so it arrives from other processes too."""
    report = yield
    gate = item.stash.get(_GATE, None)
    if gate is not None and report.when == "call":
        report.fusejax = {  # type: ignore[attr-defined]
            "file": str(gate.file),
            "test": gate.test,
            "checks": [check.to_json() for check in gate.checked.values()],
        }
        gate.is_over = True
        if report.passed and not gate.checked:
            report.outcome = "failed"
            report.longrepr = "the test takes the fixture 'fusion' and checked nothing with it"
    return report


class _Collector:
    """Records and sums up what the checks of all tests found."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[pathlib.Path, dict[str, Tested]] = {}
        self._lines: list[str] = []
        self._errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: Mapping[str, Any] | None = getattr(report, "fusejax", None)
        if found is None or not found["checks"]:
            return
        from fusejax.gates import records

        checks = tuple(map(records.checked_from_json, found["checks"]))
        file = self._tests.setdefault(pathlib.Path(found["file"]), {})
        file[found["test"]] = records.Tested(found["test"], report.passed, checks)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._tests:
            return
        from fusejax.errors import UsageError
        from fusejax.gates import records

        for file, named in sorted(self._tests.items()):
            shown, tests = _shown(file, self._config), list(named.values())
            if not self._config.option.fusion_update:
                self._lines += [
                    f"{shown}: could be tightened with --fusion-update: {line}"
                    for line in records.tighter(tests)
                ]
                continue
            try:
                changed = records.update(file, tests)
                self._lines += [f"{shown}: {line}" for line in changed or ["nothing changed"]]
                if kept := records.kept(file, tests):
                    more = f" and {len(kept) - 6} more" if len(kept) > 6 else ""
                    self._lines.append(
                        f"{shown}: kept those of tests that did not run: "
                        f"{', '.join(kept[:6])}{more}"
                    )
            except UsageError as error:
                self._errors.append(f"{shown}: {error}")
        ran = [test for named in self._tests.values() for test in named.values()]
        self._lines += records.versions(ran)
        if self._errors:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._lines or self._errors:
            terminalreporter.section("fusion budgets")
        for line in self._lines:
            terminalreporter.write_line(line)
        for line in self._errors:
            terminalreporter.write_line(f"ERROR {line}", red=True)


def _test_name(item: pytest.Item) -> str:
    """A test's name without its file's. (xdist may add a group to the node's id.)"""
    chain = item.listchain()
    file = next((n for n, node in enumerate(chain) if isinstance(node, pytest.File)), -1)
    return "::".join(node.name for node in chain[file + 1 :])


def _shown(file: pathlib.Path, config: pytest.Config) -> str:
    inside = file.is_relative_to(config.rootpath)
    return file.relative_to(config.rootpath).as_posix() if inside else str(file)


def _target(item: pytest.Item) -> Any:
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        return item.config.getini("fusion_target")
    if marker.args or not marker.kwargs.keys() <= {"target"}:
        pytest.fail('the marker takes target="..." and nothing else', pytrace=False)
    return marker.kwargs.get("target", item.config.getini("fusion_target"))


def _skip_without_compiler(target: str | Any) -> None:
    from fusejax.compile import platform

    missing = platform.missing_compiler()
    if missing is not None and target not in ("auto", "cpu", "device"):
        pytest.skip(f"cannot compile for {target}: {missing}")
