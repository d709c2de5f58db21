"""README.md and docs/: every command and every block of code as printed, the way a newcomer would.

A file is one test. Its commands run one after another from the project's root, its Python blocks in
namespaces of their own, and what is quoted as output has to be in what the command or block before
it prints; a line "..." stands for what was left out. /tmp and the home are folders of the test.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from fusejax.compile import platform

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_HERE = {
    "python3.12 -m venv .venv": "makes the environment that CI runs these tests in",
    ".venv/bin/pip install -e '.[aot]'": "the same",
    ".venv/bin/pip install -e '.[aot,test]'": "the same",
    ".venv/bin/pip install -e '.[aot,report]'": "the same",
    ".venv/bin/python -m pytest": "is this run",
    ".venv/bin/python scripts/compare.py --op residual_ln": "tests/test_compare.py runs it",
    "python scripts/docs.py /tmp/api": "tests/test_docs.py runs it",
    "python scripts/calibrate.py": "needs a GPU",
    "python scripts/peers.py": "needs a GPU",
    "python scripts/tune.py --ops softmax --widths 4096": "needs a GPU",
    "python scripts/evidence.py": "measures for hours on a GPU",
    "python scripts/check_bytes.py": "needs a GPU",
    "python examples/train.py --devices 2 --coordinator localhost:9876 --processes 2 "
    "--process-id 0 &": "one of two processes that wait for each other, see tests/examples",
    "python examples/train.py --devices 2 --coordinator localhost:9876 --processes 2 "
    "--process-id 1": "the other",
}
"""Commands that the text prints and that cannot run here, with the reason."""

SLOW = {
    "python scripts/compile_costs.py --op bias_gelu_rowsum --target h200": 110,
    "python examples/train.py --layers flax,fusejax --steps 60": 45,
    "python scripts/sweep.py --ops bias_gelu_rowsum --widths 1024,8192 --target h200": 25,
    "python scripts/bench_reader.py": 20,
}
"""Commands that run where FUSEJAX_SLOW_COMMANDS is set, with their CPU seconds; the scripts'
own tests run smaller ones."""

_COMMAND = re.compile(r"(?:python[\d.]*|\.venv/bin/\w+|pip|export|[A-Z_]+=\S+) ")
_FENCE = re.compile(r"( *)```(\w*)\s*$")
_INLINE = re.compile(r"`((?:python|\.venv/bin/\w+)\s[^`]+)`")
_KINDS = {"sh": "commands", "python": "python", "text": "output"}


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code; `kind` is commands, python, output or other."""

    kind: str
    text: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """Fenced and indented blocks, and commands inside sentences, in order."""
    lines = [*text.splitlines(), ""]
    at = 0
    while at < len(lines):
        start = at
        if fence := _FENCE.match(lines[at]):
            at += 1
            while not lines[at].lstrip().startswith("```"):
                at += 1
            body = "\n".join(line[len(fence[1]) :] for line in lines[start + 1 : at])
            yield Block(_KINDS.get(fence[2], "other"), body, start + 2)
            at += 1
        elif lines[at].startswith("    ") and (start == 0 or not lines[at - 1].strip()):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            body = "\n".join(line[4:] for line in lines[start:at]).rstrip()
            yield Block(_kind(body), body, start + 1)
        else:
            # A command inside a sentence may go on in the next line.
            while at < len(lines) and lines[at].strip() and not _FENCE.match(lines[at]):
                at += 1
            for found in _INLINE.finditer("\n".join(lines[start:at])):
                yield Block("commands", " ".join(found[1].split()), start + 1)
            at = max(at, start + 1)


def _kind(body: str) -> str:
    if re.search(r"^(?:import|from) ", body, re.MULTILINE):
        return "python"
    return "commands" if _COMMAND.match(body) else "output"


def commands(text: str) -> list[str]:
    """The commands of a block: one a line, or several with && between them."""
    lines = [line.split(" #")[0].strip() for line in text.replace("\\\n", "").splitlines()]
    return [part.strip() for line in lines if line for part in line.split(" && ")]


class Reader:
    """Does what a file says, and remembers what was printed last."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.printed: str | None = ""
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not re.match("JAX_|XLA_|NPROC|PYTEST|PYTHONPATH", name)
        } | {
            "HOME": str(folder),
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def read(self, block: Block) -> str | None:
        """What is wrong with a block, or None."""
        if block.kind == "commands":
            problems = [problem for one in commands(block.text) if (problem := self._command(one))]
            return "\n".join(problems) or None
        if block.kind == "python":
            return self._python(block.text)
        if block.kind == "output":
            return self._compare(block.text)
        return None

    def _command(self, command: str) -> str | None:
        is_slow = command in SLOW and "FUSEJAX_SLOW_COMMANDS" not in os.environ
        if command in NOT_HERE or is_slow:
            self.printed = None
            return None
        if exported := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.environment[exported[1]] = exported[2]
            return None
        bin_folder = pathlib.Path(sys.executable).parent
        text = self._aside(command).replace(".venv/bin/", f"{bin_folder}/")
        done = subprocess.run(
            ["bash", "-c", text], cwd=ROOT, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        )  # fmt: skip
        self.printed = done.stdout
        return f"{command}\n  exit code {done.returncode}: {done.stdout[-2000:]}" * (
            done.returncode != 0
        )

    def _python(self, code: str) -> str | None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(self._aside(code), "block", "exec"), {"__name__": "block"})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.printed = printed.getvalue()
        return None

    def _compare(self, quoted: str) -> str | None:
        if self.printed is None or not jax.__version__.startswith("0.12."):
            return None  # it did not run; or prints what another XLA decides
        rest = " ".join(self.printed.split())
        for part in re.split(r"^\s*\.\.\.$", quoted, flags=re.MULTILINE):
            wanted = " ".join(self._aside(part).split())
            _, found, rest = rest.partition(wanted)
            if not found and wanted:
                return f"is not printed:\n{part}\nbut:\n{self.printed[-3000:]}"
        return None

    def _aside(self, text: str) -> str:
        return text.replace("/tmp/", f"{self.folder}/")


@pytest.mark.skipif(platform.gpu_present(), reason="a GPU prints something else")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_works_as_printed(file, tmp_path, deviceless, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = sorted(os.listdir(ROOT))
    reader = Reader(tmp_path)
    problems = [
        f"{file.name}:{block.line}: {problem}"
        for block in blocks(file.read_text())
        if (problem := reader.read(block))
    ]
    assert not problems, "\n\n".join(problems)
    assert sorted(os.listdir(ROOT)) == before, "something was written into the project"


def test_exceptions_are_in_the_text():
    printed = [
        command
        for file in FILES
        for block in blocks(file.read_text())
        if block.kind == "commands"
        for command in commands(block.text)
    ]
    assert sorted({*NOT_HERE, *SLOW} - set(printed)) == []


def test_links_lead_somewhere():
    def anchors(file):
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    dead = []
    for file in FILES:
        for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{file.name}: {link}")
    assert dead == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("```sh\npython a.py\n```\n\n```text\nA\n```\n", ["commands", "output"]),
        ("a\n\n    import jax\n\n    x = 1\n\nb", ["python"]),
        ("    python a.py\n\nprints\n\n    1 launch\n", ["commands", "output"]),
        ("- see `python\n  a.py --b`,\n\n```yaml\na: 1\n```", ["commands", "other"]),
    ],
)
def test_blocks_are_told_apart(text, kinds):
    assert [block.kind for block in blocks(text)] == kinds


def test_a_reader_finds_fault(tmp_path):
    reader = Reader(tmp_path)
    assert reader.read(Block("commands", "python -c 'print(1, 2); print(3)'", 1)) is None
    assert reader.read(Block("output", "1  2\n3", 1)) is None
    assert reader.read(Block("output", "1\n...\n3", 1)) is None
    assert reader.read(Block("commands", "python -c 'print(4); exit(3)'", 1)) is not None
    assert reader.read(Block("python", "import os\n1 / 0", 1)) is not None
    if jax.__version__.startswith("0.12."):
        reader.read(Block("commands", "python -c 'print(1, 2)'", 1))
        assert reader.read(Block("output", "2 1", 1)) is not None
