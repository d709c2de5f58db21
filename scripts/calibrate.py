"""Measures what this machine's GPU really reaches, and keeps it for predictions.

Example:
  python scripts/calibrate.py
  python scripts/calibrate.py --file h200.json --json -

Times small programs for a minute or so: bandwidth of memory and of the L2 cache, what each of XLA's
kinds of kernel reaches, the cost of elementwise operations, matrix products, gaps between launches.
The card should have nothing else to do. Without --file the profile is kept where fusejax looks for
the user's own: in $FUSEJAX_PROFILE_DIR, else in fusejax/profiles of $XDG_CACHE_HOME or ~/.cache.

Exit code: 0; 2 without a GPU, or where the file cannot be written.
"""

import shlex
import sys

from absl import flags

from fusejax import cli, profile
from fusejax.compile import platform
from fusejax.errors import UsageError

_FILE = flags.DEFINE_string("file", None, "Where the profile is kept; the user's own without it.")
_JSON = flags.DEFINE_string(
    "json", None, "Also write the profile to this file; - for standard output."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of everything that is timed.", lower_bound=1)


def main() -> None:
    """Reads the flags, measures, writes, prints."""
    for flag, path in (("--file", _FILE.value), ("--json", _JSON.value)):
        cli.check_writable(flag, path)
    platform.prepare_process()
    from rich.console import Console

    from fusejax.compile import targets
    from fusejax.measure.calibrate import calibrate
    from fusejax.measure.calibration.plan import Plan
    from fusejax.report.progress import progress

    card = targets.usable_device().title
    path = _FILE.value or _user_file(card)
    with progress(Console(stderr=True)) as tell:
        found = calibrate(
            Plan(rounds=_ROUNDS.value), command=shlex.join(["python", *sys.argv]), tell=tell
        )
    document = found.to_json()
    cli.write_json("--file", path, document)
    if _JSON.value:
        cli.write_json("--json", _JSON.value, document)
    if "-" not in (path, _JSON.value):
        _print(found, path)


def _user_file(card: str) -> str:
    path = profile.user_file(card)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--file is missing, and {str(path.parent)!r} cannot be made ({error.strerror}): "
            "give --file"
        ) from error
    cli.check_writable("--file", str(path))
    return str(path)


def _print(found: profile.Profile, path: str) -> None:
    print(f"{found.card}: {path}")
    for where, curves in (("memory", found.memory), ("L2 cache", found.l2)):
        for kind, curve in curves.items():
            last = curve.points[-1]
            print(
                f"{where:9} {kind:18} {last.bytes / last.us / 1e6:8.2f} TB/s at "
                f"{last.bytes / 1e6:,.0f} MB; {curve.fixed_us:.2f} µs for the start"
            )
    for speed in found.emitters:
        name = f"{speed.kind} {speed.dtype}"
        print(f"emitter   {name:22} width {speed.width:6} {speed.bytes_per_s / 1e12:6.2f} TB/s")
    for cost in found.arithmetic:
        print(f"operation {cost.op:22} {cost.dtype:5} {cost.ps:8.4f} ps per element")
    for product in found.matmuls:
        size = f"{product.m} x {product.n} x {product.k}"
        print(f"matmul    {size:20} {product.dtype:5} {product.flop_per_s / 1e12:8.1f} TFLOP/s")
    for name, us in vars(found.launches).items():
        print(f"launches  {name:26} {us:8.2f}")
    for line in found.left_out:
        print(f"left out: {line}")


if __name__ == "__main__":
    cli.run(main, __doc__)
