"""From a document to the text of its page: names, nothing, what is not known, large numbers."""

import html.parser
import json
import re

import documents
import pytest

from fusejax.hlo.analysis import Work
from fusejax.hlo.arithmetic import flops
from fusejax.report.html import formats
from fusejax.report.html.comparison import comparison_view
from fusejax.report.html.inspection import inspection_view
from fusejax.report.html.page import page
from fusejax.report.html.roofline import roofline
from fusejax.report.html.rows import scope_sums

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}<!--"


class Reader(html.parser.HTMLParser):
    """The elements, their ids, and what could run or fetch."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.active, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        for name, value in attributes:
            is_link = name in ("src", "href", "srcset", "action", "data", "xlink:href")
            if name.startswith("on") or (is_link and not value.startswith("#")):
                self.active.append((tag, name, value))
            if name == "id":
                self.ids.append(value)


def block(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    )


def hostile():
    """A document in which every text is markup."""
    one = documents.kernel(HOSTILE, emitter=HOSTILE, scopes=[HOSTILE], source=HOSTILE)
    edge = documents.boundary(HOSTILE, [HOSTILE], scopes=[HOSTILE], source=HOSTILE, dtype=HOSTILE)
    edge["reason"] |= {"kind": HOSTILE, "text": HOSTILE}
    target = documents.TARGET | {"description": HOSTILE, "rates": HOSTILE}
    return documents.inspected(
        documents.module(
            [one], [edge], name=HOSTILE, file=HOSTILE, warnings=[HOSTILE], target=target,
            scopes=[{"name": HOSTILE, "kernels": [], "status": "folded"}],
        )
    )  # fmt: skip


def test_names_are_text_never_markup():
    text, plain = page(hostile()), page(documents.inspected(documents.module([])))
    read = Reader(text)
    assert read.active == []
    assert read.elements.count("script") == Reader(plain).elements.count("script") == 2
    assert "img" not in read.elements
    assert HOSTILE in block(text)["texts"]
    assert text.count("&lt;/script&gt;") > 10
    # The reader would see it: the same name, put in as markup.
    broken = text.replace("<h1>", f"<h1>{HOSTILE}")
    assert Reader(broken).active


def test_hostile_comparison():
    document = documents.predicted()
    document |= {"op": HOSTILE, "formula": HOSTILE}
    document["paths"] = {HOSTILE: document["paths"]["xla"] | {"warnings": [HOSTILE]}}
    document["verdict"] |= {"fastest": HOSTILE, "summary": HOSTILE}
    read = Reader(page(document))
    assert read.active == []
    assert "img" not in read.elements


def test_nothing_outside_is_named_and_ids_are_unique():
    for document in (documents.measured(), documents.of_dumps("loop", "gelu_and_row_sum")):
        text = page(document)
        read = Reader(text)
        assert len(read.ids) == len(set(read.ids))
        assert read.active == []
        links = re.findall(r"https?://[^\s\"'<)]+", text)
        assert set(links) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
        assert "@import" not in text
        assert "url(http" not in text
        assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "document",
    [
        documents.inspected(),
        documents.inspected(documents.module([])),
        documents.inspected(documents.module([], minimum_bytes=0, ratio=None, target=None)),
        documents.inspected(diff={"modules": []}),
    ],
)
def test_empty_modules(document):
    text = page(document)
    assert "no kernel" in text
    assert "no kernel reads what another one wrote" in text


def test_no_path_is_served():
    document = documents.predicted() | {"verdict": None}
    refused = document["paths"]["pallas_split"]
    document["paths"] = {"eager": refused, "xla": refused | {"reason": "does not compile: x < y"}}
    text = page(document)
    assert "does not compile: x &lt; y" in text
    assert "There is no kernel." in text


def test_what_is_not_known_is_a_dash():
    bare = documents.kernel("k", predicted_us=None, flops=None, source=None, direction=None)
    text = page(documents.inspected(documents.module([bare], target=None, time_us=None)))
    assert "µs, predicted" not in text
    assert "registers</th>" not in text
    known = documents.kernel("j", registers=40)
    both = page(documents.inspected(documents.module([bare, known], target=None)))
    rows = re.findall(r'<tr id="r0-\d">(.*?)</tr>', both)
    assert ">–<" in rows[0]
    assert ">40<" in rows[1]


def test_a_document_from_before_some_fields_were_there():
    document = documents.of_dumps("gelu_and_row_sum")
    (module,) = document["modules"]
    del module["target"], module["time_us"]
    for kernel in module["kernels"]:
        del kernel["flops"], kernel["predicted_us"]
    text = page(document)
    assert "No rates are known" in text
    assert "tanh" in json.dumps(module["kernels"][0]["work"])
    assert block(text)["kernels"]["numbers"].count("flops") == 1  # worked out from "work"


def test_huge_counts():
    document = documents.inspected(
        documents.module([documents.kernel("k", count=10**12, read=1 << 60, written=1)])
    )
    text = page(document)
    assert "1,000,000,000,000" in text
    assert block(text)["kernels"]["rows"][0][2] == 10**12 * 2**60


def test_long_tables_are_cut_in_the_page_and_whole_in_its_data():
    text = page(documents.layers(40))
    assert len(re.findall(r'<tr id="r0-', text)) == 40
    assert "The first 40 of 1,200 rows" in text
    assert len(block(text)["kernels"]["rows"]) == 1200
    short = page(documents.layers(3))
    assert len(re.findall(r'<tr id="r0-', short)) == 90
    assert "<noscript>" not in short


def test_pages_are_light():
    assert len(page(documents.measured()).encode()) < 120_000
    assert len(page(documents.layers(30)).encode()) < 300_000  # 900 launches


def test_measured_and_predicted_are_never_one_figure():
    measured, predicted = (page(d) for d in (documents.measured(), documents.predicted()))
    assert "Floor, measured" in measured
    assert "µs, measured" in measured
    assert "Floor, predicted" in predicted
    assert "µs, measured" not in predicted
    assert 'class="measured"' not in predicted
    assert "times are predicted, none was measured" in predicted
    assert "needs rows of 16 bytes" in predicted


def test_difference():
    view = inspection_view(documents.of_dumps("softmax_16384", "softmax_16385", compare=True))
    (difference,) = view.differences
    assert [p.label for p in view.programs] == ["before", "after"]
    assert difference.figures[0] == ("Launches", "count", 1, 5)
    assert [c.sign for c in difference.kernels].count("+") == 4
    assert all(c.before is None for c in difference.boundaries)  # one kernel has none
    marked = [row for row in view.programs[1].boundaries if row["change"] == "+"]
    assert len(marked) == len(difference.boundaries) > 0
    assert sorted(c.anchor for c in difference.boundaries) == sorted(r["id"] for r in marked)
    sizes = [abs((c.after or 0) - (c.before or 0)) for c in difference.kernels]
    assert sizes == sorted(sizes, reverse=True)


def test_modules_of_a_difference_are_told_apart_by_side():
    one = documents.module([documents.kernel("k", scopes=["s"])])
    pair = {
        "a": "jit_f", "b": "jit_f", "launches": {"a": 1, "b": 1}, "bytes": {"a": 1, "b": 1},
        "boundary_bytes": {"a": 0, "b": 0},
        "kernels": {"appeared": [], "went": [], "changed": [], "same": 1},
        "boundaries": {"appeared": [], "went": [], "changed": [], "same": 0},
    }  # fmt: skip
    only = pair | {"a": None, "launches": {"a": None, "b": 1}, "bytes": {"a": None, "b": 1}}
    only |= {"boundary_bytes": {"a": None, "b": 0}, "b": "jit_g"}
    other = documents.module([documents.kernel("k")], name="jit_g")
    view = inspection_view(documents.inspected(one, one, other, diff={"modules": [pair, only]}))
    assert [p.label for p in view.programs] == ["before: jit_f", "after: jit_f", "after: jit_g"]
    assert "only after" in page(
        documents.inspected(one, one, other, diff={"modules": [pair, only]})
    )


def test_a_stage_without_kernels_and_one_with_several():
    document = documents.predicted()
    eager = document["paths"]["eager"]
    eager["boundaries"][0] |= {"producer": "bias", "consumers": ["gelu", "gone"]}
    program = comparison_view(document).programs[0]
    row = next(row for row in program.boundaries if row["producer"] == "bias")
    assert (row["from"], row["to"]) == (0, [1, None])


def test_roofline():
    known = documents.module([documents.kernel("k"), documents.kernel("hidden", flops=None)])
    found = roofline(inspection_view(documents.inspected(known)).programs)
    assert 'href="#k0-0"' in found.svg
    assert "k: 0.00 flop per byte, 500.0 Mflop/s, 2.0 µs predicted" in found.svg
    assert any("1 kernel of which the compiled text" in note for note in found.notes)
    assert "#0102" not in found.svg  # every colour is the page's
    assert "DejaVu" not in found.svg
    for module, reason in (
        (known | {"target": None}, "the text does not name"),
        (known | {"target": documents.TARGET | {"effective_bandwidth_bytes_per_s": None}}, "H200"),
        (documents.module([documents.kernel("k", flops=None)]), "does not say"),
        (documents.module([documents.kernel("k", predicted_us=None)]), "and a time"),
    ):
        found = roofline(inspection_view(documents.inspected(module)).programs)
        assert found.svg == ""
        assert reason in found.reason


def test_a_roofline_is_of_one_card():
    other = documents.TARGET | {
        "description": "NVIDIA A100",
        "effective_bandwidth_bytes_per_s": 1e12,
    }
    modules = [documents.module([documents.kernel("k")], name="jit_f")]
    modules += [documents.module([documents.kernel("k")], name="jit_g", target=other)]
    found = roofline(inspection_view(documents.inspected(*modules)).programs)
    assert 'href="#k0-0"' in found.svg
    assert 'href="#k1-0"' not in found.svg
    assert any("not compiled for NVIDIA H200: jit_g" in note for note in found.notes)


def test_equal_kernels_are_one_mark():
    kernels = [documents.kernel(f"k{number}") for number in range(50)]
    view = inspection_view(documents.inspected(documents.module(kernels)))
    found = roofline(view.programs)
    assert found.svg.count("<title>") == 1
    assert "49 kernels like it" in found.svg


def test_scopes_add_up():
    view = inspection_view(documents.layers(12))
    sums = {one.name: one for one in scope_sums(view.programs[0].kernels)}
    assert sums["Model"].kernels == 360
    assert sums["Model/Block_1"].kernels == 30
    assert sums["Model/Block_1"].bytes == 60 * documents.MIB
    names = [name for name in sums if name.count("/") == 1]
    assert names == [f"Model/Block_{number}" for number in range(12)]


def test_formats():
    assert formats.size(None) == formats.us(None) == formats.share(None) == "–"
    assert formats.change(100, 50, "count") == "−50 (−50 %)"
    assert formats.change(0, 1 << 20, "bytes") == "+1.0 MiB"
    assert formats.change(None, 3, "count") == ""
    assert [formats.flops(n) for n in (0, 999, 1e9, 2.5e13)] == ["0", "999", "1.0 G", "25.0 T"]


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match=r"schema is 'fusejax.sweep/1'"):
        page({"schema": "fusejax.sweep/1"})


def test_flops_of_a_kernel():
    work = Work({"tanh:f32": 8, "convert:f32>bf16": 8, "select:f32": 8, "add:s32": 8}, 0)
    assert flops("loop", work.operations, 0) == 8
    assert flops("triton_gemm", {"add:f32": 4}, 100) == 104
    assert flops("copy", {}, 0) == 0
    for emitter in ("mosaic_gpu", "triton", "custom_call", "cublas"):
        assert flops(emitter, {}, 0) is None
    assert flops("cublas", {}, 64) == 64
    assert flops("loop", {"convolution:f32": 9}, 0) is None
