"""The trainer as a user starts it: in several processes, and with flags that make no sense."""

import functools
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import models
import numpy as np
import optax
import pytest
import training
from gpt_config import Config

MATPLOTLIB = importlib.util.find_spec("matplotlib")
EXAMPLES = pathlib.Path(training.__file__).parent

SMALL = ("--hidden", "16", "--blocks", "0", "--heads", "2", "--length", "16", "--batch", "4")


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The second compiles in a third of the time.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )


def test_two_processes_train_together(tmp_path):
    """The same losses as in one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    report, plot = tmp_path / "two.json", tmp_path / "two.svg"
    together = [
        start(
            *SMALL, "--steps", "4", "--every", "2", "--seed", "5",
            "--coordinator", coordinator, "--processes", "2", "--process-id", str(number),
            "--json", str(report), *(("--plot", str(plot)) if MATPLOTLIB else ()),
        )
        for number in range(2)
    ]  # fmt: skip
    alone = losses_alone(Config(hidden=16, blocks=0, heads=2, length=16), size=4, steps=4, seed=5)
    outputs = [process.communicate(timeout=300) for process in together]
    for process, (_, errors) in zip(together, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    assert "on 2 x cpu" in outputs[0][0]
    assert all(line.startswith("[Gloo]") for line in outputs[1][0].splitlines())  # 0 reports
    document = json.loads(report.read_text())
    assert document["devices"] == 2
    for kind in models.KINDS:
        trained = document["layers"][kind]
        np.testing.assert_allclose(trained["losses"], alone, rtol=1e-5)
        assert {one["opcode"] for one in trained["collectives"]} == {"all-reduce"}
        assert trained["step_ms"]["rounds"] == 1
    assert not MATPLOTLIB or "</svg>" in plot.read_text()


def test_kernels_of_both_steps():
    process = start(*SMALL, "--steps", "0", "--kernels", "--target", "cpu", "--json", "-")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert "A step on CPU of this machine" in errors
    steps = json.loads(output)["kernels"]["steps"]
    for kind in models.KINDS:
        assert steps[kind]["launches"] > 0
        assert {"optimizer", "norm", "head"} <= {one["module"] for one in steps[kind]["modules"]}


def losses_alone(config, *, size, steps, seed):
    model, optimizer = models.build("linen", "fusejax", config), optax.adamw(1e-3)
    where = training.placement(jax.devices("cpu")[:1])
    state = jax.jit(functools.partial(training.initial, model, optimizer))(jax.random.key(seed))
    run = training.start(model, optimizer, state, (size, config.length + 1), where)
    rounds = training.train(
        {"": run}, where, config, size=size, steps=steps, round_steps=steps, seed=seed
    )
    assert list(rounds) == [steps]
    return run.losses


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--layers", "torch"), "--layers 'torch' is unknown: give flax, fusejax, or flax,fusejax"),
        (("--batch", "3", "--devices", "2"), "--batch 3 cannot be spread over 2 devices"),
        (("--hidden", "10", "--heads", "4"), "--hidden 10 is no multiple of --heads 4"),
        (("--processes", "2"), "--coordinator None: --processes needs the host:port of process 0"),
        (("--steps", "0"), "--steps 0 trains nothing: give more, or --kernels"),
        (("--kernels", "--layers", "flax"), "--kernels compares two steps on one device"),
        (("--plot", "losses.txt"), "--plot 'losses.txt': the name must end in .svg, .png, .pdf"),
    ],
)
def test_mistakes_are_one_line(arguments, expected):
    process = start(*arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith(f"train.py: {expected}")
    assert errors.count("\n") == 1
