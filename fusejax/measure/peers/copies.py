"""The floor: the fastest of several kernels that only move one array."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from fusejax.errors import UsageError
from fusejax.measure.attempts import Failed, attempt
from fusejax.measure.peers import compiling
from fusejax.measure.peers.cells import Settings
from fusejax.measure.turns import card_turn

# Row length, warpgroups, CTAs per SM and stages of the copies among which the floor is chosen.
COPIES = (
    (1024, 1, 6, 4),
    (1024, 1, 8, 4),
    (1024, 2, 4, 4),
    (4096, 1, 3, 3),
    (4096, 2, 4, 2),
    (4096, 4, 2, 4),
    (8192, 4, 2, 3),
)
LONGEST_VIEW = 8192


@dataclasses.dataclass(frozen=True)
class Copy:
    """The fastest of several kernels that only move one array."""

    name: str
    function: Callable[[Any], Any]
    source: Any
    us: float
    moved: int
    """Bytes read plus bytes written."""

    def to_json(self) -> dict[str, Any]:
        """For the document."""
        return {"kernel": self.name, "us": self.us, "bytes": self.moved, "tb_per_s": self.tb_per_s}

    @property
    def tb_per_s(self) -> float:
        """Bytes read plus bytes written, per µs and million."""
        return self.moved / self.us / 1e6


def copied(x: Any, plan: Any, interpret: Any = None) -> Any:
    """x, by way of the ring that our kernels run in."""
    from pallas_kernels.rows import Result, run_rows

    found = run_rows(
        lambda blocks, parameters, numbers, row: Result(tuple(blocks)),
        plan,
        [x],
        name="copy",
        interpret=interpret,
    )
    return found.outputs[0]


def copy_plans(elements: int, dtype: Any) -> dict[str, Any]:
    """Ways to copy `elements`, a multiple of `LONGEST_VIEW`, by name."""
    from pallas_kernels.plan import plan_rows
    from pallas_kernels.tuned import Tuning

    found = {}
    for view, warpgroups, ctas, stages in COPIES:
        tuning = Tuning(view, 1, warpgroups, ctas, stages)
        plan = plan_rows(elements // view, view, dtype, streams=1, held=1, op="copy", tuning=tuning)
        found[f"Pallas, rows of {view}, {warpgroups}/{ctas}/{stages}"] = plan
    return found


def fastest_copy(flat: Any, settings: Settings) -> Copy:
    """Measures several copies of a flat array, when it is this process's turn."""
    import jax
    import jax.numpy as jnp

    from fusejax.measure import timing

    with card_turn():
        source = jax.block_until_ready(flat[: flat.size // LONGEST_VIEW * LONGEST_VIEW])

    def by_plan(plan: Any, x: Any) -> Any:
        return copied(x.reshape(plan.rows, plan.width), plan)

    def lowered(function: Callable[[Any], Any]) -> Any:
        return jax.jit(function).lower(source)

    functions: dict[str, Callable[[Any], Any]] = {"XLA, negation": jnp.negative}
    for name, plan in copy_plans(source.size, source.dtype).items():
        functions[name] = functools.partial(by_plan, plan)
    with compiling.pool() as pool:
        pending = {
            name: pool.submit(compiling.compiled, attempt(functools.partial(lowered, function)))
            for name, function in functions.items()
        }
    compiled = {name: future.result() for name, future in pending.items()}
    ready = {name: found for name, found in compiled.items() if not isinstance(found, Failed)}
    if not ready:
        reason = next(iter(compiled.values())).line
        raise UsageError(f"no copy compiles, so that there is no floor: {reason}")
    with card_turn():
        times = timing.device_times(
            ready, (source,), rounds=settings.rounds, iterations=settings.iterations
        )
    best = min(times, key=lambda name: times[name].median_us)
    return Copy(best, ready[best], source, times[best].median_us, 2 * source.nbytes)
