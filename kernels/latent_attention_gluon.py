"""The Gluon program of latent_attention for Hopper: 512 + 64 entries a key, 16-bit elements.

Where it sits: launched by `latent_attention_launch` instead of `latent_attention_triton` where
`fits_gluon` says so; both compute the same. Triton's own pipeline makes each product wait for the
one before and spends most instructions on addresses; here copies, products and waits are written
out. Two tiles of keys are held: one is worked on while the other one is copied, row by row.
Two forms: rows of the step as rows of both products (64 of them), or keys and latent entries as
rows (`KEYS_FIRST`), so that 16 or 32 rows of the step need not fill the 64 of a product.
Letters: R requests, T packed rows, H heads, L latent, P rotary key size, W warps.
Source: FlashMLA (one tile is key and value; each warp group owns half of the latent entries).
"""

from __future__ import annotations

from mtp_research.kernels.latent_gluon_loop import attend_latents
from mtp_research.kernels.latent_gluon_parts import (
    copy_queries,
    gl,
    gluon_jit,
    store_new_latents,
    visible_span,
    zero_rows,
)


@gluon_jit
def latent_attention_gluon_kernel(
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
    NUM_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KEYS_FIRST: gl.constexpr,  # keys and latent entries are the rows of the products
    STORED_ROWS: gl.constexpr,  # at least the new rows of a request
):
    """One tile of packed rows of one request, over one split of the keys."""
    L: gl.constexpr = 512
    P: gl.constexpr = 64
    GROUPS: gl.constexpr = gl.num_warps() // 4
    if KEYS_FIRST:
        ROW_DIM: gl.constexpr = 1
        SHAPE: gl.constexpr = [BLOCK_N, BLOCK_M]  # of scores
        SCORES: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, GROUPS], [16, BLOCK_M // GROUPS, 16]
        )
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, BLOCK_M, 16])
    else:
        ROW_DIM: gl.constexpr = 0
        SHAPE: gl.constexpr = [BLOCK_M, BLOCK_N]
        SCORES: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, GROUPS], [16, BLOCK_N // GROUPS, 16]
        )
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1 - ROW_DIM, SCORES)

    tile_row = gl.program_id(0) * BLOCK_M
    split = gl.program_id(1)
    request = gl.program_id(2)
    if not SPLIT:
        first_spare = gl.load(query_start_loc + gl.num_programs(2)) * NUM_HEADS
        num_spare = num_rows * NUM_HEADS if request == 0 else 0  # one request's programs zero them
        zero_rows(out, num_spare, first_spare + gl.program_id(0), gl.num_programs(0))
    first_row = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - first_row
    seq_len = gl.load(seq_lens + request)  # before the branch: all three travel together
    num_packed = query_len * NUM_HEADS - tile_row
    if num_packed <= 0:
        return
    lanes = gl.arange(0, BLOCK_M, layout=ROWS)
    row_pos, first_pos, lowest_key, begin, end = visible_span(
        lanes,
        tile_row,
        num_packed,
        seq_len,
        query_len,
        first_row,
        request,
        positions,
        kv_start,
        max_keys,
        NUM_HEADS,
        BLOCK_M,
        BLOCK_N,
    )
    tile_start = first_row.to(gl.int64) * NUM_HEADS + tile_row
    if SPLIT:
        tile_start += split.to(gl.int64) * num_rows * NUM_HEADS
        num_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
        num_tiles = (num_tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
        begin += split * num_tiles * BLOCK_N
        end = gl.minimum(begin + num_tiles * BLOCK_N, end)
    if begin >= end:
        if SPLIT:
            empty = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
            gl.store(lse + tile_start + lanes, empty, mask=lanes < num_packed)
        else:
            zero_rows(out + tile_start * L, gl.minimum(num_packed, BLOCK_M), 0, 1)
        return

    dtype: gl.constexpr = latent_cache.dtype.element_ty
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, L], dtype)
    Q_ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, P], dtype)
    q_latent = gl.allocate_shared_memory(dtype, [BLOCK_M, L], Q_SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_M, P], Q_ROPE_SHARED)
    copy_queries(
        query_latent,
        query_rope,
        q_latent,
        q_rope,
        first_row,
        tile_row,
        num_packed,
        stride_latent_row,
        stride_latent_head,
        stride_rope_row,
        stride_rope_head,
        NUM_HEADS,
        BLOCK_M,
    )
    if new_latent is not None:
        store_new_latents(
            new_latent,
            new_rope,
            slot_mapping,
            first_row,
            latent_cache,
            num_slots,
            query_len,
            seq_len - query_len,
            begin,
            end,
            stride_new_latent_row,
            stride_new_rope_row,
            stride_cache_block,
            stride_cache_slot,
            BLOCK_SIZE,
            STORED_ROWS,
        )
    acc, highest, total = attend_latents(
        q_latent,
        q_rope,
        latent_cache,
        block_table + request.to(gl.int64) * stride_table,
        row_pos,
        first_pos,
        lowest_key,
        begin,
        end,
        scale_log2,
        stride_cache_block,
        stride_cache_slot,
        SHAPE,
        SCORES,
        ACC,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        KEYS_FIRST,
    )

    ACC_ROWS: gl.constexpr = gl.SliceLayout(1 - ROW_DIM, ACC)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    acc = acc * gl.expand_dims(gl.convert_layout(inverse, ACC_ROWS), 1 - ROW_DIM)
    # Read again: in the loop its registers are needed.
    tile_start = gl.load(query_start_loc + request).to(gl.int64) * NUM_HEADS + tile_row
    if SPLIT:
        tile_start += split.to(gl.int64) * num_rows * NUM_HEADS
    out_lanes = gl.arange(0, BLOCK_M, layout=ACC_ROWS)
    out_dims = gl.arange(0, L, layout=gl.SliceLayout(ROW_DIM, ACC))
    at = gl.expand_dims(out_lanes * L, 1 - ROW_DIM) + gl.expand_dims(out_dims, ROW_DIM)
    inside = gl.expand_dims(out_lanes < num_packed, 1 - ROW_DIM)
    gl.store(out + tile_start * L + at, acc.to(out.dtype.element_ty), mask=inside)
    if SPLIT:
        merged = highest + gl.log2(gl.where(total == 0.0, 1.0, total))
        merged = gl.where(total == 0.0, float("-inf"), merged)
        gl.store(lse + tile_start + lanes, merged, mask=lanes < num_packed)
