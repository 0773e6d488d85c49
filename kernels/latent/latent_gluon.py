"""The Gluon program of latent_attention for Hopper: 512 + 64 entries a key, 16-bit elements.

Where it sits: launched by `latent_attention` instead of `latent_attention_triton` where
`fits_gluon` says so; both compute the same. Triton's own pipeline makes each product wait for the
one before and spends most instructions on addresses; here copies, products and waits are written
out. Two forms: rows of the step as rows of both products (64 of them), or keys and latent entries
as rows (`KEYS_FIRST`), so that 16 or 32 rows of the step need not fill the 64 of a product.

Two tiles of keys are held: one is worked on while the other one is copied, by groups of 8 threads a
row, 16 bytes each, so that a thread computes the addresses of few rows. Keys first, two tiles are
on their way when a tile is worked on: a tile is copied behind the value product that frees its
memory. Rows first, one is: its copy starts behind the score product, whose time hides the
addresses, and needs no barrier of its own.

Measured on one H200 (128 heads, 4 rows, 32 requests of 8,192 keys) and not taken: the next tile's
scores issued behind the values that still run, 702 us against 686 without; keys first with 64 rows,
773; weights from shared memory instead of registers, 672 against 664; no fence after copies, 2 to
3 % less, but the PTX rules ask for it. Taken: rotary queries in registers and row maxima exchanged
in one barrier, 652 against 662.
Letters: R requests, T packed rows, H heads, L latent, P rotary key size.
Source: FlashMLA (one tile is key and value; each warp group owns half of the latent entries).
"""

from __future__ import annotations

from mtp_research.kernels.latent.latent_gluon_parts import (
    async_copy,
    barrier,
    copy_queries,
    fence_async_shared,
    gl,
    gluon_jit,
    store_new_latents,
    visible_span,
    wait_in_front,
    warpgroup_mma,
    warpgroup_mma_wait,
    zero_rows,
)


@gluon_jit
def attend_latents(
    q_latent,  # shared memory [BLOCK_M, L], its copy not committed
    q_rope,  # shared memory [BLOCK_M, P], likewise; read into registers unless KEYS_FIRST
    latent_cache,
    table,  # pointer to the request's row of the block table
    row_pos,  # [BLOCK_M]
    first_pos,
    lowest_key,
    begin,
    end,
    scale_log2,
    stride_cache_block,
    stride_cache_slot,
    SHAPE: gl.constexpr,  # of scores, [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] if KEYS_FIRST
    SCORES: gl.constexpr,
    ACC: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KEYS_FIRST: gl.constexpr,
):
    """Unscaled output, and maximum and sum of the weights `[BLOCK_M]`."""
    KEY_DIM: gl.constexpr = 0 if KEYS_FIRST else 1
    dtype: gl.constexpr = latent_cache.dtype.element_ty
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 512], dtype)
    K_ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], dtype)
    WEIGHTS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    latents = gl.allocate_shared_memory(dtype, [2, BLOCK_N, 512], K_SHARED)
    ropes = gl.allocate_shared_memory(dtype, [2, BLOCK_N, 64], K_ROPE_SHARED)
    shared_weights = gl.allocate_shared_memory(dtype, SHAPE, WEIGHTS_SHARED)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    slots = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    at = _clamped(begin + slots, lowest_key, end)
    page = gl.load(table + at // BLOCK_SIZE)
    at = page.to(gl.int64) * stride_cache_block + at % BLOCK_SIZE * stride_cache_slot
    next_at = _clamped(begin + BLOCK_N + slots, lowest_key, end)
    next_page = gl.load(table + next_at // BLOCK_SIZE)
    _copy_tile(latent_cache, at, latents.index(0), ropes.index(0), COPY)
    if KEYS_FIRST:
        _copy_tile_if(
            begin + BLOCK_N < end,
            latent_cache,
            next_page,
            next_at,
            stride_cache_block,
            stride_cache_slot,
            latents.index(1),
            ropes.index(1),
            BLOCK_SIZE,
            COPY,
        )

    ROWS: gl.constexpr = gl.SliceLayout(KEY_DIM, SCORES)
    highest = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
    # Each thread adds up the weights it holds; the sums of threads are added after the loop.
    totals = gl.full(SHAPE, 0.0, gl.float32, layout=SCORES)
    no_scores = gl.full(SHAPE, 0.0, gl.float32, layout=SCORES)
    ACC_SHAPE: gl.constexpr = [512, BLOCK_M] if KEYS_FIRST else [BLOCK_M, 512]
    acc = gl.full(ACC_SHAPE, 0.0, gl.float32, layout=ACC)
    if not KEYS_FIRST:  # from registers: shared memory bounds the product
        async_copy.wait_group(0)
        barrier()
        q_rope = q_rope.load(gl.DotOperandLayout(0, SCORES, 2))
    slot = 0
    for start in range(begin, end, BLOCK_N):
        latent, rope = latents.index(slot), ropes.index(slot)
        async_copy.wait_group(1 if KEYS_FIRST else 0)
        fence_async_shared()
        barrier()  # every warp has read all it needs of the tile before and of its weights
        flying = _issue_scores(q_latent, q_rope, latent, rope, no_scores, KEYS_FIRST)
        if not KEYS_FIRST:
            _copy_tile_if(
                start + BLOCK_N < end,
                latent_cache,
                next_page,
                _clamped(start + BLOCK_N + slots, lowest_key, end),
                stride_cache_block,
                stride_cache_slot,
                latents.index(1 - slot),
                ropes.index(1 - slot),
                BLOCK_SIZE,
                COPY,
            )
        asked = _clamped(start + 2 * BLOCK_N + slots, lowest_key, end)
        next_page = gl.load(table + asked // BLOCK_SIZE)
        scores = warpgroup_mma_wait(0, deps=[flying])
        if (start + BLOCK_N > first_pos + 1) | (start + BLOCK_N > end) | (start < lowest_key):
            key_pos = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1 - KEY_DIM, SCORES))
            readable = (key_pos >= lowest_key) & (key_pos < end)
            seen = gl.expand_dims(key_pos, 1 - KEY_DIM) <= gl.expand_dims(row_pos, KEY_DIM)
            scores = gl.where(gl.expand_dims(readable, 1 - KEY_DIM) & seen, scores, float("-inf"))
        new_highest = gl.maximum(highest, _tile_maxima(scores, KEYS_FIRST, ROWS) * scale_log2)
        # A row that has seen no key yet is at -inf, and -inf - (-inf) would be NaN.
        base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = gl.exp2(highest - base)
        weights = gl.exp2(scores * scale_log2 - gl.expand_dims(base, KEY_DIM))
        shared_weights.store(weights.to(dtype))
        totals = totals * gl.expand_dims(decay, KEY_DIM) + weights
        acc_decay = gl.convert_layout(decay, gl.SliceLayout(KEY_DIM, ACC))
        acc = acc * gl.expand_dims(acc_decay, KEY_DIM)
        highest = new_highest
        if KEYS_FIRST:
            fence_async_shared()
        barrier()
        values = _issue_values(shared_weights, latent, acc, KEYS_FIRST, ACC)
        acc = warpgroup_mma_wait(0, deps=[values])
        if KEYS_FIRST:
            barrier()
            _copy_tile_if(
                start + 2 * BLOCK_N < end,
                latent_cache,
                next_page,
                asked,
                stride_cache_block,
                stride_cache_slot,
                latent,
                rope,
                BLOCK_SIZE,
                COPY,
            )
        slot = 1 - slot
    async_copy.wait_group(0)
    return acc, highest, gl.sum(totals, KEY_DIM)


@gluon_jit
def _clamped(key_pos, lowest_key, end):
    """Keys outside `[lowest_key, end)` repeat one inside.

    Unwritten slots may hold NaN, and 0 * NaN is NaN: they must not be read.
    """
    return gl.maximum(gl.minimum(key_pos, end - 1), lowest_key)


@gluon_jit
def _copy_tile_if(
    is_tile,
    latent_cache,
    page,  # [BLOCK_N], as key_pos
    key_pos,
    stride_cache_block,
    stride_cache_slot,
    latent,
    rope,
    BLOCK_SIZE: gl.constexpr,
    COPY: gl.constexpr,
):
    """As `_copy_tile`, but an empty group past the last tile."""
    if is_tile:
        at = page.to(gl.int64) * stride_cache_block + key_pos % BLOCK_SIZE * stride_cache_slot
        _copy_tile(latent_cache, at, latent, rope, COPY)
    else:
        async_copy.commit_group()


@gluon_jit
def _copy_tile(
    latent_cache,
    at,  # [BLOCK_N]
    latent,  # shared memory [BLOCK_N, L], written
    rope,  # shared memory [BLOCK_N, P], written
    COPY: gl.constexpr,
):
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, COPY))
    source = latent_cache + at[:, None]
    async_copy.async_copy_global_to_shared(latent, source + dims[None, :])
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(rope, source + 512 + dims[None, :])
    async_copy.commit_group()


@gluon_jit
def _issue_scores(q_latent, q_rope, latent, rope, no_scores, KEYS_FIRST: gl.constexpr):
    """Both score products of a tile, unfinished."""
    if KEYS_FIRST:
        scores = warpgroup_mma(
            latent, q_latent.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(rope, q_rope.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(
            q_rope, rope.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(q_latent, latent.permute((1, 0)), scores, is_async=True)
    return scores


@gluon_jit
def _tile_maxima(scores, KEYS_FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Largest score of each row of the step `[BLOCK_M]`."""
    if KEYS_FIRST:
        maxima = gl.max(scores, 0)
    else:
        # Each warp group has the maxima of its half of the keys; every thread reads both halves of
        # its own two rows. That takes one barrier, `gl.max` over all keys two.
        BOTH: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [8, 0]],
            [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0], [0, 0]],
            [],
            [64, 2],
        )
        halves = gl.max(gl.reshape(scores, [64, 2, 32]), 2)
        maxima = gl.convert_layout(gl.max(gl.convert_layout(halves, BOTH), 1), ROWS)
    return maxima


@gluon_jit
def _issue_values(weights, latent, acc, KEYS_FIRST: gl.constexpr, ACC: gl.constexpr):
    if KEYS_FIRST:
        acc = warpgroup_mma(latent.permute((1, 0)), weights, acc, is_async=True)
    else:  # from registers: shared memory bounds the product
        own_weights = weights.load(gl.DotOperandLayout(0, ACC, 2))
        acc = warpgroup_mma(own_weights, latent, acc, is_async=True)
    return acc


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
    READS_EARLY: gl.constexpr,  # tables and lengths, before it waits
    OVERLAPS: gl.constexpr,  # starts before the kernel in front of it has ended
):
    """One tile of packed rows of one request, over one split of the keys."""
    wait_in_front(OVERLAPS and not READS_EARLY)
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
    first_row = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - first_row
    seq_len = gl.load(seq_lens + request)
    wait_in_front(OVERLAPS and READS_EARLY)
    if not SPLIT:
        first_spare = gl.load(query_start_loc + gl.num_programs(2)) * NUM_HEADS
        num_spare = num_rows * NUM_HEADS if request == 0 else 0  # one request's programs zero them
        zero_rows(out, num_spare, first_spare + gl.program_id(0), gl.num_programs(0))
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
