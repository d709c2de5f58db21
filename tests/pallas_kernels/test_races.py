"""What touches the same memory is ordered, says JAX's simulation; and that it can tell.

It knows copies, warpgroups and CTAs. A warpgroup is one thread there: what its warps do to each
other does not show. Of two things it would report, there is nothing here:

- Blocks and columns that are moved up, to end with the last one: they are written twice, in any
  order, with the same bits.
- Late rows with outputs: threads read their ends out of the ring. Before the next copy into it,
  warps meet, which is all that Mosaic does for reads; the simulation wants a fence as well.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu
from references import INTERPRET

from pallas_kernels import catalogue, exchange, plan, row_values
from pallas_kernels.cross_entropy import cross_entropy_kernel
from pallas_kernels.partial_sums import SumsPlan, add_up
from pallas_kernels.plan import Cut
from pallas_kernels.row_softmax import softmax_kernel
from pallas_kernels.tuned import Tuning

pytestmark = pytest.mark.skipif(INTERPRET is None, reason="it is about the simulation")

BF16, F32 = jnp.bfloat16, jnp.float32
LAUNCHES = catalogue.launches()
FIELDS = {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
# From JAX 0.12 on, a race is an error where this is not said; before, it is counted.
COUNTED: dict[str, Any] = {"on_race": "warn"} if "on_race" in FIELDS else {}
SIMULATED = plgpu.InterpretGPUParams(detect_races=True, **COUNTED)
ROOM = 2  # rows, for their values


@pytest.fixture(autouse=True)
def one_cta_takes_many_blocks(monkeypatch):
    monkeypatch.setattr(plan, "SMS", 1)
    monkeypatch.setattr(plan, "SMS_OF_CLUSTERS", {1: 1, 2: 2})
    monkeypatch.setattr(row_values, "_slots", lambda p: ROOM)


def random(*shape, dtype=BF16):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def softmax(rows, tuning):
    return softmax_kernel(random(rows, tuning.width), tuning=tuning, interpret=SIMULATED)


def losses(rows, tuning):
    labels = jnp.arange(rows, dtype=jnp.int32)
    x = random(rows, tuning.width)
    return cross_entropy_kernel(x, labels, tuning=tuning, interpret=SIMULATED)


def has_races(run, *given):
    jax.block_until_ready(run(*given))
    found = get_races()
    assert found.reads
    assert found.writes
    return found.races_found


def nothing(*_, **__):
    """Instead of what orders things."""


def only_in_the_end(n, *, wait_read_only=False, wait=plgpu.wait_smem_to_gmem):
    if not wait_read_only:
        wait(n)


RUNS = {"softmax": softmax, "cross_entropy": losses}
ONE = Tuning(512, 1, 1, 1, stages=2)
TWO = Tuning(1024, 1, warpgroups=2, ctas_per_sm=1, stages=2)
CLUSTER = Tuning(512, 1, 1, 1, stages=2, parts=2)
BACK_TO_BACK = Tuning(35, 8, 1, 1, stages=1)


@pytest.mark.parametrize(
    ("op", "rows", "tuning", "cut"),
    [
        ("softmax", 3, TWO, Cut.CTA),
        ("softmax", 3, CLUSTER, Cut.CTA),
        ("softmax", 37, BACK_TO_BACK, Cut.PACKED),
        ("cross_entropy", 2 * ROOM + 1, TWO, Cut.CTA),
    ],
)
def test_these_have_none(op, rows, tuning, cut):
    p = LAUNCHES[op].plan(rows, tuning.width, BF16, tuning=tuning)
    assert (p.cut, p.warpgroups, p.parts) == (cut, tuning.warpgroups, tuning.parts)
    assert (p.walkers, p.stages) == (1, tuning.stages)
    assert p.blocks > p.stages
    assert not has_races(RUNS[op], rows, tuning)


@pytest.mark.parametrize(
    ("op", "rows", "tuning", "where", "what", "instead"),
    [
        ("softmax", 2, ONE, plgpu, "commit_smem", nothing),
        ("softmax", 3, ONE, plgpu, "wait_smem_to_gmem", only_in_the_end),
        ("softmax", 2, TWO, exchange, "meet", nothing),
        ("softmax", 2, CLUSTER, exchange.Places, "meet_cluster", nothing),
        ("cross_entropy", ROOM + 1, TWO, row_values, "meet", nothing),
    ],
)
def test_they_would_have_some_without(op, rows, tuning, where, what, instead, monkeypatch):
    monkeypatch.setattr(where, what, instead)
    assert has_races(RUNS[op], rows, tuning)


@pytest.mark.parametrize("waits", [True, False])
def test_sums_of_warpgroups(waits, monkeypatch):
    if not waits:
        monkeypatch.setattr(plgpu, "barrier_wait", nothing)
    p = SumsPlan(sums=1, count=66, width=16, rows=32, warpgroups=2)
    given = random(p.sums, p.count, p.width, dtype=F32)
    assert has_races(lambda: add_up(p, given, name="totals", interpret=SIMULATED)) != waits
