import pytest

from fusejax.compile.cards import CARDS, describe
from fusejax.resources.occupancy import SmLimits, limits_of, occupancy

HOPPER = SmLimits()


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "share", "limiter", "blocks"),
    [
        # 2048 threads / 256, and 32 registers let 64 warps in.
        (32, 256, 0, 1.0, "threads", 8),
        # One warp per block, 32 blocks: half of 64 warps. ncu on an H200 says 50 % as well.
        (16, 32, 0, 0.5, "blocks", 32),
        (16, 1, 0, 0.5, "blocks", 32),
        # 68 x 32 = 2176, in units of 256: 2304; 16384 / 2304 = 7 warps per scheduler, 28 in all.
        (68, 128, 26_649, 28 / 64, "registers", 7),
        # 34849 + 1024 reserved, in units of 128: 35968; 233472 / 35968 = 6.
        (68, 128, 34_849, 24 / 64, "shared_memory", 6),
        # 255 x 32, rounded: 8192; two warps per scheduler are one block of eight warps.
        (255, 256, 0, 8 / 64, "registers", 1),
        # 28 warps hold four blocks of six.
        (65, 192, 0, 24 / 64, "registers", 4),
        # 768 threads: two blocks of 24 warps, whatever the registers.
        (32, 768, 0, 48 / 64, "threads", 2),
        # Read off an H200 with ncu: a persistent kernel, and a cuBLAS GEMM.
        (66, 128, 67_617, 0.1875, "shared_memory", 3),
        (168, 384, 213_188, 0.1875, "shared_memory", 1),
        # The last byte that fits once and the first that does not.
        (32, 128, 232_448, 4 / 64, "shared_memory", 1),
        (32, 128, 232_449, 0.0, "shared_memory", 0),
        (255, 1024, 0, 0.0, "registers", 0),
    ],
)
def test_hopper(registers, threads, shared, share, limiter, blocks):
    found = occupancy(registers, threads, shared, HOPPER)
    assert (found.share, found.limiter, found.blocks) == (pytest.approx(share), limiter, blocks)


def test_other_cards_by_their_descriptions():
    a100 = limits_of(describe(CARDS["a100"]))
    assert a100 == SmLimits(shared_bytes=167_936)
    # 48 KiB + 1 KiB: three blocks of four warps.
    assert occupancy(32, 128, 49_152, a100).share == pytest.approx(12 / 64)
    assert limits_of(describe(CARDS["h200"])) == HOPPER


def test_fewer_blocks_fit_on_a_workstation_card():
    text = """shared_memory_per_core: 102400 threads_per_core_limit: 1536
      registers_per_core_limit: 65536 cuda_compute_capability { major: 8 minor: 6 }"""
    found = occupancy(16, 64, 0, limits_of(text))
    assert (found.share, found.limiter) == (pytest.approx(32 / 48), "blocks")


def test_description_without_limits():
    assert limits_of("gpu_device_info { core_count: 132 }") is None
