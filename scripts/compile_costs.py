"""What compiling an op costs, how often it happens, and what ends a compiled region.

Examples:
  python scripts/compile_costs.py --op bias_gelu_rowsum
  python scripts/compile_costs.py --op residual_ln --target h200 --parts times,breaks
  python scripts/compile_costs.py --op softmax --shapes 8192x4096,8192x4096,1000x4096,37x4096
  python scripts/compile_costs.py --op gemm_bias_gelu --paths xla,pallas --json costs.json

Parts: times (cold, warm and with JAX's persistent cache, in fresh processes), variants (executables
of a mix of shapes, as they are and padded), kernel (what XLA puts around the Pallas kernel),
breaks (callbacks, Python that looks at values, lax.cond), fallbacks (inputs that a path cannot
serve). Without a GPU, programs are compiled for one that is not there (--target h200, with the
extra 'aot').
"""

import os
import re
import sys
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32")

_OP = flags.DEFINE_string("op", None, "Which op; scripts/compare.py --list names them.")
_SHAPES = flags.DEFINE_list(
    "shapes",
    [],
    "Calls of the mix, such as 8192x4096,1000x4096, in order and with repetitions; the first is "
    "the shape of the other parts. By default twenty calls at widths 4096 and 8192, and 8192x8192.",
)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", f"One of {', '.join(DTYPES)}.")
_PATHS = flags.DEFINE_list(
    "paths", None, "Some of eager, split, recompute, xla, pallas; by default the op's."
)
_PARTS = flags.DEFINE_list(
    "parts", None, "Some of times, variants, kernel, breaks, fallbacks; all by default."
)
_TARGET = flags.DEFINE_string(
    "target",
    "auto",
    "auto, cpu, device, a100, h100, h200, b200, or the file of a GPU target description; as of "
    "compare.py.",
)
_JSON = flags.DEFINE_string(
    "json", None, "Also write everything to this file; - for standard output."
)


def main() -> None:
    """Reads the flags, compiles, prints."""
    platform.prepare_process()
    # Compile times are measured in processes of their own, which need room on the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from rich.console import Console

    from fusejax import paths
    from fusejax.compile import targets
    from fusejax.compile_costs.costs import PARTS, compile_costs
    from fusejax.compile_costs.document import costs_json
    from fusejax.ops import OPS
    from fusejax.report.compile_costs_console import print_costs
    from fusejax.report.console import WIDTH
    from fusejax.report.progress import progress

    cli.check_writable("--json", _JSON.value)
    if _OP.value is None:
        raise UsageError(f"--op is missing: give one of {', '.join(OPS)}")
    (name,) = _some_of("--op", [_OP.value], OPS)
    op = OPS[name]()
    (dtype,) = _some_of("--dtype", [_DTYPE.value], DTYPES)
    names = None if _PATHS.value is None else _some_of("--paths", _PATHS.value, paths.NAMES)
    parts = PARTS if _PARTS.value is None else _some_of("--parts", _PARTS.value, PARTS)
    shapes = [_shape(text, op.axes) for text in _SHAPES.value]
    target, notice = targets.resolve(_TARGET.value)
    errors = Console(stderr=True)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    import jax.numpy as jnp

    with progress(errors) as tell:
        costs = compile_costs(
            op, jnp.dtype(dtype), target, shapes=shapes, names=names, parts=parts, progress=tell
        )
    if _JSON.value != "-":
        console = Console(width=WIDTH) if not sys.stdout.isatty() else Console()
        console.width = min(console.width, WIDTH)
        print_costs(costs, console)
    if _JSON.value:
        cli.write_json("--json", _JSON.value, costs_json(costs))


def _some_of(flag: str, given: Any, known: Any) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        if name not in known:
            raise UsageError(f"{flag} {name!r} is unknown: give one of {', '.join(known)}")
    if not names:
        raise UsageError(f"{flag} is empty: give some of {', '.join(known)}")
    return [name for name in known if name in names]


def _shape(text: str, axes: tuple[str, ...]) -> tuple[int, ...]:
    right = f"give {', '.join(axes)}, such as {'x'.join(['8192'] * len(axes))}"
    sizes = text.strip().split("x")
    if not all(re.fullmatch("0*[1-9][0-9]{0,17}", size) for size in sizes):
        raise UsageError(f"--shapes {text[:40]!r} is not made of whole numbers above 0: {right}")
    if len(sizes) != len(axes):
        raise UsageError(f"--shapes {text[:40]!r} has {len(sizes)} size(s): {right}")
    return tuple(int(size) for size in sizes)


if __name__ == "__main__":
    cli.run(main, __doc__)
