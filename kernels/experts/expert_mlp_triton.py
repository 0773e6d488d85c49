"""The two products of a mixture-of-experts MLP over tiles of pairs, as Triton programs.

Where it sits: `expert_mlp` launches them.
Maths: inner[p] = silu(gate[e] x[t]) * (up[e] x[t]); out[p] = router_weight[p] * (down[e] inner[p])
for every pair p of token t and expert e, accumulated in float32.
Layout: `inner` stays in the order of the tiles, so that only the first product gathers and only the
second one scatters. Weights of one expert are contiguous; those that no token chose are not read.
FP8 weights are converted to the dtype of the rows in registers, which is exact, and what a step
adds is multiplied by the scales of its block (`scaled_weights`); with a scale per row the sum is.
In large tiles they are the left operand, which the matrix instruction takes from registers (as the
right one they would be written back to shared memory), and a program's sums stand transposed.
Letters: T tokens, P pairs, E experts, H hidden size, I inner size of an expert, B edge of a scale's
block.
"""

from __future__ import annotations

from mtp_research.kernels import checks
from mtp_research.kernels.checks import ask_for
from mtp_research.kernels.products.scaled_weights import (
    add_product,
    scaled_by_row,
    scales_of,
    widened,
)

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None


@checks.kernel_jit
def place_of(program, num_tiles, num_blocks, GROUP_TILES: tl.constexpr):
    """Tile and block of outputs of a program: groups of tiles walk all outputs together.

    Tiles of a group that run beside each other share weights in L2, blocks their rows.
    """
    group = program // (GROUP_TILES * num_blocks)
    first = group * GROUP_TILES
    size = tl.minimum(num_tiles - first, GROUP_TILES)
    inside = program - first * num_blocks
    return first + inside % size, inside // size


@checks.kernel_jit
def along_sums(rows, IS_LEFT: tl.constexpr):
    """Rows of a weight `[BLOCK_N]` in the direction in which `no_sums` has outputs."""
    return rows[:, None] if IS_LEFT else rows[None, :]


@checks.kernel_jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_LEFT: tl.constexpr):
    """Zeros `[BLOCK_M, BLOCK_N]`, or transposed where the weight is the left operand."""
    if IS_LEFT:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return sums


@checks.kernel_jit
def add_step(sums, rows, weight, scale_at, start, BLOCK: tl.constexpr, IS_LEFT: tl.constexpr):
    """Adds rows `[BLOCK_M, BLOCK_K]` times a weight `[BLOCK_N, BLOCK_K]`, as `no_sums` lie."""
    weight = widened(weight, rows.dtype)
    if IS_LEFT:
        sums = add_product(sums, weight, tl.trans(rows), scale_at, start, BLOCK)
    else:
        sums = add_product(sums, rows, tl.trans(weight), scale_at, start, BLOCK)
    return sums


@checks.kernel_jit
def by_row(sums, IS_LEFT: tl.constexpr):
    """Sums as `[BLOCK_M, BLOCK_N]`."""
    return tl.trans(sums) if IS_LEFT else sums


@checks.kernel_jit
def gate_up_kernel(
    x,  # [T, H]
    weight,  # [E, 2I, H]: rows of gate, then of up
    scale,  # float32 [E, 2 ceil(I / B), ceil(H / B)], [E, 2I, 1] for SCALE_BLOCK 0, or None
    shared,  # [2I, H], the weight of expert E, or None for none
    shared_scale,  # of its matrix, or None
    inner,  # [tiles x BLOCK_M, I], written where a row holds a pair
    pair_index,  # [tiles x BLOCK_M] int32, -1 for padding
    tile_expert,  # [tiles] int32, -1 for spare tiles
    num_tiles,
    num_experts,  # E
    stride_x_row,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # B, a multiple of BLOCK_K, or 0
    IS_LEFT: tl.constexpr,  # the weight is the left operand
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """Gathers the rows of one tile and multiplies them with a block of gate and the same of up."""
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    even: tl.constexpr = HIDDEN % BLOCK_K == 0
    tile, block = place_of(tl.program_id(0), num_tiles, num_blocks, GROUP_TILES)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    if shared is not None:  # here and below: Triton 3.6 knows no helper that returns None scales
        is_shared = expert == num_experts
        weight = tl.where(is_shared, shared, weight)
        if scale is not None:
            scale = tl.where(is_shared, shared_scale, scale)
        expert = tl.where(is_shared, 0, expert)
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(pair_index + place)
    is_row = pair >= 0
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < INNER
    k = tl.arange(0, BLOCK_K)[None, :]
    x_at = x + (tl.maximum(pair, 0) // TOP_K).to(tl.int64)[:, None] * stride_x_row + k
    rows = tl.minimum(output, INNER - 1)  # a repeated row instead of a mask
    gate_at = weight + expert.to(tl.int64) * (2 * INNER * HIDDEN) + rows[:, None] * HIDDEN + k
    up_at = gate_at + INNER * HIDDEN
    along = along_sums(rows, IS_LEFT)
    gate_scale = scales_of(scale, 2 * expert, along, INNER, HIDDEN, SCALE_BLOCK)
    up_scale = scales_of(scale, 2 * expert + 1, along, INNER, HIDDEN, SCALE_BLOCK)
    gate = no_sums(BLOCK_M, BLOCK_N, IS_LEFT)
    up = no_sums(BLOCK_M, BLOCK_N, IS_LEFT)
    for start in range(0, HIDDEN, BLOCK_K):
        if even:
            a = tl.load(x_at, mask=is_row[:, None], other=0.0)
            g = tl.load(gate_at)
            u = tl.load(up_at)
        else:
            inside = k < HIDDEN - start
            a = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0)
            g = tl.load(gate_at, mask=inside, other=0.0)
            u = tl.load(up_at, mask=inside, other=0.0)
        gate = add_step(gate, a, g, gate_scale, start, SCALE_BLOCK, IS_LEFT)
        up = add_step(up, a, u, up_scale, start, SCALE_BLOCK, IS_LEFT)
        x_at += BLOCK_K
        gate_at += BLOCK_K
        up_at += BLOCK_K
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    gate = scaled_by_row(gate, gate_scale, SCALE_BLOCK)
    up = scaled_by_row(up, up_scale, SCALE_BLOCK)
    value = by_row(gate * tl.sigmoid(gate) * up, IS_LEFT)
    target = inner + place.to(tl.int64)[:, None] * INNER + output[None, :]
    tl.store(target, value.to(inner.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@checks.kernel_jit
def down_kernel(
    inner,  # [tiles x BLOCK_M, I]
    weight,  # [E, H, I]
    scale,  # float32 [E, ceil(H / B), ceil(I / B)], [E, H, 1] for SCALE_BLOCK 0, or None
    shared,  # [H, I], the weight of expert E, or None for none
    shared_scale,  # of its matrix, or None
    router_weights,  # [P]
    out,  # [P, H], written
    pair_index,  # [tiles x BLOCK_M] int32, -1 for padding
    tile_expert,  # [tiles] int32, -1 for spare tiles
    num_tiles,
    num_experts,  # E
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # B, a multiple of BLOCK_K, or 0
    IS_LEFT: tl.constexpr,  # the weight is the left operand
    NUM_EARLY_LINES: tl.constexpr,  # cache lines of a weight row asked for early, 0 or a power of 2
    LINE: tl.constexpr,  # elements a cache line
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """Multiplies the rows of one tile with a block of down and scatters them to their pairs."""
    num_blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    even: tl.constexpr = INNER % BLOCK_K == 0
    tile, block = place_of(tl.program_id(0), num_tiles, num_blocks, GROUP_TILES)
    # Written before any program of `gate_up_kernel`, which is in front of this, got past its wait;
    # read from L2, where it lies: nothing has refreshed this multiprocessor's own cache yet.
    expert = tl.load(tile_expert + tile, cache_modifier=".cg")
    if shared is not None:
        is_shared = expert == num_experts
        weight = tl.where(is_shared, shared, weight)
        if scale is not None:
            scale = tl.where(is_shared, shared_scale, scale)
        expert = tl.where(is_shared, 0, expert)
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < HIDDEN
    k = tl.arange(0, BLOCK_K)[None, :]
    rows = tl.minimum(output, HIDDEN - 1)  # a repeated row instead of a mask
    weight_rows = weight + expert.to(tl.int64) * (HIDDEN * INNER) + rows[:, None] * INNER
    if OVERLAPS:
        if NUM_EARLY_LINES > 0 and expert >= 0:
            line = tl.arange(0, NUM_EARLY_LINES)[None, :] * LINE
            ask_for(weight_rows + tl.minimum(line, INNER - 1))
        tl.extra.cuda.gdc_wait()  # spare programs, too: the end of all says that others have ended
    if expert < 0:
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(pair_index + place)
    is_row = pair >= 0
    inner_at = inner + place.to(tl.int64)[:, None] * INNER + k
    weight_at = weight_rows + k
    along = along_sums(rows, IS_LEFT)
    scale_at = scales_of(scale, expert, along, HIDDEN, INNER, SCALE_BLOCK)
    acc = no_sums(BLOCK_M, BLOCK_N, IS_LEFT)
    for start in range(0, INNER, BLOCK_K):
        if even:
            a = tl.load(inner_at, mask=is_row[:, None], other=0.0)
            w = tl.load(weight_at)
        else:
            inside = k < INNER - start
            a = tl.load(inner_at, mask=is_row[:, None] & inside, other=0.0)
            w = tl.load(weight_at, mask=inside, other=0.0)
        acc = add_step(acc, a, w, scale_at, start, SCALE_BLOCK, IS_LEFT)
        inner_at += BLOCK_K
        weight_at += BLOCK_K
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    acc = by_row(scaled_by_row(acc, scale_at, SCALE_BLOCK), IS_LEFT)
    share = tl.load(router_weights + tl.maximum(pair, 0), mask=is_row, other=0.0).to(tl.float32)
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + output[None, :]
    value = (acc * share[:, None]).to(out.dtype.element_ty)
    tl.store(target, value, mask=is_row[:, None] & is_output[None, :])
