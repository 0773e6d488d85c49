"""The two products of a mixture-of-experts MLP for one token, without sorting pairs.

Where it sits: `expert_mlp` launches them where a step has one token.
Maths: inner[p] = silu(gate[e] x) * (up[e] x); out[p] = router_weight[p] * (down[e] inner[p]) for
the pair p of the token and its expert e = index[p], multiplied and accumulated in float32.
Layout: no two pairs have an expert in common, so that programs belong to pairs and no launch has to
sort them. A program holds a slab of the expert's weights in registers, as in `products/gemv`. Those
of `down` ask for theirs before `inner` is there; those of a shared expert, which come first, before
the others are chosen.
Letters: P pairs, E experts, H hidden size, I inner size of an expert, B edge of a scale's block.
"""

from __future__ import annotations

from mtp_research.kernels import checks
from mtp_research.kernels.checks import wait_in_front
from mtp_research.kernels.products.gemv import GemvConfig, dot_rows
from mtp_research.kernels.products.scaled_weights import scales_of

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

# On one H100 at most 2 % slower than the fastest of 9 and 10 shapes for layers of GLM-4.5-Air, in
# FP8, in bfloat16 and split over two cards, and of GLM-4.7-Flash.
GATE_UP = GemvConfig(8, 2048, 4)
DOWN = GemvConfig(32, 512, 4)


@checks.kernel_jit
def gate_up_gemv_kernel(
    x,  # [H]
    weight,  # [E, 2I, H]: rows of gate, then of up
    scale,  # float32 [E, 2 ceil(I / B), ceil(H / B)], [E, 2I, 1] for SCALE_BLOCK 0, or None
    shared,  # [2I, H], the weight of expert E, which is the last pair's, or None for none
    shared_scale,  # of its matrix, or None
    inner,  # [P, I], written but for pairs of expert E without `shared`
    index,  # [P] int64
    num_experts,  # E
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N inner numbers of a pair."""
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    num_steps: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    last = tl.num_programs(0) // num_blocks - 1
    pair = last - tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_N
    output = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(output, INNER - 1)  # a repeated row instead of a mask
    k = tl.arange(0, BLOCK_K)[None, :]
    expert = num_experts
    if shared is None or pair < last:  # the last one is the shared expert's
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
        expert = tl.load(index + pair).to(tl.int32)
    if shared is not None:  # here and below: Triton 3.6 knows no helper that returns None scales
        is_shared = expert == num_experts
        weight = tl.where(is_shared, shared, weight)
        if scale is not None:
            scale = tl.where(is_shared, shared_scale, scale)
        expert = tl.where(is_shared, 0, expert)
    elif expert == num_experts:
        return
    gate_at = weight + expert.to(tl.int64) * (2 * INNER * HIDDEN) + row[:, None] * HIDDEN + k
    up_at = gate_at + INNER * HIDDEN
    gate_scale = scales_of(scale, 2 * expert, first, INNER, HIDDEN, SCALE_BLOCK)
    up_scale = scales_of(scale, 2 * expert + 1, first, INNER, HIDDEN, SCALE_BLOCK)
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.static_range(num_steps):
        start = step * BLOCK_K
        g = tl.load(gate_at + start, mask=k < HIDDEN - start, other=0.0)
        u = tl.load(up_at + start, mask=k < HIDDEN - start, other=0.0)
        if step == 0:
            wait_in_front(OVERLAPS)
        gate += dot_rows(g, x, gate_scale, start, HIDDEN, BLOCK_K, SCALE_BLOCK)
        up += dot_rows(u, x, up_scale, start, HIDDEN, BLOCK_K, SCALE_BLOCK)
    if scale is not None and SCALE_BLOCK == 0:
        gate *= tl.load(gate_scale + row - first)
        up *= tl.load(up_scale + row - first)
    value = gate * tl.sigmoid(gate) * up
    target = inner + pair * INNER + output
    tl.store(target, value.to(inner.dtype.element_ty), mask=output < INNER)


@checks.kernel_jit
def down_gemv_kernel(
    inner,  # [P, I]
    weight,  # [E, H, I]
    scale,  # float32 [E, ceil(H / B), ceil(I / B)], [E, H, 1] for SCALE_BLOCK 0, or None
    shared,  # [H, I], the weight of expert E, or None for none
    shared_scale,  # of its matrix, or None
    router_weights,  # [P]
    out,  # [P, H], written but for pairs of expert E without `shared`
    index,  # [P] int64
    num_experts,  # E
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N outputs of a pair."""
    num_blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_steps: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_N
    # Written before any program of `gate_up_gemv_kernel`, which is in front of this, got past its
    # wait; read from L2, where it lies: nothing has refreshed this multiprocessor's own cache yet.
    expert = tl.load(index + pair, cache_modifier=".cg").to(tl.int32)
    is_last = expert == num_experts  # shared, or away
    if shared is not None:
        weight = tl.where(is_last, shared, weight)
        if scale is not None:
            scale = tl.where(is_last, shared_scale, scale)
    expert = tl.where(is_last, 0, expert)
    output = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(output, HIDDEN - 1)  # a repeated row instead of a mask
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + expert.to(tl.int64) * (HIDDEN * INNER) + row[:, None] * INNER + k
    is_away = is_last if shared is None else False
    w = tl.load(weight_at, mask=(k < INNER) & (is_away == 0), other=0.0)
    wait_in_front(OVERLAPS)  # idle programs, too: the end of all says that others have ended
    if is_away:
        return
    row_scale = scales_of(scale, expert, first, HIDDEN, INNER, SCALE_BLOCK)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.static_range(num_steps):
        start = step * BLOCK_K
        if step > 0:
            w = tl.load(weight_at + start, mask=k < INNER - start, other=0.0)
        acc += dot_rows(w, inner + pair * INNER, row_scale, start, INNER, BLOCK_K, SCALE_BLOCK)
    if scale is not None and SCALE_BLOCK == 0:
        acc *= tl.load(row_scale + row - first)
    acc *= tl.load(router_weights + pair).to(tl.float32)
    tl.store(out + pair * HIDDEN + output, acc.to(out.dtype.element_ty), mask=output < HIDDEN)
