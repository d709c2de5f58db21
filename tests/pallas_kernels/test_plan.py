import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import catalogue, norm_kernels, norms, row_softmax, tuned
from pallas_kernels.norm_kernels import Norm
from pallas_kernels.plan import (
    COPY_BYTES,
    LANES,
    MAX_BARRIERS,
    MAX_CLUSTER,
    MOST_IN_CTA,
    SHARED_PER_BLOCK,
    SHARED_PER_SM,
    SHARED_RESERVED,
    SMS,
    SMS_OF_CLUSTERS,
    Cut,
    default_tuning,
    most_width,
    unsupported_rows,
)
from pallas_kernels.tuned import Tuning

LAUNCHES = catalogue.launches()
WIDTHS = [
    *range(1, 260), 448, 511, 512, 513, 769, 1000, 1023, 1024, 1025, 1151, 2049, 2560, 4095, 5120,
    8192, 12288, 16256, 16384, 16385, 20000, 32768, 32769, 50257, 65536, 100000, 131072,
]  # fmt: skip


@pytest.mark.parametrize("op", LAUNCHES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_width_has_a_plan_that_fits_the_card(op, dtype):
    launch = LAUNCHES[op]
    itemsize = jnp.dtype(dtype).itemsize
    for width in WIDTHS:
        x = jax.ShapeDtypeStruct((8, width), dtype)
        if unsupported_rows(x, launch.streams, reduces=launch.reduces):
            assert launch.reduces
            assert width > most_width(dtype, launch.streams) >= 65536
            continue
        for rows in (1, 3, 131, 65537):
            p = launch.plan(rows, width, dtype)
            where = f"{rows=} {p}"
            assert (p.rows, p.width) == (rows, width), where
            assert p.vector * itemsize <= COPY_BYTES, where
            assert p.stages * p.warpgroups <= MAX_BARRIERS, where
            ring = p.stages * launch.streams * p.slot * itemsize
            sums = 4 * p.shared_sums * p.slot
            assert ring + sums < p.shared_bytes <= SHARED_PER_BLOCK, where
            assert 1 <= p.ctas // p.parts <= p.blocks, where
            assert p.ctas % p.parts == 0, where
            sms = SMS_OF_CLUSTERS[p.parts] if p.cluster else SMS
            resident = 1 if p.run else -(-p.ctas // sms)
            assert resident * (p.shared_bytes + SHARED_RESERVED) <= SHARED_PER_SM, where
            assert p.cluster == (launch.reduces and p.parts > 1), where
            if p.cluster:
                assert p.parts in (2, 4, MAX_CLUSTER), where
            if p.cut is not Cut.CTA:
                assert p.parts == p.warpgroups == 1, where
                continue
            # every column is some warpgroup's
            assert p.padded >= p.window >= width, where
            assert p.span <= MOST_IN_CTA, where
            assert p.shifted == (width * itemsize % COPY_BYTES != 0), where


@pytest.mark.parametrize("op", LAUNCHES)
def test_power_of_two_rows_are_loaded_in_vectors_and_padded_with_nothing(op):
    for dtype in (jnp.bfloat16, jnp.float32):
        for width in (1024, 2048, 4096, 8192, 16384, 65536):
            p = LAUNCHES[op].plan(8192, width, dtype)
            assert p.vector * jnp.dtype(dtype).itemsize >= COPY_BYTES / 2
            assert p.padded == width
            assert not p.flat


def test_few_rows_do_not_use_blocks_of_several():
    assert row_softmax.plan(3, 256, jnp.bfloat16).cut is Cut.CTA
    assert row_softmax.plan(4, 256, jnp.bfloat16).cut is Cut.WARP


def test_rows_of_a_lane_may_be_fewer_than_a_block():
    p = row_softmax.plan(3, 7, jnp.bfloat16)
    assert (p.cut, p.rows_per_block, p.blocks) == (Cut.LANE, LANES, 1)


def test_rows_that_nothing_reduces_are_cut_without_a_cluster():
    p = LAUNCHES["swiglu"].plan(64, 300_000, jnp.bfloat16)
    assert not p.cluster
    assert p.parts > MAX_CLUSTER
    assert 512 <= p.width / p.parts <= 2048


def test_few_rows_are_not_summed_along_columns_by_many_ctas():
    many = LAUNCHES["layer_norm_backward"].plan(2**16, 1024, jnp.bfloat16)
    few = LAUNCHES["layer_norm_backward"].plan(512, 1024, jnp.bfloat16)
    assert many.ctas > few.ctas == SMS
    assert LAUNCHES["layer_norm"].plan(512, 1024, jnp.bfloat16).ctas == 512


def test_plans_are_frozen_values():
    p = row_softmax.plan(8192, 8192, jnp.bfloat16)
    assert p == row_softmax.plan(8192, 8192, jnp.bfloat16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.ctas = 1


def test_a_tuning_is_obeyed_where_it_fits():
    wish = Tuning(8192, rows_per_block=1, warpgroups=4, ctas_per_sm=1, stages=2, parts=2)
    p = row_softmax.plan(8192, 8192, jnp.bfloat16, tuning=wish)
    assert (p.warpgroups, p.stages, p.parts, p.ctas) == (4, 2, 2, SMS)
    greedy = dataclasses.replace(wish, stages=100, ctas_per_sm=100)
    p = row_softmax.plan(8192, 8192, jnp.bfloat16, tuning=greedy)
    assert p.shared_bytes <= SHARED_PER_BLOCK


def test_measured_choices_are_looked_up_by_card_op_size_and_width(tmp_path, monkeypatch):
    def entry(width, stages):
        return dataclasses.asdict(Tuning(width, 1, 1, 1, stages)) | {"us": 1.0}

    file = tmp_path / "tuned.json"
    entries = [entry(4096, 2), entry(1024, 1)]
    file.write_text(json.dumps({"cards": {"A card": {"softmax": {"16": entries}}}}))
    monkeypatch.setattr(tuned, "FILE", file)
    tuned._file.cache_clear()
    try:
        assert tuned.lookup("softmax", 1024, 2, "A card").stages == 1
        assert tuned.lookup("softmax", 1025, 2, "A card").stages == 2
        assert tuned.lookup("softmax", 4097, 2, "A card") is None
        assert tuned.lookup("softmax", 1024, 4, "A card") is None
        assert tuned.lookup("rms_norm", 1024, 2, "A card") is None
        assert tuned.lookup("softmax", 1024, 2, "Another card") is None
    finally:
        tuned._file.cache_clear()


def test_rows_of_no_multiple_of_16_bytes_go_by_choices_for_such_rows(tmp_path, monkeypatch):
    file = tmp_path / "tuned.json"
    widths = (768, 769, 1024, 4096, 4097, 8192)
    entries = [dataclasses.asdict(Tuning(width, 1, 1, 1, 1)) for width in widths]
    file.write_text(json.dumps({"cards": {"A card": {"softmax": {"16": entries, "32": entries}}}}))
    monkeypatch.setattr(tuned, "FILE", file)
    tuned._file.cache_clear()

    def chosen(width, itemsize=2):
        return tuned.lookup("softmax", width, itemsize, "A card").width

    try:
        assert [chosen(w) for w in (768, 760, 776, 4104)] == [768, 768, 1024, 8192]
        assert [chosen(w) for w in (769, 500, 2049, 4097)] == [769, 769, 4097, 4097]
        # Without one of less than twice their length they go by the others.
        assert [chosen(w) for w in (100, 770, 1025, 4099)] == [768, 1024, 4096, 8192]
        assert [chosen(w, itemsize=4) for w in (772, 770, 4097)] == [1024, 1024, 4097]
    finally:
        tuned._file.cache_clear()


def test_every_entry_of_the_shipped_file_belongs_to_a_kernel():
    for ops in tuned._file().values():
        assert set(ops) <= set(LAUNCHES)
        for by_size in ops.values():
            for choices in by_size.values():
                widths = [choice.width for choice in choices]
                assert widths == sorted(set(widths))


def test_kernels_that_nobody_measured_get_a_default():
    assert tuned.lookup("no such kernel", 4096, 2) is None
    narrow, wide = default_tuning(256, 2, 1), default_tuning(131072, 6, 7)
    assert narrow.rows_per_block > 1
    assert wide.parts == MAX_CLUSTER


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((8, 300_000), jnp.float32, "at most 262144"),
        ((8, 128), jnp.int32, "int32"),
        ((2**20, 2048), jnp.bfloat16, "2**31-1 elements"),
        ((), jnp.float32, "at least one axis"),
    ],
)
def test_refusals_say_why_in_one_sentence(shape, dtype, words):
    reason = unsupported_rows(jax.ShapeDtypeStruct(shape, dtype))
    assert words in reason
    assert reason.endswith(".")
    assert ". " not in reason


def test_expected_bytes_count_parameters():
    tensor = 8192 * 8192 * 2
    norm = Norm(centred=True, residual=True)
    f32, bf16 = jnp.float32, jnp.bfloat16
    assert norm_kernels.expected_bytes(norm, 8192, 8192, bf16, [f32, bf16]) == (
        3 * tensor + 6 * 8192
    )
    assert norms.unsupported is not None
