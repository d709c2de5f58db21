"""Measures plans of the row kernels on this machine's GPU and keeps the fastest.

Example:
  python scripts/tune.py --ops softmax,layer_norm_backward --widths 4096,16385

For every kernel and width, the plan in use and those near it are compiled, timed in turns, and the
fastest is written to the file that the kernels choose from (`--file`), under the card's name.
Several runs at a time share the card and the file: one measures while the others compile.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from fusejax import cli
from fusejax.errors import UsageError
from fusejax.measure.turns import card_turn, turn

_OPS = flags.DEFINE_list("ops", None, "Kernels; all without it.")
_WIDTHS = flags.DEFINE_list(
    "widths",
    ["256", "512", "769", "1024", "2048", "4096", "8192", "16384", "32768", "65536", "131072"],
    "Elements per row.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["float16", "bfloat16", "float32"], "Of the arrays."
)
_ELEMENTS = flags.DEFINE_integer("elements", 2**26, "Of each array.", lower_bound=1)
_MOST = flags.DEFINE_integer("most", 12, "Plans that are measured for a width.", lower_bound=1)
_FILE = flags.DEFINE_string("file", None, "Where choices are kept; the package's own without it.")
_DRY = flags.DEFINE_bool("dry_run", False, "Print, write nothing.")


def candidates(launch: Any, rows: int, width: int, dtype: Any, most: int) -> list[Any]:
    """Tunings to measure, all of them different launches: the one in use, then those near it.

    Near is what differs in one field by one step of `_STEPS`; then what differs by two, and so on,
    each distance in a random order that is the same every time.
    """
    import jax.numpy as jnp

    from pallas_kernels import plan, tuned

    itemsize = jnp.dtype(dtype).itemsize
    asked = width if launch.reduces else min(width, launch.part)
    held = launch.streams + launch.parameters + 2 * launch.op.endswith("_backward")
    default, *others = (
        plan.default_tuning(asked, launch.streams * itemsize, values) for values in (held, 1, 4, 5)
    )
    kept = tuned.lookup(launch.op, asked, itemsize) or default
    # What a kernel holds is known to its plan only: one of the defaults has that launch, or what
    # was measured for another width, with as many CTAs as registers allow.
    used = launch.plan(rows, width, dtype)
    fewer = (dataclasses.replace(kept, ctas_per_sm=n) for n in range(1, kept.ctas_per_sm))
    in_use = next(
        tuning
        for tuning in (kept, default, *others, *fewer)
        if launch.plan(rows, width, dtype, tuning=tuning) == used
    )
    start = kept
    if asked > start.width or asked * 2 <= start.width:
        start = dataclasses.replace(default, width=asked)
    found = {used: in_use}
    order = random.Random(f"{launch.op} {asked}")
    seen, level = {start, default}, [start, default]
    while level and len(found) < most:
        for tuning in level:
            # Longer rows of parts go by this choice too, and no warp can have those.
            of_warps = tuning.rows_per_block > 1 and not launch.reduces and asked == launch.part
            if of_warps or len(found) == most:
                continue
            plan_of_it = launch.plan(rows, width, dtype, tuning=tuning)
            if plan_of_it.padded <= used.padded:
                run = tuning.run if plan_of_it.run else 0
                found.setdefault(plan_of_it, dataclasses.replace(tuning, run=run))
        nearby = dict.fromkeys(near for tuning in level for near in _near(tuning))
        level = [tuning for tuning in nearby if tuning not in seen]
        order.shuffle(level)
        seen |= set(level)
    return [dataclasses.replace(tuning, width=asked) for tuning in found.values()]


_STEPS = {
    "run": (0, 1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5),
    "rows_per_block": (1, 4, 8, 16, 32),
    "parts": (1, 2, 4, 8),
    "warpgroups": (1, 2, 3, 4, 6, 8),
    "ctas_per_sm": (1, 2, 3, 4, 6, 8, 12),
}


def _near(tuning: Any) -> Iterator[Any]:
    """Tunings that differ in one field by one step."""
    for field, steps in _STEPS.items():
        value = getattr(tuning, field)
        below = [step for step in steps if step < value]
        above = [step for step in steps if step > value]
        for near in (*below[-1:], *above[:1]):
            yield dataclasses.replace(tuning, **{field: near})


def main() -> None:
    """Tunes every kernel at every width."""
    import jax

    from fusejax.compile import targets
    from pallas_kernels import catalogue, tuned

    known = catalogue.launches()
    ops = _OPS.value or list(known)
    for op in ops:
        if op not in known:
            raise UsageError(f"--ops {op!r} is unknown: give some of {', '.join(known)}")
    try:
        widths = [int(width) for width in _WIDTHS.value]
    except ValueError as error:
        raise UsageError(f"--widths {','.join(_WIDTHS.value)}: give whole numbers") from error
    if min(widths) < 1:
        raise UsageError(f"--widths {','.join(_WIDTHS.value)}: give whole numbers above 0")
    targets.usable_device()
    file = pathlib.Path(_FILE.value) if _FILE.value else tuned.FILE
    card = jax.devices()[0].device_kind
    for op in ops:
        for width in widths:
            launch = known[op]
            if not launch.reduces and width > launch.part:
                continue  # cut into parts, whatever the width
            tuning, us = _fastest(launch, width)
            print(f"{op:28} {width:7} {us:8.1f} us  {tuning}", flush=True)
            if not _DRY.value:
                keep(file, card, op, _DTYPE.value, tuning, us)


def _fastest(launch: Any, width: int) -> tuple[Any, float]:
    import jax
    import jax.numpy as jnp

    from fusejax.measure import timing

    dtype = jnp.dtype(_DTYPE.value)
    rows = max(1, _ELEMENTS.value // width)
    shapes = launch.arguments(rows, width, dtype)
    compiled = {}
    for tuning in candidates(launch, rows, width, dtype, _MOST.value):
        with contextlib.suppress(Exception):  # does not fit, or the assembler refuses it
            compiled[tuning] = (
                jax.jit(lambda *given, tuning=tuning: launch.function(*given, tuning=tuning))
                .lower(*shapes)
                .compile(compiler_options=timing.GRAPHS_OFF)
            )
    if not compiled:
        raise UsageError(f"{launch.op} at {width}: no plan compiles; see --help for other widths")
    names = {str(tuning): tuning for tuning in compiled}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = jax.jit(lambda keys: list(map(_random, shapes, keys))).lower(keys).compile()
    with card_turn():
        values = inputs(keys)
        times = timing.device_times(
            {name: compiled[tuning] for name, tuning in names.items()},
            values,
            rounds=2,
            iterations=8,
        )
        jax.block_until_ready(values)
    best = min(names, key=lambda name: times[name].median_us)
    return names[best], times[best].median_us


def _random(shape: Any, key: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, 0, 100, shape.dtype)
    return jax.random.uniform(key, shape.shape, shape.dtype, 0.5, 1.5)


def keep(file: pathlib.Path, card: str, op: str, dtype: str, tuning: Any, us: float) -> None:
    """Puts a choice into the file, in the place of the one for the same width."""
    import jax.numpy as jnp

    lock = file.with_suffix(".lock")
    with turn(lock):
        document = json.loads(file.read_text()) if file.exists() else {"cards": {}}
        bits = str(8 * jnp.dtype(dtype).itemsize)
        entries = document["cards"].setdefault(card, {}).setdefault(op, {}).setdefault(bits, [])
        others = [entry for entry in entries if entry["width"] != tuning.width]
        entry = {**dataclasses.asdict(tuning), "us": round(us, 1)}
        ordered = sorted([*others, entry], key=lambda one: one["width"])
        document["cards"][card][op][bits] = ordered
        aside = file.with_name(f"{file.name}.{os.getpid()}")
        aside.write_text(_text(document))
        aside.replace(file)
        lock.unlink(missing_ok=True)


def _text(document: Any) -> str:
    """JSON with each choice on a line of its own."""
    text = json.dumps(document, indent=1)
    one_line: Sequence[str] = re.split(r"(\{\s*\"width\"[^}]*\})", text)
    return (
        "".join(
            re.sub(r"\s+", " ", part).replace("{ ", "{").replace(" }", "}") if number % 2 else part
            for number, part in enumerate(one_line)
        )
        + "\n"
    )


if __name__ == "__main__":
    cli.run(main, __doc__)
