"""Who is fastest, by measurement or by prediction, and what in bytes or launches explains it."""

import itertools
from collections.abc import Sequence

from fusejax.comparison import PathResult, Step, Verdict
from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Boundary
from fusejax.report.units import counted, mib, tensor

# Two measured times closer than this share are called equal.
_TIE = 0.02
# Kernels this much slower than predicted are held back by something that bytes do not show.
_SLOWER_THAN_ITS_BYTES = 1.2


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
    if "split" in by_name and "xla" in by_name:
        lines.append(_fused_or_split(by_name["split"], by_name["xla"], basis))
    held_back = [note for path in ranked if (note := _held_back(path, basis))]
    return " ".join([*lines, *held_back])


def _held_back(path: PathResult, basis: str) -> str | None:
    """A sentence where a path's kernels take much longer than their bytes foretell."""
    device = path.timing.device_us if path.timing else None
    if basis != "measured" or device is None or path.predicted_us is None:
        return None
    if device < path.predicted_us * _SLOWER_THAN_ITS_BYTES:
        return None
    times = (path.timing.kernel_us if path.timing else None) or (None,) * len(path.kernels)
    timed = [(time, kernel) for time, kernel in zip(times, path.kernels, strict=True) if time]
    told = ""
    if timed:
        time, slowest = max(timed, key=lambda pair: pair[0])
        rate = slowest.traffic.total / time / 1e6
        used = path.resources.get(slowest.name, {})
        known = [
            f"{used['registers']} registers" if used.get("registers") is not None else "",
            f"{used['spill_bytes']} B spilled" if used.get("spill_bytes") else "",
            f"occupancy {used['occupancy']:.0%}" if used.get("occupancy") is not None else "",
        ]
        resources = ", ".join(text for text in known if text)
        told = f" ({slowest.name}: {rate:.2f} TB/s{', ' + resources if resources else ''})"
    return (
        f"{path.name}'s kernels take {device / path.predicted_us:.2f}x what their bytes foretell"
        f"{told}: arithmetic or latency holds them back, not bandwidth."
    )


def _fused_or_split(split: PathResult, xla: PathResult, basis: str) -> str:
    before, after = _cost(split, basis), _cost(xla, basis)
    if _equal(split, xla, basis):
        return "Splitting and XLA's own fusion cost the same, as far as this can tell."
    if before < after:
        return (
            f"Splitting wins over XLA's own fusion, {after / before:.2f}x: "
            f"{_what_differs(xla, split)}."
        )
    return f"Fusing wins over splitting, {before / after:.2f}x: {_what_differs(split, xla)}."


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
    known = {(b.dtype, b.shape) for b in fast.boundaries}
    new = [b for b in slow.boundaries if (b.dtype, b.shape) not in known] or slow.boundaries
    return max(new, key=lambda b: b.written_bytes + b.read_bytes, default=None)


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
    if predicted is not None and target.effective_bandwidth:
        removed_bytes = origin.traffic.total - to.traffic.total
        removed_launches = origin.launches - to.launches
        dispatches = origin.programs - to.programs
        terms = [
            f"{removed_bytes / 1e6:,.1f} MB / {target.effective_bandwidth / 1e12:.2f} TB/s",
            f"{counted(removed_launches, 'launch')} x {target.launch_us:g} µs",
        ]
        if dispatches:
            terms.append(f"{counted(dispatches, 'dispatch')} x {target.dispatch_us:g} µs")
        parts.append(f"predicted gain {predicted:,.1f} µs = {' + '.join(terms)}")
    if measured is not None and predicted is not None:
        parts.append(f"measured gain {measured:,.1f} µs")
        if measured * predicted < 0 and abs(measured) > _TIE * _cost(origin, basis):
            parts.append(
                "bytes and launches alone predict the opposite: look at the kernels' registers, "
                "occupancy and arithmetic"
            )
    return "; ".join(parts)
