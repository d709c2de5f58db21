"""Pages in a real browser: filters, sorting, links, keyboard, colours, phone, paper."""

import functools
import re

import documents
import pytest

PAGES = {
    "measured": documents.measured,
    "predicted": documents.predicted,
    "layers": functools.partial(documents.layers, 12),
    "difference": functools.partial(
        documents.of_dumps, "softmax_16384", "softmax_16385", compare=True
    ),
    "modules": functools.partial(documents.of_dumps, "gelu_and_row_sum", "loop", "folded"),
    "empty": documents.inspected,
}


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def wait_for_filter(page, count):
    page.wait_for_function(
        "count => document.querySelectorAll('table.boundaries tbody tr').length === count",
        arg=count,
    )


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (375, "dark")])
def test_pages_ask_for_nothing_and_fit(name, width, colours, saved, show):
    page = show(saved(name, PAGES[name]), width=width, color_scheme=colours)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h1").inner_text()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (colours == "light")


def test_what_would_be_asked_for_outside_is_refused(saved, show, tmp_path):
    text = saved("modules", PAGES["modules"]).read_text()
    hostile = '<img src="https://example.invalid/a.png"><script>document.title = "taken"</script>'
    (tmp_path / "index.html").write_text(text.replace("<main", f"{hostile}<main"))
    page = show(tmp_path / "index.html")
    assert page.title() != "taken"
    assert sum("Content Security Policy" in problem for problem in page.problems) == 2
    page.problems.clear()


def test_filter_by_text_path_and_scope(saved, show):
    page = show(saved("measured", PAGES["measured"]))
    wait_for_filter(page, 4)
    page.get_by_label("Find").fill("COST_MODEL")
    wait_for_filter(page, 1)
    assert "f32[8192,8192]" in texts(page, "table.boundaries tbody tr")[0]
    assert "1 of 4 boundaries" in page.locator("#found").inner_text()
    page.get_by_role("button", name="Clear").click()
    wait_for_filter(page, 4)
    assert page.locator("#found").inner_text() == ""
    page.get_by_role("combobox", name="Path").select_option("split")
    wait_for_filter(page, 1)
    assert texts(page, "article.program:visible h3") == ["split"]
    assert set(texts(page, "table.resources tbody td:first-child")) == {"split"}
    assert texts(page, "table.programs tbody th") == ["split"]
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("combobox", name="Scope").select_option("rowsum")
    wait_for_filter(page, 3)
    assert page.locator("table.programs tbody tr").count() == 5  # nothing of theirs is filtered
    page.locator("table.scopes").get_by_role("button", name="bias", exact=True).click()
    assert page.get_by_role("combobox", name="Scope").input_value() == "bias"
    shown = texts(page, "table.launches:visible tbody .sub")
    assert shown
    assert all("bias" in text for text in shown)


def test_a_scope_is_no_part_of_a_longer_name(saved, show):
    page = show(saved("layers", PAGES["layers"]))
    page.get_by_role("combobox", name="Scope").select_option("Model/Block_1")
    assert page.locator("#found").inner_text().startswith("30 of 360 kernels")


def test_sorting_by_keyboard(saved, show):
    page = show(saved("measured", PAGES["measured"]))
    head = page.locator("table.resources thead th", has_text="registers")
    button = head.get_by_role("button")
    values = "table.resources tbody tr"

    def registers():
        place = head.evaluate("head => head.cellIndex")
        return [row.split("\t")[place] for row in texts(page, values)]

    before = registers()
    button.focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert registers() == sorted(before, key=int, reverse=True) != before
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "ascending"
    assert registers() == sorted(before, key=int)
    assert page.locator("table.resources thead [aria-sort]").count() == 1
    by_name = page.locator("table.resources thead th", has_text="kernel")
    by_name.get_by_role("button").click()
    names = texts(page, "table.resources tbody th")
    assert names == sorted(names, key=str.lower)


def test_boundaries_come_by_cost_and_what_is_not_known_comes_last(show, tmp_path):
    kernels = [documents.kernel(f"k{n}", registers=n or None, threads=1) for n in range(4)]
    edges = [documents.boundary("k0", [f"k{n}"], read=n * documents.MIB) for n in (1, 3, 2)]
    from fusejax.report import html

    page = show(html.save(documents.inspected(documents.module(kernels, edges)), tmp_path))
    assert texts(page, "table.boundaries td.cost") == ["4.0 MiB", "3.0 MiB", "2.0 MiB"]
    button = page.locator("table.resources thead").get_by_role("button", name="registers")
    for expected in (["k3", "k2", "k1", "k0"], ["k1", "k2", "k3", "k0"]):
        button.click()
        assert texts(page, "table.resources tbody th") == expected


def test_boundaries_lead_to_kernels(saved, show):
    page = show(saved("measured", PAGES["measured"]))
    page.get_by_label("Find").fill("f32[8192,8192]")  # hides the kernels
    wait_for_filter(page, 1)
    page.locator("table.boundaries").get_by_role("link", name="input_convert_reduce_fusion").click()
    page.wait_for_selector("tr.target")
    target = page.locator("tr.target")
    assert target.locator("a").first.inner_text() == "input_convert_reduce_fusion"
    assert target.get_attribute("id") == "k3-1"
    assert target.evaluate("row => row === document.activeElement")
    box = target.bounding_box()
    assert 0 <= box["y"] < 900
    assert page.get_by_label("Find").input_value() == ""
    target.get_by_role("link").first.click()  # and on to its resources
    page.wait_for_selector("#r3-1.target")
    arc = page.locator("#p3 .arc").first
    arc.locator(".line").dispatch_event("click")
    page.wait_for_selector("#b3-0.target")


def test_marks_of_the_roofline_lead_to_kernels(saved, show):
    page = show(saved("measured", PAGES["measured"]))
    mark = page.locator("svg.roofline a[href='#k3-0']")
    assert "µs measured" in mark.locator("title").text_content()
    mark.locator("path, use").first.dispatch_event("click")
    page.wait_for_selector("#k3-0.target")


def test_many_kernels_are_collapsed_by_scope(saved, show):
    page = show(saved("layers", PAGES["layers"]))
    rows = page.locator("table.launches tbody tr")
    assert rows.count() == 23  # twelve layers there and back; the last is its own neighbour
    arcs = page.locator(".arc")
    assert arcs.count() == 22
    first = rows.first
    assert first.locator("button").inner_text() == "Model/Block_0"
    assert first.locator("td").all_inner_texts() == ["15.0 MiB", "15.0 MiB", "30.0"]
    first.locator("button").focus()
    page.keyboard.press("Enter")
    assert first.locator("button").get_attribute("aria-expanded") == "true"
    assert rows.count() == 23 + 3
    indents = [rows.nth(n).locator("th").bounding_box()["x"] for n in (0, 1)]
    texts_at = [rows.nth(n).locator("button").bounding_box()["x"] for n in (0, 1)]
    assert indents[0] == indents[1]
    assert texts_at[0] < texts_at[1]
    page.keyboard.press("Enter")
    assert rows.count() == 23
    page.get_by_role("button", name="Show every kernel").click()
    assert rows.count() == 360
    assert arcs.count() == 359
    page.get_by_role("button", name="Collapse by scope").click()
    assert rows.count() == 23


def test_a_link_opens_what_is_collapsed(saved, show):
    page = show(saved("layers", PAGES["layers"]), fragment="#k0-200")
    target = page.locator("tr.target")
    assert target.get_attribute("id") == "k0-200"
    assert target.locator("a").inner_text() == "fusion.200"
    assert page.locator("table.launches tbody tr").count() < 100


def test_thousands_of_kernels(saved, show):
    path = saved("thousands", lambda: documents.layers(100))
    page = show(path)
    taken = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert taken < 5000
    assert page.evaluate("document.querySelectorAll('tr').length") < 500
    page.get_by_label("Find").fill("fusion.2999")
    page.wait_for_function("document.querySelectorAll('table.resources tbody tr').length === 1")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Show 1,500 more of 2,960").click()
    assert page.locator("table.resources tbody tr").count() == 1540


def test_kernels_without_scopes_are_collapsed_too(show, tmp_path):
    from fusejax.report import html

    kernels = [documents.kernel(f"k{number}") for number in range(250)]
    page = show(html.save(documents.inspected(documents.module(kernels)), tmp_path))
    labels = texts(page, "table.launches tbody button")
    assert labels == ["launches 1–100", "launches 101–200", "launches 201–250"]


def test_arcs_are_as_wide_as_their_bytes(show, tmp_path):
    from fusejax.report import html

    kernels = [documents.kernel(name) for name in "abc"]
    edges = [
        documents.boundary("a", ["b"], read=100 * documents.MIB),
        documents.boundary("a", ["c"], read=50 * documents.MIB),
        documents.boundary("b", ["c"], written=0, read=0, memory="on_chip"),
    ]
    page = show(html.save(documents.inspected(documents.module(kernels, edges)), tmp_path))
    widths = {
        arc.get_attribute("href"): float(arc.locator(".line").get_attribute("stroke-width"))
        for arc in page.locator(".arc").all()
    }
    assert widths == {"#b0-0": 12, "#b0-1": 6, "#b0-2": 1}
    assert "on chip" in page.locator(".arc.uncounted title").text_content()
    page.locator("#k0-1").hover()
    assert page.locator(".arc.on").count() == 2


def test_keyboard(saved, show):
    page = show(saved("measured", PAGES["measured"]))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.keyboard.type("dispatch/")
    assert page.get_by_label("Find").input_value() == "dispatch/"
    unreachable = page.evaluate(
        """[...document.querySelectorAll("thead th")].filter(head =>
             head.closest("table").tagName === "TABLE" && !head.closest(".sheet, .launches")
             && head.textContent && head.querySelector("button")?.tabIndex !== 0).length"""
    )
    assert unreachable == 0


def test_light_and_dark(saved, show):
    page = show(saved("modules", PAGES["modules"]), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    button = page.locator("#theme")
    assert button.inner_text() == "Light"
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    assert button.inner_text() == "Dark"
    page.reload()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    button.click()
    assert page.evaluate(background) == dark


def test_on_paper_it_is_light_and_has_no_controls(saved, show):
    page = show(saved("measured", PAGES["measured"]), color_scheme="dark")
    page.get_by_label("Find").is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_label("Find").is_visible()
    assert page.locator("table.boundaries tbody tr").count() == 4
    assert len(page.pdf(format="A4")) > 10_000
    clipped = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(box =>"
        " getComputedStyle(box).overflowX !== 'visible').length"
    )
    assert clipped == 0


def test_without_the_script_the_tables_are_there(saved, browser):
    for name, kernels, boundaries in (("measured", 10, 4), ("layers", 40, 40)):
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(saved(name, PAGES[name]).as_uri())
        assert page.locator("table.launches tbody tr").count() == kernels
        assert page.locator("table.resources tbody tr").count() == kernels
        assert page.locator("table.boundaries tbody tr").count() == boundaries
        assert not page.locator("#filters").is_visible()
        assert page.locator("noscript").count() == (3 if name == "layers" else 0)
        context.close()


@pytest.mark.parametrize("name", ["measured", "difference", "modules", "odd"])
def test_the_script_writes_rows_as_the_template_does(name, saved, show, tmp_path):
    build = PAGES.get(name, odd)
    path = saved(name, build)
    tables = """[...document.querySelectorAll(".launches, .boundaries, .resources")].map(
        table => table.tBodies[0].innerHTML.replaceAll("\\n", ""))"""
    written = show(path)
    bare = re.sub(
        r'(<table class="(?:launches|boundaries|resources).*?<tbody>).*?(</tbody>)',
        r"\1\2", path.read_text(), flags=re.DOTALL,
    )  # fmt: skip
    (tmp_path / "index.html").write_text(bare)
    built = show(tmp_path / "index.html")
    expected = written.evaluate(tables)
    assert any(expected)
    for one, wanted in zip(built.evaluate(tables), expected, strict=True):
        assert one.split("<td") == wanted.split("<td")


def odd():
    """Figures at which two ways to round come apart, and every kind of cell."""
    kernels = [
        documents.kernel(
            f"k{n}", read=size, written=0, count=n + 1, predicted_us=us, flops=flops,
            occupancy=0.125, occupancy_limiter="shared_memory", grid=[7, 1, 2], shared_bytes=size,
            scopes=[f"s{i}" for i in range(n)], source=None if n == 1 else "a/b.py:3",
        )
        for n, (size, us, flops) in enumerate(
            [(1023, 0.25, 0), (1280, 0.75, 1250), (1_310_720, 1234.25, 12_250_000),
             (3 << 40, 0.125, None), (0, None, 10**15), (1792, 1e7, 999)]
        )
    ]  # fmt: skip
    edges = [
        documents.boundary("k0", [f"k{n}" for n in range(1, 6)], written=0, scopes=list("abcde")),
        documents.boundary("k1", ["elsewhere"], memory="on_chip", source=None),
    ]
    return documents.inspected(documents.module(kernels, edges))
