"""Times fusejax's HLO reader against XLA's own parser, on the same modules, as their size grows.

Usage: bench_reader.py [flags]

The modules are gradients of unrolled transformers, compiled for this CPU, so that they carry names,
stack frames and back-end configurations. Both readers are timed in this process, alternating; the
best of --repeats is taken.
"""

import gc
import time

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

_LAYERS = flags.DEFINE_list("layers", ["3", "6", "12", "24"], "Layers of the transformers.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Times that each module is read.", lower_bound=1)
_COPIES = flags.DEFINE_integer(
    "copies", 1, "Put this many gradients, of different widths, into one module.", lower_bound=1
)


def module_text(layers: int, copies: int = 1) -> str:
    """HLO of the gradient of a transformer, compiled for the CPU."""
    import jax
    import jax.numpy as jnp

    def block(x, w):
        heads = 4
        with jax.named_scope("attention"):
            y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
            q, k, v = (
                (y @ w[n]).reshape(x.shape[0], heads, -1).swapaxes(0, 1) for n in ("q", "k", "v")
            )
            mixed = jax.nn.softmax(q @ k.swapaxes(1, 2), -1) @ v
            x = x + mixed.swapaxes(0, 1).reshape(x.shape) @ w["o"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(weights, x):
        for number, w in enumerate(weights):
            with jax.named_scope(f"block_{number}"):
                x = block(x, w)
        return jnp.mean(x**2)

    def arguments(width):
        matrix = jax.ShapeDtypeStruct((width, width), jnp.float32)
        wide = {"up": (width, 4 * width), "down": (4 * width, width)}
        layer = dict.fromkeys("qkvo", matrix) | {
            name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in wide.items()
        }
        return [layer] * layers, jax.ShapeDtypeStruct((16, width), jnp.float32)

    given = [arguments(32 + 8 * number) for number in range(copies)]
    gradients = jax.jit(lambda *all_given: [jax.grad(loss)(*one) for one in all_given])
    return gradients.lower(*given).compile().as_text()


def best_time(read, text: str) -> float:
    """Seconds of one reading."""
    gc.collect()
    start = time.perf_counter()
    read(text)
    return time.perf_counter() - start


def main() -> None:
    """Prints a line per module."""
    platform.prepare_process()
    from fusejax.hlo.text import read_module

    try:
        from jaxlib._hlo import hlo_module_from_text as xla_read
    except ImportError:
        from jax._src.lib import xla_client

        xla_read = xla_client._xla.hlo_module_from_text
    if not all(number.isdigit() and int(number) for number in _LAYERS.value):
        raise UsageError(f"--layers {','.join(_LAYERS.value)!r}: give whole numbers above 0")
    print("layers      MB  instructions  fusejax ms   XLA ms   ratio   fusejax ms/MB")
    for layers in map(int, _LAYERS.value):
        text = module_text(layers, _COPIES.value)
        instructions = sum(len(c.instructions) for c in read_module(text).computations.values())
        times = [
            (best_time(read_module, text), best_time(xla_read, text)) for _ in range(_REPEATS.value)
        ]
        mine, theirs = (min(column) * 1e3 for column in zip(*times, strict=True))
        size = len(text) / 1e6
        print(
            f"{layers:6} {size:7.2f} {instructions:13} {mine:11.1f} {theirs:8.1f} "
            f"{mine / theirs:7.2f} {mine / size:15.2f}",
            flush=True,
        )


if __name__ == "__main__":
    cli.run(main, __doc__)
