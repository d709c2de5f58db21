"""Which module a kernel counts for, and what two steps have in common."""

import io
import json

import pytest
import step_kernels
from rich.console import Console
from step_kernels import Group, Place, Profile, Share

from fusejax.compile import targets
from fusejax.hlo.analysis import Analysis, Kernel, Traffic


def kernel(name, emitter, scopes, size, direction="forward", count=1):
    return Kernel(name, emitter, scopes, None, count, Traffic(size - 1, 1), direction)


def profile(kernels, us):
    analysis = Analysis("step", "gpu", tuple(kernels), (), 1, ())
    ends = {one.name: one.scopes[-1] if one.scopes else "" for one in kernels}
    return Profile(analysis, ends, us, 100.0)


FLAX = profile(
    [
        kernel("loop_add_fusion", "loop", ("GPT/block_0/mlp/down", "GPT/block_0/mlp_norm"), 10),
        kernel("loop_add_fusion.1", "loop", ("GPT/block_1/mlp_norm/mlp_norm",), 10),
        kernel("gemm_fusion_dot", "triton_gemm", ("GPT/block_0/mlp/up/up",), 30),
        kernel("gemm_fusion_dot.1", "triton_gemm", ("GPT/block_1/mlp/up/up",), 30, count=2),
        kernel(
            "copy.3", "copy", ("GPT/head/transpose;jit(step)/GPT/block_1/mlp/up",), 7, "backward"
        ),
        kernel("fusion", "loop", ("GPT/head", "optimizer"), 5, "both"),
        kernel("fusion.1", "loop", (), 3, None),
    ],
    {
        "loop_add_fusion": 2.0, "loop_add_fusion.1": 2.0, "gemm_fusion_dot": None,
        "gemm_fusion_dot.1": 4.0, "copy.3": 1.0, "fusion": 0.5, "fusion.1": 0.25,
    },
)  # fmt: skip
OURS = profile(
    [
        kernel("mpmd_map", "mosaic_gpu", ("GPT/block_0/mlp_norm/prenorm_layer_norm",), 6),
        kernel("mpmd_map.2", "mosaic_gpu", ("GPT/block_1/mlp_norm/prenorm_layer_norm",), 6),
        kernel("gemm_fusion_dot.9", "triton_gemm", ("GPT/block_0/mlp/up",), 30),
        kernel("gemm_fusion_dot", "triton_gemm", ("GPT/block_1/mlp/up",), 30, count=2),
        kernel("fusion.7", "loop", ("optimizer",), 5, "forward"),
    ],
    {
        "mpmd_map": 1.0, "mpmd_map.2": 1.5, "gemm_fusion_dot.9": 3.0, "gemm_fusion_dot": 4.0,
        "fusion.7": 0.5,
    },
)  # fmt: skip
BOTH = {"flax": FLAX, "fusejax": OURS}


def test_blocks_are_added_up_and_a_kernel_counts_for_where_it_ends():
    assert step_kernels.by_module(BOTH) == {
        "flax": {
            Place("block_*/mlp_norm", "fwd"): Share(2, 20, 4.0),
            Place("block_*/mlp/up", "fwd"): Share(3, 90, 8.0),
            Place("block_*/mlp/up", "bwd"): Share(1, 7, 1.0),
            Place("optimizer", ""): Share(1, 5, 0.5),
            Place("(none)", "fwd"): Share(1, 3, 0.25),
        },
        "fusejax": {
            Place("block_*/mlp_norm", "fwd"): Share(2, 12, 2.5),
            Place("block_*/mlp/up", "fwd"): Share(3, 90, 11.0),
            Place("optimizer", ""): Share(1, 5, 0.5),
        },
    }


def test_kernels_with_a_counterpart_are_left_out():
    norm, up = Place("block_*/mlp_norm", "fwd"), Place("block_*/mlp/up", "bwd")
    assert step_kernels.only_in_one(BOTH) == [
        Group("flax", "loop_add_fusion", "loop", norm, Share(2, 20, 4.0)),
        Group("fusejax", "mpmd_map", "mosaic_gpu", norm, Share(2, 12, 2.5)),
        Group("flax", "copy", "copy", up, Share(1, 7, 1.0)),
        Group("flax", "fusion", "loop", Place("(none)", "fwd"), Share(1, 3, 0.25)),
    ]


def test_a_kernel_ends_where_its_fusion_is_named_after():
    hlo = """HloModule m

    fused {
      p = f32[8] parameter(0)
      a = f32[8] negate(p), metadata={op_name="jit(f)/GPT/block_0/attention/softmax/neg"}
      b = f32[8] negate(a), metadata={op_name="jit(f)/GPT/block_0/mlp/up/neg"}
      ROOT c = f32[8] add(a, b), metadata={op_name="jit(f)/GPT/block_0/attention/softmax/add"}
    }

    ENTRY main {
      x = f32[8] parameter(0)
      named = f32[8] fusion(x), kind=kLoop, calls=fused,
        metadata={op_name="jit(f)/GPT/block_0/attention/softmax/add"}
      ROOT unnamed = f32[8] fusion(named), kind=kLoop, calls=fused
    }
    """
    scopes = ("GPT/block_0/attention/softmax", "GPT/block_0/mlp/up")
    kernels = [kernel(name, "loop", scopes, 64) for name in ("named", "unnamed")]
    kernels.append(kernel("bare", "loop", (), 64))
    assert step_kernels._ends(kernels, hlo) == {
        "named": scopes[0],
        "unnamed": scopes[1],
        "bare": "",
    }


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_tables_and_json(name):
    target = targets.cpu() if name == "cpu" else targets.deviceless(name)
    out = io.StringIO()
    step_kernels.print_tables(BOTH, target, Console(file=out, width=100))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert "modules that differ (4 of 5)" in out.getvalue()
    norm = ["block_*/mlp_norm", "fwd", "2", "2", "0.0", "0.0", "4", "2", "-2"]
    assert norm in rows
    assert ["whole", "step", "8", "6", "0.0", "0.0", "100", "100", "+0"] in rows
    document = json.loads(json.dumps(step_kernels.to_json(BOTH, target)))
    assert document["steps"]["flax"]["launches"] == 8
    assert document["steps"]["fusejax"]["bytes"] == 6 + 6 + 30 + 60 + 5
    assert document["steps"]["flax"]["kernels"][2]["us"] is None
    assert document["only_in_one"][1]["place"] == {"module": "block_*/mlp_norm", "part": "fwd"}
