import time

import pytest

from fusejax.resources import ptxas
from fusejax.resources.ptxas import Usage

needs_ptxas = pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")

REPORT = """\
ptxas application ptx input, line 564; info    : Potential out of bound access
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'loop_multiply_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_multiply_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.9 ms
ptxas info    : Compiling entry function 'fat' for 'sm_90a'
ptxas info    : Function properties for __internal_helper
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for fat
ptxas         .     96 bytes stack frame, 92 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size, 4160 bytes smem
"""

COPY = """
.version 8.0
.target {target}
.address_size 64
.visible .entry {name}(.param .u64 p)
{{
  .reg .b64 %rd<3>;
  .reg .b32 %r<2>;
  .shared .align 4 .b8 scratch[{shared}];
  ld.param.u64 %rd1, [p];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r1, [%rd2];
  st.shared.u32 [scratch], %r1;
  bar.sync 0;
  ld.shared.u32 %r1, [scratch];
  st.global.u32 [%rd2+4], %r1;
  ret;
}}
"""


def test_reads_the_report():
    assert ptxas.parse(REPORT) == {
        "loop_multiply_fusion": Usage(8, 0, 0, 0, 0),
        "fat": Usage(255, 92, 120, 96, 4160),
    }


@pytest.mark.parametrize("report", ["", "ptxas fatal   : Unknown option", REPORT[:250]])
def test_half_a_report_gives_nothing(report):
    assert ptxas.parse(report) == {}


@needs_ptxas
def test_runs_ptxas_on_texts_of_the_same_name():
    texts = [
        COPY.format(target="sm_90a", name="k", shared=64),
        COPY.format(target="sm_80", name="k", shared=128),
        "not PTX",
        ".target sm_90a\nnot PTX either",
    ]
    first, second, *others = ptxas.usages(texts)
    assert first["k"].static_shared_bytes == 64
    assert second["k"].static_shared_bytes == 128
    assert first["k"].registers >= 4
    assert first["k"].spill_store_bytes == 0
    assert others == [{}, {}]


@needs_ptxas
def test_is_fast():
    texts = [COPY.format(target="sm_90a", name=f"k{i}", shared=64) for i in range(6)]
    ptxas.usages(texts[:1])
    start = time.perf_counter()
    assert all(ptxas.usages(texts))
    # 0.1 s on two idle cores; the rest is for busy ones.
    assert time.perf_counter() - start < 2


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(ptxas, "find", lambda: None)
    assert ptxas.usages(["anything", "else"]) == ({}, {})
    assert "fusejax[aot]" in ptxas.missing()
