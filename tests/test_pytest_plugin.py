"""The fixture `fusion` in projects of its own: recording, holding, mistakes, the sample project."""

import json
import pathlib
import re
import shutil

import pytest

from fusejax.compile import platform
from fusejax.gates import held, record_file

pytest_plugins = ("pytester",)

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "sample_project"

CPU_PROJECT = """
import functools
import jax, pytest
X = jax.ShapeDtypeStruct((8, 16), "float32")
pytestmark = pytest.mark.fusion(target="cpu")

def double(x, factor=2):
    with jax.named_scope("double"):
        return x * factor

class TestGroup:
    @pytest.mark.parametrize("factor", [2, 3])
    @pytest.mark.xdist_group("one")
    def test_double(self, fusion, factor):
        report = fusion.check(functools.partial(double, factor=factor), X)
        assert report.modules[0].launches == 1

def test_two_checks(fusion):
    fusion.check(double, X)
    fusion.check(double, X, name="again", scope="double")
"""
TESTS = ["TestGroup::test_double[2]", "TestGroup::test_double[3]", "test_two_checks"]


@pytest.fixture
def project(pytester, monkeypatch):
    """A project whose tests compile for the CPU."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # several processes would share a GPU's memory
    pytester.makefile(".ini", pytest="[pytest]\n")
    pytester.makepyfile(test_cpu=CPU_PROJECT)
    return pytester


def run(pytester, *flags):
    return pytester.runpytest("-p", "no:cacheprovider", *flags)


def says(result, *lines):
    """Asserts that these lines were printed, in this order."""
    result.stdout.fnmatch_lines(lines)


def edit(file, change):
    """Applies `change` to every recorded budget of a file."""
    document = json.loads(file.read_text())
    for checks in document["budgets"].values():
        for entry in checks.values():
            change(entry)
    file.write_text(json.dumps(document))


def test_recording_in_several_processes_and_holding_against_it(project):
    run(project, "-n2", "--dist=loadgroup", "--fusion-update").assert_outcomes(passed=3)
    file = project.path / "test_cpu.fusion.json"
    document = json.loads(file.read_text())
    assert list(document["budgets"]) == TESTS
    assert list(document["budgets"]["test_two_checks"]) == ["again", "double"]
    entry = document["budgets"]["test_two_checks"]["again"]
    assert (entry["target"], entry["scope"], entry["launches"]) == ("cpu", "double", 1)
    assert entry["jax"] == held.jax_version()
    (kernel,) = entry["kernels"]
    assert kernel == {"emitter": "loop", "count": 1, "bytes": 1024, "scopes": ["double"],
                      "source": "test_cpu.py:8"}  # fmt: skip

    same = run(project)
    same.assert_outcomes(passed=3)
    same.stdout.no_fnmatch_line("*fusion budgets*")

    edit(file, lambda entry: entry.update(bytes=1023, jax="0.1"))
    worse = run(project, "-k", "two_checks")
    worse.assert_outcomes(failed=1, deselected=2)
    says(
        worse,
        "'double' on cpu is worse than its budget in test_cpu.fusion.json: bytes read and written "
        "1,023 -> 1,024",
        f"  recorded with JAX 0.1, this is JAX {held.jax_version()}",
        "  accept it with --fusion-update",
        "*= fusion budgets =*",
        f"recorded with JAX 0.1, run with JAX {held.jax_version()}: 1 worse",
    )
    worse.stdout.no_fnmatch_line("*Traceback*")

    edit(file, lambda entry: entry.update(bytes=1025))
    better = run(project, "-k", "two_checks")
    better.assert_outcomes(passed=1, deselected=2)
    says(
        better,
        "test_cpu.fusion.json: could be tightened with --fusion-update: test_two_checks, double: "
        "bytes read and written 1,025 -> 1,024",
        f"recorded with JAX 0.1, run with JAX {held.jax_version()}: 2 better",
    )
    project.makefile(".ini", pytest="[pytest]\nfusion_strict = true\n")
    run(project, "-k", "two_checks").assert_outcomes(failed=1, deselected=2)

    update = run(project, "-k", "two_checks", "--fusion-update", "--fusion-strict")
    update.assert_outcomes(passed=1, deselected=2)
    says(
        update,
        "test_cpu.fusion.json: test_two_checks, double: bytes read and written 1,025 -> 1,024; JAX "
        f"0.1 -> {held.jax_version()}",
        "test_cpu.fusion.json: kept those of tests that did not run: *[[]2], *[[]3]",
    )
    kept = {test: checks["double"].bytes for test, checks in record_file.read(file).items()}
    assert kept == dict(zip(TESTS, (1025, 1025, 1024), strict=True))

    file.chmod(0o444)
    refused = run(project, "-k", "two_checks", "--fusion-update")
    refused.assert_outcomes(failed=1, deselected=2)
    says(refused, "test_cpu.fusion.json: it is read-only: make it writable*")


def test_mistakes_are_one_line_each(project, monkeypatch):
    project.makepyfile(
        test_cpu=CPU_PROJECT
        + """
def test_name_twice(fusion):
    fusion.check(double, X)
    fusion.check(double, X)

def test_no_name(fusion):
    fusion.check(double, X, name="")

def test_nothing(fusion):
    pass

def test_unknown(fusion):
    fusion.check(double, X, target="h900")

def test_no_scope(fusion):
    fusion.check(double, X, scope="mlp")

def test_no_compiler(fusion):
    fusion.check(double, X, target="h100")

def test_own_error(fusion):
    fusion.check(lambda x: 1 / 0, X)

@pytest.mark.fusion(target="cpu")
def test_without_fixture():
    pass

@pytest.mark.fusion("cpu")
def test_bad_marker(fusion):
    fusion.check(double, X)

def test_without_gate():
    pass
"""
    )
    monkeypatch.setattr(platform, "missing_compiler", lambda: "the extra 'aot' is not installed")
    result = run(project)
    result.assert_outcomes(failed=10, errors=2, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "no budget of 'double' is recorded in test_cpu.fusion.json: run pytest with "
            "--fusion-update, review the file and commit it (now: 1 launch, 1.0 KiB read and "
            "written, no boundaries)",
            "name='': give a text of printable characters",
            "the test takes the fixture 'fusion' and checked nothing with it",
            "target 'h900' is unknown: give one of *",
            "scope 'mlp' is not in double: give one of double",
            "target 'h100' cannot be compiled for: the extra 'aot' is not installed",
            "E * ZeroDivisionError: division by zero",
            "marked fusion(target=...), but the test does not take the fixture 'fusion', so *",
            'the marker takes target="..." and nothing else',
        ]
    )
    assert not (project.path / "test_cpu.fusion.json").exists()

    skips = run(project, "-k", "no_compiler", "-o", "fusion_skip_without_compiler=true")
    skips.assert_outcomes(skipped=1, deselected=12)
    twice = run(project, "-k", "twice", "--fusion-update")
    twice.assert_outcomes(failed=1, deselected=12)
    says(twice, "'double' is checked before in this test: give one another name=")

    (project.path / "test_cpu.fusion.json").write_text("{\n<<<<<<< HEAD\n")
    for flags in ((), ("--fusion-update",)):
        result = run(project, "-k", "two_checks", *flags)
        result.assert_outcomes(failed=1, deselected=12)
        says(
            result,
            "test_cpu.fusion.json: it cannot be read (line 2: Expecting property name*): mend it, "
            "or delete it and run pytest with --fusion-update",
        )


def test_a_file_that_breaks_during_the_run_fails_it(project):
    project.makeconftest("""
import pathlib
def pytest_runtest_teardown():
    (pathlib.Path(__file__).parent / "test_cpu.fusion.json").write_text("broken")
""")
    result = run(project, "-k", "again or two_checks", "--fusion-update")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    says(result, "ERROR test_cpu.fusion.json: it cannot be read (line 1: *")
    assert (project.path / "test_cpu.fusion.json").read_text() == "broken"


def test_other_suites_are_left_alone(pytester):
    pytester.makefile(".ini", pytest="[pytest]\naddopts = --strict-markers --strict-config -Werror")
    pytester.makepyfile("""
import sys
import pytest

@pytest.fixture
def fusion():
    return "theirs"

@pytest.mark.fusion
def test_their_marker():
    pass

def test_their_fixture(fusion):
    assert fusion == "theirs"

def test_nothing_heavy_is_imported():
    ours = {name for name in sys.modules if name.startswith("fusejax")}
    assert ours == {"fusejax", "fusejax.pytest_plugin"}
    assert not {"jax", "numpy", "rich", "absl"} & sys.modules.keys()
""")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line("*fusion budgets*")


def test_the_code_of_the_documentation(pytester, deviceless):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    pytester.makepyfile(**{f"test_block_{number}": block for number, block in enumerate(blocks)})
    run(pytester, "--fusion-update", "--strict-markers").assert_outcomes(passed=len(blocks))
    assert sorted(pytester.path.glob("*.json")) == [pytester.path / "test_block_1.fusion.json"]


def test_the_sample_project(pytester, deviceless):
    """Its gate passes at 16384, fails at 16385 with the reason, passes where that is accepted."""
    shutil.copytree(
        SAMPLE, pytester.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    head = pytester.path / "tinylm" / "head.py"
    record = pytester.path / "tests" / "test_head.fusion.json"

    passes = run(pytester)
    passes.assert_outcomes(passed=2)
    recorded = record_file.read(record)["test_probabilities"]["probabilities"]
    if recorded.jax != held.jax_version():
        says(passes, f"*run with JAX {held.jax_version()}: 2 the same")

    head.write_text(head.read_text().replace("VOCABULARY = 16384", "VOCABULARY = 16385"))
    fails = run(pytester, "-k", "test_probabilities")
    fails.assert_outcomes(failed=1, deselected=1)
    line = head.read_text().splitlines().index("        return jax.nn.softmax(logits)") + 1
    where = f"in probabilities, at tinylm/head.py:{line}"
    says(
        fails,
        "'probabilities' on h100 is worse than its budget in tests/test_head.fusion.json: launches "
        "1 -> 5; bytes read and written 268,435,456 -> 540,647,424; bytes at boundaries 0 -> "
        "3,743,744",
        "  inputs and outputs, moved once each: 268,435,456 -> 268,451,840 bytes",
        "  boundaries that appeared:",
        "    + f32[[]2048,113[]], 1.8 MiB (904.0 KiB written, 904.0 KiB read again) from * to *, "
        + where,
        "        emitter_limit: rows of 16385 elements are longer than the 16384 that *",
        "  kernels that appeared:",
        f"    + loop, 256.0 MiB, {where} (*)",
        f"    ~ triton, 256.0 MiB -> reduction, 128.9 MiB, {where} (*)",
    )

    accepts = run(pytester, "-k", "test_probabilities", "--fusion-update")
    accepts.assert_outcomes(passed=1, deselected=1)
    says(
        accepts, "tests/test_head.fusion.json: test_probabilities, probabilities: launches 1 -> 5;*"
    )
    run(pytester, "-k", "test_probabilities").assert_outcomes(passed=1, deselected=1)
    assert record_file.read(record)["test_probabilities"]["probabilities"].launches == 5
    assert record_file.read(record)["test_masked_probabilities"]["masked"].launches == 1
