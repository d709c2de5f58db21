"""Row values that are finished for many rows at once: more rows than there is room for."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import column_sums, cross_entropy, plan
from pallas_kernels.plan import Cut
from pallas_kernels.tuned import Tuning
from tests.pallas_kernels.references import INTERPRET, f64


@pytest.mark.parametrize(
    ("rows", "width", "rows_per_block", "parts", "cut", "dtype"),
    [
        (70, 256, 1, 1, Cut.CTA, jnp.bfloat16),
        (70, 100, 1, 1, Cut.CTA, jnp.float32),
        (263, 128, 4, 1, Cut.WARP, jnp.float16),
        (300, 16, 1, 1, Cut.LANE, jnp.bfloat16),
        (35, 512, 1, 2, Cut.CTA, jnp.bfloat16),
    ],
)
def test_losses(monkeypatch, rows, width, rows_per_block, parts, cut, dtype):
    monkeypatch.setattr(plan, "SMS", 1)
    monkeypatch.setattr(plan, "SMS_OF_CLUSTERS", {1: 1, 2: 2})
    wish = Tuning(width, rows_per_block, 1, 1, 2, parts)
    p = cross_entropy.plan(rows, width, dtype, tuning=wish)
    assert (p.cut, p.parts, p.cluster, p.walkers) == (cut, parts, parts > 1, 1)
    random = np.random.default_rng(width)
    logits = jnp.asarray(8 * random.normal(size=(rows, width)), dtype)
    labels = random.integers(-1, width + 1, rows)
    found = cross_entropy.cross_entropy_kernel(
        logits, jnp.asarray(labels, jnp.int32), saves=True, tuning=wish, interpret=INTERPRET
    )
    x = f64(logits)
    maximum = x.max(-1)
    total = np.exp(x - maximum[:, None]).sum(-1)
    known = (labels >= 0) & (labels < width)
    picked = x[np.arange(rows), np.where(known, labels, 0)]
    losses = np.where(known, np.log(total) + (maximum - picked), np.nan)
    for got, wanted in zip(found, (losses, maximum, total), strict=True):
        np.testing.assert_allclose(f64(got), wanted, rtol=2e-6, atol=2e-6)


def test_sums_of_rows_beside_sums_of_columns(monkeypatch):
    monkeypatch.setattr(plan, "SMS", 1)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(70, 256)), jnp.bfloat16)
    scale = jnp.asarray(random.normal(size=256), jnp.float32)
    wish = Tuning(256, 1, 1, 1, 2)
    of_rows, of_columns = column_sums.scale_sums_kernel(x, scale, tuning=wish, interpret=INTERPRET)
    h = f64(x) * f64(scale)
    np.testing.assert_allclose(f64(of_rows), h.sum(1), atol=2e-5)
    np.testing.assert_allclose(f64(of_columns), h.sum(0), atol=2e-5)
