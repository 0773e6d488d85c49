"""The Triton programs of paged_attention.

Where it sits: launched by `attention_launch` once `paged_attention` has checked its arguments; that
module explains maths, layout, letters and sources. A long context is spread over several programs,
which leave partial outputs and log-sum-exps for a second launch (`splits`), or for the one of them
that ends last; one split writes the result. `store_kv` explains how programs store the step's own
keys and values.
"""

from __future__ import annotations

from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import (
    merge_parts,
    shared_program,
    shared_span,
    split_span,
    visible_positions,
)
from mtp_research.kernels.attention.store_kv import (
    load_new_rows,
    load_rows,
    rotate_rows,
    write_new_rows,
)
from mtp_research.kernels.checks import wait_in_front

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None


@checks.kernel_jit_once(
    "num_slots", "num_rows", "num_requests", "num_query_tiles", "num_at_once", "max_keys"
)
def attention_kernel(
    query,  # [T, H, Dk]
    key_cache,  # [num_blocks, block_size, Hkv, Dk]
    value_cache,  # [num_blocks, block_size, Hkv, Dv]
    block_table,  # [R, M] int32
    seq_lens,  # [R] int32
    query_start_loc,  # [R + 1] int32
    sinks,  # [H] float32 or None
    positions,  # [T] int64 or None
    kv_start,  # [R] int32 or None
    new_key,  # [T, Hkv, Dk], stored first; None if the pages hold this step's rows
    new_value,  # [T, Hkv, Dv] or None
    slot_mapping,  # [T] int64 or None
    cos,  # [T, P], queries and new keys are to be rotated; None if they are as they should be
    sin,  # [T, P] or None
    out,  # [T, H, Dv], written, unless a second launch merges the parts
    partial,  # [splits, T, H, Dv] float32, written if SPLIT
    lse,  # [splits, T, H] float32 in base 2, written if SPLIT
    arrived,  # [R x Hkv] int32 zeros, zeros again at the end; None if not SHARED
    num_slots,
    num_rows,
    num_requests,
    num_query_tiles,
    num_at_once,
    max_keys,
    scale_log2,
    stride_query_row,
    stride_query_head,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_table,
    stride_new_key_row,
    stride_new_key_head,
    stride_new_value_row,
    stride_new_value_head,
    stride_cos_row,
    stride_sin_row,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # 0 = a split is an even share of the keys that the tile sees
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STORED_ROWS: tl.constexpr,  # at least the new rows of a request
    ROTARY_DIM: tl.constexpr,  # P
    RAGGED: tl.constexpr,  # 0 = every request has `num_query_tiles`; else a power of two >= R
    SHARED: tl.constexpr,  # 0, or requests share splits by their lengths: a power of two >= R
    MOST_SHARED: tl.constexpr,  # splits of a request then
    READS_EARLY: tl.constexpr,  # tables and lengths, before it waits
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """One tile of packed rows of one request and KV head, over one split of the keys."""
    wait_in_front(OVERLAPS and not READS_EARLY)
    tile, num_tiles, request, tile_row, kv_head, split, all_tiles = _place_of_program(
        seq_lens,
        query_start_loc,
        num_requests,
        num_query_tiles,
        num_at_once,
        NUM_HEADS // GROUP,
        GROUP,
        WINDOW,
        BLOCK_M,
        BLOCK_N,
        RAGGED,
        SHARED,
        MOST_SHARED,
    )
    if SHARED > 0:  # noqa: SIM102 - a constant; what is in it is compiled only then
        if request >= num_requests:
            return  # without a wait: other programs wait for the kernel in front
    first_head = kv_head * GROUP
    key_cache += kv_head * stride_key_head
    value_cache += kv_head * stride_value_head
    value_dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    first_spare = tl.load(query_start_loc + num_requests)
    packed = tile_row + tl.arange(0, BLOCK_M)
    row = first_row + packed // GROUP
    is_row = packed < query_len * GROUP
    head = first_head + packed % GROUP

    seq_len = tl.load(seq_lens + request)
    row_pos, first_pos, last_pos, lowest_key = visible_positions(
        request,
        row,
        is_row,
        tile_row,
        seq_len,
        query_len,
        positions,
        kv_start,
        GROUP,
        WINDOW,
        BLOCK_M,
    )
    begin = lowest_key // BLOCK_N * BLOCK_N
    end = tl.minimum(tl.minimum(last_pos + 1, seq_len), max_keys)
    num_splits = tl.num_programs(1)
    if SHARED > 0:
        begin, end, num_splits = shared_span(
            begin,
            end,
            split,
            tl.where((RAGGED == 0) | (query_len * GROUP <= BLOCK_M), seq_len, 0),
            all_tiles,
            num_at_once,
            WINDOW,
            BLOCK_N,
            MOST_SHARED,
        )
    else:
        begin, end = split_span(begin, end, split, num_splits, SPLIT_KEYS, BLOCK_N)
    table = block_table + request.to(tl.int64) * stride_table
    key_pos = begin + tl.arange(0, BLOCK_N)
    readable = (key_pos >= lowest_key) & (key_pos < end)
    page = tl.load(table + key_pos // BLOCK_SIZE, mask=readable, other=0)
    # Queries and new rows are not there yet, nor has what reads `out` ended.
    wait_in_front(OVERLAPS and READS_EARLY)
    if SHARED > 0 or not SPLIT:
        zero_spare_rows(
            out + first_head * VALUE_DIM + value_dims,
            first_spare,
            num_rows,
            tile,
            num_tiles,
            value_dims < VALUE_DIM,
            NUM_HEADS * VALUE_DIM,
            GROUP,
            VALUE_DIM,
            BLOCK_M,
        )
    if (tile_row >= query_len * GROUP) | (split >= num_splits):
        return
    if SPLIT and SHARED == 0:  # noqa: SIM102 - constants; what is in it is compiled only then
        # The first split counts the sinks, and has to although it may hold no visible key.
        if (begin >= end) & ((sinks is None) | (split > 0)):
            part = (split.to(tl.int64) * num_rows + row) * NUM_HEADS + head
            tl.store(lse + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return
    # All that is read before any of it is used, and before anything is stored.
    key_dims = tl.arange(0, PADDED_KEY_DIM)[None, :]
    unrotated = load_rows(
        (query + row.to(tl.int64) * stride_query_row + head * stride_query_head)[:, None],
        cos,
        sin,
        row.to(tl.int64)[:, None],
        is_row[:, None],
        key_dims,
        stride_cos_row,
        stride_sin_row,
        KEY_DIM,
        ROTARY_DIM,
    )
    if new_key is not None:
        new = load_new_rows(
            new_key + kv_head * stride_new_key_head,
            new_value + kv_head * stride_new_value_head,
            slot_mapping,
            cos,
            sin,
            first_row,
            query_len,
            seq_len - query_len,
            begin,
            end,
            num_slots,
            stride_new_key_row,
            stride_new_value_row,
            stride_cos_row,
            stride_sin_row,
            KEY_DIM,
            VALUE_DIM,
            PADDED_KEY_DIM,
            PADDED_VALUE_DIM,
            ROTARY_DIM,
            STORED_ROWS,
        )
        write_new_rows(
            new,
            key_cache,
            value_cache,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            KEY_DIM,
            VALUE_DIM,
            PADDED_KEY_DIM,
            PADDED_VALUE_DIM,
            BLOCK_SIZE,
            ROTARY_DIM,
        )
    q = rotate_rows(unrotated, is_row[:, None], key_dims, ROTARY_DIM)  # [BLOCK_M, Dk]

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # A sink is one more key; exactly one split counts it.
    if sinks is not None and split == 0:
        highest = tl.load(sinks + head, mask=is_row, other=0.0) * 1.4426950408889634
        total += 1.0
    acc, highest, total = _attend_keys(
        q,
        key_cache + key_dims,
        value_cache + value_dims,
        table,
        page,
        highest,
        total,
        row_pos,
        first_pos,
        last_pos,
        lowest_key,
        begin,
        end,
        scale_log2,
        stride_key_block,
        stride_key_slot,
        stride_value_block,
        stride_value_slot,
        key_dims < KEY_DIM,
        value_dims < VALUE_DIM,
        BLOCK_SIZE,
        WINDOW,
        BLOCK_N,
    )
    row_head = row.to(tl.int64) * NUM_HEADS + head  # index into [T, H]
    _write_rows(
        acc / tl.where(total == 0.0, 1.0, total)[:, None],
        highest,
        total,
        out,
        partial,
        lse,
        None if arrived is None else arrived + request * (NUM_HEADS // GROUP) + kv_head,
        row_head,
        row_head[:, None] * VALUE_DIM + value_dims,
        is_row,
        is_row[:, None] & (value_dims < VALUE_DIM),
        split,
        num_splits,
        num_rows * NUM_HEADS,
        VALUE_DIM,
        SPLIT,
        SHARED,
        MOST_SHARED,
    )


@checks.kernel_jit
def _write_rows(
    acc,  # [BLOCK_M, Dv], over the keys of the split
    highest,  # [BLOCK_M]
    total,  # [BLOCK_M]
    out,
    partial,
    lse,
    arrived,  # pointer to the count of the tile
    row_head,  # [BLOCK_M], index into [T, H]
    at,  # [BLOCK_M, Dv], index into [T, H, Dv]
    is_row,
    inside,
    split,
    num_splits,
    num_row_heads,  # T x H
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    MOST_SHARED: tl.constexpr,
):
    """The rows of one split: the result, or a part that the last program of a tile merges."""
    if SHARED > 0 and num_splits == 1:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    elif SPLIT:
        first = split.to(tl.int64) * num_row_heads
        part_lse = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
        part_lse = tl.where(total == 0.0, float("-inf"), part_lse)
        tl.store(lse + first + row_head, part_lse, mask=is_row)
        tl.store(partial + first * VALUE_DIM + at, acc, mask=inside)
        if SHARED > 0:
            tl.debug_barrier()  # every thread's part is there before the program has arrived
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
                tl.store(arrived, 0)
                merged = merge_parts(
                    partial + at,
                    lse + row_head,
                    num_splits,
                    num_row_heads,
                    is_row,
                    inside,
                    VALUE_DIM,
                    MOST_SHARED,
                )
                tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@checks.kernel_jit
def _attend_keys(
    q,  # [BLOCK_M, Dk]
    key_base,  # pointers [1, Dk] to the KV head in block 0, slot 0
    value_base,  # pointers [1, Dv]
    table,  # pointer to the request's row of the block table
    page,  # [BLOCK_N], of the first tile
    highest,  # [BLOCK_M] running maximum of the scaled base-2 scores
    total,  # [BLOCK_M] running sum of weights
    row_pos,  # [BLOCK_M]
    first_pos,
    last_pos,
    lowest_key,
    begin,
    end,
    scale_log2,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    key_inside,
    value_inside,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_N)
    acc = tl.zeros([q.shape[0], value_inside.shape[1]], tl.float32)
    # The page ids of the next tile travel in a loop variable: a table load in the same iteration
    # as the loads that depend on it would leave K and V one pipeline buffer each.
    for start in range(begin, end, BLOCK_N):
        key_pos = start + lanes
        readable = (key_pos >= lowest_key) & (key_pos < end)
        slot = key_pos % BLOCK_SIZE
        # Unwritten slots may hold NaN, and 0 * NaN is NaN: they must not reach V.
        at = page.to(tl.int64) * stride_key_block + slot * stride_key_slot
        k = tl.load(key_base + at[:, None], mask=readable[:, None] & key_inside, other=0.0)
        at = page.to(tl.int64) * stride_value_block + slot * stride_value_slot
        v = tl.load(value_base + at[:, None], mask=readable[:, None] & value_inside, other=0.0)
        next_pos = key_pos + BLOCK_N
        page = tl.load(table + next_pos // BLOCK_SIZE, mask=next_pos < end, other=0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        hidden = (start + BLOCK_N > first_pos + 1) | (start + BLOCK_N > end) | (start < lowest_key)
        if WINDOW > 0:
            hidden |= start < last_pos - WINDOW + 1
        if hidden:
            allowed = readable[None, :] & (key_pos[None, :] <= row_pos[:, None])
            if WINDOW > 0:
                allowed &= key_pos[None, :] > row_pos[:, None] - WINDOW
            scores = tl.where(allowed, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet is at -inf, and -inf - (-inf) would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@checks.kernel_jit
def _place_of_program(
    seq_lens,
    query_start_loc,
    num_requests,
    num_query_tiles,
    num_at_once,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,
    SHARED: tl.constexpr,
    MOST_SHARED: tl.constexpr,
):
    """Tile and number of tiles, request and first packed row, KV head and split of a program.

    Last, where requests share splits, key tiles of those that do; else 0. KV heads are beside each
    other, so that prompts of all heads come first, and programs without work last.
    """
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    num_tiles, split, all_tiles = tl.num_programs(0) // NUM_KV_HEADS, tl.program_id(1), 0
    if SHARED > 0:
        num_tiles = num_query_tiles if RAGGED > 0 else num_requests
        request, split, all_tiles = shared_program(
            tile,
            num_tiles,
            seq_lens,
            query_start_loc,
            num_requests,
            num_at_once,
            GROUP,
            WINDOW,
            BLOCK_M,
            BLOCK_N,
            RAGGED,
            SHARED,
            MOST_SHARED,
        )
        tile_row = tl.zeros([], tl.int32)
        if RAGGED > 0:  # noqa: SIM102 - a constant; what is in it is compiled only then
            if tile < num_tiles:
                request, tile_row = tile_of_program(
                    tile, query_start_loc, num_requests, GROUP, BLOCK_M, RAGGED
                )
    elif RAGGED > 0:
        request, tile_row = tile_of_program(
            tile, query_start_loc, num_requests, GROUP, BLOCK_M, RAGGED
        )
    else:
        request = tile // num_query_tiles
        tile_row = (tile % num_query_tiles) * BLOCK_M
    return tile, num_tiles, request, tile_row, kv_head, split, all_tiles


@checks.kernel_jit
def tile_of_program(
    program,
    query_start_loc,
    num_requests,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Request and first packed row of the tile with this number; one behind the last has no rows.

    Tiles that have rows are counted through all requests. A grid of as many tiles for each request
    as the longest has would start mostly programs without work: 2,112 in place of 97 a KV head for
    a prompt chunk of 1,024 rows beside 32 requests that decode. Requests of several tiles, which
    are prompts, come first: with KV heads beside each other a prompt of 384 rows beside 31 requests
    took up to 16 % less time than in the order of the requests, head by head, and at worst 1 % more
    (one H200).
    """
    lanes = tl.arange(0, RAGGED)
    is_request = lanes < num_requests
    first = tl.load(query_start_loc + lanes, mask=is_request, other=0)
    behind = tl.load(query_start_loc + lanes + 1, mask=is_request, other=0)
    tiles = tl.cdiv((behind - first) * GROUP, BLOCK_M)
    of_several = tl.where(tiles > 1, tiles, 0)
    ends_alone = tl.sum(of_several, 0) + tl.cumsum(tiles - of_several, 0)
    ends = tl.where(tiles > 1, tl.cumsum(of_several, 0), ends_alone)
    is_own = (ends - tiles <= program) & (program < ends)
    # One behind the last gets request 0, whose tiles all come before it, and so no rows.
    request = tl.sum(tl.where(is_own, lanes, 0), 0)
    begin = tl.sum(tl.where(is_own, ends - tiles, 0), 0)
    return request, (program - begin) * BLOCK_M


@checks.kernel_jit
def zero_spare_rows(
    out,  # pointers [1, Dv] to row 0 of the group's first head
    first_spare,  # the first row that belongs to no request
    num_rows,
    tile,
    num_tiles,  # that share the work
    value_inside,
    ROW_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Zeros the rows of a KV head that belong to no request."""
    lanes = tl.arange(0, BLOCK_M)
    num_spare = (num_rows - first_spare) * GROUP
    for begin in range(tile * BLOCK_M, num_spare, num_tiles * BLOCK_M):
        spare = begin + lanes
        at = (first_spare + spare // GROUP).to(tl.int64) * ROW_STRIDE + spare % GROUP * VALUE_DIM
        zeros = tl.zeros([BLOCK_M, value_inside.shape[1]], out.dtype.element_ty)
        tl.store(out + at[:, None], zeros, mask=(spare < num_spare)[:, None] & value_inside)
