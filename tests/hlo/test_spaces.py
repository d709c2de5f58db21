"""Arrays outside the device's main memory: on the chip of a TPU, or on the host."""

import pytest

from fusejax.hlo import spaces
from fusejax.hlo.analyse import analyse, boundary_json
from fusejax.hlo.module import Shape
from fusejax.program import Program
from fusejax.report.inspection_console import as_text

MIB = 1 << 20
TILED = "{1,0:T(8,128)}"
ON_CHIP = "{1,0:T(8,128)S(1)}"
ARRAY = "f32[1024,256]"  # one MiB


def run(text, backend=None):
    return analyse(Program("m", text, backend=backend))


def traffic(result):
    return {k.name: (k.traffic.read, k.traffic.written) for k in result.kernels}


@pytest.mark.parametrize(
    ("layout", "memories"),
    [
        ("", ("device", "device", "device", "device")),
        ("1,0:T(8,128)", ("device", "device", "device", "device")),
        ("1,0:S(0)", ("device", "device", "device", "device")),
        ("1,0:T(8,128)S(1)", ("on_chip", "device", "device", "device")),
        (":T(128)S(6)", ("on_chip", "device", "device", "device")),
        ("1,0:S(5)", ("host", "host", "device", "host")),
    ],
)
def test_memories(layout, memories):
    shape = Shape("f32", (8, 8), layout)
    backends = ("tpu", "gpu", "cpu", "unoptimised")
    assert tuple(spaces.memory(shape, back_end) for back_end in backends) == memories


# Prefetched, computed on the chip, and brought back.
TPU = f"""
HloModule m, is_scheduled=true
c {{ x = {ARRAY}{ON_CHIP} parameter(0) ROOT n = {ARRAY}{ON_CHIP} negate(x) }}
d {{ x = {ARRAY}{ON_CHIP} parameter(0) y = {ARRAY}{TILED} parameter(1)
  ROOT n = {ARRAY}{TILED} add(x, y) }}
e {{ x = {ARRAY}{TILED} parameter(0)
  ROOT s = f32[256,256]{ON_CHIP} slice(x), slice={{[0:256], [0:256]}} }}
ENTRY e_ {{
  p = {ARRAY}{TILED} parameter(0)
  copy-start = ({ARRAY}{ON_CHIP}, {ARRAY}{TILED}, u32[]{{:S(2)}}) copy-start(p)
  copy-done = {ARRAY}{ON_CHIP} copy-done(copy-start)
  inside = {ARRAY}{ON_CHIP} fusion(copy-done), kind=kLoop, calls=c
  out = {ARRAY}{TILED} fusion(inside, p), kind=kLoop, calls=d
  slice-start = (({ARRAY}{TILED}), f32[256,256]{ON_CHIP}, u32[]{{:S(2)}}) async-start(out), calls=e
  slice-done = f32[256,256]{ON_CHIP} async-done(slice-start)
  back = f32[256,256]{TILED} copy(slice-done)
  ROOT t = ({ARRAY}{TILED}, f32[256,256]{TILED}) tuple(out, back)
}}
"""


def test_what_is_on_the_chip_moves_no_bytes():
    result = run(TPU)
    assert result.backend == "tpu"
    assert traffic(result) == {
        "copy-start": (MIB, 0),
        "inside": (0, 0),
        "out": (MIB, MIB),
        "slice-start": (MIB // 4, 0),
        "back": (0, MIB // 4),
    }
    assert result.minimum_bytes == 2 * MIB + MIB // 4
    costs = {(b.producer, b.memory): (b.written_bytes, b.read_bytes) for b in result.boundaries}
    assert costs == {
        ("out", "device"): (0, MIB // 4),  # an output
        ("copy-start", "on_chip"): (0, 0),
        ("inside", "on_chip"): (0, 0),
        ("slice-start", "on_chip"): (0, 0),
    }
    assert result.boundaries[0].memory == "device"  # what costs comes first
    assert boundary_json(result.boundaries[1])["memory"] == "on_chip"
    assert not any("host" in warning for warning in result.warnings)


def test_the_same_in_main_memory_moves_bytes():
    result = run(TPU.replace("S(1)", ""))
    assert traffic(result) == {
        "copy-start": (MIB, MIB),
        "inside": (MIB, MIB),
        "out": (2 * MIB, MIB),
        "slice-start": (MIB // 4, MIB // 4),
        "back": (MIB // 4, MIB // 4),
    }
    assert {b.memory for b in result.boundaries} == {"device"}


HOST = f"""
HloModule m, is_scheduled=true
c {{ x = {ARRAY} parameter(0) ROOT n = {ARRAY} negate(x) }}
ENTRY e {{
  p = {ARRAY} parameter(0)
  q = {ARRAY}{{1,0:S(5)}} parameter(1)
  a = {ARRAY} fusion(p), kind=kLoop, calls=c
  away = ({ARRAY}{{1,0:S(5)}}, {ARRAY}, u32[]) copy-start(a)
  away-done = {ARRAY}{{1,0:S(5)}} copy-done(away)
  again = ({ARRAY}, {ARRAY}{{1,0:S(5)}}, u32[]) copy-start(away-done)
  again-done = {ARRAY} copy-done(again)
  fetched = {ARRAY} copy(q)
  b = {ARRAY} fusion(again-done), kind=kLoop, calls=c
  ROOT t = ({ARRAY}, {ARRAY}) tuple(b, fetched)
}}
"""


@pytest.mark.parametrize("backend", ["gpu", "tpu"], ids=["card", "tpu"])
def test_host_memory_is_not_the_devices(backend):
    result = run(HOST, backend)
    assert traffic(result) == {
        "a": (MIB, MIB), "away": (MIB, 0), "again": (0, MIB), "fetched": (0, MIB), "b": (MIB, MIB),
    }  # fmt: skip
    assert [(b.producer, b.written_bytes) for b in result.boundaries if b.memory == "host"] == [
        ("away", 0)
    ]
    assert result.minimum_bytes == 3 * MIB  # q is on the host
    (warning,) = (w for w in result.warnings if "host" in w)
    assert warning.startswith("3,145,728 bytes per run go to host memory or come from it")


def test_a_cpu_has_one_memory():
    result = run(HOST, "cpu")
    assert traffic(result)["away"] == (MIB, MIB)
    assert result.minimum_bytes == 4 * MIB
    assert not any("host memory" in warning for warning in result.warnings)


def test_an_update_in_host_memory_counts_the_update_alone():
    result = run(
        f"""HloModule m, is_scheduled=true
        u {{ x = {ARRAY}{{1,0:S(5)}} parameter(0) y = f32[1,256] parameter(1) i = s32[] parameter(2)
          ROOT d = {ARRAY}{{1,0:S(5)}} dynamic-update-slice(x, y, i, i) }}
        ENTRY e {{ x = {ARRAY}{{1,0:S(5)}} parameter(0) y = f32[1,256] parameter(1)
          i = s32[] parameter(2)
          ROOT k = {ARRAY}{{1,0:S(5)}} fusion(x, y, i), kind=kLoop, calls=u }}""",
        "gpu",
    )
    assert traffic(result) == {"k": (1024 + 4, 0)}
    assert any(w.startswith("1,024 bytes per run go to host memory") for w in result.warnings)


def test_the_tables_say_where_a_tensor_is(tmp_path):
    from fusejax import inspection

    (tmp_path / "m.txt").write_text(TPU)
    text = as_text(inspection.inspect_paths([str(tmp_path / "m.txt")]))
    assert text.count("(on chip)") == 3
    assert text.count("(output)") == 1
    (tmp_path / "m.txt").write_text(HOST)
    assert as_text(inspection.inspect_paths([str(tmp_path / "m.txt")])).count("(host)") == 1
