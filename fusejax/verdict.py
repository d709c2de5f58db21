"""Who is fastest, by measurement or by prediction, and what in bytes or launches explains it."""

import collections
import itertools
from collections.abc import Sequence

from fusejax import rates
from fusejax.comparison import PathResult, Step, Verdict
from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Boundary
from fusejax.report.units import counted, mib, tensor

_XLA = "XLA's own fusion"
# Which paths are compared as split and fused, and what the fused one is called.
_FUSED_OR_SPLIT = (("split", "xla", _XLA), ("pallas_split", "pallas", "one kernel"))
# Two measured times closer than this share are called equal.
_TIE = 0.02
_LEAST_TERM_US = 0.05
# Kernels this much slower are held back by something that the prediction does not know.
_SLOWER_THAN_PREDICTED = 1.2


def judge(paths: Sequence[PathResult], target: Target) -> Verdict | None:
    """The verdict over paths given from the most to the least split; None where there are none."""
    if not paths:
        return None
    basis = _basis(paths)
    fastest = min(paths, key=lambda path: _cost(path, basis))
    steps = tuple(_step(a, b, target, basis) for a, b in itertools.pairwise(paths))
    return Verdict(fastest.name, basis, _summary(paths, fastest, basis), steps)


def _basis(paths: Sequence[PathResult]) -> str:
    if all(path.timing is not None for path in paths):
        return "measured"
    if all(path.predicted_us is not None for path in paths):
        return "predicted"
    return "modelled bytes"


def _cost(path: PathResult, basis: str) -> float:
    if basis == "measured" and path.timing is not None:
        return path.timing.end_to_end_us
    if basis == "predicted" and path.predicted_us is not None:
        return path.predicted_us
    return path.traffic.total


def _equal(a: PathResult, b: PathResult, basis: str) -> bool:
    """Whether the two cannot be told apart: as good as equal, or spreads that overlap."""
    low, high = sorted((_cost(a, basis), _cost(b, basis)))
    if low >= high * (1 - _TIE):
        return True
    if basis != "measured" or a.timing is None or b.timing is None:
        return False
    if a.timing.device_us is not None:
        return False  # a card's spread is that of the kernels' own time: gaps decide beside it
    return a.timing.low_us <= b.timing.high_us and b.timing.low_us <= a.timing.high_us


def _said(path: PathResult, basis: str) -> str:
    if basis == "modelled bytes":
        return mib(path.traffic.total)
    return f"{_cost(path, basis):,.1f} µs"


def _summary(paths: Sequence[PathResult], fastest: PathResult, basis: str) -> str:
    ranked = sorted(paths, key=lambda path: _cost(path, basis))
    listed = ", ".join(f"{path.name} {_said(path, basis)}" for path in ranked)
    equal = [path.name for path in ranked if _equal(path, fastest, basis)]
    if len(equal) > 1:
        lines = [f"{' and '.join(equal)} are equally fast ({basis}): {listed}."]
    else:
        lines = [f"{fastest.name} is fastest ({basis}): {listed}."]
    by_name = {path.name: path for path in paths}
    for split, fused, called in _FUSED_OR_SPLIT:
        if split in by_name and fused in by_name:
            lines.append(_fused_or_split(by_name[split], by_name[fused], called, basis))
    held_back = [note for path in ranked if (note := _held_back(path, basis))]
    return " ".join([*lines, *held_back])


def _held_back(path: PathResult, basis: str) -> str | None:
    """A sentence where a path's kernels take much longer than predicted."""
    device = path.timing.device_us if path.timing else None
    if basis != "measured" or device is None or path.cost is None:
        return None
    if device < path.cost.kernels_us * _SLOWER_THAN_PREDICTED:
        return None
    why = f" ({path.attribution})" if path.attribution else ""
    return f"{path.name}'s kernels take {device / path.cost.kernels_us:.2f}x the prediction{why}."


def _fused_or_split(split: PathResult, fused: PathResult, called: str, basis: str) -> str:
    before, after = _cost(split, basis), _cost(fused, basis)
    if _equal(split, fused, basis):
        return f"Splitting and {called} cost the same, as far as this can tell."
    if before < after:
        lost = None if called == _XLA else _product_lost(split, fused)
        why = f"{lost}; it cannot make up for that, though {_what_differs(split, fused)}"
        return (
            f"Splitting wins over {called}, {after / before:.2f}x: "
            f"{why if lost else _what_differs(fused, split)}."
        )
    told = "Fusing" if called == _XLA else f"{called[:1].upper()}{called[1:]}"
    return f"{told} wins over splitting, {before / after:.2f}x: {_what_differs(split, fused)}."


def _product_lost(split: PathResult, fused: PathResult) -> str | None:
    """What is lost on the matrix product itself where a kernel has more to do than that."""

    def product(path: PathResult) -> tuple[float, str] | None:
        times = (path.timing.kernel_us if path.timing else None) or (None,) * len(path.kernels)
        found = [
            (time, kernel)
            for time, kernel in zip(times, path.kernels, strict=True)
            if time is not None and kernel.work is not None and kernel.work.matmul_flops
        ]
        if not found:
            return None
        time, kernel = max(found, key=lambda one: one[0])
        rate = kernel.work.matmul_flops / time / 1e6 if kernel.work else 0.0
        used = path.resources.get(kernel.name, {})
        registers = f", {used['registers']} registers" if used.get("registers") else ""
        return time, f"{time:,.1f} µs ({rate:,.0f} TFLOP/s{registers})"

    alone, within = product(split), product(fused)
    if alone is None or within is None or within[0] * (1 - _TIE) < alone[0]:
        return None
    return (
        f"the product takes {alone[1]} alone and {within[1]} with its epilogue, whose live values "
        "and arithmetic the tensor cores wait for"
    )


def _what_differs(slow: PathResult, fast: PathResult) -> str:
    extra_bytes = slow.traffic.total - fast.traffic.total
    extra_launches = slow.launches - fast.launches
    parts = []
    if extra_bytes:
        word = "more" if extra_bytes > 0 else "less"
        parts.append(f"{slow.name} moves {mib(abs(extra_bytes))} {word}")
    if extra_launches:
        count = abs(extra_launches)
        word = "more" if extra_launches > 0 else "fewer"
        parts.append(f"{slow.name} launches {count} {word} kernel{'s' if count > 1 else ''}")
    boundary = _costliest_new(slow, fast)
    if boundary is not None and extra_bytes > 0:
        known = boundary.reason.kind != "unknown"
        why = f", because {_uncapped(boundary.reason.text)}" if known else ""
        parts.append(f"it {_handing_over(boundary)}{why}")
    if slow.programs != fast.programs:
        parts.append(
            f"{slow.name} dispatches {counted(slow.programs, 'program')}, {fast.name} "
            f"{fast.programs}"
        )
    return "; ".join(parts) or "bytes and launches are equal, so the difference lies inside kernels"


def _uncapped(text: str) -> str:
    text = text.rstrip(".")
    return (
        text
        if text[:2].isupper() or text.startswith(("XLA", "Mosaic"))
        else text[:1].lower() + text[1:]
    )


def _handing_over(boundary: Boundary) -> str:
    what = tensor(boundary.dtype, boundary.shape)
    return f"writes and re-reads {what}" if boundary.written_bytes else f"re-reads {what}"


def _costliest_new(slow: PathResult, fast: PathResult) -> Boundary | None:
    """Of the boundaries that `slow` has and `fast` has no equal of, the one that moves most."""

    def cost(boundary: Boundary) -> int:
        return boundary.written_bytes + boundary.read_bytes

    known = collections.Counter((b.dtype, b.shape, cost(b)) for b in fast.boundaries)
    new = []
    for boundary in slow.boundaries:
        key = boundary.dtype, boundary.shape, cost(boundary)
        if known[key]:
            known[key] -= 1
        else:
            new.append(boundary)
    return max(new, key=cost, default=None)


def _step(origin: PathResult, to: PathResult, target: Target, basis: str) -> Step:
    removed_bytes = origin.traffic.total - to.traffic.total
    removed_launches = origin.launches - to.launches
    predicted = measured = None
    if origin.predicted_us is not None and to.predicted_us is not None:
        predicted = origin.predicted_us - to.predicted_us
    if origin.timing is not None and to.timing is not None:
        measured = origin.timing.end_to_end_us - to.timing.end_to_end_us
    return Step(
        origin.name,
        to.name,
        removed_bytes,
        removed_launches,
        predicted,
        measured,
        _explain(origin, to, target, predicted, measured, basis),
    )


def _explain(
    origin: PathResult,
    to: PathResult,
    target: Target,
    predicted: float | None,
    measured: float | None,
    basis: str,
) -> str:
    slow, fast = (origin, to) if _cost(to, basis) <= _cost(origin, basis) else (to, origin)
    parts = [f"{_said(origin, basis)} to {_said(to, basis)} ({basis}): {_what_differs(slow, fast)}"]
    if predicted is not None and origin.cost is not None and to.cost is not None:
        parts.append(f"predicted gain {predicted:,.1f} µs = {_terms(origin, to, target)}")
    if measured is not None and predicted is not None:
        parts.append(f"measured gain {measured:,.1f} µs")
        if measured * predicted < 0 and abs(measured) > _TIE * _cost(origin, basis):
            parts.append(
                "the prediction is the opposite: look at the kernels' registers, occupancy and "
                "spills"
            )
    return "; ".join(parts)


def _terms(origin: PathResult, to: PathResult, target: Target) -> str:
    """The predicted gain from one path to another, term by term."""
    assert origin.cost is not None
    assert to.cost is not None
    rate = rates.of(target)
    gain = origin.cost - to.cost
    removed = f"{(origin.traffic.total - to.traffic.total) / 1e6:,.1f} MB"
    at = f" at {rate.copy_bytes_per_s / 1e12:.2f} TB/s" if rate else ""
    launches = counted(origin.launches - to.launches, "launch")
    dispatches = counted(origin.programs - to.programs, "dispatch")
    terms = [
        (gain.traffic_us, f"{removed}{at}"),
        (gain.launch_us + gain.start_us, launches),
        (gain.dispatch_us, dispatches),
        (gain.emitter_us, "kernels nearer to a copy's speed"),
        (gain.compute_us, "arithmetic beyond the bytes"),
    ]
    told = [f"{us:+,.1f} ({what})" for us, what in terms if abs(us) >= _LEAST_TERM_US]
    return " ".join(told) or "0"
