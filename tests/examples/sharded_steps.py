"""Prints as JSON what the step on eight devices becomes: of a CPU, and of H200s that are not there.

Run by test_sharded_gpt.py: the number of devices must be fixed before JAX starts.
"""

import functools
import json
import os
import sys

from fusejax.compile import platform

platform.prepare_process()
os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"  # the library's need no compiling

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time

sys.path.insert(0, sys.argv[1])  # the folder of the examples

import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import optax  # noqa: E402
import training  # noqa: E402
from gpt_config import Config  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from fusejax.compile import targets  # noqa: E402
from fusejax.hlo.analyse import analyse  # noqa: E402
from fusejax.program import Program  # noqa: E402

OPTIMIZER = optax.sgd(0.1)  # the simplest: what is asked is what comes before it
BATCH = 8


def on_cpus() -> dict:
    """The first two steps of the nnx model on one device and on eight."""
    config = Config(hidden=32, blocks=1, heads=2, length=24, attention="softmax")
    model = models.build("nnx", "fusejax", config)
    make = jax.jit(functools.partial(training.initial, model, OPTIMIZER))
    found = {}
    for count in (1, 8):
        where = training.placement(jax.devices()[:count])
        state = jax.device_put(make(jax.random.key(0)), where.state)
        run = training.start(model, OPTIMIZER, state, (BATCH, config.length + 1), where)
        for _ in training.train(
            {"run": run}, where, config, size=BATCH, steps=2, round_steps=2, seed=0
        ):
            pass
        leaves = jax.tree.leaves(run.state.parameters)
        found[count] = {
            "losses": run.losses,
            "collectives": _collectives(run.step.as_text()),
            "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
            "norms": [float(jnp.linalg.norm(leaf)) for leaf in leaves],
        }
    return found


def on_h200s() -> dict:
    """The linen model's step in bfloat16 compiled for a host of eight."""
    config = Config(hidden=256, blocks=1, heads=2, length=64, dtype=jnp.bfloat16)
    model = models.build("linen", "fusejax", config)
    platform.discover_backends_quietly()
    platform.register_cuda_compiler()
    target = targets.deviceless("h200")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.title,
        topology="1x1x8",
        target_config=target.description,
    )
    where = training.placement(topology.devices)
    shapes = jax.eval_shape(
        functools.partial(training.initial, model, OPTIMIZER), jax.random.key(0)
    )
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where.state), shapes
    )
    run = training.start(model, OPTIMIZER, state, (BATCH, config.length + 1), where)
    text = run.step.as_text()
    analysis = analyse(Program("step", text))
    return {
        "collectives": _collectives(text),
        "parameter_bytes": sum(4 * leaf.size for leaf in jax.tree.leaves(shapes.parameters)),
        "kernels": [
            {"emitter": kernel.emitter, "scopes": kernel.scopes, "bytes": kernel.traffic.total}
            for kernel in analysis.kernels
        ],
        "boundaries": [
            {"scopes": boundary.scopes, "shape": boundary.shape} for boundary in analysis.boundaries
        ],
    }


def _collectives(hlo: str) -> list:
    return [[one.opcode, one.bytes] for one in training.collectives(hlo)]


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # a third of the time to compile
    report = {"cpu": on_cpus()}
    jax.config.update("jax_disable_most_optimizations", False)
    if platform.missing_compiler() is None:
        report["h200s"] = on_h200s()
    print(json.dumps(report))
