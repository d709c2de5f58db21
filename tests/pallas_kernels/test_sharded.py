"""Rows over devices: eight of the CPU's, and eight H200s that are not there."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels.launches import Launch, Mode, RowOperation
from pallas_kernels.plan import MAX_ELEMENTS


def test_on_eight_devices_of_the_cpu():
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles for longer than it runs
    }
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).with_name("on_eight_devices.py"))],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert done.stderr == ""


@pytest.fixture(scope="module")
def eight(deviceless):
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="H200",
        topology="1x1x8",
        target_config=deviceless("h200").description,
    )
    return np.asarray(topology.devices).reshape(4, 2)


BF16, F32 = jnp.bfloat16, jnp.float32
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = P("data", "model", None)
PARTS = P("data", None, "model")
# function, arguments besides x, split of rows, kernels, all-reduces, shape of a kernel's first rows
CASES = {
    "layer_norm": (AUTO, ROWS, [(1024,), (1024,)], 2, 1, "bf16[512,"),
    "bias_gelu": (EXPLICIT, ROWS, [(1024,)], 2, 1, "bf16[512,"),
    "swiglu": (AUTO, PARTS, [(16, 256, 1024)], 2, 0, "bf16[1024,"),
    "softmax": (AUTO, PARTS, [], 0, 3, None),
}


@pytest.mark.parametrize("name", CASES)
def test_on_eight_cards_that_are_not_there(eight, name):
    kind, spec, others, kernels, reductions, shape = CASES[name]
    mesh = Mesh(eight, ("data", "model"), axis_types=(kind, kind))

    def described(shape):
        rows = len(shape) > 1
        sharding = NamedSharding(mesh, spec if rows else P())
        return jax.ShapeDtypeStruct(shape, BF16 if rows else F32, sharding=sharding)

    def run(*given, fallback=True):
        y, pull = jax.vjp(functools.partial(getattr(pk, name), fallback=fallback), *given)
        return y, pull(y)

    given = [described((16, 256, 1024)), *map(described, others)]
    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(*given).compile().as_text()
    calls = re.findall(r'= (.*?) custom-call\(.*custom_call_target="mosaic_gpu_v2"', text)
    rows = [call for call in calls if shape and shape in call]
    assert len(rows) == kernels
    # What all-reduce is given was added up by a kernel, too.
    assert len(calls) - len(rows) == (reductions if kernels else 0)
    assert not re.search(r" all-gather(-start)?\(", text)
    assert len(re.findall(r"= .*? all-reduce(?:-start)?\(", text)) == reductions
    if not kernels:
        without = functools.partial(run, fallback=False)
        with (
            jax.set_mesh(mesh),
            pytest.raises(Exception, match="needs whole rows, and the last axis is split over"),
        ):
            jax.jit(without).lower(*given).compile()


def test_the_limit_of_elements_is_that_of_one_device():
    """An array may have more of them than a kernel, if devices share it, or examples do."""
    half = jax.ShapeDtypeStruct((2**20, 1024), BF16)
    assert half.size <= MAX_ELEMENTS < 2 * half.size
    launch = Launch(RowOperation("softmax", None, None), Mode())
    assert launch.refusal(half) is None
    too_many = jax.ShapeDtypeStruct((2**21, 1024), BF16)
    assert "at most 2**31-1 elements, and it has 2147483648" in launch.refusal(too_many)
    assert launch.refusal(jax.ShapeDtypeStruct((2, 2**20, 1024), BF16)) is None

    def lowered(x, **options):
        f = jax.jit(lambda x: pk.softmax(x, **options))
        return f.trace(x).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")

    assert jax.eval_shape(pk.softmax, too_many).shape == too_many.shape
    with pytest.raises(ValueError, match="elements, and it has 2147483648"):
        lowered(too_many)
    assert lowered(too_many, fallback=True) == 0
    assert lowered(jax.ShapeDtypeStruct((2, 2**20, 1024), BF16)) == 1
