"""Compares ways to run an op, or a function of your own: stages apart, split, fused by XLA, Pallas.

Examples:
  python scripts/compare.py --op residual_ln
  python scripts/compare.py --op bias_gelu_rowsum --shape 8192,8192 --dtype bfloat16 --target h200
  python scripts/compare.py --op softmax --target device --json softmax.json --html report
  python scripts/compare.py --fn my_model.py:block --args 'f16[8192,8192], f16[8192]'
  python scripts/compare.py --fn my_model:loss --args "{'w': f32[64,64]}, s32[8]" --mode backward
  python scripts/compare.py --op softmax --xla-option xla_disable_hlo_passes=priority-fusion
  python scripts/compare.py --op all --targets a100,h100,h200,b200
  python scripts/compare.py --list

Without a GPU, programs are compiled for one that is not there (--target h200 and others, with the
extra 'aot') and times are predicted. With a GPU, --target device compiles for it and measures.

A function's stages are its jax.named_scopes: 'eager' dispatches them apart, 'split' is one program
with a boundary behind each, 'xla' one program as it is.
"""

import contextlib
import functools
import inspect
import os
import re
import sys

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32")

_OP = flags.DEFINE_string(
    "op", None, "Which op to compare; --list names them. With --targets several, or all."
)
_FN = flags.DEFINE_string(
    "fn",
    None,
    "Which function of your own to compare, as MODULE:NAME or FILE.py:NAME, such as "
    "my_model:block. Modules are looked for in this folder first.",
)
_ARGS = flags.DEFINE_string(
    "args",
    None,
    "Arguments of --fn, as dtype[sizes]: 'f16[8192,8192], f32[]'. Trees are written as in Python: "
    "{'w': bf16[8,8]}, (f32[8], f32[8]); so are values: 3, True.",
)
_SCOPES = flags.DEFINE_list(
    "scopes", None, "Named scopes of --fn to cut at, such as norm,mlp; by default all."
)
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
    "Which of eager, split, recompute, xla, pallas_split, pallas; by default all there are. Of "
    "--fn: eager, split, xla.",
)
_TARGET = flags.DEFINE_string(
    "target",
    "auto",
    "auto, cpu, device, a100, h100, h200, b200, or the file of a GPU target description. auto: "
    "this machine's GPU; else h200 without a device; else cpu.",
)
_TARGETS = flags.DEFINE_string(
    "targets",
    None,
    "Several cards, such as a100,h100,h200,b200: one table over them, compiled without a device.",
)
_XLA_OPTION = flags.DEFINE_multi_string(
    "xla-option",
    [],
    "An option of XLA for every compile, as NAME=VALUE; give it again, or NAME=VALUE,NAME=VALUE, "
    "for several. Shows what it changes: xla_gpu_enable_triton_gemm=false.",
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
_HTML = flags.DEFINE_string(
    "html", None, "Also write the report as a page, index.html in this folder (extra 'report')."
)
_LIST = flags.DEFINE_boolean("list", False, "List the ops, then stop.")

_ONLY_OP = ("shape", "dtype", "approximate", "counters")
_ONLY_FN = ("args", "scopes")
_NOT_TARGETS = ("target", "counters", "html")


def main() -> None:
    """Reads the flags, compares, prints."""
    platform.prepare_process()
    from rich.console import Console

    from fusejax.report.console import WIDTH

    console = Console(width=WIDTH) if not sys.stdout.isatty() else Console()
    console.width = min(console.width, WIDTH)
    if _LIST.value:
        _print_list(console)
        return
    _check_together()
    _one_of("--dtype", _DTYPE.value, DTYPES)
    cli.check_writable("--json", _JSON.value)
    # Absolute, since a function of the user's may change the folder.
    json_file = os.path.abspath(_JSON.value) if _JSON.value not in (None, "-") else _JSON.value
    folder = None if _HTML.value is None else os.path.abspath(_HTML.value)
    if folder is not None:
        from fusejax.report import html

        if folder == json_file:
            raise UsageError(f"--html and --json are both {_HTML.value!r}: give two places")
        html.check_folder("--html", folder)
    errors = Console(stderr=True)
    compare = _on_one if _TARGETS.value is None else _over_targets
    # What a function of the user's prints must not get into a document.
    with contextlib.redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):
        document = compare(console, errors)
    if json_file:
        cli.write_json("--json", json_file, document)
    if folder is not None:
        html.save(document, folder)


def _on_one(console, errors) -> dict:
    """Compares for one target; prints the report and gives its document."""
    from fusejax import what_if
    from fusejax.compile import targets
    from fusejax.report.console import print_comparison
    from fusejax.report.document import comparison_json
    from fusejax.report.progress import progress
    from fusejax.report.what_if_console import print_what_if

    options = what_if.read_options(_XLA_OPTION.value)
    compare = _function() if _FN.value else _op_alone()
    target, notice = targets.resolve(_TARGET.value)
    if _COUNTERS.value and target.kind != "device":
        raise UsageError(
            f"--counters needs a GPU of this machine, and --target is {target.name!r}: "
            "give --target device"
        )
    what_if.check_options(options, target)
    if notice:
        errors.print(notice, highlight=False, markup=False)
    found = None
    with progress(errors) as tell:
        compare = functools.partial(compare, target=target, mode=_mode(), progress=tell)
        if options:
            found = what_if.compare_options(
                lambda some, is_brief: compare(xla_options=some, is_brief=is_brief), options
            )
        comparison = found.comparison if found else compare()
    if _JSON.value != "-":
        print_comparison(comparison, console)
        if found:
            print_what_if(found, console)
    return comparison_json(comparison) | ({"what_if": found.to_json()} if found else {})


def _over_targets(console, errors) -> dict:
    """Compares for several cards; prints one table and gives its document."""
    from fusejax import across_targets, paths, what_if
    from fusejax.compile import targets
    from fusejax.ops import OPS
    from fusejax.report.progress import progress
    from fusejax.report.targets_console import print_targets

    names = across_targets.cards(_TARGETS.value)
    options = what_if.read_options(_XLA_OPTION.value)
    for name in names:
        targets.resolve(name)
    if _FN.value:
        _function()
        subject = {"fn": _FN.value, "arguments": _ARGS.value or ""}
        subject |= {"scopes": _SCOPES.value, "names": _paths_of_function()}
    else:
        ops = tuple(OPS) if _OP.value == "all" else tuple(_OP.value.split(",") if _OP.value else ())
        axes = max((_op(op).axes for op in ops), key=len, default=()) if ops else _op(None)
        known = _paths(_PATHS.value, paths.NAMES) if _PATHS.value else None
        subject = {"ops": ops, "shape": _shape(_SHAPE.value, axes), "names": known}
        subject |= {"dtype": _DTYPE.value, "options": _approximate()}
    work = across_targets.Work(**subject, mode=_mode(), xla_options=options)
    with progress(errors) as tell:
        document = across_targets.compare_targets(work, names, tell)
    if _JSON.value != "-":
        print_targets(document, console)
    return document


def _op_alone():
    """What compares --op, given a target and the rest."""
    from fusejax import paths
    from fusejax.compare_ops import compare_op

    op = _op(_OP.value)
    shape = _shape(_SHAPE.value, op.axes)
    names = paths.of(op) if _PATHS.value is None else _paths(_PATHS.value, paths.NAMES)
    import jax.numpy as jnp

    return functools.partial(
        compare_op, op, shape, jnp.dtype(_DTYPE.value),
        names=names, options=_approximate(), counters=_COUNTERS.value,
    )  # fmt: skip


def _function():
    """What compares --fn, given a target and the rest."""
    from fusejax import user_function
    from fusejax.compare_fn import compare_fn

    if _ARGS.value is None:
        raise UsageError(
            "--args is missing: give the arguments of --fn, such as 'f16[8192,8192], f32[]'; '' "
            "where it takes none"
        )
    names = _paths_of_function()
    arguments = user_function.read_arguments(_ARGS.value)
    function = user_function.load(_FN.value)
    user_function.check_call(_FN.value, function, _ARGS.value, arguments)
    return functools.partial(
        compare_fn, _FN.value, function, arguments, names=names, scopes=_SCOPES.value
    )


def _paths_of_function() -> tuple[str, ...]:
    from fusejax.compare_fn import NAMES
    from fusejax.paths import PALLAS

    if _PATHS.value is None:
        return NAMES
    for name in (name.strip() for name in _PATHS.value.split(",")):
        if name in PALLAS:
            raise UsageError(
                f"--paths {name!r}: there is no kernel of ours for --fn {_FN.value!r}: give some "
                f"of {', '.join(NAMES)}"
            )
    return _paths(_PATHS.value, NAMES)


def _check_together() -> None:
    """Raises UsageError where flags are given that do not go together."""
    given = {name for name in flags.FLAGS if flags.FLAGS[name].present}
    if {"op", "fn"} <= given:
        raise UsageError(f"--op {_OP.value!r} and --fn {_FN.value!r}: give one of the two")
    wrong = given.intersection(_ONLY_OP if "fn" in given else _ONLY_FN)
    if wrong:
        raise UsageError(
            f"--{min(wrong)} goes with {'--op' if 'fn' in given else '--fn'} only: leave it out"
        )
    wrong = given.intersection(_NOT_TARGETS)
    if "targets" in given and wrong:
        raise UsageError(f"--{min(wrong)} does not go with --targets: leave one of the two out")


def _mode() -> str:
    from fusejax.paths import MODES

    return _one_of("--mode", _MODE.value, MODES)


def _op(name: str | None):
    from fusejax.ops import OPS

    if name is None:
        raise UsageError(f"--op is missing: give one of {', '.join(OPS)}")
    build = OPS[_one_of("--op", name.strip(), tuple(OPS))]
    known = inspect.signature(build).parameters
    return build(**{key: value for key, value in _approximate().items() if key in known})


def _approximate() -> dict[str, bool]:
    """What --approximate says, where it is given and one of the ops has two forms."""
    from fusejax.ops import OPS

    if _APPROXIMATE.value is None:
        return {}
    names = tuple(OPS) if _OP.value == "all" else (_OP.value or "").split(",")
    builds = [OPS[name.strip()] for name in names if name.strip() in OPS]
    if not any("approximate" in inspect.signature(build).parameters for build in builds):
        raise UsageError(
            f"--approximate and --noapproximate: --op {_OP.value!r} has no two forms of a GELU"
        )
    return {"approximate": _APPROXIMATE.value}


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
