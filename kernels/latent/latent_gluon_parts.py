"""Parts of the Gluon program of latent attention: its imports, spans, rows copied and stored.

Where it sits: called by `latent_gluon` before and after its loop over keys.
Letters: R requests, T packed rows, H heads, L latent (512), P rotary key size (64).
"""

from __future__ import annotations

from mtp_research.kernels import checks

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in triton 3.7
except ImportError:  # latent_attention takes the Triton program then
    gluon = gl = async_copy = fence_async_shared = barrier = None
    warpgroup_mma = warpgroup_mma_wait = None

GLUON_DIMS = (512, 64)  # L and P


def gluon_jit(function: checks.Kernel) -> checks.Kernel:
    """`gluon.jit`, or the bare function where Gluon is missing (it is then never called)."""
    return function if gluon is None else gluon.jit(function)


@gluon_jit
def wait_in_front(OVERLAPS: gl.constexpr):
    """As that of `kernels.checks`."""
    if OVERLAPS:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon_jit
def visible_span(
    lanes,  # [BLOCK_M]
    tile_row,  # first packed row of the tile
    num_packed,  # packed rows of the request from the tile on
    seq_len,
    query_len,
    first_row,
    request,
    positions,  # [T] int64 or None
    kv_start,  # [R] int32 or None
    max_keys,
    NUM_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Position of each row, the least of them, the lowest key that any sees, and keys to visit."""
    if positions is None:
        shift = seq_len - query_len
        row_pos = shift + (tile_row + lanes) // NUM_HEADS
        first_pos = shift + tile_row // NUM_HEADS
        last_pos = gl.minimum(shift + (tile_row + BLOCK_M - 1) // NUM_HEADS, seq_len - 1)
    else:
        is_row = lanes < num_packed
        at = positions + first_row + (tile_row + lanes) // NUM_HEADS
        row_pos = gl.load(at, mask=is_row, other=-1).to(gl.int32)
        first_pos = _same_in_warp(gl.min(gl.where(is_row, row_pos, seq_len), 0))
        last_pos = _same_in_warp(gl.max(row_pos, 0))
    lowest_key = 0
    if kv_start is not None:
        lowest_key = gl.load(kv_start + request)
    begin = lowest_key // BLOCK_N * BLOCK_N
    end = gl.minimum(gl.minimum(last_pos + 1, seq_len), max_keys)
    if end <= lowest_key:
        end = begin
    return row_pos, first_pos, lowest_key, begin, end


@gluon_jit
def _same_in_warp(scalar):
    """The scalar, which the compiler then knows to be the same in all threads of a warp.

    It cannot tell so of a reduction over rows, and a loop up to such an end takes 70 registers
    more: 4 warps of 32 rows would spill.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;",
        "=r,r",
        [scalar],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def copy_queries(
    query_latent,
    query_rope,
    q_latent,  # shared memory [BLOCK_M, L], written
    q_rope,  # shared memory [BLOCK_M, P], written
    first_row,
    tile_row,
    num_packed,
    stride_latent_row,
    stride_latent_head,
    stride_rope_row,
    stride_rope_head,
    NUM_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Starts the copy of a tile of rows; part of the group that is committed next."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Rows past the request's own repeat its last one: no masks, and nothing of them is stored.
    lanes = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    packed = tile_row + gl.minimum(lanes, num_packed - 1)
    row = (first_row + packed // NUM_HEADS).to(gl.int64)
    head = packed % NUM_HEADS
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, COPY))
    at = row * stride_latent_row + head * stride_latent_head
    async_copy.async_copy_global_to_shared(q_latent, query_latent + at[:, None] + dims[None, :])
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    at = row * stride_rope_row + head * stride_rope_head
    async_copy.async_copy_global_to_shared(q_rope, query_rope + at[:, None] + dims[None, :])


@gluon_jit
def zero_rows(out, num_rows, begin, step):
    """Zeros every `step`-th of the rows `[begin, num_rows)` of `[num_rows, L]`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    dims = gl.arange(0, 512, layout=LAYOUT)
    for row in range(begin, num_rows, step):
        zeros = gl.full([512], 0.0, out.dtype.element_ty, layout=LAYOUT)
        gl.store(out + row.to(gl.int64) * 512 + dims, zeros)


@gluon_jit
def store_new_latents(
    new_latent,  # [T, 1, L]
    new_rope,  # [T, 1, P]
    slot_mapping,  # [T] int64
    first_row,
    latent_cache,  # written
    num_slots,
    num_new_rows,
    first_pos,  # position of the request's first new row
    begin,
    end,
    stride_new_latent_row,
    stride_new_rope_row,
    stride_cache_block,
    stride_cache_slot,
    BLOCK_SIZE: gl.constexpr,
    NUM_ROWS: gl.constexpr,
):
    """As `store_kv.load_new_rows` and `write_new_rows`."""
    if (first_pos + num_new_rows > begin) & (first_pos < end):
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        rows = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(1, COPY))
        pos = first_pos + rows
        stored = (rows < num_new_rows) & (pos >= begin) & (pos < end)
        packed = first_row.to(gl.int64) + rows
        slot = gl.load(slot_mapping + packed, mask=stored, other=-1)
        stored = stored & (slot >= 0) & (slot < num_slots)
        at = slot // BLOCK_SIZE * stride_cache_block + slot % BLOCK_SIZE * stride_cache_slot
        stored = stored[:, None]
        dims = gl.arange(0, 512, layout=gl.SliceLayout(0, COPY))[None, :]
        new = gl.load(new_latent + (packed * stride_new_latent_row)[:, None] + dims, mask=stored)
        gl.store(latent_cache + at[:, None] + dims, new, mask=stored)
        dims = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))[None, :]
        new = gl.load(new_rope + (packed * stride_new_rope_row)[:, None] + dims, mask=stored)
        gl.store(latent_cache + at[:, None] + 512 + dims, new, mask=stored)
    barrier()  # every thread sees the rows that the others stored
