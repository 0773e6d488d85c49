"""The Triton program of latent_attention.

Where it sits: launched by `latent_attention`, which checks the arguments and explains maths,
letters and sources. The latent tile is loaded once and serves as key and as value. The heads of a
row are packed into M tiles of at most 64 rows (128 would spill: the accumulator alone is 64 x 512
float32), and the M tiles of one split run beside each other, so that they find its latents in L2.
"""

from __future__ import annotations

from mtp_research.kernels import checks
from mtp_research.kernels.attention.paged_attention_triton import zero_spare_rows
from mtp_research.kernels.attention.splits import split_span
from mtp_research.kernels.attention.store_kv import load_new_rows, write_new_rows
from mtp_research.kernels.checks import wait_in_front

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


@checks.kernel_jit_once("num_slots", "num_rows", "max_keys")
def latent_attention_kernel(
    query_latent,  # [T, H, L]
    query_rope,  # [T, H, P]
    latent_cache,  # [num_blocks, block_size, L + P]
    block_table,  # [R, M] int32
    seq_lens,  # [R] int32
    query_start_loc,  # [R + 1] int32
    positions,  # [T] int64 or None
    kv_start,  # [R] int32 or None
    new_latent,  # [T, 1, L], stored first; None if the pages hold this step's rows
    new_rope,  # [T, 1, P] or None
    slot_mapping,  # [T] int64 or None
    out,  # [T, H, L], written; the partial outputs [splits, T, H, L] float32 if SPLIT
    lse,  # [splits, T, H] float32 in base 2, written if SPLIT
    num_slots,
    num_rows,
    max_keys,
    scale_log2,
    stride_latent_row,
    stride_latent_head,
    stride_rope_row,
    stride_rope_head,
    stride_cache_block,
    stride_cache_slot,
    stride_table,
    stride_new_latent_row,
    stride_new_rope_row,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_LATENT_DIM: tl.constexpr,
    PADDED_ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # 0 = a split is an even share of the keys that the tile sees
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STORED_ROWS: tl.constexpr,  # at least the new rows of a request
    READS_EARLY: tl.constexpr,  # tables and lengths, before it waits
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """One tile of packed rows of one request, over one split of the keys."""
    wait_in_front(OVERLAPS and not READS_EARLY)
    tile_row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    request = tl.program_id(2)
    dims = tl.arange(0, PADDED_LATENT_DIM)[None, :]
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    seq_len = tl.load(seq_lens + request)
    wait_in_front(OVERLAPS and READS_EARLY)
    if not SPLIT:
        num_spare = tl.where(request == 0, num_rows, 0)  # one request's programs zero them
        zero_spare_rows(
            out + dims,
            tl.load(query_start_loc + tl.num_programs(2)),
            num_spare,
            tl.program_id(0),
            tl.num_programs(0),
            dims < LATENT_DIM,
            NUM_HEADS * LATENT_DIM,
            NUM_HEADS,
            LATENT_DIM,
            BLOCK_M,
        )
    if tile_row >= query_len * NUM_HEADS:
        return
    lanes = tl.arange(0, BLOCK_M)
    packed = tile_row + lanes
    row = first_row + packed // NUM_HEADS
    is_row = packed < query_len * NUM_HEADS
    head = packed % NUM_HEADS
    # All heads are packed, so that the tile's entries of [T, H] follow each other: one scalar
    # index and small offsets, where an index per row would cost registers.
    tile_start = first_row.to(tl.int64) * NUM_HEADS + tile_row
    if SPLIT:
        tile_start += split.to(tl.int64) * num_rows * NUM_HEADS

    row_pos = seq_len - query_len + packed // NUM_HEADS
    if positions is not None:
        row_pos = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
    first_pos = tl.min(tl.where(is_row, row_pos, seq_len), 0)
    lowest_key = 0 if kv_start is None else tl.load(kv_start + request)
    begin = lowest_key // BLOCK_N * BLOCK_N
    end = tl.max(tl.where(is_row, row_pos, -1), 0) + 1
    end = tl.minimum(tl.minimum(end, seq_len), max_keys)
    if SPLIT:
        begin, end = split_span(begin, end, split, tl.num_programs(1), SPLIT_KEYS, BLOCK_N)
        if begin >= end:
            tl.store(
                lse + tile_start + lanes, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row
            )
            return
    if new_latent is not None:
        new = load_new_rows(
            new_latent,
            new_rope,
            slot_mapping,
            None,
            None,
            first_row,
            query_len,
            seq_len - query_len,
            begin,
            end,
            num_slots,
            stride_new_latent_row,
            stride_new_rope_row,
            0,
            0,
            LATENT_DIM,
            ROPE_DIM,
            PADDED_LATENT_DIM,
            PADDED_ROPE_DIM,
            0,
            STORED_ROWS,
        )
        write_new_rows(
            new,
            latent_cache,
            latent_cache + LATENT_DIM,
            stride_cache_block,
            stride_cache_slot,
            stride_cache_block,
            stride_cache_slot,
            LATENT_DIM,
            ROPE_DIM,
            PADDED_LATENT_DIM,
            PADDED_ROPE_DIM,
            BLOCK_SIZE,
            0,
        )

    rope_dims = tl.arange(0, PADDED_ROPE_DIM)[None, :]
    at = row.to(tl.int64) * stride_latent_row + head * stride_latent_head
    inside = is_row[:, None] & (dims < LATENT_DIM)
    q_latent = tl.load(query_latent + at[:, None] + dims, mask=inside, other=0.0)
    at = row.to(tl.int64) * stride_rope_row + head * stride_rope_head
    inside = is_row[:, None] & (rope_dims < ROPE_DIM)
    q_rope = tl.load(query_rope + at[:, None] + rope_dims, mask=inside, other=0.0)
    acc, highest, total = _attend_latents(
        q_latent,
        q_rope,
        latent_cache + dims,
        latent_cache + LATENT_DIM + rope_dims,
        block_table + request.to(tl.int64) * stride_table,
        row_pos,
        first_pos,
        lowest_key,
        begin,
        end,
        scale_log2,
        stride_cache_block,
        stride_cache_slot,
        dims < LATENT_DIM,
        rope_dims < ROPE_DIM,
        BLOCK_SIZE,
        BLOCK_N,
    )
    # One reciprocal a row: dividing every element needs registers that the accumulator occupies.
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    inside = is_row[:, None] & (dims < LATENT_DIM)
    tile = out + tile_start * LATENT_DIM
    tl.store(tile + (lanes[:, None] * LATENT_DIM + dims), acc.to(out.dtype.element_ty), mask=inside)
    if SPLIT:
        merged = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
        merged = tl.where(total == 0.0, float("-inf"), merged)
        tl.store(lse + tile_start + lanes, merged, mask=is_row)


@checks.kernel_jit
def _attend_latents(
    q_latent,  # [BLOCK_M, L]
    q_rope,  # [BLOCK_M, P]
    latent_base,  # pointers [1, L] to block 0, slot 0
    rope_base,  # pointers [1, P]
    table,  # pointer to the request's row of the block table
    row_pos,  # [BLOCK_M]
    first_pos,
    lowest_key,
    begin,
    end,
    scale_log2,
    stride_cache_block,
    stride_cache_slot,
    latent_inside,
    rope_inside,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_N)
    highest = tl.full([q_latent.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_latent.shape[0]], tl.float32)
    acc = tl.zeros([q_latent.shape[0], q_latent.shape[1]], tl.float32)
    # The next tile's page ids travel in a loop variable: see paged_attention_triton.
    key_pos = begin + lanes
    page = tl.load(table + key_pos // BLOCK_SIZE, mask=key_pos < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key_pos = start + lanes
        readable = (key_pos >= lowest_key) & (key_pos < end)
        at = page.to(tl.int64) * stride_cache_block + key_pos % BLOCK_SIZE * stride_cache_slot
        # Unwritten slots may hold NaN, and 0 * NaN is NaN: they must not be read.
        latent = tl.load(
            latent_base + at[:, None], mask=readable[:, None] & latent_inside, other=0.0
        )
        rope = tl.load(rope_base + at[:, None], mask=readable[:, None] & rope_inside, other=0.0)
        next_pos = key_pos + BLOCK_N
        page = tl.load(table + next_pos // BLOCK_SIZE, mask=next_pos < end, other=0)

        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee") * scale_log2
        if (start + BLOCK_N > first_pos + 1) | (start + BLOCK_N > end) | (start < lowest_key):
            allowed = readable[None, :] & (key_pos[None, :] <= row_pos[:, None])
            scores = tl.where(allowed, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet is at -inf, and -inf - (-inf) would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, highest, total
