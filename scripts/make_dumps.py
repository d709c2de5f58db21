"""Compiles small functions whose kernels are known, and keeps what XLA dumped about each.

Usage: make_dumps.py OUT [flags]

Every case gets a folder of its own in OUT, which inspect_hlo.py reads. No GPU is needed. Only JAX
and its CUDA plugin are: with any JAX from 0.10.2 on, installed or not next to fusejax, so that the
dumps of several versions can be compared.

Examples:
  python scripts/make_dumps.py /tmp/dumps
  python scripts/make_dumps.py /tmp/dumps --cases loop,folded --small
"""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else a machine without a GPU has no CUDA compiler

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import flags  # noqa: E402

from fusejax import cli  # noqa: E402
from fusejax.compile.cards import CARDS, describe  # noqa: E402
from fusejax.errors import UsageError  # noqa: E402

bf16, f32 = jnp.bfloat16, jnp.float32


def _array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def gelu(x):
    """GELU by tanh: dear enough that XLA does not compute it twice."""
    return jax.nn.gelu(x, approximate=True)


def activation_and_sum(activation, axis):
    """An activation that is written in 16 bits and summed in 32."""

    def function(x, b):
        y = activation((x + b).astype(f32))
        return y.astype(bf16), y.sum(axis)

    return function


def residual_rms_norm(x, r, g):
    """A sum that is an output and goes into a norm."""
    h = x + r
    h32 = h.astype(f32)
    y = h32 * jax.lax.rsqrt(jnp.mean(h32 * h32, -1, keepdims=True) + 1e-6) * g
    return h, y.astype(bf16)


def softmax(x):
    """Softmax of 16-bit rows, computed in 32 bits."""
    return jax.nn.softmax(x.astype(f32), -1).astype(bf16)


def two_parts(x):
    """Two scopes with a barrier between them."""
    with jax.named_scope("part_a"):
        y = jnp.exp(x)
    y = jax.lax.optimization_barrier(y)
    with jax.named_scope("part_b"):
        return (y * 2).sum(-1)


def barrier_on_parameter(x):
    """A barrier in front of the first operation: there is nothing to split."""
    return jnp.exp(jax.lax.optimization_barrier(x)).sum(-1)


def barrier_of_two(x):
    """A barrier on one of two consumers of a value."""
    y = jnp.exp(x)
    z, _ = jax.lax.optimization_barrier((y, x))
    return z.sum(-1), y.max(-1)


def dense(activation):
    """Matrix product, bias, activation."""
    return lambda x, w, b: activation(x @ w + b)


def folded(x):
    """Two scopes whose additions become one."""
    with jax.named_scope("glug"):
        y = x + 2
    with jax.named_scope("bar"):
        return y + 1


def cross_entropy_gradient(x, w, labels):
    """Gradient of softmax cross-entropy over a large vocabulary."""

    def loss(x, w):
        logits = (x @ w).astype(f32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return jax.grad(loss, (0, 1))(x, w)


def loop(c):
    """Ten steps of a scan."""
    return jax.lax.scan(
        lambda c, _: (jnp.tanh(c @ c * 0.1) + jnp.sin(c), None), c, None, length=10
    )[0]


_BIASED = (_array(bf16, 8192, 8192), _array(bf16, 8192))
_DENSE = (_array(f32, 1024, 128), _array(f32, 128, 256), _array(f32, 256))
_WIDE = _array(f32, 8192, 4096)
_RESIDUAL = _array(bf16, 8192, 4096)

CASES = {
    "gelu_and_row_sum": (activation_and_sum(gelu, -1), _BIASED),
    "relu_and_row_sum": (activation_and_sum(jax.nn.relu, -1), _BIASED),
    "gelu_and_column_sum": (activation_and_sum(gelu, 0), _BIASED),
    "residual_rms_norm": (residual_rms_norm, (_RESIDUAL, _RESIDUAL, _array(f32, 4096))),
    "softmax_16384": (softmax, (_array(bf16, 2048, 16384),)),
    "softmax_16385": (softmax, (_array(bf16, 2048, 16385),)),
    "barrier": (two_parts, (_WIDE,)),
    "barrier_gradient": (jax.grad(lambda x: two_parts(x).sum()), (_WIDE,)),
    "barrier_on_parameter": (barrier_on_parameter, (_WIDE,)),
    "barrier_of_two": (barrier_of_two, (_WIDE,)),
    "dense_relu": (dense(jax.nn.relu), _DENSE),
    "dense_gelu": (dense(gelu), _DENSE),
    "folded": (folded, (_array(jnp.int32, 1048576),)),
    "cross_entropy_gradient": (
        cross_entropy_gradient,
        (_array(bf16, 8192, 4096), _array(bf16, 4096, 128256), _array(jnp.int32, 8192)),
    ),
    "loop": (loop, (_array(f32, 512, 512),)),
}
"""Functions and arguments, by the name of the case."""

_READ = (
    "after_optimizations.txt", ".before_optimizations.txt", ".priority_fusion_dump.txt",
    ".thunk_sequence.txt", ".gpu_target_config.pbtxt", ".ptx",
)  # fmt: skip
_NOT_SMALL = (".gpu_target_config.pbtxt", ".ptx")


def dump(function, arguments, folder, description, *, small=False):
    """Compiles for the described card; `folder` gets the files that inspect_hlo.py reads.

    Args:
      small: leaves out PTX and the card's description, and the paths of this machine.
    """
    from jax.experimental import topologies

    device = topologies.get_topology_desc(
        platform="cuda", topology_name="dumps", topology="1x1x1", target_config=description
    ).devices[0]
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
        for a in arguments
    ]
    folder.mkdir(parents=True, exist_ok=True)
    jax.jit(function).lower(*placed).compile(
        compiler_options={
            "xla_dump_to": str(folder),
            "xla_dump_hlo_pass_re": "priority-fusion",
            "xla_dump_emitter_re": "^ptx$",
        }
    )
    wanted = tuple(suffix for suffix in _READ if not (small and suffix in _NOT_SMALL))
    for path in sorted(folder.iterdir()):
        if not path.name.endswith(wanted):
            path.unlink()
        elif small:
            path.write_text(_shortened(path.read_text()))
            path.rename(folder / re.sub(r"^module_\d+\.", "module_0001.", path.name))


def _shortened(text):
    """Without the machine's paths, and without the card in a dump of fusion decisions."""
    text = re.sub(rf"{re.escape(str(ROOT))}/", "", text)
    text = re.sub(r"/[^\s\"\\]*/site-packages/", "/site-packages/", text)
    return re.sub(r"\ngpu_device_info \{\n.*?\n\}", "", text, flags=re.DOTALL)


_CASES = flags.DEFINE_list("cases", list(CASES), "Which cases, by commas.")
_CARD = flags.DEFINE_enum("card", "h100", sorted(CARDS), "The card that is compiled for.")
_SMALL = flags.DEFINE_boolean(
    "small", False, "Leave out PTX, the card's description and this machine's paths."
)


def main(arguments):
    """Makes the dumps."""
    if len(arguments) != 1:
        raise UsageError("give one folder, OUT, for the dumps; see --help")
    for name in _CASES.value:
        if name not in CASES:
            raise UsageError(f"--cases {name!r} is unknown: give some of {', '.join(CASES)}")
    out = pathlib.Path(arguments[0])
    description = describe(CARDS[_CARD.value])
    for name in _CASES.value:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"OUT {str(out)!r} cannot be made: {error.strerror}") from error
        if (out / name).exists() and any((out / name).iterdir()):
            raise UsageError(f"OUT {str(out / name)!r} is not empty: give another folder")
        dump(*CASES[name], out / name, description, small=_SMALL.value)
        print(f"{out / name}")


if __name__ == "__main__":
    cli.run(main, __doc__, takes_arguments=True)
