"""Predicted times against sums made by hand."""

import pytest

from fusejax import predict
from fusejax.compile import targets
from fusejax.hlo.analysis import Traffic


def test_the_terms_add_up():
    h200 = targets.deviceless("h200")
    bandwidth = 4_814_304_000_000 * targets.COPY_EFFICIENCY
    moved = Traffic(2 * 10**8, 10**8)
    one = predict.time_us(moved, launches=1, programs=1, target=h200)
    assert one == pytest.approx(3e8 / bandwidth * 1e6 + targets.LAUNCH_US)
    three = predict.time_us(moved, launches=3, programs=3, target=h200)
    assert three - one == pytest.approx(2 * targets.LAUNCH_US + 2 * targets.DISPATCH_US)


def test_a_cpu_is_not_predicted():
    assert predict.time_us(Traffic(1, 1), launches=1, programs=1, target=targets.cpu()) is None
