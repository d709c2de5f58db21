"""What documents say of a target, and of the time that kernels are predicted to take on it."""

from collections.abc import Sequence
from typing import Any

from fusejax import predict, rates
from fusejax.compile.targets import Target
from fusejax.hlo.analysis import Kernel
from fusejax.rates import Rates


def target_json(target: Target) -> dict[str, Any]:
    """What a program was compiled for, and the rates that are known of it."""
    rate = rates.of(target)
    return {
        "name": target.name,
        "kind": target.kind,
        "description": target.title,
        "bandwidth_bytes_per_s": target.bandwidth_bytes_per_s,
        "effective_bandwidth_bytes_per_s": rate.copy_bytes_per_s if rate else None,
        "flop_per_s": rate.flop_per_s if rate else {},
        "launch_us": rate.launch_us if rate else 0.0,
        "dispatch_us": rate.dispatch_us if rate else 0.0,
        "rates": rate.source if rate else None,
    }


def predicted_us(kernels: Sequence[Kernel], rate: Rates | None) -> list[float | None]:
    """What one launch of each kernel is predicted to take, its start included."""
    if rate is None:
        return [None] * len(kernels)
    costs = predict.kernel_costs(kernels, rate)
    return [
        cost.kernels_us / kernel.count if kernel.count else None
        for kernel, cost in zip(kernels, costs, strict=True)
    ]
