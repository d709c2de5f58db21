"""Holds modelled bytes against a card's DRAM counters, kernel by kernel, for a suite of functions.

Example:
  python scripts/check_bytes.py --json bytes.json

Compiles the ops (forward and backward, split and as XLA fuses them), rows longer than XLA's
one-kernel reductions take, a cross-entropy gradient and a transformer block for this machine's GPU,
runs each once under Nsight Compute, and prints every kernel of at least 64 MB, with the reason
where its reads are off by more than 2 %. Needs a GPU and ncu.

Exit code: 0; 1 where a function could not be counted (it is named, the others are shown).
"""

import concurrent.futures
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError
from fusejax.measure.attempts import Failed, attempt

_JSON = flags.DEFINE_string("json", None, "Also write the rows to this file.")
_LEAST = flags.DEFINE_integer(
    "least_mb", 64, "Smallest kernel that is shown, in MB read + written."
)
_ONLY = flags.DEFINE_string(
    "only", None, "Functions of the suite, parted by semicolons; all without it."
)
_TIMEOUT_S = flags.DEFINE_integer(
    "timeout_s",
    600,
    "Seconds after which no further function is begun; those before are still shown.",
    lower_bound=1,
)
_COUNT = flags.DEFINE_string(
    "count", None, "Run the suite once, to be counted, and tell its kernels in this file. For ncu."
)
_COMPILE = flags.DEFINE_bool("compile", False, "Only compile the suite, into JAX's cache.")

_MARKER = "wrapped_negate"
# For the function that is running when the time is up, and for ncu's report.
_GRACE_S = 90
_MOST_COMPILES = 8
_UNTOLD = "the run that is counted ended before it"

type Suite = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def suite() -> Suite:
    """Functions with the shapes of their arguments, by name."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from fusejax import paths
    from fusejax.ops import OPS

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    found: Suite = {}
    for name, build in OPS.items():
        op = build()
        sizes = (8192,) * len(op.axes)
        for mode in paths.MODES:
            for path_name in ("split", "xla"):
                (stage,) = paths.build(op, path_name, mode).chain.stages
                shapes = paths.argument_shapes(op, mode, sizes, jnp.dtype(jnp.bfloat16))
                found[f"{name} {mode} {path_name}"] = stage.function, shapes
        pallas = paths.build(op, "pallas", "forward").chain.stages[0].function
        found[f"{name} pallas"] = pallas, op.argument_shapes(sizes, jnp.bfloat16)
    for width in (16384, 16385, 32768):
        found[f"softmax {width}"] = jax.nn.softmax, (array(2**26 // width, width),)

    def rms_norm(h, r, g):
        h = h + r
        wide = h.astype(jnp.float32)
        return h, (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * g).astype(
            h.dtype
        )

    found["residual RMSNorm, sum returned"] = (
        rms_norm,
        (array(16384, 4096), array(16384, 4096), array(4096, dtype=jnp.float32)),
    )

    def cross_entropy(x, w, labels):
        logits = (x @ w).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    found["cross-entropy gradient"] = (
        jax.grad(cross_entropy, argnums=(0, 1)),
        (array(4096, 4096), array(4096, 32768), array(4096, dtype=jnp.int32)),
    )
    block = _transformer_block(nn)
    x = array(8, 2048, 2048)
    params = jax.eval_shape(block.init, jax.random.key(0), x)
    found["transformer block"] = block.apply, (params, x)
    return found


def _chosen() -> Suite:
    known = suite()
    if _ONLY.value is None:
        return known
    names = [name.strip() for name in _ONLY.value.split(";")]
    for name in names:
        if name not in known:
            raise UsageError(f"--only {name!r} is unknown: give some of {'; '.join(known)}")
    return {name: known[name] for name in names}


def _transformer_block(nn: Any) -> Any:
    class Block(nn.Module):
        """Attention and a GELU MLP, both behind a LayerNorm."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.LayerNorm(dtype="bfloat16")(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=16, dtype="bfloat16")(h)
            h = nn.gelu(nn.Dense(8192, dtype="bfloat16")(nn.LayerNorm(dtype="bfloat16")(x)))
            return x + nn.Dense(2048, dtype="bfloat16")(h)

    return Block()


def main() -> int:
    """Counts the suite, joins it with the compiled kernels, prints."""
    # Else this process, which computes nothing, would take most of the card's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from fusejax.compile import targets

    targets.usable_device()
    functions = _chosen()
    if _COMPILE.value:
        compile_all(functions)
        return 0
    if _COUNT.value:
        _run_suite(pathlib.Path(_COUNT.value), functions)
        return 0
    cli.check_writable("--json", _JSON.value)
    from rich.console import Console

    from fusejax.measure import byte_check
    from fusejax.report.console import WIDTH
    from fusejax.report.progress import progress

    with progress(Console(stderr=True)) as tell:
        tell(f"compiling {len(functions)} functions")
        runs, launches = _counted(tell)
    rows = byte_check.rows(runs, launches, _MARKER)
    failures = {run.function: run.failure for run in runs if run.failure is not None}
    _print(rows, failures, Console(width=WIDTH))
    if _JSON.value:
        document = {
            "schema": "fusejax.check_bytes/1",
            "rows": [row.to_json() for row in rows],
            "failures": failures,
        }
        cli.write_json("--json", _JSON.value, document)
    return 1 if failures else 0


def _counted(tell: Callable[[str], None]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Runs this script under ncu; what it ran, and the launches that were counted."""
    from fusejax.measure import counters

    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        told = pathlib.Path(folder, "runs")
        command = [sys.executable, __file__, "--timeout_s", str(_TIMEOUT_S.value)]
        if _ONLY.value is not None:
            command += ["--only", _ONLY.value]
        # Compiling includes measuring many small kernels, which takes minutes under ncu: it is
        # done before, into a cache.
        cached = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(folder, "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        subprocess.run([*command, "--compile"], env=cached, capture_output=True, check=False)
        tell("starting ncu")
        try:
            launches = counters.run_under_ncu(
                [*command, "--count", str(told)],
                bytes_only=True,
                timeout_s=_TIMEOUT_S.value + _GRACE_S,
                environment=cached,
                tell=tell,
            )
        except UsageError as error:
            raise UsageError(f"{error}{_blame(told)}") from error
        return pickle.loads(told.read_bytes()), launches


def _blame(told: pathlib.Path) -> str:
    """The function at which the run that is counted ended, and those that failed before."""
    runs = pickle.loads(told.read_bytes()) if told.exists() else ()
    lines = [f"{r.function} failed ({r.failure})" for r in runs if r.failure not in (None, _UNTOLD)]
    last = next((run.function for run in runs if run.failure == _UNTOLD), None)
    if last is not None:
        lines.append(f"it ended in {last!r}: leave that out by way of --only")
    return "".join(f"; {line}" for line in lines)


def _run_suite(told: pathlib.Path, functions: Suite) -> None:
    """Runs every function once where it is counted, and tells in a file what became of each."""
    import jax
    import jax.numpy as jnp

    from fusejax.hlo.analyse import analyse
    from fusejax.measure import counters
    from fusejax.measure.byte_check import Run
    from fusejax.program import Program

    start = time.monotonic()
    marker = jax.jit(lambda x: -x)
    dot = jnp.ones(3)
    jax.block_until_ready(marker(dot))

    def run(name: str, compiled: Any) -> Run:
        kernels = analyse(Program(name, compiled.as_text())).kernels
        values = jax.tree.map(_made, functions[name][1])
        jax.block_until_ready(compiled(*values))
        with counters.counted():
            jax.block_until_ready(marker(dot))
            ran = attempt(lambda: jax.block_until_ready(compiled(*values)))
        failure = ran.line if isinstance(ran, Failed) else None
        return Run(name, kernels, failure, is_begun=True)

    runs = {name: Run(name, failure=_UNTOLD) for name in functions}
    all_compiled = compile_all(functions)
    for number, name in enumerate(functions, 1):
        told.write_bytes(pickle.dumps(tuple(runs.values())))
        print(f"counting {name} ({number} of {len(functions)})", flush=True)
        ran = all_compiled.pop(name)
        if time.monotonic() - start > _TIMEOUT_S.value:
            ran = Failed(f"--timeout_s {_TIMEOUT_S.value} was over before it began")
        if not isinstance(ran, Failed):
            ran = attempt(lambda name=name, compiled=ran: run(name, compiled))
        runs[name] = Run(name, failure=ran.line) if isinstance(ran, Failed) else ran
    told.write_bytes(pickle.dumps(tuple(runs.values())))


def compile_all(functions: Suite) -> dict[str, Any]:
    """The compiled functions, by name; `Failed` in the place of one that cannot be compiled.

    XLA compiles without holding Python's lock, so several are compiled at a time.
    """
    import jax

    from fusejax.measure import timing

    def compiled(lowered: Any) -> Any:
        if isinstance(lowered, Failed):
            return lowered
        return attempt(lambda: lowered.compile(compiler_options=dict(timing.GRAPHS_OFF)))

    with concurrent.futures.ThreadPoolExecutor(min(_MOST_COMPILES, os.cpu_count() or 1)) as pool:
        pending = {
            name: pool.submit(compiled, attempt(lambda f=f, a=a: jax.jit(f).lower(*a)))
            for name, (f, a) in functions.items()
        }
        return {name: future.result() for name, future in pending.items()}


def _made(leaf: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if leaf.dtype == jnp.bool:
        return jax.random.bernoulli(jax.random.key(2), 0.5, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(1), leaf.shape, 0, 1000, leaf.dtype)
    return jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)


def _print(rows: Sequence[Any], failures: Mapping[str, str], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    from fusejax.measure.byte_check import why_off

    table = Table(title="MB by the model and by the card", title_justify="left", box=None)
    for name, justify in (
        ("function", "left"), ("kernel", "left"), ("read", "right"), ("counted", "right"),
        ("off", "right"), ("written", "right"), ("counted", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    reasons = []
    for row in rows:
        if row.modelled is None or row.modelled.total < _LEAST.value * 1e6:
            continue
        bound = "<=" if row.modelled.is_bound else ""
        table.add_row(
            row.function, row.kernel, f"{bound}{row.modelled.read / 1e6:,.1f}",
            f"{row.counted.read / 1e6:,.1f}",
            "" if row.off is None else f"{row.off:+.1%}",
            f"{row.modelled.written / 1e6:,.1f}", f"{row.counted.written / 1e6:,.1f}",
        )  # fmt: skip
        reason = why_off(row)
        if reason is not None:
            reasons.append(f"{row.function}, {row.kernel}: {reason}")
    console.print(table)
    if reasons:
        console.print("Reads that are off by more than 2 %:")
    for line in dict.fromkeys(reasons):
        console.print(Text(f"  {line}"))
    unknown = [row for row in rows if row.modelled is None]
    console.print(f"{len(rows)} launches; {len(unknown)} of them could not be told apart.")
    for name, failure in failures.items():
        console.print(Text(f"Not counted: {name}: {failure}"))


if __name__ == "__main__":
    cli.run(main, __doc__)
