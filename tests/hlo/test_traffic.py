"""Bytes, boundaries and kernels of small modules written by hand."""

import pytest

from fusejax.hlo.analyse import analyse
from fusejax.program import Program

F = 4  # bytes of an f32


def run(text):
    return analyse(Program("m", text))


def module(entry, computations=""):
    return f"HloModule m, is_scheduled=true\n{computations}\nENTRY e {{\n{entry}\n}}\n"


def kernel(text, name):
    return next(k for k in run(text).kernels if k.name == name)


def fused(body, operands, result, kind="kLoop", parameters="f32[64,128] parameter(0)"):
    entry = f"""
      p = {parameters}
      ROOT f = {result} fusion({operands}), kind={kind}, calls=c
    """
    return module(entry, f"c {{ {body} }}")


def test_an_operand_taken_twice_is_read_once():
    text = fused(
        "a = f32[64,128] parameter(0) b = f32[64,128] parameter(1) ROOT r = f32[64,128] add(a, b)",
        "p, p", "f32[64,128]",
    )  # fmt: skip
    assert kernel(text, "f").traffic.read == 64 * 128 * F


def test_a_view_is_the_array_itself():
    text = module(
        """
      p = f32[64] parameter(0)
      v = f32[8,8] bitcast(p)
      t = (f32[64], f32[8,8]) tuple(p, v)
      g = f32[8,8] get-tuple-element(t), index=1
      ROOT f = f32[64] fusion(p, g, t#0), kind=kLoop, calls=c
    """,
        """c { a = f32[64] parameter(0) b = f32[8,8] parameter(1) d = f32[64] parameter(2)
        s = f32[64] bitcast(b) x = f32[64] add(a, s) ROOT r = f32[64] add(x, d) }""",
    )
    assert kernel(text, "f").traffic.read == 64 * F


@pytest.mark.parametrize(
    ("pick", "read", "is_bound"),
    [
        ("slice(a), slice={[0:4], [0:128]}", 4 * 128 * F, False),
        ("dynamic-slice(a, i, i), dynamic_slice_sizes={4,128}", 4 * 128 * F + F, False),
    ],
)
def test_a_slice_reads_what_it_picks(pick, read, is_bound):
    body = f"""a = f32[64,128] parameter(0) i = s32[] parameter(1)
      x = f32[64,128] negate(a) ROOT r = f32[4,128] {pick.replace("(a", "(x")}"""
    text = fused(
        body, "p, i", "f32[4,128]", parameters="f32[64,128] parameter(0)\n i = s32[] parameter(1)"
    )
    traffic = kernel(text, "f").traffic
    assert (traffic.read, traffic.is_bound) == (read, is_bound)


def test_a_slice_beside_a_full_use_reads_all():
    body = """a = f32[64,128] parameter(0) s = f32[4,128] slice(a), slice={[0:4], [0:128]}
      z = f32[] constant(0) b = f32[64,128] negate(a)
      ROOT r = (f32[4,128], f32[64,128]) tuple(s, b)"""
    text = fused(body, "p", "(f32[4,128], f32[64,128])")
    assert kernel(text, "f").traffic.read == 64 * 128 * F


def test_a_gather_is_a_bound():
    body = """a = f32[64,128] parameter(0) i = s32[8,1] parameter(1)
      ROOT r = f32[8,128] gather(a, i), offset_dims={1}, collapsed_slice_dims={0},
        start_index_map={0}, index_vector_dim=1, slice_sizes={1,128}"""
    text = fused(
        body,
        "p, i",
        "f32[8,128]",
        parameters="f32[64,128] parameter(0)\n i = s32[8,1] parameter(1)",
    )
    traffic = kernel(text, "f").traffic
    assert (traffic.read, traffic.is_bound) == (8 * 128 * F + 32, True)


def test_an_update_in_place_touches_the_update():
    body = """a = f32[64,128] parameter(0) u = f32[1,128] parameter(1) i = s32[] parameter(2)
      ROOT r = f32[64,128] dynamic-update-slice(a, u, i, i)"""
    text = fused(
        body, "p, u, i", "f32[64,128]",
        parameters="f32[64,128] parameter(0)\n u = f32[1,128] parameter(1)\n"
        " i = s32[] parameter(2)",
    )  # fmt: skip
    traffic = kernel(text, "f").traffic
    assert (traffic.read, traffic.written) == (128 * F + F, 128 * F)


def test_half_bytes():
    text = module("p = s4[1000] parameter(0)\n ROOT c = s4[1000] copy(p)")
    assert kernel(text, "c").traffic.total == 1000


def test_scratch_of_a_call_is_left_out():
    text = module(
        """
      p = f32[16,16] parameter(0)
      g = (f32[16,16], s8[4096]) custom-call(p, p), custom_call_target="__cublas$gemm"
      ROOT r = f32[16,16] get-tuple-element(g), index=0
    """
    )
    found = kernel(text, "g")
    assert (found.emitter, found.traffic.read, found.traffic.written) == ("cublas", 1024, 1024)


def test_boundary_of_an_output_costs_the_second_read():
    text = module(
        """
      p = f32[64] parameter(0)
      a = (f32[64], f32[64]) fusion(p), kind=kLoop, calls=c
      b = f32[64] fusion(a#1), kind=kLoop, calls=d
      ROOT t = (f32[64], f32[64]) tuple(a#1, b)
    """,
        """c { x = f32[64] parameter(0) n = f32[64] negate(x)
          ROOT t = (f32[64], f32[64]) tuple(n, x) }
        d { x = f32[64] parameter(0) ROOT n = f32[64] negate(x) }""",
    )
    (boundary,) = run(text).boundaries
    assert (boundary.producer, boundary.consumers) == ("a", ("b",))
    assert (boundary.written_bytes, boundary.read_bytes) == (0, 256)
    assert boundary.reason.kind == "unknown"


LOOP = """
  body { p = (s32[], f32[8]) parameter(0) i = s32[] get-tuple-element(p), index=0
    x = f32[8] get-tuple-element(p), index=1 one = s32[] constant(1) j = s32[] add(i, one)
    y = f32[8] negate(x) ROOT t = (s32[], f32[8]) tuple(j, y) }
  cond { p = (s32[], f32[8]) parameter(0) i = s32[] get-tuple-element(p), index=0
    n = s32[] constant(5) ROOT l = pred[] compare(i, n), direction=LT }
"""


@pytest.mark.parametrize(
    ("config", "launches", "unknown"),
    [
        (', backend_config={"known_trip_count":{"n":"5"}}', 15, False),
        (r', backend_config="{\"known_trip_count\":{\"n\":\"5\"}}"', 15, False),
        ("", 3, True),
    ],
)
def test_trip_counts(config, launches, unknown):
    result = run(
        module(
            f"""i = s32[] constant(0)\n x = f32[8] parameter(0)
            t = (s32[], f32[8]) tuple(i, x)
            w = (s32[], f32[8]) while(t), condition=cond, body=body{config}
            ROOT r = f32[8] get-tuple-element(w), index=1""",
            LOOP,
        )
    )
    assert result.launches == launches
    assert any("trip count" in warning for warning in result.warnings) is unknown


def test_an_async_pair_is_launched_once():
    result = run(
        module(
            """p = f32[8] parameter(0)
            s = (f32[8], f32[16], u32[]) all-gather-start(p), dimensions={0}
            d = f32[16] all-gather-done(s)
            c = (f32[16]{0:S(5)}, f32[16], u32[]) copy-start(d)
            ROOT e = f32[16] copy-done(c)"""
        )
    )
    assert [(k.name, k.emitter) for k in result.kernels] == [("s", "collective"), ("c", "copy")]
    assert [(b.producer, b.consumers, b.read_bytes) for b in result.boundaries] == [
        ("s", ("c",), 64)
    ]


@pytest.mark.parametrize(
    ("line", "emitter"),
    [
        ('custom-call(p), custom_call_target="mosaic_gpu_v2"', "mosaic_gpu"),
        ('custom-call(p), custom_call_target="__cublas$lt$matmul"', "cublas"),
        ('custom-call(p), custom_call_target="__cudnn$convForward"', "cudnn"),
        ('custom-call(p), custom_call_target="__gpu$xla.gpu.triton"', "triton"),
        ('custom-call(p), custom_call_target="mine"', "custom_call"),
        ('fusion(p), kind=kCustom, calls=c, backend_config={"kind":"__triton"}', "triton"),
        (
            "fusion(p), kind=kCustom, calls=c, "
            'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}',
            "triton_gemm",
        ),
        ("fusion(p), kind=kInput, calls=c", "loop"),
        ("fusion(p), kind=kInput, calls=t", "transpose"),
        ("sort(p), dimensions={0}", "sort"),
        ("copy(p)", "copy"),
    ],
)
def test_emitters(line, emitter):
    text = module(
        f"p = f32[8,8] parameter(0)\n ROOT k = f32[8,8] {line}",
        """c { x = f32[8,8] parameter(0) ROOT n = f32[8,8] negate(x) }
        t { x = f32[8,8] parameter(0) ROOT n = f32[8,8] transpose(x), dimensions={1,0} }""",
    )
    assert kernel(text, "k").emitter == emitter


def test_back_ends():
    unoptimised = "ENTRY e { p = f32[8] parameter(0) ROOT n = f32[8] negate(p) }"
    assert run(unoptimised).backend == "unoptimised"
    tiled = module("p = f32[8,8]{1,0:T(8,128)} parameter(0)\n ROOT c = f32[8,8]{1,0} copy(p)")
    assert run(tiled).backend == "tpu"
