"""Compiled live for a card that is not there, against figures worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fusejax.compile import aot
from fusejax.hlo.analyse import GEMM_NOT_AUTOTUNED, analyse, to_json

bf16, f32 = jnp.bfloat16, jnp.float32


@pytest.fixture(scope="module")
def compiled(deviceless):
    target = deviceless("h100")

    def run(function, *arguments, expected_scopes=()):
        program = aot.compile_program(function, arguments, target).program
        return analyse(program, expected_scopes=expected_scopes), program

    return run


def arg(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def gelu(x):
    return jax.nn.gelu(x, approximate=True)


def bias_activation_sum(activation, axis):
    def function(x, b):
        y = activation((x + b).astype(f32))
        return y.astype(bf16), y.sum(axis)

    return function


BIAS = (arg(bf16, 8192, 8192), arg(bf16, 8192))


def test_expensive_producer_with_two_consumers(compiled):
    result, _ = compiled(bias_activation_sum(gelu, -1), *BIAS)
    assert [k.name for k in result.kernels] == [
        "loop_multiply_fusion",
        "input_convert_reduce_fusion",
    ]
    assert [k.emitter for k in result.kernels] == ["loop", "reduction"]
    assert (result.traffic.total, result.minimum_bytes) == (805_355_520, 268_484_608)
    (boundary,) = result.boundaries
    assert (boundary.dtype, boundary.shape) == ("f32", (8192, 8192))
    assert boundary.written_bytes == boundary.read_bytes == 268_435_456
    assert boundary.consumers == ("input_convert_reduce_fusion",)
    assert boundary.source is not None
    assert "test_cases.py:" in boundary.source
    assert boundary.reason.kind == "cost_model"
    assert boundary.reason.us_fused == pytest.approx(1050.9, rel=0.01)
    assert boundary.reason.us_unfused == pytest.approx(726.1, rel=0.01)
    assert any("wider" in warning for warning in result.warnings)


def test_cheap_producer_is_fused(compiled):
    result, _ = compiled(bias_activation_sum(jax.nn.relu, -1), *BIAS)
    assert (result.launches, result.boundaries) == (1, ())
    assert result.traffic.total == result.minimum_bytes == 268_484_608


def test_sum_over_columns_goes_through_a_partial(compiled):
    result, _ = compiled(bias_activation_sum(gelu, 0), *BIAS)
    assert result.launches == 3
    whole, partial = result.boundaries
    assert (whole.written_bytes, whole.reason.kind) == (268_435_456, "cost_model")
    assert (partial.shape, partial.written_bytes) == ((64, 8192), 2_097_152)
    assert partial.reason.kind == "rule"


def test_output_that_is_read_again_costs_the_read(compiled):
    def residual_rmsnorm(x, r, g):
        h = x + r
        h32 = h.astype(f32)
        y = h32 * jax.lax.rsqrt(jnp.mean(h32 * h32, -1, keepdims=True) + 1e-6) * g
        return h, y.astype(bf16)

    x = arg(bf16, 8192, 4096)
    result, _ = compiled(residual_rmsnorm, x, x, arg(f32, 4096))
    assert [k.emitter for k in result.kernels] == ["loop", "triton"]
    assert (result.traffic.total, result.minimum_bytes) == (335_560_704, 268_451_840)
    (boundary,) = result.boundaries
    assert boundary.producer == "wrapped_add"
    assert (boundary.written_bytes, boundary.read_bytes) == (0, 67_108_864)
    assert boundary.reason.kind == "rule"
    assert "the consumer is not fusible" in boundary.reason.text


def softmax(x):
    return jax.nn.softmax(x.astype(f32), -1).astype(bf16)


def layer_norm(x):
    x = x.astype(f32)
    centred = x - x.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(bf16)


def rms_norm(x):
    x = x.astype(f32)
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)).astype(bf16)


@pytest.mark.parametrize(
    ("function", "above"), [(softmax, 5), (layer_norm, 7), (rms_norm, 4)], ids=lambda v: str(v)[:14]
)
def test_rows_over_16384_split(compiled, function, above):
    below, _ = compiled(function, arg(bf16, 2048, 16384))
    assert [k.emitter for k in below.kernels] == ["triton"]
    assert below.traffic.total == 134_217_728
    result, _ = compiled(function, arg(bf16, 2048, 16385))
    assert result.launches == above
    limits = [b.reason for b in result.boundaries if b.reason.kind == "emitter_limit"]
    assert limits
    assert all("16385" in limit.text and "16384" in limit.text for limit in limits)
    if function is softmax:
        assert (result.traffic.total, result.minimum_bytes) == (272_195_584, 134_225_920)
        partials = [b for b in result.boundaries if b.shape == (2048, 113)]
        assert [b.reason.kind for b in partials] == ["emitter_limit"] * 2
        assert all(b.dtype == "f32" for b in partials)


def two_parts(x, barrier):
    with jax.named_scope("part_a"):
        y = jnp.exp(x)
    y = jax.lax.optimization_barrier(y) if barrier else y
    with jax.named_scope("part_b"):
        return (y * 2).sum(-1)


X = arg(f32, 8192, 4096)


def test_without_a_barrier_one_kernel_holds_both_scopes(compiled):
    result, _ = compiled(lambda x: two_parts(x, False), X)
    assert (result.launches, result.traffic.total) == (1, 134_250_496)
    assert result.kernels[0].scopes == ("part_a", "part_b")


def test_a_barrier_splits(compiled):
    result, program = compiled(lambda x: two_parts(x, True), X)
    (boundary,) = result.boundaries
    assert [k.scopes for k in result.kernels] == [("part_a",), ("part_b",)]
    assert (boundary.written_bytes, boundary.reason.kind) == (134_217_728, "barrier")
    assert boundary.scopes == ("part_a", "part_b")
    # The text before optimisation tells it as well, where there is no dump of decisions.
    (again,) = analyse(dataclasses.replace(program, decisions=None)).boundaries
    assert again.reason.kind == "barrier"


def test_the_gradient_of_a_barrier_materialises_a_broadcast(compiled):
    result, _ = compiled(jax.grad(lambda x: two_parts(x, True).sum()), X)
    broadcast, _ = result.kernels
    assert (broadcast.traffic.read, broadcast.traffic.written) == (0, 134_217_728)
    assert (broadcast.scopes, broadcast.direction) == (("part_b",), "backward")
    assert [b.reason.kind for b in result.boundaries] == ["barrier"]


def test_a_barrier_on_a_parameter_splits_nothing(compiled):
    result, _ = compiled(lambda x: jnp.exp(jax.lax.optimization_barrier(x)).sum(-1), X)
    assert (result.launches, result.boundaries) == (1, ())
    assert any("split nothing" in warning for warning in result.warnings)


def test_a_barrier_on_one_of_two_consumers(compiled):
    def function(x):
        y = jnp.exp(x)
        z, _ = jax.lax.optimization_barrier((y, x))
        return z.sum(-1), y.max(-1)

    result, _ = compiled(function, X)
    assert [k.name for k in result.kernels] == [
        "input_exponential_reduce_fusion",
        "input_reduce_fusion",
    ]
    assert [(b.shape, b.reason.kind) for b in result.boundaries] == [((8192, 4096), "barrier")]


@pytest.mark.parametrize("activation", [jax.nn.relu, gelu], ids=["relu", "gelu"])
def test_dense_with_bias_and_activation(compiled, activation):
    result, _ = compiled(
        lambda x, w, b: activation(x @ w + b),
        arg(f32, 1024, 128), arg(f32, 128, 256), arg(f32, 256),
    )  # fmt: skip
    assert result.backend == "gpu"
    assert result.kernels[0].emitter == "triton_gemm"
    assert GEMM_NOT_AUTOTUNED in result.warnings
    if activation is jax.nn.relu:
        assert (result.launches, result.traffic.total) == (1, 1_704_960)
        return
    (boundary,) = result.boundaries
    assert (boundary.dtype, boundary.shape) == ("f32", (1024, 256))
    assert boundary.written_bytes == 1_048_576
    assert "the producer is not fusible" in boundary.reason.text
    assert "GEMM back end not autotuned" in boundary.reason.text


def test_folded_scopes_are_listed(compiled):
    def function(x):
        with jax.named_scope("glug"):
            y = x + 2
        with jax.named_scope("bar"):
            return y + 1

    result, _ = compiled(function, arg(jnp.int32, 1048576), expected_scopes=("glug", "bar"))
    assert result.launches == 1
    name = result.kernels[0].name
    assert [(s.name, s.kernels) for s in result.scopes] == [("glug", ()), ("bar", (name,))]
    assert [s["status"] for s in to_json(result)["scopes"]] == ["folded", "kernels"]


def test_cross_entropy_gradient(compiled):
    def gradient(x, w, labels):
        def loss(x, w):
            logits = (x @ w).astype(f32)
            picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

        return jax.grad(loss, (0, 1))(x, w)

    result, _ = compiled(
        gradient, arg(bf16, 8192, 4096), arg(bf16, 4096, 128256), arg(jnp.int32, 8192)
    )
    assert result.launches == 12
    first = result.boundaries[0]
    assert (first.dtype, first.written_bytes) == ("f32", 4_202_692_608)
    assert first.consumers == ("input_scatter_fusion", "wrapped_convert")
    scatter = next(k for k in result.kernels if k.emitter == "scatter")
    assert scatter.traffic.written == 8192 * 4
    assert scatter.traffic.total < 200_000
    converted = next(b for b in result.boundaries if b.producer == "wrapped_convert")
    assert (converted.dtype, converted.written_bytes) == ("bf16", 2_101_346_304)
    assert len(converted.consumers) == 2
    costs = [b.written_bytes + b.read_bytes for b in result.boundaries]
    assert costs == sorted(costs, reverse=True)


def test_a_loop_counts_its_trips(compiled):
    def function(c):
        return jax.lax.scan(
            lambda c, _: (jnp.tanh(c @ c * 0.1) + jnp.sin(c), None), c, None, length=10
        )[0]

    result, _ = compiled(function, arg(f32, 512, 512))
    assert [k.count for k in result.kernels if k.emitter != "copy"] == [10] * 4
    carried = next(b for b in result.boundaries if b.producer == "loop_add_fusion")
    assert "loop_add_fusion" in carried.consumers
    assert carried.read_bytes == 2 * 9 * 512 * 512 * 4


def test_json_has_every_field(compiled):
    result, _ = compiled(bias_activation_sum(gelu, -1), *BIAS)
    module = to_json(result, file="f.txt", resources={"loop_multiply_fusion": {"registers": 32}})
    assert module["ratio"] == pytest.approx(3.0, abs=0.001)
    first, second = module["kernels"]
    assert (first["registers"], second["registers"]) == (32, None)
    assert first["bytes"]["total"] == first["bytes"]["read"] + first["bytes"]["written"]
    assert module["boundaries"][0]["reason"]["kind"] == "cost_model"
