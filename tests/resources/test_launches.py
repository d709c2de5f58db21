from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.resources import launches
from fusejax.resources.launches import Thunk
from fusejax.resources.matching import function_name, match

LOOPS = """\
001: kCopy         [source       | next=004 (3)] kCopy
003: kCustomKernel [source       | next=004 (1)] loop_broadcast_fusion grid: [1, 1, 1] \
threads: [3, 1, 1]  shared_memory: 0 bytes
004: kWhile        [prev=003 (1) | sink        ]   
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  \
shared_memory: 0 bytes
  body:
    006: kCustomKernel [source       | next=007 (1)] input_reduce_fusion_1 grid: [32, 2, 1] \
threads: [256, 1, 1]  shared_memory: 0 bytes
    013: kWhile        [prev=012 (1) | next=018 (1)]       
condition:
      body:
        016: kCustomKernel [source       | sink          ] gemm_fusion_dot grid: [2048, 1, 1] \
threads: [64, 1, 1]  shared_memory: 768 bytes
"""  # noqa: W291


def kernel(name, emitter="loop", count=1):
    return Kernel(name, emitter, (), None, count, Traffic(0, 0))


def test_reads_loops():
    found = launches.parse(LOOPS)
    assert [(thunk.kind, thunk.depth) for thunk in found] == [
        ("Copy", 0),
        ("CustomKernel", 0),
        ("While", 0),
        ("CustomKernel", 1),
        ("CustomKernel", 1),
        ("While", 1),
        ("CustomKernel", 2),
    ]
    assert found[-1] == Thunk("CustomKernel", 2, "gemm_fusion_dot", (2048, 1, 1), (64, 1, 1), 768)
    assert found[4].grid == (32, 2, 1)


def test_other_text_is_no_launch():
    assert launches.parse("HloModule jit_f\n\nENTRY main {\n 001: nothing\n}") == ()


def test_joins_by_name():
    kernels = [kernel("input_reduce_fusion.1"), kernel("gemm_fusion_dot"), kernel("elsewhere")]
    found = launches.by_kernel(LOOPS, kernels)
    assert {name: thunk.function for name, thunk in found.items()} == {
        "input_reduce_fusion.1": "input_reduce_fusion_1",
        "gemm_fusion_dot": "gemm_fusion_dot",
    }


def test_function_name():
    assert function_name("%loop_add_fusion.1.clone-2") == "loop_add_fusion_1_clone_2"


def test_kernels_that_share_a_function_are_told_apart_by_order():
    # LayerNorm of wide rows: the second row sum runs the first one's code.
    kernels = [
        kernel(name)
        for name in (
            "input_reduce_fusion.1",
            "input_reduce_fusion.2",
            "loop_multiply_fusion",
            "input_reduce_fusion",
            "input_reduce_fusion.3",
        )
    ]
    launched = [
        "input_reduce_fusion_1",
        "input_reduce_fusion_2",
        "loop_multiply_fusion",
        "input_reduce_fusion",
        "input_reduce_fusion_2",
    ]
    names = tuple(kernel.name for kernel in kernels)
    assert match(launched, kernels, per_run=True) == names
    assert match(launched, kernels, per_run=False) == names


def test_order_that_contradicts_the_names_tells_nothing():
    kernels = [kernel("add.1"), kernel("add.2"), kernel("add.3")]
    assert match(["add_2", "add_1", "add_1"], kernels, per_run=True) == (None, None, None)


def test_a_launch_too_many_tells_nothing():
    kernels = [kernel("add.1"), kernel("add.2"), kernel("mul")]
    assert match(["add_1", "add_1", "add_2", "mul"], kernels, per_run=True) == (
        None,
        None,
        None,
        "mul",
    )


def test_loop_bodies_count_once_per_trip():
    kernels = [kernel("a", count=3), kernel("b.1", count=3), kernel("c")]
    launched = ["a", "b_1", "a", "b_1", "a", "b_1", "c"]
    assert match(launched, kernels, per_run=True) == ("a", "b.1", "a", "b.1", "a", "b.1", "c")


def test_library_and_pallas_kernels_by_order():
    kernels = [
        kernel("cublas-lt-matmul.1", "cublas"),
        kernel("mpmd_map.3", "mosaic_gpu"),
        kernel("mpmd_map.7", "mosaic_gpu"),
        kernel("loop_multiply_fusion"),
    ]
    launched = [
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_NNT",
        "body_mosaic_gpu_kernel",
        "other_mosaic_gpu_kernel",
        "loop_multiply_fusion",
    ]
    assert match(launched, kernels, per_run=True) == tuple(k.name for k in kernels)
    # A library that launches two kernels for one call leaves its time unassigned.
    found = match(["nvjet", "splitKreduce", *launched[1:]], kernels, per_run=True)
    assert found[:2] == (None, None)
    assert found[2:] == ("mpmd_map.3", "mpmd_map.7", "loop_multiply_fusion")


def test_a_damaged_launch_is_no_launch():
    text = (
        "001: kCustomKernel [source | sink] good grid: [2, 1, 1] threads: [128, 1, 1]"
        "  shared_memory: 0 bytes\n"
        "002: kCustomKernel [source | sink] bad grid: [2, 1] threads: [128, 1, 1]"
        "  shared_memory: 0 bytes\n"
    )
    assert [thunk.function for thunk in launches.parse(text)] == ["good", None]
