import json
import random
from pathlib import Path

import pytest
import torch
from mtp_research.kernels.attention import attention_launch, splits
from mtp_research.kernels.attention.attention_launch import (
    MAX_SPLITS,
    MERGES_A_TILE,
    LaunchConfig,
    choose_config,
    choose_num_at_once,
    choose_num_splits,
    merge_warps,
    num_shared_programs,
    padded_head_dim,
    programs_per_sm,
)
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring


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
    chosen = choose_num_splits(num_programs, max_key_tiles=max_key_tiles, num_slots=264)
    assert chosen == expected


@pytest.mark.parametrize("num_programs", [2, 4, 8, 16, 24, 32, 64, 128, 256, 300])
def test_few_requests_of_128k_tokens_keep_the_device_busy(num_programs):
    # Tiles of work over the tiles that 264 slots run meanwhile; 2 programs take 128 splits each.
    num_splits = choose_num_splits(num_programs, max_key_tiles=2048, num_slots=264)
    waves, tiles = -(-num_programs * num_splits // 264), -(-2048 // num_splits)
    assert num_programs * 2048 / 264 / (waves * tiles) > 0.9


def test_programs_of_narrow_heads_share_a_multiprocessor_by_four():
    assert [programs_per_sm(*dims) for dims in ((64, 64), (32, 64), (128, 64), (128, 128))] == [
        4,
        4,
        2,
        2,
    ]
    assert choose_num_splits(128 * 3, max_key_tiles=26, num_slots=4 * 132) == 4  # three full waves
    assert choose_num_splits(128 * 3, max_key_tiles=26, num_slots=2 * 132) == 2


def test_a_merged_row_takes_as_few_warps_as_hold_its_parts():
    assert [merge_warps(splits, value_dim=256) for splits in (16, 17, 64, 65)] == [1, 2, 4, 8]
    assert [merge_warps(splits, value_dim=64) for splits in (1, 64, 65)] == [1, 1, 2]
    alone = [merge_warps(splits, value_dim=64, is_alone=True) for splits in (16, 17, 256, 257)]
    assert alone == [1, 4, 4, 8]


@pytest.mark.parametrize(
    ("num_programs", "max_key_tiles", "num_splits"),
    [
        pytest.param(8, 42, 16, id="no_more_splits_than_merging_is_worth"),
        pytest.param(8, 136, 32, id="a_longer_text_is_worth_more"),
        pytest.param(64, 128, 4, id="a_full_wave"),
        pytest.param(32, 42, 8, id="a_tie_goes_to_more"),
        pytest.param(256, 21, 1, id="requests_that_fill_the_device"),
    ],
)
def test_merging_costs_what_its_splits_do(num_programs, max_key_tiles, num_splits):
    sizes = {"max_key_tiles": max_key_tiles, "num_slots": 264}
    assert choose_num_splits(num_programs, **sizes, merges_a_tile=MERGES_A_TILE) == num_splits


def test_requests_share_splits_once_they_fill_a_quarter_of_the_device():
    def at_once(num_requests, num_kv_heads=8, max_key_tiles=21, num_slots=264):
        sizes = {"max_key_tiles": max_key_tiles, "num_slots": num_slots}
        return choose_num_at_once(num_requests, num_kv_heads, **sizes)

    assert [at_once(requests) for requests in (1, 8, 9, 32)] == [0, 0, 33, 33]
    assert [at_once(requests) for requests in (33, 34, 67)] == [33, 66, 99]  # whole waves
    assert at_once(32, max_key_tiles=1) == 0  # nothing to split
    assert at_once(1025) == 0  # more than a program counts through
    assert at_once(1024, num_kv_heads=17) == 0  # more tiles than arrivals are counted of


@pytest.mark.parametrize(("num_requests", "num_at_once"), [(9, 33), (32, 33), (64, 66), (5, 6)])
def test_a_launch_has_as_many_programs_as_requests_may_share_and_no_more(num_requests, num_at_once):
    def num_programs(tiles):
        shares = [2 * count * num_at_once / sum(tiles) for count in tiles]
        return sum(1 + sum(share >= limit for limit in (3, 5, 7)) for share in shares)

    most = num_shared_programs(num_requests, num_at_once)
    generator = random.Random(0)
    drawn = [
        [generator.randint(1, 40) ** power for _ in range(num_requests)]
        for power in (1, 2, 6)
        for _ in range(200)
    ]
    # As many long texts as may have four splits, and very short ones: the bound is reached.
    num_long = min(num_requests, 2 * num_at_once // 7)
    worst = num_programs([1000] * num_long + [1] * (num_requests - num_long))
    assert max(map(num_programs, drawn)) <= most
    assert most - 2 <= worst <= most


def test_choose_num_splits_one_program_an_sm_takes_half_the_splits():
    chosen = choose_num_splits(32, max_key_tiles=128, num_slots=132)
    assert chosen == 4


def test_choose_num_splits_partial_wave_splits_to_even_it_out():
    # 300 programs take two waves of 264 slots, the second nearly empty.
    num_splits = choose_num_splits(300, max_key_tiles=128, num_slots=264)
    num_waves = -(-300 * num_splits // 264)
    assert num_waves * 128 / num_splits < 0.75 * 2 * 128


def test_prompts_that_fill_the_device_are_not_split_whatever_the_table_could_hold():
    # 8,192 rows of 32/8 heads and 35 requests, with tables of 32,768 tokens.
    sizes = {"max_key_tiles": 512, "num_slots": 264}
    assert choose_num_splits((512 + 35) * 8, **sizes) > 1  # a few waves are evened out a little
    for num_programs, expected in (((512 + 35) * 8, 1), (300, 1), (133, 3), (132, 2), (20, 13)):
        assert choose_num_splits(num_programs, **sizes, has_prompts=True) == expected


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


def test_few_keys_are_read_in_narrow_tiles():
    sizes = {"key_dim": 128, "value_dim": 128, "element_bytes": 2}
    few, many = 64 * 1344, 64 * 2048  # keys of 8 heads, 8 requests
    assert choose_config(4, **sizes, num_keys=few) == LaunchConfig(16, 32, 4, 3)
    assert choose_config(4, **sizes, num_keys=many) == choose_config(4, **sizes)
    narrow = sizes | {"key_dim": 64, "value_dim": 64}
    assert choose_config(4, **narrow, num_keys=few) == choose_config(4, **narrow)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 16), (16, 16), (24, 32), (128, 128), (192, 256)]
)
def test_padded_head_dim_is_a_power_of_two_tl_dot_takes(head_dim, padded):
    assert padded_head_dim(head_dim) == padded


class Recorder:
    """Stands in for a kernel: notes the grid and the keywords of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **keywords: self.launches.append((grid, keywords))


@pytest.mark.parametrize(
    ("num_requests", "query_len", "num_heads", "expected"),
    [
        # grid, keys a tile, stages, whether splits are shared, warps of the merge
        pytest.param(1, 4, 32, ((8, 21), 64, 3, 0, 4), id="one_request"),
        pytest.param(8, 4, 32, ((64, 4), 32, 3, 0, 1), id="few_requests"),
        pytest.param(16, 4, 32, ((352, 1), 64, 3, 16, None), id="requests_that_share"),
        pytest.param(17, 4, 32, ((360, 1), 64, 4, 32, None), id="two_an_sm"),
        pytest.param(33, 4, 32, ((488, 1), 64, 4, 64, None), id="two_on_each"),
        pytest.param(34, 4, 32, ((720, 1), 64, 3, 64, None), id="more_than_two"),
        pytest.param(24, 4, 96, ((192, 1), 64, 3, 0, None), id="more_rows_than_a_small_tile"),
        pytest.param(24, 64, 32, ((768, 1), 64, 3, 0, None), id="prompts"),
    ],
)
def test_what_a_launch_of_bfloat16_chooses(
    num_requests, query_len, num_heads, expected, monkeypatch
):
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * query_len
    (grid, keywords), merges = launched(
        starts, query_len, num_rows=num_requests * query_len, num_heads=num_heads, patch=monkeypatch
    )
    found = (grid, keywords["BLOCK_N"], keywords["num_stages"], keywords["SHARED"])
    assert (*found, merges[0] if merges else None) == expected


@pytest.mark.parametrize(
    ("num_requests", "num_rows", "expected"),
    [
        # grid, requests that are counted through and that share; then warps of the merge
        pytest.param(33, 1024, ((8 * (64 + 33 + 28), 1), 64, 64, None), id="requests_share"),
        pytest.param(2, 512, ((8 * (32 + 2 + 6), 1), 2, 2, None), id="one_beside_a_prompt"),
        pytest.param(3, 64, ((8 * (4 + 3), 4), 4, 0, 1), id="few_programs"),
        pytest.param(33, 4096, ((8 * (256 + 33), 1), 64, 0, None), id="many_rows"),
    ],
)
def test_how_requests_share_beside_prompts(num_requests, num_rows, expected, monkeypatch):
    starts = torch.zeros(num_requests + 1, dtype=torch.int32)
    (grid, keywords), merges = launched(
        starts, num_rows, num_rows=num_rows, num_heads=32, patch=monkeypatch
    )
    found = (grid, keywords["RAGGED"], keywords["SHARED"])
    assert (*found, merges[0] if merges else None) == expected


def launched(starts, query_len, *, num_rows, num_heads, patch):
    """Grid and constants of a launch of bfloat16, tables of 1,344 keys, and warps of its merges."""
    attention, merge = Recorder(), Recorder()
    patch.setattr(attention_launch, "attention_kernel", attention)
    patch.setattr(splits, "merge_splits_kernel", merge)
    num_requests = len(starts) - 1
    rows = AttentionRows(
        torch.zeros(num_requests, 84, dtype=torch.int32),
        torch.full((num_requests,), 1000, dtype=torch.int32),
        starts,
        query_len,
    )
    query = torch.zeros(num_rows, num_heads, 128, dtype=torch.bfloat16)
    pages = PagedKV(*torch.zeros(2, 1, 16, 8, 128, dtype=torch.bfloat16))
    attention_launch.launch_paged_attention(query, pages, rows, Scoring(1.0))
    (launch,) = attention.launches
    return launch, [keywords["num_warps"] for _, keywords in merge.launches]


def test_table_of_attention_beside_prompts_is_the_stored_one():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "benchmarks.md").read_text(encoding="utf8")
    stored = json.loads((docs / "results" / "beside_prompts.json").read_text(encoding="utf8"))
    lines = {
        f"| {row['heads']} | {row['num_requests']} | {row['num_rows']:,} | {row['texts']} "
        f"| {row['table']:,} | {row['us_before']} ({row['splits_before']}) | {row['us']} "
        f"| {row['us_by_splits']['1']} |"
        for row in stored["rows"]
    }
    part = page.partition("### Attention beside prompts")[2].partition("\n## ")[0]
    shown = [line for line in part.splitlines() if line[:3] in ("| 9", "| 3")]
    assert len(shown) == 9
    assert lines.issuperset(shown)
    changes = [row["us"] / row["us_before"] for row in stored["rows"]]
    faster, equal = sum(one < 0.99 for one in changes), sum(0.99 <= one <= 1.01 for one in changes)
    words = {2: "two", 3: "three", 4: "four"}[equal]
    assert f"Of the {len(changes)} cases {faster} are faster than before, {words} as fast" in part
    for limit in (2048, 8192):
        rates = [
            " and ".join(
                f"{one['tokens_per_s']:,}"
                for one in stored["passes"]
                if (one["code"], one["max_model_len"]) == (code, limit)
            )
            for code in ("before", "since")
        ]
        words = f"{rates[0]} before and {rates[1]} since with"
        assert words in part
    replays = [
        f"{one['replay_ms_with_prompt_rows']:.2f}" for one in stored["passes"] if one["pass"] == 2
    ]
    assert "measured {0} to {2} and {1} to {3})".format(*replays) in part
