"""The browser that the machine has, driven by playwright; without one its tests are skipped."""

import contextlib
import shutil

import pytest

from fusejax.report import html

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(_BROWSERS)} is on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=list(_FLAGS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that makes the page of a document, once for each name."""
    made = {}

    def save(name, build):
        if name not in made:
            made[name] = html.save(build(), tmp_path_factory.mktemp("pages") / name)
        return made[name]

    return save


@pytest.fixture
def show(browser):
    """A function that opens a page file. Whatever goes wrong in the page fails the test."""
    with contextlib.ExitStack() as opened:
        problems = []

        def open_page(path, *, width=1280, fragment="", **options):
            context = browser.new_context(viewport={"width": width, "height": 900}, **options)
            opened.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("console", lambda said: _note(problems, said))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda asked: _note_request(problems, asked.url, path.as_uri()))
            page.goto(path.as_uri() + fragment)
            page.problems = problems
            return page

        yield open_page
        assert problems == []


def _note(problems, said):
    if said.type in ("error", "warning"):
        problems.append(said.text)


def _note_request(problems, url, own):
    if url.partition("#")[0] != own:
        problems.append(f"asked for {url}")
