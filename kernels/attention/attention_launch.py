"""Launch of the paged attention programs: tile sizes, warps, stages, number of splits.

Where it sits: between the checked wrapper `paged_attention` and its Triton programs. Everything is
computed from static shapes, never from device values, so that one CUDA graph per batch bucket
replays it, and so that a test can compile every configuration that ships without a GPU.
Letters: R requests, H / Hkv heads, Dk / Dv head dims, M blocks per table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.attention.splits import (
    ceil_div,
    merge_splits,
    next_power_of_two,
    padded_head_dim,
    split_outputs,
)
from mtp_research.kernels.attention.store_kv import MAX_STORED_ROWS, NewRows

if TYPE_CHECKING:
    from torch import Tensor

# Shared memory of one sm_90 SM is 228 KiB; two programs an SM keep loads in flight while one waits.
_PIPELINE_BYTES = 104 * 1024
_PROGRAMS_PER_SM = 2
# With a stage less four programs of so small tiles fit on an SM, which was faster for narrow heads
# (keys and values together) with 32 and with 128 requests (9 / 3 heads of 64, one H200).
_SMALL_STAGE_BYTES = 16 * 1024
_NARROW_WIDTH, _USUAL_WIDTH = 128, 256  # keys and values of a head, padded
_NARROW_PROGRAMS_PER_SM = 4
# One request with one KV head reaches 128 of the 132 multiprocessors; at 64 splits it reached 64.
MAX_SPLITS = 128
# Partial outputs of a row being merged. More warps wait for each other: rows of 8 requests with 16
# parts of 128 values took 24.5 us with four warps and 20.3 with one, attention included (one H200).
_VALUES_OF_A_WARP, _MAX_MERGE_WARPS = 4096, 8
# Of one request, whose few rows leave room for more warps.
_ALONE_OF_A_WARP, _ALONE_OF_FOUR_WARPS = 1024, 16384
# Keys of a split whose bounds do not depend on the batch; a multiple of every tile width.
INVARIANT_SPLIT_KEYS = 256
MAX_RAGGED = 1024  # requests whose tiles a program counts through
# Start, drain and partial write of a split, in units of one key tile. Estimated, not measured.
_SPLIT_OVERHEAD_TILES = 2
# Splits whose merging takes as long as one key tile. Fitted to one to eight requests (one H200).
MERGES_A_TILE = 12
# With at most so many tiles of 64 keys in all tables and KV heads, tiles of 32 and more splits took
# 11 and 13 % less time launch behind launch, and 1 and 4 % behind a product of cuBLAS: 8 and 4
# requests of 1,024 tokens, four rows, heads of 128, one H200. With more keys no less, or more.
_FEW_TILES = 1536
# Splits of a request that shares them. Texts of 29 to 1,491 tokens, 400 on average, took 5 to 42 %
# less time than with one split each (16 to 64 requests, heads of 128; 128, heads of 64), those of
# equal length 15 % less to 6 % more, behind a product (one H200; docs/log.md has the table).
# Beside prompts, where splits had followed the longest table, 20 cases took 57 % less to 49 % more,
# half of them 24 % less or better (docs/results/beside_prompts.json).
_MOST_SHARED = 4
# The most bytes of parts beside prompts. Rows of prompts leave none, but there is room for them: of
# 1,024 rows with 32 heads of 128 half of this.
_MOST_PART_BYTES = 2**27


class LaunchConfig(NamedTuple):
    """Compile-time shape of one attention program."""

    block_m: int  # packed query rows: rows of the step x heads of one KV group
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int


class Spread(NamedTuple):
    """How a launch spreads requests over programs."""

    config: LaunchConfig
    grid: tuple[int, int]
    # of each request; where ragged requests share splits, of all together
    num_query_tiles: int
    num_splits: int  # at most, of a request
    num_at_once: int  # programs of one KV head that requests share by their lengths, or 0
    num_ragged_requests: int  # whose tiles are counted through, or 0


def launch_paged_attention(
    query: Tensor,
    kv: PagedKV,
    rows: AttentionRows,
    scoring: Scoring,
    *,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
    config: LaunchConfig | None = None,
    invariant: bool = False,
) -> Tensor:
    """Launches the attention programs, then a merge where these leave parts (see `splits`).

    Arguments and result as in `paged_attention`, checked there. With `new_rows` (at most
    `MAX_STORED_ROWS` a request) the programs first write them to the pages; with angles they rotate
    them, and `query`. `config` overrides the tile sizes that `choose_config` picks (for
    measurements). With `invariant` tiles are those of one row and splits lie at fixed positions, so
    that a row's result does not depend on its batch.
    """
    num_rows, num_heads, key_dim = query.shape
    num_blocks, block_size, num_kv_heads, value_dim = kv.values.shape
    num_requests, num_table_blocks = rows.block_table.shape
    out = query.new_empty(num_rows, num_heads, value_dim)
    spread = spread_requests(
        query, kv, rows, num_splits=num_splits, config=config, invariant=invariant
    )
    split = split_outputs(out, spread.num_splits, always_split=invariant)
    has_angles = new_rows is not None and new_rows.cos is not None
    constants = attention_constants(
        num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        sliding_window=scoring.sliding_window,
        split=split.partial is not None,
        split_keys=INVARIANT_SPLIT_KEYS if invariant else 0,
        config=spread.config,
        num_stored_rows=0 if new_rows is None else rows.max_query_len,
        rotary_dim=new_rows.cos.shape[1] if has_angles else 0,
        num_ragged_requests=spread.num_ragged_requests,
        num_sharing_requests=num_requests if spread.num_at_once else 0,
    )
    with checks.launch_device(query):
        attention_kernel[spread.grid](
            query,
            *kv,
            rows.block_table,
            rows.seq_lens,
            rows.query_start_loc,
            scoring.sinks,
            rows.positions,
            rows.kv_start,
            *(new_rows or (None,) * 5),
            out,
            *split,
            checks.arrivals(query.device) if spread.num_at_once else None,
            num_blocks * block_size,
            num_rows,
            num_requests,
            spread.num_query_tiles,
            spread.num_at_once,
            num_table_blocks * block_size,
            scoring.scale / math.log(2),
            *query.stride()[:2],
            *kv.keys.stride()[:3],
            *kv.values.stride()[:3],
            rows.block_table.stride(0),
            *_new_row_strides(new_rows),
            **constants,
            num_warps=spread.config.num_warps,
            num_stages=spread.config.num_stages,
            **checks.overlapping_rows(query.device, are_settled=rows.are_settled),
        )
        if not spread.num_at_once:
            is_alone = num_requests == 1
            num_warps = merge_warps(spread.num_splits, value_dim=value_dim, is_alone=is_alone)
            merge_splits(
                split,
                query_start_loc=rows.query_start_loc,
                out=out,
                num_warps=4 if invariant else num_warps,
                in_order=invariant,
            )
    return out


def spread_requests(
    query: Tensor,
    kv: PagedKV,
    rows: AttentionRows,
    *,
    num_splits: int | None = None,
    config: LaunchConfig | None = None,
    invariant: bool = False,
) -> Spread:
    """The programs of a launch, from sizes alone; arguments as in `launch_paged_attention`."""
    num_rows, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = kv.values.shape
    num_requests, num_table_blocks = rows.block_table.shape
    group = num_heads // num_kv_heads
    max_keys = num_table_blocks * block_size
    has_prompts = rows.max_query_len > MAX_STORED_ROWS
    # One request is left out: with narrow tiles and fewer splits its attention took 12 to 19 % less
    # time by itself, and the captured step of MiMo-7B with three drafts .6 % more (one H200).
    is_batch = num_requests > 1 and not has_prompts and not invariant
    has_choice = config is None
    if config is None:
        config = choose_config(
            1 if invariant else rows.max_query_len * group,
            key_dim=key_dim,
            value_dim=value_dim,
            element_bytes=query.element_size(),
            num_keys=num_requests * num_kv_heads * max_keys if is_batch else None,
        )
    num_query_tiles = max(1, ceil_div(rows.max_query_len * group, config.block_m))
    # Padding of ragged requests leaves tiles without rows; T bounds the tiles that have some.
    num_tiles = num_requests * num_query_tiles
    num_ragged = num_rows * group // config.block_m + num_requests
    is_ragged = num_ragged < num_tiles and num_requests <= MAX_RAGGED
    num_sms = checks.num_multiprocessors(query.device)
    num_slots = num_sms * programs_per_sm(key_dim, value_dim)
    max_key_tiles = ceil_div(max_keys, config.block_n)
    if invariant:
        num_splits = ceil_div(max_keys, INVARIANT_SPLIT_KEYS)
    elif num_splits is None:
        num_programs = num_kv_heads * min(num_ragged, num_tiles)
        shares = is_batch and config.block_m == 16 and num_query_tiles == 1
        if has_prompts and is_ragged:  # with fewer programs prompts behind long texts need splits
            part_bytes = 4 * _MOST_SHARED * num_rows * num_heads * value_dim
            shares = 2 * num_programs > num_slots and part_bytes <= _MOST_PART_BYTES
        num_at_once = 0
        if shares:
            num_at_once = choose_num_at_once(
                num_requests,
                num_kv_heads,
                max_key_tiles=max_key_tiles,
                num_slots=num_slots,
                has_prompts=has_prompts,
            )
        if num_at_once:
            is_tight = is_batch and num_sms < num_requests * num_kv_heads <= num_slots
            if has_choice and is_tight:
                config = keep_two_an_sm(config, key_dim=key_dim, value_dim=value_dim)
            num_first, num_counted = (num_ragged, num_requests) if is_ragged else (num_requests, 0)
            num_further = num_shared_programs(num_requests, num_at_once) - num_requests
            grid = (num_kv_heads * (num_first + num_further), 1)
            return Spread(config, grid, num_first, _MOST_SHARED, num_at_once, num_counted)
        num_splits = choose_num_splits(
            num_programs,
            max_key_tiles=max_key_tiles,
            num_slots=num_slots,
            has_prompts=has_prompts,
            merges_a_tile=MERGES_A_TILE if is_batch else 0,
        )
    grid = (num_kv_heads * (num_ragged if is_ragged else num_tiles), num_splits)
    return Spread(config, grid, num_query_tiles, num_splits, 0, num_requests if is_ragged else 0)


def merge_warps(num_splits: int, *, value_dim: int, is_alone: bool = False) -> int:
    """Warps of a program that merges one row: as few as hold its partial outputs in registers.

    `is_alone`: the rows are those of one request.
    """
    num_values = next_power_of_two(num_splits) * padded_head_dim(value_dim)
    if not is_alone:
        return min(max(num_values // _VALUES_OF_A_WARP, 1), _MAX_MERGE_WARPS)
    if num_values <= _ALONE_OF_A_WARP:
        return 1
    return 4 if num_values <= _ALONE_OF_FOUR_WARPS else 8


def programs_per_sm(key_dim: int, value_dim: int) -> int:
    """Programs that share a multiprocessor, by head dims; see `choose_config`."""
    is_narrow = padded_head_dim(key_dim) + padded_head_dim(value_dim) <= _NARROW_WIDTH
    return _NARROW_PROGRAMS_PER_SM if is_narrow else _PROGRAMS_PER_SM


def _new_row_strides(new_rows: NewRows | None) -> tuple[int, ...]:
    """Of row and head of keys and values, then of row of cos and sin; 0 where not given."""
    if new_rows is None:
        return (0,) * 6
    angles = (new_rows.cos, new_rows.sin)
    of_angles = (0 if tensor is None else tensor.stride(0) for tensor in angles)
    return (*new_rows.key.stride()[:2], *new_rows.value.stride()[:2], *of_angles)


def attention_constants(
    num_heads: int,
    *,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    sliding_window: int | None,
    split: bool,
    config: LaunchConfig,
    split_keys: int = 0,
    num_stored_rows: int = 0,
    rotary_dim: int = 0,
    num_ragged_requests: int = 0,
    num_sharing_requests: int = 0,
) -> dict[str, int | bool]:
    """The compile-time arguments of the attention kernel, by parameter name."""
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PADDED_KEY_DIM": padded_head_dim(key_dim),
        "PADDED_VALUE_DIM": padded_head_dim(value_dim),
        "BLOCK_SIZE": block_size,
        "WINDOW": sliding_window or 0,
        "SPLIT": split,
        "SPLIT_KEYS": split_keys,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STORED_ROWS": next_power_of_two(num_stored_rows),
        "ROTARY_DIM": rotary_dim,
        "RAGGED": next_power_of_two(num_ragged_requests) if num_ragged_requests else 0,
        "SHARED": next_power_of_two(num_sharing_requests) if num_sharing_requests else 0,
        "MOST_SHARED": _MOST_SHARED,
    }


def choose_config(
    num_packed_rows: int,
    *,
    key_dim: int,
    value_dim: int,
    element_bytes: int,
    num_keys: int | None = None,
) -> LaunchConfig:
    """Picks tile sizes, warps and pipeline depth.

    `num_packed_rows` share one KV head's keys: max_query_len x (H / Hkv). Few of them fill one
    mma.sync tile (16), more one wgmma tile (64). The pipeline takes the stages that let two
    programs share an SM, of narrow heads four. float32 multiplies without tensor cores, so that it
    stays exact; only small tiles of it fit the registers. Few `num_keys`, of all tables and KV
    heads, are read in narrower tiles; None leaves that out, and tiles do not depend on the batch.
    """
    padded_width = padded_head_dim(key_dim) + padded_head_dim(value_dim)
    wide = padded_width > _USUAL_WIDTH
    exact = element_bytes == 4
    few = num_keys is not None and num_keys <= _FEW_TILES * 64
    block_m = 16 if exact or num_packed_rows <= 16 else 64
    block_n = 32 if exact or wide or (few and padded_width == _USUAL_WIDTH) else 64
    stage_bytes = block_n * padded_width * element_bytes
    # Few rows of wide keys spill with four stages; with values of another width they do with three
    # (ptxas, sm_90, Triton 3.6).
    fewer = 3 if key_dim == value_dim else 2
    max_stages = 3 if stage_bytes <= _SMALL_STAGE_BYTES else 4
    if wide and block_m == 16:
        max_stages = fewer
    num_stages = max(2, min(max_stages, _PIPELINE_BYTES // stage_bytes))
    num_warps = 8 if wide and block_m == 64 else 4
    return LaunchConfig(block_m, block_n, num_warps=num_warps, num_stages=num_stages)


def keep_two_an_sm(config: LaunchConfig, *, key_dim: int, value_dim: int) -> LaunchConfig:
    """The same program with a stage more if, as with heads of 128, three would fit on one SM.

    For launches of one to two working programs an SM, and others that may have no work. With those
    the device gives some SMs three working programs and others one: of 132 SMs eight had three for
    32 equal texts, and the launch took 4 to 5 % longer than with a stage more (one H200).
    """
    width = padded_head_dim(key_dim) + padded_head_dim(value_dim)
    return config._replace(num_stages=4) if width == _USUAL_WIDTH else config


def choose_num_at_once(
    num_requests: int,
    num_kv_heads: int,
    *,
    max_key_tiles: int,
    num_slots: int,
    has_prompts: bool = False,
) -> int:
    """Programs of one KV head that requests share by the lengths of their texts, or 0.

    0: each gets the same number of splits. Sharing takes no second launch, and pays once requests
    alone fill a good part of the `num_slots` programs that run at once: then equal texts need no
    splits, and one that is much longer than the others holds all up unless it is split. With
    `has_prompts` the rows of prompts fill that part, so that few requests share, too.
    """
    num_programs = num_requests * num_kv_heads
    is_tracked = num_requests <= MAX_RAGGED and num_programs <= checks.MAX_SHARED_TILES
    are_few = num_programs * _MOST_SHARED <= num_slots and not has_prompts
    if not is_tracked or max_key_tiles == 1 or are_few:
        return 0
    return num_slots * ceil_div(num_programs, num_slots) // num_kv_heads  # whole waves


def num_shared_programs(num_requests: int, num_at_once: int) -> int:
    """The most programs of one KV head that requests can share, whatever their lengths.

    A share is rounded: n splits, n - 1 of them beside the first, are given for n - .5 of the
    programs at once. So most are given where some requests have as many as they may.
    """
    further = _MOST_SHARED - 1
    most_further = 2 * further * num_at_once // (2 * _MOST_SHARED - 1)
    return num_requests + min(num_requests * further, most_further)


def choose_num_splits(
    num_programs: int,
    *,
    max_key_tiles: int,
    num_slots: int,
    has_prompts: bool = False,
    merges_a_tile: int = 0,
) -> int:
    """Picks how many programs share one request's keys, so that short batches still fill the GPU.

    `num_programs` have work before splitting, `num_slots` run at once; `max_key_tiles` is what the
    block table can hold. Minimises waves x (key tiles a split + fixed cost), and what merging costs
    (`merges_a_tile` splits, padded to a power of two, are worth a tile; 0: nothing). A tie goes to
    fewer splits, with a cost of merging to more, as texts are shorter than tables. For example 64
    programs of 128 tiles on 132 SMs give 4: 256 programs run in one wave of 264. Rows of prompts
    (`has_prompts`) are so many that their partial outputs are a load of their own, and texts mostly
    shorter than the table: they get no more splits than fill the device twice.
    """
    most = max(2 * num_slots // num_programs, 1) if has_prompts else MAX_SPLITS
    best, best_cost = 1, None
    for num_splits in range(1, max(1, min(most, MAX_SPLITS, max_key_tiles)) + 1):
        waves = ceil_div(num_programs * num_splits, num_slots)
        cost = waves * (ceil_div(max_key_tiles, num_splits) + _SPLIT_OVERHEAD_TILES)
        if merges_a_tile:
            cost += next_power_of_two(num_splits) / merges_a_tile
        if best_cost is None or cost < best_cost or (merges_a_tile and cost == best_cost):
            best, best_cost = num_splits, cost
    return best
