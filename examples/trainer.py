"""A training by the flags of train.py: what it does, prints and writes."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import corpus
import flax
import jax
import jax.numpy as jnp
import loss_plot
import models
import optax
import step_kernels
import training
from gpt_config import Config
from models import Model
from rich.console import Console
from training import Placement, Run, State

import fusejax
from fusejax import cli
from fusejax.compile import platform, targets
from fusejax.compile.targets import Target
from fusejax.errors import UsageError
from fusejax.report.console import WIDTH
from fusejax.report.units import mib


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of train.py."""

    model: str
    layers: tuple[str, ...]
    config: Mapping[str, Any]
    """The fields of `Config`, dtypes by their names."""
    batch: int
    steps: int
    every: int
    learning_rate: float
    seed: int
    devices: int
    coordinator: str | None
    processes: int
    process_id: int
    kernels: bool
    target: str
    json: str | None
    plot: str | None


def run(options: Options) -> None:
    """Trains, compares kernels, prints and writes, as far as it is asked for."""
    devices = _devices(options)
    reports = jax.process_index() == 0
    console = Console(
        width=WIDTH,
        file=sys.stderr if options.json == "-" else sys.stdout,
        quiet=not reports,
        highlight=False,
    )
    target = _target(options, console) if options.kernels else None
    config = Config(**{**options.config, "dtype": jnp.dtype(options.config["dtype"])})
    built = {kind: models.build(options.model, kind, config) for kind in options.layers}
    optimizer = optax.adamw(options.learning_rate)
    # The layers' parameters are the same: one model's serve all.
    initial = functools.partial(training.initial, built[options.layers[0]], optimizer)
    document: dict[str, Any] = {
        "model": options.model,
        "config": dict(options.config),
        "batch": options.batch,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "versions": {
            "fusejax": fusejax.__version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
        },
    }
    state = None
    if options.steps:
        where = training.placement(devices)
        runs = _train(options, config, built, optimizer, initial, where, console)
        document["layers"] = {kind: _run_json(run) for kind, run in runs.items()}
        if options.plot and reports:
            plot(options.plot, document)
        state = runs[options.layers[0]].state
        del runs  # timing kernels needs the memory of the others' states
    if target is not None:
        document["kernels"] = _compare(
            options, config, built, optimizer, initial, state, target, console
        )
    if options.json and reports:
        cli.write_json("--json", options.json, document)


def _devices(options: Options) -> list[Any]:
    """Those to train on, of all processes together."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process_id)
        return jax.devices()
    platform.discover_backends_quietly()
    if len(jax.devices()) < options.devices:
        raise UsageError(
            f"--devices {options.devices}: this machine has {len(jax.devices())}; give as many"
        )
    return jax.devices()[: options.devices]


def _target(options: Options, console: Console) -> Target:
    """What the kernels of both steps are compiled for."""
    target, notice = targets.resolve(options.target)
    if notice:
        console.print(notice, markup=False)
    return target


def _train(
    options: Options, config: Config, built: Mapping[str, Model], optimizer: Any, initial: Any,
    where: Placement, console: Console,
) -> dict[str, Run]:  # fmt: skip
    make = jax.jit(initial, out_shardings=where.state)
    shape = options.batch, config.length + 1
    runs = {}
    for kind, model in built.items():
        state = make(jax.random.key(options.seed))
        runs[kind] = training.start(model, optimizer, state, shape, where)
        if where.mesh.size > 1:
            found = training.collectives(runs[kind].step.as_text())
            named = ", ".join(f"{one.opcode} of {mib(one.bytes)}" for one in found)
            console.print(f"collectives of {kind}'s step: {named or 'none'}")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(runs[kind].state.parameters))
    count, device = where.mesh.size, where.mesh.devices.flat[0]
    console.print(
        f"{options.model}, {parameters / 1e6:,.1f} million parameters, {config.dtype}, "
        f"{options.batch} x {config.length} tokens on "
        + (f"{count} x {device.device_kind}" if count > 1 else device.device_kind)
    )
    console.print(f"{'step':>6}" + "".join(f"{'loss, ' + kind:>16}" for kind in runs))
    for done in training.train(
        runs, where, config, size=options.batch, steps=options.steps, round_steps=options.every,
        seed=options.seed,
    ):  # fmt: skip
        console.print(f"{done:6}" + "".join(f"{run.losses[-1]:16.5f}" for run in runs.values()))
    if len(runs) == 2:
        pairs = zip(*(run.losses for run in runs.values()), strict=True)
        console.print(f"losses differ by at most {max(abs(a - b) for a, b in pairs):.2g}")
    console.print(
        f"ms per step, 10-90 % over rounds of {options.every} steps"
        + ("" if device.platform == "gpu" else " (on a CPU: says nothing about a GPU)")
    )
    for kind, run in runs.items():
        console.print(f"{kind:8} {_times(run)}; compiled in {run.compile_s:.1f} s")
    return runs


def _times(run: Run) -> str:
    time = training.step_time(run)
    if time is None:
        return "not timed: give more --steps than --every"
    return f"{time.median:10.2f} {f'{time.low:.2f}-{time.high:.2f}':>18}, {time.rounds} rounds"


def _run_json(run: Run) -> dict[str, Any]:
    time = training.step_time(run)
    found = training.collectives(run.step.as_text())
    return {
        "losses": run.losses,
        "step_ms": None if time is None else dataclasses.asdict(time),
        "rounds_ms": run.step_ms,
        "compile_s": run.compile_s,
        "collectives": [dataclasses.asdict(one) for one in found],
    }


def plot(path: str, document: Mapping[str, Any]) -> None:
    """Draws the losses of what `run` writes as JSON."""
    losses = {}
    for kind, run in document["layers"].items():
        time = run["step_ms"]
        losses[f"{kind}, {time['median']:.2f} ms/step" if time else kind] = run["losses"]
    config = document["config"]
    title = (
        f"{document['model']}, hidden {config['hidden']}, {config['blocks']} blocks, "
        f"{config['dtype']}, {document['device']}"
    )
    loss_plot.save(losses, title, path)


def _compare(
    options: Options, config: Config, built: Mapping[str, Model], optimizer: Any, initial: Any,
    state: State | None, target: Target, console: Console,
) -> dict[str, Any]:  # fmt: skip
    if state is None:
        key = jax.random.key(options.seed)
        runs = target.kind == "device"
        state = jax.jit(initial)(key) if runs else jax.eval_shape(initial, key)
    tokens = corpus.batch(0, size=options.batch, length=config.length, seed=options.seed)
    steps = {kind: training.make_step(model, optimizer) for kind, model in built.items()}
    found = step_kernels.profiles(steps, (state, jnp.asarray(tokens)), target)
    step_kernels.print_tables(found, target, console)
    return step_kernels.to_json(found, target)
