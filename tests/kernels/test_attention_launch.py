import pytest
from mtp_research.kernels.attention.attention_launch import (
    MAX_SPLITS,
    LaunchConfig,
    choose_config,
    choose_num_splits,
    merge_warps,
    padded_head_dim,
    programs_per_sm,
)


@pytest.mark.parametrize(
    ("num_programs", "max_key_tiles", "expected"),
    [
        pytest.param(64, 128, 4, id="8_requests_8_heads_fill_one_wave"),
        pytest.param(256, 128, 1, id="32_requests_fill_the_device"),
        pytest.param(8, 16, 16, id="one_request_one_tile_each"),
        pytest.param(8, 1, 1, id="one_tile_cannot_split"),
        pytest.param(1, 12_800, MAX_SPLITS, id="never_more_than_the_maximum"),
        pytest.param(4096, 128, 1, id="prefill_tiles_suffice"),
        pytest.param(8, 2048, 33, id="one_request_of_128k_8_heads_fill_one_wave"),
        pytest.param(32, 2048, 8, id="4_requests_of_128k_fill_one_wave"),
        pytest.param(1, 2048, 128, id="one_request_of_128k_one_head"),
    ],
)
def test_choose_num_splits_fills_132_multiprocessors(num_programs, max_key_tiles, expected):
    chosen = choose_num_splits(num_programs, max_key_tiles=max_key_tiles, num_sms=132)
    assert chosen == expected


@pytest.mark.parametrize("num_programs", [2, 4, 8, 16, 24, 32, 64, 128, 256, 300])
def test_few_requests_of_128k_tokens_keep_the_device_busy(num_programs):
    # Tiles of work over the tiles that 264 slots run meanwhile; 2 programs take 128 splits each.
    num_splits = choose_num_splits(num_programs, max_key_tiles=2048, num_sms=132)
    waves, tiles = -(-num_programs * num_splits // 264), -(-2048 // num_splits)
    assert num_programs * 2048 / 264 / (waves * tiles) > 0.9


def test_programs_of_narrow_heads_share_a_multiprocessor_by_four():
    assert [programs_per_sm(*dims) for dims in ((64, 64), (32, 64), (128, 64), (128, 128))] == [
        4,
        4,
        2,
        2,
    ]
    sizes = {"max_key_tiles": 26, "num_sms": 132}
    assert choose_num_splits(128 * 3, **sizes, programs_per_sm=4) == 4  # three full waves of 528
    assert choose_num_splits(128 * 3, **sizes, programs_per_sm=2) == 2


def test_a_merged_row_takes_as_few_warps_as_hold_its_parts():
    assert [merge_warps(splits, value_dim=256) for splits in (4, 5, 64, 65)] == [1, 4, 4, 8]
    assert [merge_warps(splits, value_dim=64) for splits in (16, 17)] == [1, 4]


def test_choose_num_splits_one_program_an_sm_takes_half_the_splits():
    chosen = choose_num_splits(32, max_key_tiles=128, num_sms=132, programs_per_sm=1)
    assert chosen == 4


def test_choose_num_splits_partial_wave_splits_to_even_it_out():
    # 300 programs take two waves of 264 slots, the second nearly empty.
    num_splits = choose_num_splits(300, max_key_tiles=128, num_sms=132)
    num_waves = -(-300 * num_splits // 264)
    assert num_waves * 128 / num_splits < 0.75 * 2 * 128


def test_prompts_that_fill_the_device_are_not_split_whatever_the_table_could_hold():
    # 8,192 rows of 32/8 heads and 35 requests, with tables of 32,768 tokens.
    sizes = {"max_key_tiles": 512, "num_sms": 132}
    assert choose_num_splits((512 + 35) * 8, **sizes) > 1  # a few waves are evened out a little
    assert choose_num_splits((512 + 35) * 8, **sizes, has_prompts=True) == 1
    short = {"max_key_tiles": 26, "num_sms": 132}
    assert choose_num_splits(300, **short) > 1
    assert choose_num_splits(300, **short, has_prompts=True) == 1
    few = choose_num_splits(100, **sizes)
    assert choose_num_splits(100, **sizes, has_prompts=True) == few > 1


@pytest.mark.parametrize(
    ("num_packed_rows", "head_dim", "element_bytes", "expected"),
    [
        pytest.param(4, 128, 2, LaunchConfig(16, 64, 4, 3), id="plain_decode"),
        pytest.param(16, 128, 2, LaunchConfig(16, 64, 4, 3), id="verify_q4_group4"),
        pytest.param(48, 128, 2, LaunchConfig(64, 64, 4, 3), id="verify_q4_group12"),
        pytest.param(32, 256, 2, LaunchConfig(64, 32, 8, 3), id="wide_heads"),
        pytest.param(12, 64, 2, LaunchConfig(16, 64, 4, 3), id="narrow_heads"),
        pytest.param(48, 128, 4, LaunchConfig(16, 32, 4, 3), id="float32"),
    ],
)
def test_choose_config_shapes(num_packed_rows, head_dim, element_bytes, expected):
    config = choose_config(
        num_packed_rows, key_dim=head_dim, value_dim=head_dim, element_bytes=element_bytes
    )
    assert config == expected


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 16), (16, 16), (24, 32), (128, 128), (192, 256)]
)
def test_padded_head_dim_is_a_power_of_two_tl_dot_takes(head_dim, padded):
    assert padded_head_dim(head_dim) == padded
