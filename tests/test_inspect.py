"""scripts/inspect_hlo.py and fusejax.inspect: reports, limits, differences, broken input."""

import importlib.util
import json
import pathlib
import random
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fusejax
from fusejax import inspection
from fusejax.errors import UsageError

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "jax-0.12.0.1"
CASE = DATA / "gelu_and_row_sum"
KERNEL_FIELDS = {
    "name", "emitter", "scopes", "count", "bytes", "registers", "spill_bytes", "shared_bytes",
    "threads", "grid", "occupancy", "occupancy_limiter", "time_us",
}  # fmt: skip
BOUNDARY_FIELDS = {
    "producer", "consumers", "dtype", "shape", "written_bytes", "read_bytes", "scopes", "source",
    "reason",
}  # fmt: skip


def run(*arguments, stdin=""):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "inspect_hlo.py", *map(str, arguments)],
        input=stdin, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def final_text(case=CASE):
    return next(case.glob("*after_optimizations.txt")).read_text()


def test_report_of_a_dump_folder(tmp_path):
    done = run(CASE, "--json", tmp_path / "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "768.0 MiB read and written, 3.00 x the minimum" in done.stdout
    assert re.search(r"f32\[8192,8192\] +256.0 MiB +256.0 MiB", done.stdout)
    assert "cost_model: XLA's cost model expects" in done.stdout
    assert "Warning: boundary loop_multiply_fusion" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["schema"], document["diff"]) == ("fusejax.inspect/1", None)
    (module,) = document["modules"]
    assert (module["name"], module["backend"], module["launches"]) == ("jit_function", "gpu", 2)
    assert pathlib.Path(module["file"]).parent == CASE
    assert all(kernel.keys() >= KERNEL_FIELDS for kernel in module["kernels"])
    assert all(boundary.keys() >= BOUNDARY_FIELDS for boundary in module["boundaries"])
    assert module["kernels"][0]["grid"] is not None


def test_text_from_standard_input_and_json_to_standard_output():
    done = run("-", "--json", "-", stdin=final_text())
    document = json.loads(done.stdout)
    (module,) = document["modules"]
    assert (module["file"], module["launches"]) == ("-", 2)
    assert module["boundaries"][0]["reason"]["kind"] == "unknown"


def test_several_paths_and_several_modules_in_one_file(tmp_path):
    (tmp_path / "two.txt").write_text(final_text() + "\n" + final_text(DATA / "folded"))
    report = inspection.inspect_paths([str(tmp_path / "two.txt"), str(DATA / "loop")])
    assert [m.name for m in report.modules] == ["jit_function", "jit_folded", "jit_loop"]
    (tmp_path / "folder").mkdir()
    for number, case in enumerate(("folded", "loop")):
        for path in (DATA / case).iterdir():
            name = path.name.replace("module_0001", f"module_{number:04}")
            (tmp_path / "folder" / name).write_text(path.read_text())
    report = inspection.inspect_paths([str(tmp_path / "folder")])
    assert [m.name for m in report.modules] == ["jit_folded", "jit_loop"]
    assert [s.name for m in report.modules for s in m.analysis.scopes] == ["glug", "bar"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-kernels", "1"], "2 launches, 1 over --max-kernels 1: loop_multiply_fusion, input"),
        (["--max-bytes", "805355519"], "1 over --max-bytes 805,355,519: most by input_convert"),
        (
            ["--max-boundary-bytes", "0"],
            "536,870,912 over --max-boundary-bytes 0: most at f32[8192,8192] from loop_multiply",
        ),
    ],
)
def test_limits(flags, message):
    done = run(CASE, *flags)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert "jit_function" in line


def test_limits_that_hold():
    flags = ["--max-kernels=2", "--max-bytes=805355520", "--max-boundary-bytes=536870912"]
    assert run(CASE, *flags).returncode == 0
    barrier = inspection.inspect_paths([str(DATA / "barrier")], scope="part_b")
    limits = inspection.Limits(kernels=1)
    assert inspection.exceeded(barrier, limits) == ()  # one of the two kernels is in the scope
    loop = inspection.inspect_paths([str(DATA / "loop")])
    assert "x10" in inspection.exceeded(loop, limits)[0]


def test_the_back_end_is_in_the_names_of_dumped_files(tmp_path):
    text = "HloModule m, is_scheduled=true\nENTRY e {\n p = f32[8] parameter(0)\n"
    text += " ROOT c = f32[8] copy(p)\n}\n"
    for back_end, name in (
        ("cpu", "module_0000.m.cpu_after_optimizations.txt"),
        ("gpu", "module_0001.m.2.sm_9.0a_gpu_after_optimizations.txt"),
        ("gpu", "module_0002.m.gfx942_gpu_after_optimizations.txt"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name.replace("optimizations", "optimizations-buffer-assignment")).write_text(
            "x"
        )
        (module,) = inspection.inspect_paths([str(tmp_path / name)]).modules
        assert module.analysis.backend == back_end
    found = [m.analysis.backend for m in inspection.inspect_paths([str(tmp_path)]).modules]
    assert found == ["cpu", "gpu", "gpu"]


def test_scope():
    report = inspection.inspect_paths([str(DATA / "barrier")], scope="part_a")
    (module,) = report.to_json()["modules"]
    assert [k["scopes"] for k in module["kernels"]] == [["part_a"]]
    assert (module["launches"], module["selected"]["launches"]) == (2, 1)
    assert len(module["boundaries"]) == 1
    assert "in scope part_a: 1 launch" in str(report)
    with pytest.raises(UsageError, match="give one of part_"):
        inspection.inspect_paths([str(DATA / "barrier")], scope="part_c")


def test_folded_scopes_are_printed():
    report = inspection.inspect_paths([str(DATA / "folded")])
    assert "Folded scopes (no instruction of theirs is left): glug" in str(report)


def test_difference():
    same = run("--diff", ROOT / "tests/data/jax-0.10.2/loop", DATA / "loop")
    assert same.returncode == 0
    assert "Nothing appeared, went or changed bytes." in same.stdout
    done = run("--diff", DATA / "softmax_16384", DATA / "softmax_16385", "--max-kernels", "1",
               "--json", "-")  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1  # the second is held against the limit
    (found,) = json.loads(done.stdout)["diff"]["modules"]
    assert found["launches"] == {"a": 1, "b": 5}
    assert len(found["boundaries"]["appeared"]) == 4
    text = str(
        inspection.inspect_paths(
            [str(DATA / "softmax_16384"), str(DATA / "softmax_16385")], compare=True
        )
    )
    assert "launches 1 -> 5" in text
    assert re.search(r"^\+ +f32\[2048,113\]", text, re.MULTILINE)


def test_top():
    text = run(DATA / "cross_entropy_gradient", "--top", "3").stdout
    assert "Kernels, largest 3 of 12" in text
    assert "largest 3 of 9" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"line 1: expected an HLO module"),
        (b"\0" * 9, "line 1: expected HLO text, found binary data"),
        (b"HloModule m\n\n\xff\xfe", "line 3: expected HLO text, found the byte 0xff"),
        (b"hello world\n", "line 1: expected '{'"),
        (
            b"#loc = loc(unknown)\nmodule @jit_f attributes {",
            "line 1: expected HLO text, found MLIR",
        ),
        (None, "line [0-9]+: expected an instruction or '}', found the end of the text"),
    ],
)
def test_broken_files(tmp_path, content, message):
    file = tmp_path / "broken.txt"
    file.write_bytes(final_text().rsplit("\n  ROOT", 1)[0].encode() if content is None else content)
    with pytest.raises(UsageError, match=rf"broken\.txt: {message}") as error:
        inspection.inspect_paths([str(file)])
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.txt").write_text("HloModule m\n\nENTRY e {\n")
    for arguments, message in (
        ([tmp_path / "empty"], "holds no module: expected *after_optimizations.txt"),
        ([DATA], "give one of its folders: barrier, barrier_gradient"),
        ([tmp_path / "missing"], "No such file"),
        ([tmp_path / "broken.txt"], "broken.txt: line 4: expected"),
        (["/dev/zero"], "is a device"),
        ([], "PATH is missing"),
        (["--diff", CASE], "--diff takes two PATHs, not 1"),
        ([CASE, "--max-kernels", "-1"], "--max-kernels"),
        ([CASE, "--scope", "nope"], "--scope 'nope' is in no module"),
        ([CASE, "--json", "/no/such/folder/x.json"], "--json"),
        ([CASE, "--frobnicate"], "frobnicate"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        (line,) = done.stderr.splitlines()
        assert message in line


def mutate(text, rng):
    """Cuts, doubles, swaps or replaces pieces of a text."""
    for _ in range(rng.choice((1, 2, 6))):
        start, length = rng.randrange(len(text) + 1), rng.choice((1, 4, 60))
        piece = text[start : start + length]
        other = rng.randrange(len(text) + 1)
        replacement = rng.choice((
            "", piece * 2, text[other : other + length], rng.choice('(){}[]",=%#:\\/*<>-0 \n\x00é'),
            str(rng.choice((-1, 7, 10**9, 10**30))),
        ))  # fmt: skip
        text = text[:start] + replacement + text[start + length :]
        if rng.random() < 0.05:
            text = text[: rng.randrange(len(text) + 1)]
    return text


def fuzz(folder, mutations, seed):
    """Inspects dumps with mutated files; returns how many were read and how many refused."""
    rng = random.Random(seed)
    cases = [
        [(path.name, path.read_text()) for path in sorted(case.iterdir())]
        for case in sorted(DATA.iterdir())
    ]
    folder.mkdir(exist_ok=True)
    read = refused = 0
    for _ in range(mutations):
        files = rng.choice(cases)
        victim = rng.randrange(len(files))
        for number, (name, text) in enumerate(files):
            mutated = mutate(text, rng) if number == victim or rng.random() < 0.2 else text
            (folder / name).write_text(mutated)
        try:
            report = inspection.inspect_paths([str(folder)])
            json.dumps(report.to_json(), allow_nan=False)
            str(report)
            read += 1
        except UsageError as error:
            refused += "\n" not in str(error)
        for name, _ in files:
            (folder / name).unlink()
    return read, refused


def test_mutated_dumps_raise_nothing_but_usage_errors(tmp_path):
    read, refused = fuzz(tmp_path / "mutated", 150, seed=20)
    assert read + refused == 150
    assert min(read, refused) > 20


def test_inspect_a_function(deviceless):
    def function(x):
        with jax.named_scope("glug"):
            y = x + 2
        with jax.named_scope("bar"):
            return {"y": y + 1}

    x = jax.ShapeDtypeStruct((1048576,), jnp.int32)
    for target in ("h100", deviceless("h100")):
        report = fusejax.inspect(function, x, target=target)
        (module,) = report.to_json()["modules"]
        assert (module["launches"], module["file"]) == (1, None)
        statuses = {scope["name"]: scope["status"] for scope in module["scopes"]}
        assert statuses == {"glug": "folded", "bar": "kernels"}
        assert module["kernels"][0]["registers"] > 0
        assert str(report).startswith(
            "jit_function  gpu, NVIDIA H100 80GB HBM3\n1 launch; 8.0 MiB read and written"
        )
    small = fusejax.inspect(jax.jit(function), jnp.arange(8), target="cpu")
    assert small.modules[0].analysis.backend == "cpu"
    with pytest.raises(UsageError, match="unknown"):
        fusejax.inspect(function, x, target="h900")


def test_traced_scopes_reach_into_loops_and_calls():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def step(c, _):
        with jax.named_scope("step"):
            return inner(c), None

    def function(x):
        with jax.named_scope("outer"):
            y = jax.lax.scan(step, x, None, length=3)[0]
        with jax.named_scope("tail"):
            return jax.checkpoint(inner)(y).sum()

    assert set(inspection.traced_scopes(jax.grad(function), (jnp.ones(3),), "cpu")) >= {
        "outer/step/inner", "tail/inner",
    }  # fmt: skip


def scoped(name, function):
    def inside(x):
        with jax.named_scope(name):
            return function(x)

    return inside


def by_platform(x):
    with jax.named_scope("outer"):
        y = jax.lax.platform_dependent(
            x, cpu=scoped("on_cpu", jnp.sin), cuda=scoped("on_cuda", jnp.cos),
            default=scoped("elsewhere", jnp.tan),
        )  # fmt: skip
        return jax.lax.cond(y[0] > 0, scoped("yes", jnp.exp), scoped("no", jnp.log), y)


def test_scopes_of_branches_for_other_platforms_are_not_the_programs(deviceless):
    def names(platform, function=by_platform):
        found = inspection.traced_scopes(function, (jnp.ones(8),), platform)
        return {scope.split("/")[-1] for scope in found} - {"outer"}

    assert names("cpu") == {"on_cpu", "yes", "no"}
    assert names("cuda") == {"on_cuda", "yes", "no"}
    assert names("tpu") == {"elsewhere", "yes", "no"}
    assert names("cuda", jax.grad(lambda x: by_platform(x).sum())) == {"on_cuda", "yes", "no"}
    for target, taken, other in (("cpu", "cpu", "cuda"), (deviceless("h100"), "cuda", "cpu")):
        report = fusejax.inspect(by_platform, jnp.ones(8), target=target)
        scopes = [scope.name for scope in report.modules[0].analysis.scopes]
        assert any(f"on_{taken}" in name for name in scopes)
        assert not any(f"on_{other}" in name or "elsewhere" in name for name in scopes)


def test_damaged_decisions_are_told(tmp_path):
    for path in CASE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (dump,) = tmp_path.glob("*.priority_fusion_dump.txt")
    whole = dump.read_text()

    def warnings():
        report = inspection.inspect_paths([str(tmp_path)])
        damage = [w for w in report.to_json()["modules"][0]["warnings"] if "damaged" in w]
        shown = " ".join(str(report).split())
        assert all(" ".join(f"Warning: {warning}".split()) in shown for warning in damage)
        return damage

    assert warnings() == []
    for text, wrong in (
        ("", "it is empty"),
        (whole[: len(whole) // 3], "line "),
        (whole[: whole.index("hlo_module_before_fusion")], "ends before hlo_module_before_fusion"),
        (whole[: whole.index("hlo_module_before_fusion") - 2], "ends inside a message, in line "),
        (whole.replace("us_fused:", "us_fused", 1), "line 5: expected a field"),
        (whole.replace("HloModule", "HloModul"), "hlo_module_before_fusion: line 1: expected"),
        (whole.replace("fusion_steps", "\0", 1), "line 1: expected a field"),
    ):
        dump.write_text(text)
        (warning,) = warnings()
        assert warning.startswith(f"{dump.name} is damaged ("), text[:50]
        assert wrong in warning
    dump.write_bytes(whole.encode()[:900] + b"\xff\xfe" + whole.encode()[902:])
    assert len(warnings()) <= 1  # inside a string they harm nothing
    dump.unlink()
    assert warnings() == []


def test_static_arguments_and_functions_that_nnx_jitted():
    from flax import nnx

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def scaled(x, factor, name="no"):
        with jax.named_scope(name):
            return x * 2 if factor > 2 else x + 1

    for options in ({"static_argnums": (1, 2)}, {"static_argnames": ("factor", "name")}):
        report = fusejax.inspect(jax.jit(scaled, **options), x, 3, "yes", target="cpu")
        (kernel,) = report.modules[0].kernels
        assert kernel.scopes == ("yes",)
    assert len(fusejax.inspect(lambda x, y: x * y, x, 2.0, target="cpu").modules[0].kernels) == 1
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    jitted = nnx.jit(lambda model, x: jax.named_scope("part")(model)(x))
    report = fusejax.inspect(jitted, model, x, target="cpu")
    assert any("part" in kernel.scopes for kernel in report.modules[0].kernels)


def test_scopes_inside_a_pallas_kernel_are_not_the_programs(deviceless):
    from pallas_kernels.row_softmax import softmax_kernel

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    traced = inspection.traced_scopes(lambda x: softmax_kernel(x), (x,), "cuda")
    assert traced == ("softmax",)


def transformer(layers, width=256, vocabulary=1000):
    """A Flax transformer's forward function, its loss, and their arguments."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, dtype=jnp.bfloat16)(h, h)
            h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            h = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16)(h))
            return x + nn.Dense(width, dtype=jnp.bfloat16)(h)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(vocabulary, width, dtype=jnp.bfloat16)(tokens)
            for _ in range(layers):
                x = Block()(x)
            x = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            return nn.Dense(vocabulary, dtype=jnp.bfloat16)(x)

    model = Transformer()
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    parameters = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(parameters, tokens):
        scores = jax.nn.log_softmax(model.apply(parameters, tokens).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))

    return model.apply, jax.grad(loss), (parameters, tokens)


def test_a_flax_transformer(deviceless):
    forward, gradient, arguments = transformer(layers=1)
    for function in (forward, gradient):
        report = fusejax.inspect(function, *arguments, target=deviceless("h100"))
        (module,) = report.modules
        ten = module.boundaries[:10]
        assert len(ten) == 10
        assert all(b.source and "test_inspect.py:" in b.source for b in ten)
        assert all(b.reason.text for b in ten)
        assert sum(any("Transformer/" in scope for scope in b.scopes) for b in ten) >= 8
        assert sum(b.reason.kind != "unknown" for b in ten) >= 9
        assert all(scope.kernels for scope in module.analysis.scopes if "Block_0" in scope.name)
        print(report)


def test_the_benchmark_runs():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "scripts" / "bench_reader.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    from fusejax.hlo.text import read_module

    text = bench.module_text(1)
    assert "block_0" in text
    assert "mlp" in text
    assert bench.best_time(read_module, text) > 0
