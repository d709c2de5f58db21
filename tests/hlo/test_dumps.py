"""Cases whose kernels are known, on dumps of three JAX versions and compiled now."""

import importlib.util
import json
import pathlib

import pytest

from fusejax import inspection
from fusejax.hlo.analysis import Traffic

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
VERSIONS = ("jax-0.10.2", "jax-0.11.2", "jax-0.12.0.1")


@pytest.fixture(scope="session")
def make_dumps():
    spec = importlib.util.spec_from_file_location("make_dumps", ROOT / "scripts" / "make_dumps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=(*VERSIONS, "now"))
def read(request, make_dumps, tmp_path):
    """A function from a case's name to what its dump says."""

    def inspected(case):
        folder = DATA / request.param / case
        if request.param == "now":
            target = request.getfixturevalue("deviceless")("h100")
            folder = tmp_path / case
            make_dumps.dump(*make_dumps.CASES[case], folder, target.description)
        (module,) = inspection.inspect_paths([str(folder)]).modules
        json.dumps(module.to_json(), allow_nan=False)
        return module

    return inspected


def total(module):
    return module.analysis.traffic.total


def test_gelu_and_row_sum(read):
    module = read("gelu_and_row_sum")
    assert [k.emitter for k in module.kernels] == ["loop", "reduction"]
    assert (total(module), module.analysis.minimum_bytes) == (805_355_520, 268_484_608)
    (boundary,) = module.boundaries
    assert (boundary.dtype, boundary.shape) == ("f32", (8192, 8192))
    assert boundary.written_bytes == boundary.read_bytes == 268_435_456
    assert pathlib.PurePath(boundary.source.rpartition(":")[0]).name == "make_dumps.py"
    assert boundary.reason.kind == "cost_model"
    assert boundary.reason.us_fused == pytest.approx(1050.9, rel=0.01)
    assert boundary.reason.us_unfused == pytest.approx(726.1, rel=0.01)
    assert any("wider" in warning for warning in module.warnings)
    assert any("written twice, as different types" in warning for warning in module.warnings)


def test_relu_and_row_sum(read):
    module = read("relu_and_row_sum")
    assert (module.launches, total(module), module.boundaries) == (1, 268_484_608, ())
    assert module.warnings == ()


def test_gelu_and_column_sum(read):
    module = read("gelu_and_column_sum")
    assert module.launches == 3
    whole, partial = module.boundaries
    assert (whole.written_bytes, whole.reason.kind) == (268_435_456, "cost_model")
    assert (partial.shape, partial.written_bytes) == ((64, 8192), 2_097_152)


def test_residual_rms_norm(read):
    module = read("residual_rms_norm")
    assert [k.emitter for k in module.kernels] == ["loop", "triton"]
    assert (total(module), module.analysis.minimum_bytes) == (335_560_704, 268_451_840)
    (boundary,) = module.boundaries
    assert (boundary.written_bytes, boundary.read_bytes) == (0, 67_108_864)
    assert "the consumer is not fusible" in boundary.reason.text


def test_softmax_over_the_cliff(read):
    below, above = read("softmax_16384"), read("softmax_16385")
    assert (below.launches, total(below)) == (1, 134_217_728)
    assert (above.launches, total(above)) == (5, 272_195_584)
    assert above.analysis.minimum_bytes == 134_225_920
    partials = [b for b in above.boundaries if b.shape == (2048, 113)]
    assert [(b.dtype, b.reason.kind) for b in partials] == [("f32", "emitter_limit")] * 2
    assert all("16385" in b.reason.text and "16384" in b.reason.text for b in partials)
    limits = inspection.Limits(kernels=1)
    assert inspection.exceeded(inspection.Report((below,)), limits) == ()
    (line,) = inspection.exceeded(inspection.Report((above,)), limits)
    assert "5 launches, 4 over --max-kernels 1" in line


def test_barrier(read):
    module = read("barrier")
    assert [k.scopes for k in module.kernels] == [("part_a",), ("part_b",)]
    (boundary,) = module.boundaries
    assert (boundary.written_bytes, boundary.reason.kind) == (134_217_728, "barrier")
    assert not any("split nothing" in warning for warning in module.warnings)


def test_gradient_of_a_barrier(read):
    module = read("barrier_gradient")
    broadcast, _ = module.kernels
    assert broadcast.traffic == Traffic(0, 134_217_728)
    assert (broadcast.scopes, broadcast.direction) == (("part_b",), "backward")


def test_barriers_that_split_nothing_and_one_of_two(read):
    parameter = read("barrier_on_parameter")
    assert (parameter.launches, parameter.boundaries) == (1, ())
    (warning,) = parameter.warnings
    assert "the optimization barrier split nothing" in warning
    assert "make_dumps.py:" in warning
    two = read("barrier_of_two")
    assert two.launches == 2
    assert [(b.shape, b.reason.kind) for b in two.boundaries] == [((8192, 4096), "barrier")]


def test_dense(read):
    relu, gelu = read("dense_relu"), read("dense_gelu")
    assert [k.emitter for k in relu.kernels] == ["triton_gemm"]
    assert total(relu) == 1_704_960
    (boundary,) = gelu.boundaries
    assert (gelu.launches, boundary.dtype, boundary.shape) == (2, "f32", (1024, 256))
    assert boundary.written_bytes == 1_048_576
    assert "the producer is not fusible" in boundary.reason.text
    for module in (relu, gelu):
        assert any("GEMM back end not autotuned" in warning for warning in module.warnings)


def test_folded_scope(read):
    module = read("folded")
    assert module.launches == 1
    statuses = {s["name"]: s["status"] for s in module.to_json()["scopes"]}
    assert statuses == {"glug": "folded", "bar": "kernels"}


def test_cross_entropy_gradient(read):
    module = read("cross_entropy_gradient")
    assert module.launches == 12
    first = module.boundaries[0]
    assert (first.dtype, first.written_bytes) == ("f32", 4_202_692_608)
    scatter = next(k for k in module.kernels if k.emitter == "scatter")
    assert scatter.traffic.written == 8192 * 4
    assert scatter.traffic.total < 200_000
    converted = next(b for b in module.boundaries if b.producer == "wrapped_convert")
    assert (converted.dtype, converted.written_bytes) == ("bf16", 2_101_346_304)
    assert len(converted.consumers) == 2


def test_loop(read):
    module = read("loop")
    in_loop = [k for k in module.kernels if k.emitter != "copy"]
    assert [k.count for k in in_loop] == [10] * 4


@pytest.mark.parametrize("case", sorted(path.name for path in (DATA / VERSIONS[0]).iterdir()))
def test_versions_differ_in_nothing_that_matters(case):
    for version in VERSIONS[1:]:
        report = inspection.inspect_paths(
            [str(DATA / VERSIONS[0] / case), str(DATA / version / case)], compare=True
        )
        (difference,) = report.diff
        assert (difference.kernels.appeared, difference.kernels.went) == ((), ()), case
        assert (difference.boundaries.appeared, difference.boundaries.went) == ((), ()), case
        assert difference.is_empty


def test_a_dump_has_no_path_of_the_machine_that_made_it():
    for path in DATA.rglob("*.txt"):
        text = path.read_text()
        assert '"/home' not in text
        assert '"/tmp' not in text
        assert '"/root' not in text
