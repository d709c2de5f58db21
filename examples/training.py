"""A training step, spread over devices by the batch, and runs of it that are timed in turn."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_config import Config
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from models import Model

from fusejax.hlo import text as hlo_text
from fusejax.measure.timing import percentile


class State(NamedTuple):
    """What a step takes and returns."""

    parameters: Any
    optimizer: Any


def make_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """A step: from a state and tokens [batch, length + 1] to the next state and the mean loss."""

    def loss_of(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = model.logits(parameters, tokens[:, :-1])
        with jax.named_scope("loss"):
            return model.loss(logits, tokens[:, 1:]).mean()

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.parameters, tokens)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state.optimizer, state.parameters)
            return State(optax.apply_updates(state.parameters, updates), moments), loss

    return step


@dataclasses.dataclass(frozen=True)
class Placement:
    """Data parallel: every device has all parameters and its share of the batch."""

    mesh: jax.sharding.Mesh

    @property
    def batch(self) -> NamedSharding:
        """Of tokens: split by rows."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    @property
    def state(self) -> NamedSharding:
        """Of parameters and moments: the same everywhere."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, tokens: np.ndarray) -> jax.Array:
        """Tokens of the whole batch, of which each process hands over the rows of its devices."""
        return jax.make_array_from_callback(tokens.shape, self.batch, lambda rows: tokens[rows])


def placement(devices: Sequence[Any]) -> Placement:
    """A mesh of one axis, whose shardings the compiler spreads through the program."""
    return Placement(jax.sharding.Mesh(np.array(devices), ("data",), (AxisType.Auto,)))


@dataclasses.dataclass
class Run:
    """The training of one model, and what came of it so far."""

    state: State
    step: Any
    """Compiled; the old state's memory is given to the new one."""
    compile_s: float
    losses: list[float] = dataclasses.field(default_factory=list)
    """Of every step."""
    step_ms: list[float] = dataclasses.field(default_factory=list)
    """Per step, of every round but the first."""


def initial(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> State:
    """The state before the first step."""
    parameters = model.init(key)
    return State(parameters, optimizer.init(parameters))


def start(
    model: Model, optimizer: optax.GradientTransformation, state: State,
    shape: tuple[int, int], where: Placement,
) -> Run:  # fmt: skip
    """A run from a state, whose memory it takes over, with tokens of a shape; compiles the step."""
    step = jax.jit(
        make_step(model, optimizer), donate_argnums=0, out_shardings=(where.state, where.state)
    )
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where.batch)
    begin = time.perf_counter()
    compiled = step.lower(state, tokens).compile()
    return Run(state, compiled, time.perf_counter() - begin)


def train(
    runs: Mapping[str, Run], where: Placement, config: Config, *,
    size: int, steps: int, round_steps: int, seed: int,
) -> Iterator[int]:  # fmt: skip
    """Trains all runs on the same batches, in turn by rounds; yields the steps done so far.

    Times are of the host's clock, over the steps of a round, which are dispatched one after another
    and waited for at the end. Clocks drift with heat: hence the turns, every other round in
    reversed order.
    """
    names = list(runs)
    for first in range(0, steps, round_steps):
        numbers = range(first, min(first + round_steps, steps))
        batches = [
            where.put(corpus.batch(n, size=size, length=config.length, seed=seed)) for n in numbers
        ]
        jax.block_until_ready(batches)
        for name in names if first // round_steps % 2 == 0 else reversed(names):
            run = runs[name]
            begin = time.perf_counter()
            losses = []
            for tokens in batches:
                run.state, loss = run.step(run.state, tokens)
                losses.append(loss)
            jax.block_until_ready((run.state, losses))
            if first:
                run.step_ms.append((time.perf_counter() - begin) * 1e3 / len(batches))
            run.losses += map(float, losses)
        yield numbers.stop


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds per step over rounds: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float
    rounds: int


def step_time(run: Run) -> StepTime | None:
    """None where there was one round only, which is not timed."""
    times = run.step_ms
    if not times:
        return None
    spread = percentile(times, 0.1), percentile(times, 0.9)
    return StepTime(statistics.median(times), *spread, len(times))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a compiled step."""

    opcode: str
    """all-reduce, all-gather, ..."""
    bytes: int
    """Of its results, on each device."""


_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


def collectives(hlo: str) -> tuple[Collective, ...]:
    """Those of a compiled module, from its text; asynchronous ones by their ends."""
    module = hlo_text.read_module(hlo)
    return tuple(
        Collective(opcode, instruction.shape.bytes)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if (opcode := instruction.opcode.removesuffix("-done")) in _COLLECTIVES
    )
