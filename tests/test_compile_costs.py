"""Compile costs: what is counted is counted by hand here, on small shapes."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fusejax import paths
from fusejax.comparison import Refusal
from fusejax.compile import targets
from fusejax.compile_costs import breaks, fallbacks, fresh, mix, surroundings, variants
from fusejax.compile_costs.costs import compile_costs
from fusejax.compile_costs.document import costs_json
from fusejax.ops import OPS
from fusejax.paths import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "compile_costs.py"
ROWS, WIDTH = 256, 512
TENSOR = ROWS * WIDTH * 2
CALLS = ((8, 64), (8, 64), (7, 64), (5, 64), (3, 64))


def by_construct(found):
    return {row.construct: row for row in found}


# The mix


def test_rows_are_padded_to_powers_of_two():
    padded = {rows: mix.power_of_two(rows) for rows in (1, 2, 3, 37, 64, 1000, 8191, 8192)}
    assert padded == {1: 1, 2: 2, 3: 4, 37: 64, 64: 64, 1000: 1024, 8191: 8192, 8192: 8192}


@pytest.mark.parametrize("axes", [("rows", "width"), ("rows", "width", "depth")])
def test_twenty_calls_have_fourteen_twelve_and_eight_shapes(axes):
    calls = mix.calls(axes)
    assert len(calls) == 20
    assert {len(shape) for shape in calls} == {len(axes)}
    distinct = [len({(p.rows(s[0]), *s[1:]) for s in calls}) for p in mix.POLICIES]
    assert distinct == [14, 12, 8]


@pytest.mark.parametrize("name", ["xla", "eager"])
def test_executables_are_as_many_as_jit_keeps_when_it_is_called(name):
    op = OPS["bias_gelu_rowsum"]()
    path = paths.build(op, name, "forward")
    shapes = [op.argument_shapes(shape, np.float32) for shape in CALLS]
    jax.clear_caches()  # programs of equal functions share what they keep
    programs = [jax.jit(stage.function) for stage in path.chain.stages]
    for arguments in shapes:
        path.run(programs, [jnp.ones(a.shape, a.dtype) for a in arguments])
    kept = sum(program._cache_size() for program in programs)
    assert variants.traced(path, shapes) == kept == 4 * len(programs)


def test_padding_lowers_variants_to_the_number_counted_by_hand(deviceless):
    op = OPS["bias_gelu"]()
    found = variants.of_mix(op, CALLS, np.float32, deviceless("h200"), ["xla"])
    exact, pow2, from64 = found.variants
    assert [v.executables for v in (exact, pow2, from64)] == [4, 2, 1]
    assert {v.served for v in found.variants} == {5}
    assert min(v.compile_s for v in found.variants) > 0
    # One kernel that reads x and writes y, a row of which is 256 bytes: 7, 5 and 3 rows become 8,
    # 8 and 4, then all five calls 64.
    assert exact.extra_bytes == exact.copied_bytes == 0
    assert pow2.extra_bytes == (1 + 3 + 1) * 2 * 256
    assert from64.extra_bytes == (2 * 56 + 57 + 59 + 61) * 2 * 256
    assert pow2.copied_bytes == ((7 + 8 + 14) + (5 + 8 + 10) + (3 + 4 + 6)) * 256
    assert from64.moved_bytes - from64.extra_bytes == exact.moved_bytes
    assert found.note is None
    assert found.kernels == ()


def test_each_shape_has_a_pallas_kernel_of_its_own_in_few_configurations(deviceless):
    op = OPS["bias_gelu_rowsum"]()
    calls = [(300, 256), (37, 256), (300, 256), (37, 4096)]
    found = variants.of_mix(
        op, calls, BF16, deviceless("h200"), ["pallas"], policies=mix.POLICIES[:1]
    )
    (exact,) = found.variants
    assert exact.executables == exact.mosaic_kernels == 3
    assert exact.configurations == 2
    assert [(k.shape, k.calls) for k in found.kernels] == [
        ((300, 256), 2), ((37, 256), 1), ((37, 4096), 1),
    ]  # fmt: skip
    assert {k.function for k in found.kernels} == {"bias_gelu_rowsum"}
    assert found.kernels[0].plan.startswith("warp, ")
    assert found.kernels[2].plan.startswith("CTA, 1 row, ")


def test_tails_that_a_kernel_refuses_are_served_once_padded(deviceless):
    op = OPS["gemm_bias_gelu"]()
    calls = [(128, 128, 128), (37, 128, 128)]
    found = variants.of_mix(op, calls, BF16, deviceless("h200"), ["pallas"])
    exact, pow2, _ = found.variants
    assert (exact.served, pow2.served) == (1, 2)
    assert "37" in exact.refusal
    assert pow2.refusal is None
    (refused,) = variants.of_mix(op, calls[:1], BF16, deviceless("a100"), ["pallas"]).variants
    assert isinstance(refused, Refusal)
    assert "compute capability" in refused.reason


@pytest.mark.parametrize("name", OPS)
def test_padded_rows_stay_out_of_results_unless_the_op_says_otherwise(name):
    op = OPS[name]()
    shape, larger = (5, 64, 32)[: len(op.axes)], (8, 64, 32)[: len(op.axes)]
    random = np.random.default_rng(0)

    def values(a):
        if a.dtype == np.bool_:
            return random.random(a.shape) < 0.8
        return random.standard_normal(a.shape).astype(a.dtype)

    own = [values(a) for a in op.argument_shapes(shape, np.float32)]
    padded = [
        np.pad(value, [(0, n - m) for n, m in zip(a.shape, value.shape, strict=True)])
        for value, a in zip(own, op.argument_shapes(larger, np.float32), strict=True)
    ]
    program = op.chain.program(op.name)
    same = all(
        np.allclose(a, np.asarray(b)[tuple(slice(n) for n in a.shape)], rtol=1e-5, atol=1e-5)
        for a, b in zip(program(*own), program(*padded), strict=True)
    )
    assert same or op.mixes_rows
    if name == "bias_gelu_colsum":
        assert not same
        assert variants._note(op) is not None


# Around the kernel


@pytest.fixture
def around(deviceless):
    """A function from the name of a case to how xla and pallas compile it for bias + GELU."""

    def compiled(name):
        op = OPS["bias_gelu"]()
        cases = [c for c in surroundings.inputs(op, (ROWS, WIDTH), BF16) if c.name == name]
        return surroundings.surroundings(op, (ROWS, WIDTH), BF16, deviceless("h200"), cases=cases)

    return compiled


@pytest.mark.parametrize(
    ("case", "does", "moved"),
    [
        ("columns of a larger array", "slice", 2 * TENSOR),
        ("cast from float32", "convert", 3 * TENSOR),
    ],
)
def test_what_xla_fuses_is_a_kernel_of_its_own_before_a_pallas_call(around, case, does, moved):
    xla, pallas = around(case)
    (extra,) = pallas.extras
    assert extra.does == (does,)
    assert extra.traffic.total == pallas.extra_bytes == moved
    assert (pallas.launches, pallas.mosaic_kernels) == (2, 1)
    assert pallas.boundary_bytes == 2 * TENSOR
    assert (xla.launches, xla.mosaic_kernels, xla.boundary_bytes) == (1, 0, 0)
    assert pallas.traffic.total == xla.traffic.total + 2 * TENSOR
    assert xla.traffic.total == xla.needed_bytes


def test_a_transposed_input_is_transposed_in_memory_by_both(around):
    for row in around("transposed"):
        assert row.launches == 2
        assert row.extras[0].does == ("transpose",)
        assert row.extras[0].traffic.total == row.boundary_bytes == 2 * TENSOR


@pytest.mark.parametrize(
    "case", ["row-major", "rows of a larger array", "float32, bfloat16 vectors", "odd rows"]
)
def test_what_a_pallas_call_takes_as_it_is(around, case):
    _, pallas = around(case)
    assert (pallas.launches, pallas.mosaic_kernels, pallas.extras) == (1, 1, ())
    assert pallas.boundary_bytes == 0
    assert pallas.traffic.total == pallas.needed_bytes


def test_neighbours_are_fused_by_xla_and_cut_off_by_a_pallas_call(around):
    xla, pallas = around("between element-wise neighbours")
    assert (xla.launches, xla.boundary_bytes) == (1, 0)
    assert (pallas.launches, pallas.boundary_bytes) == (3, 4 * TENSOR)
    assert [extra.does for extra in pallas.extras] == [("multiply",), ("add",)]


def test_an_input_that_the_kernel_refuses_is_a_row(deviceless):
    op = OPS["gemm_bias_gelu"]()
    shape = (128, 128, 128)
    cases = surroundings.inputs(op, shape, BF16)[-4:-1]
    found = surroundings.surroundings(
        op, shape, BF16, deviceless("h200"), names=["pallas"], cases=cases
    )
    assert [row.name for row in found] == [f"pallas, {case.name}" for case in cases]
    assert "float32" in found[0].reason
    assert "127" in found[1].reason
    (nothing,) = surroundings.surroundings(
        op, shape, BF16, deviceless("a100"), names=["pallas"], cases=cases
    )
    assert (nothing.name, "compute capability" in nothing.reason) == ("pallas", True)


# Breaks


def test_breaks_of_a_program_that_cannot_run_here(deviceless):
    found = by_construct(breaks.breaks(OPS["bias_gelu"](), (ROWS, WIDTH), BF16, deviceless("h200")))
    one, two = found["one jit"], found["two jits"]
    assert (one.programs, one.launches, one.boundary_bytes, one.host_bytes) == (1, 1, 0, 0)
    assert (two.programs, two.launches, two.boundary_bytes) == (2, 2, 2 * TENSOR)
    assert two.traffic.total == one.traffic.total + 2 * TENSOR
    looked = found["if float(sum) between jits"]
    assert (looked.programs, looked.host_bytes, looked.host_waits) == (2, 4, 1)
    inside = found["if float(sum) inside jit"]
    assert inside.refusal.startswith("ConcretizationTypeError: ")
    assert inside.programs == 0
    cond = found["jax.lax.cond"]
    assert (cond.refusal, cond.programs, cond.host_waits) == (None, 1, 0)
    for name in ("jax.pure_callback", "io_callback"):
        row = found[name]
        assert row.is_stand_in
        assert row.refusal  # in the words of JAX, which differ where a GPU is
        assert (row.programs, row.launches, row.callbacks, row.host_waits) == (1, 2, 1, 1)
        assert row.host_bytes == 2 * TENSOR
        # Written for the callback, which reads it; its answer written, and read by the next.
        assert row.boundary_bytes == 4 * TENSOR
    for name in ("jax.debug.callback", "jax.debug.print"):
        row = found[name]
        assert row.is_stand_in
        assert (row.programs, row.callbacks, row.host_bytes) == (1, 1, 4)
        assert row.boundary_bytes < TENSOR


def test_callbacks_are_real_where_they_can_be_lowered():
    found = by_construct(breaks.breaks(OPS["bias_gelu"](), (ROWS, WIDTH), BF16, targets.cpu()))
    refused = {name for name, row in found.items() if row.refusal is not None}
    assert refused == {"if float(sum) inside jit"}
    assert not any(row.is_stand_in for row in found.values())
    assert found["jax.pure_callback"].host_bytes == 2 * TENSOR
    assert found["jax.debug.print"].host_bytes == 4
    assert [row.callbacks for row in found.values()] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["bias_gelu_rowsum", "residual_ln", "shared_scale"])
@pytest.mark.parametrize("seed", [0, 1])
def test_constructs_compute_the_op(name, seed):
    op = OPS[name]()
    random = np.random.default_rng(seed)
    arguments = [
        (random.standard_normal(a.shape) + 2).astype(np.float32)  # the sum is above 0
        for a in op.argument_shapes((7, 33), np.float32)
    ]
    wanted = op.reference(*(a.astype(np.float64) for a in arguments), np.float32)
    for construct in breaks.constructs(op):
        if construct.name == "if float(sum) inside jit":
            continue
        programs = [jax.jit(stage.function) for stage in construct.chain.stages]
        found = Path(construct.name, construct.chain).run(programs, arguments)
        for value, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, right, rtol=2e-5, atol=2e-4)


def test_cond_takes_the_other_branch_where_the_sum_is_not_above_zero():
    op = OPS["bias_gelu"]()
    (cond,) = (c for c in breaks.constructs(op) if c.name == "jax.lax.cond")
    (stage,) = cond.chain.stages
    (y,) = stage.function(-jnp.ones((4, 8)), jnp.zeros(8))
    assert not np.any(y)


@pytest.mark.gpu
def test_a_stand_in_compiles_to_what_the_callback_does():
    target = targets.device()
    op = OPS["bias_gelu"]()
    shapes = op.argument_shapes((ROWS, WIDTH), BF16)
    for construct in breaks.constructs(op):
        if construct.stand_in is not None:
            real = breaks._compiled(construct, construct.chain, shapes, target)
            assert real == breaks._compiled(construct, construct.stand_in, shapes, target)


# Fallbacks


def test_fallbacks_of_a_row_kernel(deviceless):
    found = {
        row.case: row for row in fallbacks.fallbacks(OPS["bias_gelu_rowsum"](), deviceless("h200"))
    }
    serves = {case: row.serves for case, row in found.items()}
    assert serves == {
        "float64": "xla",
        "int8": "xla",
        "float8_e4m3fn": "xla",
        "no rows": "pallas",
        "no columns": "pallas",
        "very wide rows": "xla",
        "2^31 elements": "xla",
        "odd sizes": "pallas",
        "rank 0": None,
        "rank 3": "pallas",
        "vectors too short": None,
        "x wider than the others": None,
        "a card before Hopper": "xla",
    }
    assert found["float64"].arguments == "f64[64,1024], f64[1024]"
    assert found["float8_e4m3fn"].arguments.startswith("f8e4m3fn[")
    assert "300000" in found["very wide rows"].pallas.refusal
    assert found["a card before Hopper"].target == "a100"
    for case, row in found.items():
        if row.pallas.refusal is not None and case != "a card before Hopper":
            assert row.pallas.raised == f"ValueError: {row.pallas.refusal}"


def test_a_product_has_ragged_sizes_and_a_row_alone_no_others(deviceless):
    product, alone = (
        {case.name for case in fallbacks.cases(OPS[name]())}
        for name in ("shared_matmul", "softmax")
    )
    assert "vectors too short" not in product
    assert "x wider than the others" in product
    assert not alone & {"vectors too short", "x wider than the others"}
    op = OPS["gemm_bias_gelu"]()
    (ragged,) = (case for case in fallbacks.cases(op) if case.name == "odd sizes")
    outcome = fallbacks._pallas(op, ragged.arguments, deviceless("h200"))
    assert "multiple of 8" in outcome.refusal
    assert fallbacks._compiled(
        op.chain.program(op.name), ragged.arguments, deviceless("h200")
    ).launches


def test_a_check_that_breaks_is_told_in_its_row():
    op = dataclasses.replace(OPS["bias_gelu"](), kernel_refusal=lambda *_: 1 // 0)
    usual = op.argument_shapes((4, 8), np.float32)
    outcome = fallbacks._pallas(op, usual, targets.cpu())
    assert outcome.refusal == "the check itself fails: ZeroDivisionError: integer division or " + (
        "modulo by zero"
    )


# Times


def test_the_persistent_cache_is_hit_from_another_process():
    work = fresh.Work("bias_gelu_rowsum", {}, "eager", (8, 64), "float32")
    (found,) = fresh.compile_times([work], targets.cpu())
    assert (found.programs, found.requests, found.hits, found.no_hit) == (3, 3, 3, None)
    assert found.entry_bytes > 0
    assert found.executable_bytes > 0
    assert 0 < found.cached_s < found.fill_s
    assert found.warm_s > 0


def test_without_a_device_the_cache_is_filled_and_cannot_be_read(deviceless):
    work = fresh.Work("bias_gelu_rowsum", {}, "xla", (8, 64), "float32")
    (found,) = fresh.compile_times([work], deviceless("h200"))
    assert (found.programs, found.requests, found.hits, found.cached_s) == (1, 1, 0, None)
    assert "Client" in found.no_hit
    assert found.entry_bytes > 0
    assert found.cold_s > 0


# Report


def test_document_has_every_part_that_was_asked_for():
    op = OPS["softmax"]()
    costs = compile_costs(
        op,
        np.float32,
        targets.cpu(),
        shapes=[(8, 64), (3, 64)],
        names=["xla", "pallas"],
        parts=["variants", "breaks"],
    )
    document = json.loads(json.dumps(costs_json(costs), allow_nan=False))
    assert document["schema"] == "fusejax.compile_costs/1"
    assert document["shape"] == [8, 64]
    assert document["times"] is document["surroundings"] is document["fallbacks"] is None
    exact, *_, pallas = document["mix"]["variants"]
    assert (exact["path"], exact["policy"], exact["executables"]) == ("xla", "exact", 2)
    assert pallas["status"] == "unsupported"
    assert document["breaks"][0]["traffic"]["total"] > 0


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )


def test_script_prints_tables_of_at_most_100_columns():
    done = run("--op", "softmax", "--target", "cpu", "--shapes", "8x64,3x64", "--parts",
               "variants,breaks", "--paths", "xla,pallas")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    for title in ("Executables for a mix of 2 calls", "What ends a compiled region"):
        assert title in done.stdout
    assert "ConcretizationTypeError" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--op is missing"),
        (["--op", "softmax", "--shapes", "8192"], "--shapes '8192' has 1 size(s)"),
        (["--op", "softmax", "--parts", "tests"], "--parts 'tests' is unknown"),
    ],
)
def test_script_refuses_in_one_line(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
