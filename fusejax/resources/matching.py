"""Which compiled kernel is it that the launch order, the profiler or the counters name?

XLA names a kernel's function after the HLO instruction ("loop_add_fusion.1" becomes
"loop_add_fusion_1"), and lets instructions with equal code share the function of the first of them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from fusejax.hlo.analysis import Kernel

MOSAIC_SUFFIX = "_mosaic_gpu_kernel"

# Emitters whose device functions belong to a library and are not named after the instruction.
_LIBRARY = frozenset({"cublas", "cudnn", "custom_call", "sort"})


def function_name(instruction: str) -> str:
    """The device function that XLA makes for an HLO instruction of this name."""
    return re.sub(r"\W", "_", instruction.removeprefix("%"))


def match(
    launched: Sequence[str], kernels: Sequence[Kernel], *, per_run: bool
) -> tuple[str | None, ...]:
    """For each launched device function, the name of the compiled kernel that it is.

    Args:
      launched: names of device functions, in order.
      kernels: the program's kernels in launch order.
      per_run: whether `launched` holds a kernel as often as a run launches it (loop bodies once per
        trip); otherwise it holds every kernel once.

    Returns:
      As many names as `launched` has; None where more than one kernel could be meant.
    """
    answer: list[str | None] = [None] * len(launched)
    by_stem: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(launched):
        by_stem[_stem(name)].append(index)
    kernels_by_stem: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        kernels_by_stem[_kernel_stem(kernel)].append(kernel)
    for stem, group in kernels_by_stem.items():
        indices = by_stem.pop(stem, [])
        names = _in_group([launched[i] for i in indices], group, per_run)
        for index, name_of_kernel in zip(indices, names, strict=True):
            answer[index] = name_of_kernel
    foreign = sorted(index for indices in by_stem.values() for index in indices)
    library = [k for k in kernels if k.emitter in _LIBRARY and k.name not in answer]
    if len(foreign) == len(library) and all(kernel.count == 1 for kernel in library):
        for index, kernel in zip(foreign, library, strict=True):
            answer[index] = kernel.name
    return tuple(answer)


def _in_group(names: Sequence[str], group: Sequence[Kernel], per_run: bool) -> list[str | None]:
    """The same for names and kernels that differ in their trailing numbers only."""
    times = [kernel.count if per_run else 1 for kernel in group]
    own = {function_name(kernel.name): kernel.name for kernel in group}
    seen = Counter(names)
    if all(seen[f] == n for f, n in zip(own, times, strict=True)) and len(names) == sum(times):
        return [own[name] for name in names]
    if len(group) == 1 and len(names) == sum(times):
        return [group[0].name] * len(names)
    # Some share a function: only their order tells them apart, and only where nothing repeats.
    if len(names) == len(group) and set(times) == {1}:
        in_order = [kernel.name for kernel in group]
        if all(
            function_name(kernel) not in seen or function_name(kernel) == name
            for name, kernel in zip(names, in_order, strict=True)
        ):
            return list(in_order)
    return [None] * len(names)


def _stem(name: str) -> str:
    if name.endswith(MOSAIC_SUFFIX):
        return MOSAIC_SUFFIX
    return re.sub(r"(_+\d+)+$", "", name)


def _kernel_stem(kernel: Kernel) -> str:
    return MOSAIC_SUFFIX if kernel.emitter == "mosaic_gpu" else _stem(function_name(kernel.name))
