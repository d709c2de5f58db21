"""scripts/docs.py: a page for each public module, with every public name's docstring on it.

And what docs/ take from elsewhere: fields of the JSON documents, figures that were measured.
"""

import html
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fusejax

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "docs.py"


def modules():
    spec = importlib.util.spec_from_file_location("docs_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.MODULES


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def words(text):
    """Letters and digits alone: what is left of a text whatever it is marked up with."""
    return re.sub(r"[^a-z0-9]", "", html.unescape(re.sub(r"<[^>]+>", "", text)).lower())


def indented(docstring):
    """First lines of the blocks of code in a docstring."""
    lines = inspect.cleandoc(docstring).splitlines()
    before_arguments = lines[: next((n for n, x in enumerate(lines) if x == "Args:"), len(lines))]
    return [
        line.strip()
        for last, line in zip(["", *before_arguments], before_arguments, strict=False)
        if line.startswith("    ") and not last.strip()
    ]


def missing(name, page):
    """Public names of a module that are not on its page, or not with all of their docstring."""
    module = importlib.import_module(name)
    assert words(module.__doc__.splitlines()[0]) in words(page)
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if inspect.ismodule(value):
            continue
        section = sections.get(public, "")
        text = words(section)
        code = words("".join(re.findall("<pre>.*?</pre>", section, re.DOTALL)))
        whole = words(inspect.cleandoc(value.__doc__).split("\n\n")[0]) in text
        if not whole or not all(words(line) in code for line in indented(value.__doc__)):
            yield f"{name}.{public}"


def test_every_public_name_is_on_its_page_with_its_docstring(tmp_path):
    pytest.importorskip("pdoc")
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [
        lost
        for name in modules()
        for lost in missing(name, (tmp_path / f"{name.replace('.', '/')}.html").read_text())
    ] == []


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = run(tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    done = run()
    assert done.returncode == 2
    assert "OUT" in done.stderr


# Keys that are names given by whoever asks, or kinds that are counted.
_NAMED = ("differences", "flop_per_s", "options", "operations", "paths", "versions", "xla_options")


def fields(document):
    if isinstance(document, list):
        for one in document:
            yield from fields(one)
    elif isinstance(document, dict):
        for key, value in document.items():
            yield key
            children = value.values() if key in _NAMED and isinstance(value, dict) else [value]
            for child in children:
                yield from fields(child)


def test_fields_of_the_documents_are_told(deviceless):
    x = jax.ShapeDtypeStruct((64, 16385), jnp.float32)
    compared = fusejax.compare({"one": jax.nn.softmax}, x, target="h200").to_json()
    inspected = fusejax.inspect(jax.nn.softmax, x, target="h200").to_json()
    found = {*fields(compared), *fields(inspected)}
    text = (ROOT / "docs" / "reports.md").read_text()
    section = text[text.index("## JSON") :]
    told = set(re.findall(r"`(\w+)`", section))
    assert sorted(found - told - {"schema"}) == []
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", section, re.M)]
    with_a_card_or_flags = {name for row in rows for name in row if name.startswith("measured_")}
    assert sorted({name for row in rows for name in row} - found - with_a_card_or_flags) == []


def chunks(text):
    """Paragraphs, and rows of tables; a table without links has those of what stands before it."""
    before = ""
    for chunk in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n"):
        is_table = chunk.lstrip().startswith("|")
        inherited = before if is_table and "](" not in chunk else ""
        for part in chunk.splitlines() if is_table else [chunk]:
            yield inherited + part
        before = chunk


def test_measured_figures_are_those_of_the_page_that_they_link_to():
    link = re.compile(r"\]\(\.\./((?:evidence|BUILD_NOTES)[^)#]*)[^)]*\)")
    figure = re.compile(r"\d+\.\d+|\d{3,}")
    wrong, checked = [], 0
    for file in sorted((ROOT / "docs").glob("*.md")):
        for chunk in chunks(file.read_text()):
            pages = [ROOT / path for path in link.findall(chunk)]
            pages = [page / "README.md" if page.is_dir() else page for page in pages]
            known = "".join(p.read_text() for p in pages if p.suffix == ".md" and p.is_file())
            known = set(figure.findall(known.replace(",", "")))
            for number in figure.findall(chunk.replace(",", "")) if known else []:
                checked += 1
                if number not in known:
                    wrong.append(f"{file.name}: {number} in {' '.join(chunk.split())[:80]!r}")
    assert wrong == []
    assert checked > 40
