"""The two programs of a mixture-of-experts router: logits, and the choice of experts by them.

Where it sits: `expert_router` launches them and says what they compute.
Letters: T tokens, E experts, H hidden size.
"""

from __future__ import annotations

from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None


@checks.kernel_jit
def router_logits_kernel(
    x,  # [T, H]
    weight,  # [E, H]
    logits,  # [T, E] float32, written
    num_tokens,
    num_experts,
    stride_x_row,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Logits of a few tokens and a few experts, over all of H."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_token, is_expert = token < num_tokens, expert < num_experts
    k = tl.arange(0, BLOCK_K)[None, :]
    x_at = x + token.to(tl.int64)[:, None] * stride_x_row + k
    weight_at = weight + expert[:, None] * HIDDEN + k
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        inside = k < HIDDEN - start
        a = tl.load(x_at, mask=is_token[:, None] & inside, other=0.0)
        w = tl.load(weight_at, mask=is_expert[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    target = logits + token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    tl.store(target, acc, mask=is_token[:, None] & is_expert[None, :])


@checks.kernel_jit
def router_choice_kernel(
    logits,  # [T, E] float32
    bias,  # [E] float32
    weights,  # [T, TOP_K] float32, written
    index,  # [T, TOP_K] int64, written
    num_tokens,
    num_experts,
    scale,
    least_sum,
    NORMALISES: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Chooses one expert after another for a few tokens."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, PADDED_EXPERTS)
    is_token, is_expert = token < num_tokens, expert < num_experts
    at = logits + token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    logit = tl.load(at, mask=is_token[:, None] & is_expert[None, :], other=0.0)
    score = tl.sigmoid(logit)
    choice = score + tl.load(bias + expert, mask=is_expert, other=0.0)[None, :]
    choice = tl.where(is_expert[None, :], choice, float("-inf"))
    rank = tl.arange(0, PADDED_TOP_K)[None, :]
    chosen = tl.zeros([BLOCK_T, PADDED_TOP_K], tl.int32)
    weight = tl.zeros([BLOCK_T, PADDED_TOP_K], tl.float32)
    for step in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(choice, 1, tie_break_left=True), num_experts - 1)  # NaN rows
        is_best = expert[None, :] == best[:, None]
        share = tl.sum(tl.where(is_best, score, 0.0), 1)
        chosen = tl.where(rank == step, best[:, None], chosen)
        weight = tl.where(rank == step, share[:, None], weight)
        choice = tl.where(is_best, float("-inf"), choice)
    if NORMALISES:
        weight = weight / (tl.sum(weight, 1) + least_sum)[:, None]
    target = token.to(tl.int64)[:, None] * TOP_K + rank
    mask = is_token[:, None] & (rank < TOP_K)
    tl.store(weights + target, weight * scale, mask=mask)
    tl.store(index + target, chosen.to(tl.int64), mask=mask)
