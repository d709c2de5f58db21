"""Holds modelled bytes against a card's DRAM counters, kernel by kernel, for a suite of functions.

Example:
  python scripts/check_bytes.py --json bytes.json

Compiles the ops (forward and backward, split and as XLA fuses them), rows longer than XLA's
one-kernel reductions take, a cross-entropy gradient and a transformer block for this machine's GPU,
runs each once under Nsight Compute, and prints every kernel of at least 64 MB. Needs a GPU and ncu.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError

_JSON = flags.DEFINE_string("json", None, "Also write the rows to this file.")
_LEAST = flags.DEFINE_integer(
    "least_mb", 64, "Smallest kernel that is shown, in MB read + written."
)
_ONLY = flags.DEFINE_string(
    "only", None, "Functions of the suite, parted by semicolons; all without it."
)
_COUNT = flags.DEFINE_string(
    "count", None, "Run the suite once, to be counted, and tell its kernels in this file. For ncu."
)

_MARKER = "wrapped_negate"


def suite() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions with the shapes of their arguments, by name."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from fusejax import paths
    from fusejax.ops import OPS

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for name, build in OPS.items():
        op = build()
        for mode in paths.MODES:
            for path_name in ("split", "xla"):
                (stage,) = paths.build(op, path_name, mode).chain.stages
                shapes = paths.argument_shapes(op, mode, (8192, 8192), jnp.dtype(jnp.bfloat16))
                found[f"{name} {mode} {path_name}"] = stage.function, shapes
        pallas = paths.build(op, "pallas", "forward").chain.stages[0].function
        found[f"{name} pallas"] = pallas, op.argument_shapes((8192, 8192), jnp.bfloat16)
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


def _chosen() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
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


def main() -> None:
    """Counts the suite, joins it with the compiled kernels, prints."""
    from fusejax.compile import targets

    target, _ = targets.resolve("device")
    if _COUNT.value:
        _run_suite(pathlib.Path(_COUNT.value), target)
        return
    cli.check_writable("--json", _JSON.value)
    from rich.console import Console

    from fusejax.report.console import WIDTH
    from fusejax.report.progress import progress

    with progress(Console(stderr=True)) as tell:
        tell(f"counting {len(_chosen())} functions with ncu")
        rows = _rows()
    _print(rows, Console(width=WIDTH))
    if _JSON.value:
        cli.write_json("--json", _JSON.value, {"schema": "fusejax.check_bytes/1", "rows": rows})


def _rows() -> list[dict[str, Any]]:
    from fusejax.measure import counters

    with tempfile.TemporaryDirectory(prefix="fusejax-") as folder:
        told = pathlib.Path(folder, "kernels.json")
        command = [sys.executable, __file__, "--count", str(told)]
        if _ONLY.value is not None:
            command += ["--only", _ONLY.value]
        launches = counters.run_under_ncu(command)
        compiled = json.loads(told.read_text())
    runs: list[list[Any]] = []
    for launch in launches:
        if launch.function == _MARKER:
            runs.append([])
        elif runs:
            runs[-1].append(launch)
    return [
        row
        for (name, kernels), counted in zip(compiled.items(), runs, strict=True)
        for row in _joined(name, kernels, counted)
    ]


def _joined(
    function: str, kernels: dict[str, dict[str, Any]], counted: list[Any]
) -> Iterator[dict[str, Any]]:
    """A row per launch: what its kernel should move, None where it is not known which it was."""
    from fusejax.hlo.analysis import Kernel, Traffic
    from fusejax.resources.matching import match

    known = [
        Kernel(name, k["emitter"], (), None, k["count"], Traffic(k["read"], k["written"]))
        for name, k in kernels.items()
    ]
    names = match([launch.function for launch in counted], known, per_run=True)
    for name, launch in zip(names, counted, strict=True):
        kernel = kernels.get(name or "", {})
        yield {
            "function": function,
            "kernel": name or launch.function,
            "emitter": kernel.get("emitter"),
            "modelled_read": kernel.get("read"),
            "modelled_written": kernel.get("written"),
            "counted_read": launch.read_bytes,
            "counted_written": launch.written_bytes,
        }


def _run_suite(told: pathlib.Path, target: Any) -> None:
    import jax
    import jax.numpy as jnp

    from fusejax.compile import aot
    from fusejax.hlo.analyse import analyse
    from fusejax.measure import counters, timing

    marker = jax.jit(lambda x: -x)
    dot = jnp.ones(3)

    def made(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(1), leaf.shape, 0, 1000, leaf.dtype)
        return jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)

    jax.block_until_ready(marker(dot))
    compiled = {}
    for name, (function, arguments) in _chosen().items():
        done = aot.compile_program(function, arguments, target, timing.GRAPHS_OFF)
        compiled[name] = {
            kernel.name: {
                "emitter": kernel.emitter,
                "count": kernel.count,
                "read": kernel.traffic.read,
                "written": kernel.traffic.written,
            }
            for kernel in analyse(done.program).kernels
        }
        values = jax.tree.map(made, arguments)
        jax.block_until_ready(done.executable(*values))
        with counters.counted():
            jax.block_until_ready(marker(dot))
            jax.block_until_ready(done.executable(*values))
    told.write_text(json.dumps(compiled))


def _print(rows: list[dict[str, Any]], console: Any) -> None:
    from rich.table import Table

    table = Table(title="MB by the model and by the card", title_justify="left", box=None)
    for name, justify in (
        ("function", "left"), ("kernel", "left"), ("read", "right"), ("counted", "right"),
        ("off", "right"), ("written", "right"), ("counted", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        if row["modelled_read"] is None:
            continue
        if row["modelled_read"] + row["modelled_written"] < _LEAST.value * 1e6:
            continue
        read = row["modelled_read"]
        table.add_row(
            row["function"], row["kernel"], f"{read / 1e6:,.1f}",
            f"{row['counted_read'] / 1e6:,.1f}",
            f"{row['counted_read'] / read - 1:+.1%}" if read else "",
            f"{row['modelled_written'] / 1e6:,.1f}", f"{row['counted_written'] / 1e6:,.1f}",
        )  # fmt: skip
    console.print(table)
    unknown = [row for row in rows if row["modelled_read"] is None]
    console.print(f"{len(rows)} launches; {len(unknown)} of them could not be told apart.")


if __name__ == "__main__":
    cli.run(main, __doc__)
