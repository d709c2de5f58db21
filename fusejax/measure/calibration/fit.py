"""From measured points to the figures of a profile: pure functions."""

from collections.abc import Sequence

import numpy as np
import scipy.optimize

from fusejax.profile import Curve, Point


def curve(points: Sequence[Point]) -> Curve:
    """Fits us = fixed_us + bytes / bytes_per_s, both at least 0, to the relative errors.

    Each point weighs as much as any other, whether it took 2 µs or 200.

    Raises:
      ValueError: no points, or one without bytes or time.
    """
    if not points:
        raise ValueError("no points to fit")
    if any(point.bytes <= 0 or point.us <= 0 for point in points):
        raise ValueError("a point without bytes or time")
    ordered = tuple(sorted(points, key=lambda point: point.bytes))
    sizes = np.array([point.bytes for point in ordered], float)
    us = np.array([point.us for point in ordered])
    largest = sizes[-1]
    # In units of the largest point, so that both columns are of one order of magnitude.
    (fixed, whole), _ = scipy.optimize.nnls(
        np.stack([1 / us, sizes / largest / us], axis=1), np.ones_like(us)
    )
    if whole == 0:  # the larger the faster: nothing but noise
        fixed, whole = 0.0, us[-1]
    return Curve(ordered, float(fixed), float(largest / whole * 1e6))


def per_step_ps(short: tuple[int, float], long: tuple[int, float], elements: int) -> float:
    """Picoseconds per element of one more step, from (steps, µs) of two kernels."""
    return (long[1] - short[1]) / (long[0] - short[0]) / elements * 1e6
