"""Figures of the GPUs that programs are compiled for, and the descriptions XLA makes of them.

XLA's cost model decides fusions from these figures, so they are pinned: a wrong bandwidth flips
decisions. The H200's were read off a card (`jax.experimental.topologies` gives
`topology.target_config`); the others follow NVIDIA's data sheets and what XLA reads off such cards.
"""

import dataclasses
from collections.abc import Mapping

# Numbers of xla.PrimitiveType, by which a description keys its arithmetic rates.
_PRIMITIVE_TYPES: Mapping[str, int] = {
    "s8": 2, "s32": 4, "u8": 6, "u32": 8, "f16": 10, "f32": 11, "f64": 12, "bf16": 16,
    "f8e5m2": 19, "f8e4m3fn": 20, "f8e4m3b11fnuz": 23, "f8e5m2fnuz": 24, "f8e4m3fnuz": 25,
    "f8e4m3": 28, "f8e3m4": 29, "f4e2m1fn": 32, "f8e8m0fnu": 33,
}  # fmt: skip
_EIGHT_BIT = (
    "s8", "u8", "f8e5m2", "f8e4m3fn", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz", "f8e4m3",
    "f8e3m4", "f8e8m0fnu",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rate:
    """Arithmetic of one kind: what one multiprocessor does in a clock."""

    dtypes: tuple[str, ...]
    units: int
    operations: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU's figures. Sizes in bytes, bandwidth in bytes/s, clocks in GHz."""

    name: str
    capability: tuple[int, int]
    accelerated: bool
    """Whether code uses the features of this very architecture (sm_90a, sm_100a)."""
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bandwidth: int
    memory_bytes: int
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    scalar_rates: tuple[Rate, ...] = ()
    matrix_rates: tuple[Rate, ...] = ()


def _scalar_rates(clock_ghz: float, half_operations: int) -> tuple[Rate, ...]:
    return (
        Rate(("s32", "u32", "f64"), 64, 1, clock_ghz),
        Rate(("f32",), 128, 1, clock_ghz),
        Rate(("f16", "bf16"), 128, half_operations, clock_ghz),
    )


def _matrix_rates(tensor_clock: float, half: int, double: Rate) -> tuple[Rate, ...]:
    return (
        Rate(_EIGHT_BIT, 4, 2 * half, tensor_clock),
        Rate(("f16", "bf16"), 4, half, tensor_clock),
        Rate(("f32",), 4, half // 2, tensor_clock),
        double,
    )


def _hopper(name: str, *, memory_bandwidth: int, memory_bytes: int, l2_bytes: int) -> Card:
    return Card(
        name=name,
        capability=(9, 0),
        accelerated=True,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        memory_bandwidth=memory_bandwidth,
        memory_bytes=memory_bytes,
        l2_bytes=l2_bytes,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        scalar_rates=_scalar_rates(1.98, half_operations=2),
        matrix_rates=_matrix_rates(1.82952011, half=512, double=Rate(("f64",), 4, 32, 1.98)),
    )


CARDS: Mapping[str, Card] = {
    "a100": Card(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        accelerated=False,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory_bandwidth=2_039_040_000_000,
        memory_bytes=85_100_068_864,
        l2_bytes=41_943_040,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
    ),
    "h100": _hopper(
        "NVIDIA H100 80GB HBM3",
        memory_bandwidth=3_352_320_000_000,
        memory_bytes=84_942_979_072,
        l2_bytes=52_428_800,
    ),
    "h200": _hopper(
        "NVIDIA H200",
        memory_bandwidth=4_814_304_000_000,
        memory_bytes=150_109_880_320,
        l2_bytes=62_914_560,
    ),
    "b200": Card(
        name="NVIDIA B200",
        capability=(10, 0),
        accelerated=True,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        memory_bandwidth=7_672_320_000_000,
        memory_bytes=191_514_411_008,
        l2_bytes=132_644_864,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        scalar_rates=_scalar_rates(1.965, half_operations=1),
        matrix_rates=_matrix_rates(1.8353101, half=1024, double=Rate(("f64",), 4, 16, 1.965)),
    ),
}


def describe(card: Card) -> str:
    """The card as the text form of XLA's GpuTargetConfigProto."""
    major, minor = card.capability
    suffix = "a" if card.accelerated else ""
    feature = "ACCELERATED_FEATURES" if card.accelerated else "NONE"
    return "\n".join(
        [
            "gpu_device_info {",
            "  threads_per_block_limit: 1024",
            "  threads_per_warp: 32",
            "  shared_memory_per_block: 49152",
            f"  shared_memory_per_core: {card.shared_memory_per_core}",
            "  threads_per_core_limit: 2048",
            f"  core_count: {card.cores}",
            f"  fpus_per_core: {card.fpus_per_core}",
            "  block_dim_limit_x: 2147483647",
            "  block_dim_limit_y: 65535",
            "  block_dim_limit_z: 65535",
            f"  memory_bandwidth: {card.memory_bandwidth}",
            f"  l2_cache_size: {card.l2_bytes}",
            f"  clock_rate_ghz: {card.clock_ghz}",
            f"  device_memory_size: {card.memory_bytes}",
            f"  shared_memory_per_block_optin: {card.shared_memory_per_block}",
            "  cuda_compute_capability {",
            f"    major: {major}",
            f"    minor: {minor}",
            f"    feature_extension: {feature}",
            "  }",
            "  registers_per_core_limit: 65536",
            "  registers_per_block_limit: 65536",
            *_rates("scalar_unit_description", card.scalar_rates),
            *_rates("matrix_unit_description", card.matrix_rates),
            "  thread_dim_limit_x: 1024",
            "  thread_dim_limit_y: 1024",
            "  thread_dim_limit_z: 64",
            '  device_vendor: "NVIDIA Corporation"',
            f'  platform_version: "Compute Capability {major}.{minor}{suffix}"',
            f'  name: "{card.name}"',
            '  driver_version: "13.0.0"',
            '  runtime_version: "13.0.0"',
            '  compile_time_toolkit_version: "13.0.0"',
            "  device_address_bits: 64",
            "  ecc_enabled: true",
            "}",
            'platform_name: "CUDA"',
            f'device_description_str: "{card.name}"',
            "runtime_version {",
            "  major: 13",
            "}",
        ]
    )


def _rates(field: str, rates: tuple[Rate, ...]) -> list[str]:
    entries = sorted(
        ((_PRIMITIVE_TYPES[dtype], rate) for rate in rates for dtype in rate.dtypes),
        key=lambda entry: entry[0],
    )
    lines = [
        f"    rate_infos {{ key: {key} value {{ clock_rate_ghz: {rate.clock_ghz} "
        f"units_per_core: {rate.units} ops_per_clock: {rate.operations} }} }}"
        for key, rate in entries
    ]
    return [f"  {field} {{", *lines, "  }"] if lines else []
