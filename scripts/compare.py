"""Compares ways to run an op: eager stages, split program, XLA's fusion, Pallas kernel.

Examples:
  python scripts/compare.py --op residual_ln
  python scripts/compare.py --op bias_gelu_rowsum --shape 8192,8192 --dtype bfloat16 --target h200
  python scripts/compare.py --op softmax --target device --json softmax.json
  python scripts/compare.py --list

Without a GPU, programs are compiled for one that is not there (--target h200 and others, with the
extra 'aot') and times are predicted. With a GPU, --target device compiles for it and measures.
"""

import inspect
import re
import sys

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32")

_OP = flags.DEFINE_string("op", None, "Which op to compare; --list names them.")
_SHAPE = flags.DEFINE_string(
    "shape",
    None,
    "Sizes, as --list names them: rows and width, rows, width and depth. 8192 each by default.",
)
_DTYPE = flags.DEFINE_string("dtype", "float16", f"One of {', '.join(DTYPES)}.")
_MODE = flags.DEFINE_string("mode", "forward", "forward, or backward for the gradient.")
_PATHS = flags.DEFINE_string(
    "paths",
    None,
    "Which of eager, split, recompute, xla, pallas_split, pallas; by default all of the op.",
)
_TARGET = flags.DEFINE_string(
    "target",
    "auto",
    "auto, cpu, device, a100, h100, h200, b200, or the file of a GPU target description. auto: "
    "this machine's GPU; else h200 without a device; else cpu.",
)
_APPROXIMATE = flags.DEFINE_boolean(
    "approximate", None, "GELU by tanh (the default) or, with --noapproximate, by erf."
)
_COUNTERS = flags.DEFINE_boolean(
    "counters", False, "Count DRAM bytes with Nsight Compute (needs --target device and ncu)."
)
_JSON = flags.DEFINE_string(
    "json", None, "Also write the report to this file; - for standard output."
)
_LIST = flags.DEFINE_boolean("list", False, "List the ops, then stop.")


def main() -> None:
    """Reads the flags, compares, prints."""
    platform.prepare_process()
    from rich.console import Console

    from fusejax.report.console import WIDTH, print_comparison

    console = Console(width=WIDTH) if not sys.stdout.isatty() else Console()
    console.width = min(console.width, WIDTH)
    if _LIST.value:
        _print_list(console)
        return
    dtype = _one_of("--dtype", _DTYPE.value, DTYPES)
    cli.check_writable("--json", _JSON.value)
    op, options = _op()
    shape = _shape(_SHAPE.value, op.axes)
    from fusejax import paths
    from fusejax.compare_ops import compare_op
    from fusejax.compile import targets
    from fusejax.report.document import comparison_json
    from fusejax.report.progress import progress

    mode = _one_of("--mode", _MODE.value, paths.MODES)
    names = paths.of(op) if _PATHS.value is None else _paths(_PATHS.value, paths.NAMES)
    target, notice = targets.resolve(_TARGET.value)
    if _COUNTERS.value and target.kind != "device":
        raise UsageError(
            f"--counters needs a GPU of this machine, and --target is {target.name!r}: "
            "give --target device"
        )
    errors = Console(stderr=True)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    import jax.numpy as jnp

    with progress(errors) as tell:
        comparison = compare_op(
            op, shape, jnp.dtype(dtype), target, mode=mode, names=names, options=options,
            counters=_COUNTERS.value, progress=tell,
        )  # fmt: skip
    if _JSON.value != "-":
        print_comparison(comparison, console)
    if _JSON.value:
        cli.write_json("--json", _JSON.value, comparison_json(comparison))


def _op():
    from fusejax.ops import OPS

    if _OP.value is None:
        raise UsageError(f"--op is missing: give one of {', '.join(OPS)}")
    build = OPS[_one_of("--op", _OP.value, tuple(OPS))]
    if _APPROXIMATE.value is None:
        return build(), {}
    if "approximate" not in inspect.signature(build).parameters:
        raise UsageError(
            f"--approximate and --noapproximate: --op {_OP.value!r} has no two forms of a GELU"
        )
    return build(approximate=_APPROXIMATE.value), {"approximate": _APPROXIMATE.value}


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{flag} {value!r} is unknown: give one of {', '.join(known)}")
    return value


def _paths(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        _one_of("--paths", name, known)
    return tuple(name for name in known if name in names)


def _shape(text: str | None, axes: tuple[str, ...]) -> tuple[int, ...]:
    if text is None:
        return (8192,) * len(axes)
    named = f"{', '.join(axes[:-1])} and {axes[-1]}"
    right = f"give {named}, such as --shape {','.join(['8192'] * len(axes))}"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):
        raise UsageError(f"--shape {text[:40]!r} is not made of whole numbers: {right}")
    sizes = tuple(int(part) for part in parts)
    if len(sizes) != len(axes):
        raise UsageError(f"--shape {text!r} has {len(sizes)} size(s), not {len(axes)}: {right}")
    if min(sizes) < 1:
        raise UsageError(f"--shape {text!r} has a size below 1: {right}")
    return sizes


def _print_list(console) -> None:
    from fusejax.ops import OPS

    for name, build in OPS.items():
        op = build()
        stages = " -> ".join(stage.name for stage in op.chain.stages)
        console.print(
            f"{name:20} {op.formula}\n{'':20} sizes: {', '.join(op.axes)}; stages: {stages}",
            highlight=False,
        )


if __name__ == "__main__":
    cli.run(main, __doc__)
