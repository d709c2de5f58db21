"""The folder of a page: what may be written, and that nothing else is touched."""

import os
import stat
import subprocess
import sys

import documents
import jax
import jax.numpy as jnp
import pytest

import fusejax
from fusejax import files
from fusejax.errors import UsageError
from fusejax.report import html
from fusejax.report.html import folder

DOCUMENT = documents.inspected(documents.module([documents.kernel("k")]))


def contents(path):
    return {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}


def test_new_empty_and_earlier_reports(tmp_path):
    place = tmp_path / "report"
    html.check_folder("--html", place)
    assert list(tmp_path.iterdir()) == []
    assert html.save(DOCUMENT, place) == place / "index.html"
    first = contents(place)
    html.check_folder("--html", place)
    html.save(documents.measured(), str(place) + "/")
    assert contents(place).keys() == first.keys() == {"index.html"}
    assert contents(place) != first
    assert stat.S_IMODE((place / "index.html").stat().st_mode) == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def make(path, what):
    path.mkdir()
    if what == "other file":
        (path / "notes.txt").write_text("mine")
    elif what == "report and another":
        html.save(DOCUMENT, path)
        (path / "data.csv").write_text("mine")
    elif what == "another's page":
        (path / "index.html").write_text("<!doctype html><title>mine</title>")
    elif what == "link":
        (path.parent / "target.html").write_text("mine")
        (path / "index.html").symlink_to(path.parent / "target.html")
    elif what == "folder":
        (path / "index.html").mkdir()


@pytest.mark.parametrize(
    "what", ["other file", "report and another", "another's page", "link", "folder"]
)
def test_a_folder_with_other_things_is_left_alone(what, tmp_path):
    place = tmp_path / "report"
    make(place, what)
    before = contents(place), sorted(tmp_path.rglob("*"))
    for write in (lambda: html.check_folder("--html", place), lambda: html.save(DOCUMENT, place)):
        with pytest.raises(UsageError, match=r"--html .* is no report of fusejax") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert (contents(place), sorted(tmp_path.rglob("*"))) == before


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is empty"),
        ("file", "is a file"),
        ("no/such/folder", "make it first"),
        ("x" * 300, "cannot be written to"),
        ("a\0b", "cannot be written to"),
        ("file/below", "make it first"),
        ("/proc/report", "cannot be written to"),
    ],
)
def test_what_is_no_folder(name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for write in (lambda: html.check_folder("--html", name), lambda: html.save(DOCUMENT, name)):
        with pytest.raises(UsageError, match=why) as caught:
            write()
        assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        html.check_folder("--html", tmp_path / "report")


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    html.save(DOCUMENT, tmp_path / "old")
    before = contents(tmp_path / "old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    for place in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(UsageError, match="No space left"):
            html.save(documents.measured(), place)
    assert contents(tmp_path / "old") == before
    assert not (tmp_path / "new").exists()


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_NEEDED", ("jinja2", "no_such_library"))
    with pytest.raises(UsageError, match=r"--html needs no_such_library: .*fusejax\[report\]"):
        html.check_folder("--html", tmp_path)


def run(*arguments):
    script = documents.ROOT / "scripts" / "inspect_hlo.py"
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_the_script_saves_pages_and_refuses_in_one_line(tmp_path):
    case = documents.DATA / "gelu_and_row_sum"
    done = run(case, "--html", tmp_path / "report", "--top", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "f32[8192,8192]" in (tmp_path / "report" / "index.html").read_text()
    (tmp_path / "notes.txt").write_text("mine")
    done = run(case, "--html", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "holds 'notes.txt'" in done.stderr


def test_reports_save_themselves(tmp_path):
    def f(x):
        with jax.named_scope("act"):
            return jnp.tanh(x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    written = fusejax.inspect(f, x, target="cpu").save_html(tmp_path / "a")
    assert "CPU of this machine" in written.read_text()
    assert "no plot" in written.read_text()
    compared = fusejax.compare({"f": f, "g": jax.jit(f)}, x, target="cpu")
    assert "act" in compared.save_html(tmp_path / "b").read_text()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="save_html"):
        compared.save_html(tmp_path)
