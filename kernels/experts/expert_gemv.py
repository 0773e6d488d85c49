"""The two products of a mixture-of-experts MLP for up to four tokens, without sorting pairs.

Where it sits: `expert_mlp` launches them for steps of so few rows.
Maths: inner[p] = silu(gate[e] x[t]) * (up[e] x[t]); out[p] = router_weight[p] * (down[e] inner[p])
for every pair p of token t and expert e, multiplied and accumulated in float32.
Layout: programs belong to pairs. That of the first pair of an expert serves all tokens that chose
it, at most one pair each, and those of its other pairs do nothing: no launch has to sort anything.
A program holds a slab of the expert's weights in registers, BLOCK_N rows by BLOCK_K columns, as in
`products/gemv`; those of `down` ask for theirs before `inner` is there.
Letters: T tokens, P pairs, E experts, H hidden size, I inner size of an expert, B edge of a scale's
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.products.gemv import GemvConfig, scaled_row
from mtp_research.kernels.products.scaled_weights import widened

if TYPE_CHECKING:
    from mtp_research.kernels.experts.expert_mlp import ExpertScales, SharedExpert
    from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    triton = tl = None


@checks.kernel_jit
def pairs_of_tokens(chosen, each, expert, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr):
    """The pair of every token with an expert `[BLOCK_T]`, -1 for a token that has none."""
    token = tl.arange(0, BLOCK_T)
    is_pair = (chosen == expert)[None, :] & (each[None, :] // TOP_K == token[:, None])
    return tl.max(tl.where(is_pair, each[None, :], -1), 1)


@checks.kernel_jit
def scales_of_rows(
    scale, matrix, first_row, NUM_ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Where the scales of the block that holds a row of one matrix of many begin."""
    if BLOCK > 0:
        columns: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
        rows: tl.constexpr = (NUM_ROWS + BLOCK - 1) // BLOCK
        scale += (matrix * rows + first_row // BLOCK) * columns
    return scale


@checks.kernel_jit
def gate_up_gemv_kernel(
    x,  # [T, H]
    weight,  # [E, 2I, H]: rows of gate, then of up
    scale,  # float32 [E, 2 ceil(I / B), ceil(H / B)], [E, 2I, 1] for SCALE_BLOCK 0, or None
    shared,  # [2I, H], the weight of expert E, or None for none
    shared_scale,  # of its matrix, or None
    inner,  # [P, I], written but for pairs of expert E without `shared`
    index,  # [P] int64
    num_pairs,
    num_experts,  # E
    stride_x_row,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    NUM_TOKENS: tl.constexpr,  # T
    BLOCK_T: tl.constexpr,  # T or the power of two above it
    BLOCK_P: tl.constexpr,  # P or the power of two above it
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N inner numbers of every token that chose the expert of this pair."""
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    num_steps: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_N
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # they wait for the end of this before they write
    each = tl.arange(0, BLOCK_P)
    chosen = tl.load(index + each, mask=each < num_pairs, other=-1).to(tl.int32)
    expert = tl.load(index + pair).to(tl.int32)
    is_served = tl.sum(((chosen == expert) & (each < pair)).to(tl.int32)) > 0
    if shared is None:
        is_served = is_served | (expert == num_experts)
    if is_served:
        return
    pair_of = pairs_of_tokens(chosen, each, expert, TOP_K, BLOCK_T)
    if shared is not None:  # here and below: Triton 3.6 knows no helper that returns None scales
        is_shared = expert == num_experts
        weight = tl.where(is_shared, shared, weight)
        if scale is not None:
            scale = tl.where(is_shared, shared_scale, scale)
        expert = tl.where(is_shared, 0, expert)
    output = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(output, INNER - 1)  # a repeated row instead of a mask
    k = tl.arange(0, BLOCK_K)[None, :]
    gate_at = weight + expert.to(tl.int64) * (2 * INNER * HIDDEN) + row[:, None] * HIDDEN + k
    up_at = gate_at + INNER * HIDDEN
    gate_scale = scale
    up_scale = scale
    if scale is not None:
        gate_scale = scales_of_rows(scale, 2 * expert, first, INNER, HIDDEN, SCALE_BLOCK)
        up_scale = scales_of_rows(scale, 2 * expert + 1, first, INNER, HIDDEN, SCALE_BLOCK)
    lane = tl.arange(0, BLOCK_T)
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.static_range(num_steps):
        start = step * BLOCK_K
        is_inside = k < HIDDEN - start
        g = tl.load(gate_at + start, mask=is_inside, other=0.0)
        u = tl.load(up_at + start, mask=is_inside, other=0.0)
        for token in range(pair // TOP_K, NUM_TOKENS):
            if tl.max(tl.where(lane == token, pair_of, -1)) >= 0:
                x_at = x + token * stride_x_row
                is_token = (lane == token)[None, :]
                a = scaled_row(x_at, gate_scale, start, HIDDEN, BLOCK_K, SCALE_BLOCK)
                part = tl.sum(widened(g, tl.float32) * a[None, :], 1)
                gate += tl.where(is_token, part[:, None], 0.0)
                if SCALE_BLOCK > 0:
                    a = scaled_row(x_at, up_scale, start, HIDDEN, BLOCK_K, SCALE_BLOCK)
                part = tl.sum(widened(u, tl.float32) * a[None, :], 1)
                up += tl.where(is_token, part[:, None], 0.0)
    if scale is not None and SCALE_BLOCK == 0:
        scale_at = scale + 2 * expert * INNER + row
        gate *= tl.load(scale_at)[:, None]
        up *= tl.load(scale_at + INNER)[:, None]
    value = gate * tl.sigmoid(gate) * up
    target = inner + pair_of[None, :] * INNER + output[:, None]
    is_place = (pair_of >= 0)[None, :] & (output < INNER)[:, None]
    tl.store(target, value.to(inner.dtype.element_ty), mask=is_place)


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
    num_pairs,
    num_experts,  # E
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    NUM_TOKENS: tl.constexpr,  # T
    BLOCK_T: tl.constexpr,  # T or the power of two above it
    BLOCK_P: tl.constexpr,  # P or the power of two above it
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N outputs of every token that chose the expert of this pair."""
    num_blocks: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_steps: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_N
    # Written before any program of `gate_up_gemv_kernel`, which is in front of this, got past its
    # wait; read from L2, where they lie: nothing has refreshed this multiprocessor's cache yet.
    each = tl.arange(0, BLOCK_P)
    is_pair = each < num_pairs
    chosen = tl.load(index + each, mask=is_pair, other=-1, cache_modifier=".cg").to(tl.int32)
    expert = tl.load(index + pair, cache_modifier=".cg").to(tl.int32)
    is_served = tl.sum(((chosen == expert) & (each < pair)).to(tl.int32)) > 0
    if shared is None:
        is_served = is_served | (expert == num_experts)
    pair_of = pairs_of_tokens(chosen, each, expert, TOP_K, BLOCK_T)
    if shared is not None:
        is_shared = expert == num_experts
        weight = tl.where(is_shared, shared, weight)
        if scale is not None:
            scale = tl.where(is_shared, shared_scale, scale)
        expert = tl.where(is_shared, 0, expert)
    output = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(output, HIDDEN - 1)  # a repeated row instead of a mask
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + expert.to(tl.int64) * (HIDDEN * INNER) + row[:, None] * INNER + k
    w = tl.load(weight_at, mask=(k < INNER) & (is_served == 0), other=0.0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # idle programs, too: the end of all says that others have ended
        tl.extra.cuda.gdc_launch_dependents()
    if is_served:
        return
    scale_at = scale
    if scale is not None:
        scale_at = scales_of_rows(scale, expert, first, HIDDEN, INNER, SCALE_BLOCK)
    lane = tl.arange(0, BLOCK_T)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.static_range(num_steps):
        start = step * BLOCK_K
        if step > 0:
            w = tl.load(weight_at + start, mask=k < INNER - start, other=0.0)
        for token in range(pair // TOP_K, NUM_TOKENS):
            place = tl.max(tl.where(lane == token, pair_of, -1))
            if place >= 0:
                inner_at = inner + place.to(tl.int64) * INNER
                a = scaled_row(inner_at, scale_at, start, INNER, BLOCK_K, SCALE_BLOCK)
                part = tl.sum(widened(w, tl.float32) * a[None, :], 1)
                acc += tl.where((lane == token)[None, :], part[:, None], 0.0)
    if scale is not None and SCALE_BLOCK == 0:
        acc *= tl.load(scale + expert * HIDDEN + row)[:, None]
    is_token = pair_of >= 0
    share = tl.load(router_weights + pair_of, mask=is_token, other=0.0).to(tl.float32)
    target = out + pair_of[None, :] * HIDDEN + output[:, None]
    is_place = is_token[None, :] & (output < HIDDEN)[:, None]
    tl.store(target, (acc * share[None, :]).to(out.dtype.element_ty), mask=is_place)


MAX_TOKENS = 4


class ExpertGemvConfig(NamedTuple):
    """Shapes of both products' programs."""

    gate_up: GemvConfig
    down: GemvConfig


def launch_expert_gemv(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    out: Tensor,
    config: ExpertGemvConfig,
    scales: ExpertScales | None,
    shared: SharedExpert | None,
) -> None:
    """Both products; arguments as in `expert_mlp.expert_pairs`, writes `out`."""
    num_tokens, top_k = top_k_index.shape
    num_experts, hidden_size, inner_size = down_proj.shape
    index = top_k_index.reshape(-1)
    inner = x.new_empty(len(index), inner_size)
    sizes = {"TOP_K": top_k, "HIDDEN": hidden_size, "INNER": inner_size}
    with checks.launch_device(x):
        product = expert_gemv_constants(num_tokens, top_k, config=config.gate_up, scales=scales)
        gate_up_gemv_kernel[(len(index) * ceil_div(inner_size, product["BLOCK_N"]),)](
            x,
            gate_up_proj,
            None if scales is None else scales.gate_up,
            None if shared is None else shared.gate_up,
            None if shared is None else shared.gate_up_scale,
            inner,
            index,
            len(index),
            num_experts,
            x.stride(0),
            **sizes,
            **product,
            **checks.overlapping(x.device),
            num_warps=config.gate_up.num_warps,
        )
        product = expert_gemv_constants(num_tokens, top_k, config=config.down, scales=scales)
        down_gemv_kernel[(len(index) * ceil_div(hidden_size, product["BLOCK_N"]),)](
            inner,
            down_proj,
            None if scales is None else scales.down,
            None if shared is None else shared.down,
            None if shared is None else shared.down_scale,
            top_k_weights.reshape(-1),
            out,
            index,
            len(index),
            num_experts,
            **sizes,
            **product,
            **checks.overlapping(x.device),
            num_warps=config.down.num_warps,
        )


def expert_gemv_constants(
    num_tokens: int, top_k: int, *, config: GemvConfig, scales: ExpertScales | None
) -> dict[str, int]:
    """Compile-time arguments of a product but the layer's sizes and `OVERLAPS`, by name."""
    scale_block = 0 if scales is None else scales.block
    return {
        "NUM_TOKENS": num_tokens,
        "BLOCK_T": triton.next_power_of_2(num_tokens),
        "BLOCK_P": triton.next_power_of_2(num_tokens * top_k),
        "BLOCK_N": min(config.block_n, scale_block or config.block_n),
        "BLOCK_K": max(config.block_k, scale_block),
        "SCALE_BLOCK": scale_block,
    }
