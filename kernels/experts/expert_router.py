"""A sigmoid router of a mixture of experts: its logits in one launch, the choice in another.

Where it sits: `models/experts.py` calls it on a GPU, for frozen routers all of it, for
trained ones the choice. As single PyTorch calls the router of one layer takes a dozen launches,
which at a few tokens a step cost as much as the experts' weights, and at many tokens copies all
rows to float32.
Maths: logits = x weight^T in float32; score = sigmoid(logits); the `top_k` experts of highest
score + bias are chosen; their weights are their scores, divided by their sum where asked, times a
scale.
Layout: products of bfloat16 are exact in float32. Each slice of H is added up for itself, then the
slices in their order, so that a token's routing does not depend on its batch. With many tokens one
program has all slices of its tokens; with few there is a program for each slice, since a single one
would wait for the memory. On Hopper both launches may begin before the kernel in front of them has
ended, and wait before they read anything but weights.
Letters: T tokens, E experts, H hidden size.
Source: DeepSeek-V3's router without groups, as in transformers' `Glm4MoeTopkRouter`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.checks import LINE_BYTES, ask_for, start_next_and_wait
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None


@checks.kernel_jit
def router_logits_kernel(
    x,  # [T, H]
    weight,  # [E, H]
    parts,  # [PARTS, T, E] float32, written
    num_tokens,
    num_experts,
    stride_x_row,
    HIDDEN: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,  # of one program
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,  # elements a cache line
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """Logits of a few tokens and a few experts: the sum over some slices of H."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    is_token, is_expert = token < num_tokens, expert < num_experts
    k = tl.arange(0, BLOCK_K)[None, :]
    steps: tl.constexpr = SLICE // BLOCK_K
    first = part * SLICES * steps
    x_at = x + token.to(tl.int64)[:, None] * stride_x_row + first * BLOCK_K + k
    weight_rows = weight + tl.minimum(expert, num_experts - 1)[:, None] * HIDDEN
    weight_at = weight_rows + first * BLOCK_K + k
    if OVERLAPS:
        line = first * BLOCK_K + tl.arange(0, SLICE // LINE)[None, :] * LINE
        ask_for(weight_rows + tl.minimum(line, HIDDEN - 1))
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for step in range(first, first + SLICES * steps):
        inside = k < HIDDEN - step * BLOCK_K
        a = tl.load(x_at, mask=is_token[:, None] & inside, other=0.0)
        w = tl.load(weight_at, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        ends_slice = step % steps == steps - 1
        total = tl.where(ends_slice, total + acc, total)
        acc = tl.where(ends_slice, 0.0, acc)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = part.to(tl.int64) * num_tokens + token
    target = parts + row[:, None] * num_experts + expert[None, :]
    tl.store(target, total, mask=is_token[:, None] & is_expert[None, :])


@checks.kernel_jit
def router_choice_kernel(
    parts,  # [PARTS, T, E] float32
    bias,  # [E] float32
    logits,  # [T, E] float32, written, or None where the parts are the logits
    weights,  # [T, TOP_K + SHARED] float32, written
    index,  # [T, TOP_K + SHARED] int64, written
    num_tokens,
    num_experts,
    scale,
    least_sum,
    NORMALISES: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # 1: every token has expert E, too, with weight 1
    PADDED_TOP_K: tl.constexpr,  # of both
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Adds up the parts of a few tokens' logits; chooses one expert after another by them."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, PADDED_EXPERTS)
    is_token, is_expert = token < num_tokens, expert < num_experts
    at = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    inside = is_token[:, None] & is_expert[None, :]
    start_next_and_wait(OVERLAPS)
    logit = tl.zeros([BLOCK_T, PADDED_EXPERTS], tl.float32)
    at_part = parts + at
    for _ in tl.static_range(PARTS):
        logit += tl.load(at_part, mask=inside, other=0.0)
        at_part += num_tokens * num_experts
    if logits is not None:
        tl.store(logits + at, logit, mask=inside)
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
    weight = tl.where(rank < TOP_K, weight * scale, 1.0)
    chosen = tl.where(rank < TOP_K, chosen, num_experts)
    target = token.to(tl.int64)[:, None] * (TOP_K + SHARED) + rank
    mask = is_token[:, None] & (rank < TOP_K + SHARED)
    tl.store(weights + target, weight, mask=mask)
    tl.store(index + target, chosen.to(tl.int64), mask=mask)


LEAST_SUM = 1e-20  # added to the sum of weights before dividing by it
MAX_ROUTED_EXPERTS = 512
LOGITS_BLOCKS = {"BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_K": 256, "SLICE": 512}
LOGITS_WARPS, LOGITS_STAGES = 2, 5
_MOST_SLICED = 128  # tokens; more have programs enough without, and parts would cost bandwidth
_SCORES_A_PROGRAM = 512


class ChosenExperts(NamedTuple):
    """What a router decides, by falling score + bias; the lower expert first in a tie."""

    weights: Tensor  # [T, top_k] float32
    index: Tensor  # [T, top_k] int64


class RoutedTokens(NamedTuple):
    """The choice, and the logits that it was made by; a shared expert is the last of each token."""

    logits: Tensor  # [T, E] float32
    weights: Tensor
    index: Tensor


def router_logits_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Plain PyTorch. Arguments and result as in `router_logits`."""
    return x.float() @ weight.float().mT


def choose_experts_ref(
    logits: Tensor, bias: Tensor, *, top_k: int, normalises: bool, scale: float
) -> ChosenExperts:
    """Plain PyTorch. Arguments and result as in `choose_experts`."""
    scores = logits.sigmoid()
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    index = order[:, :top_k].contiguous()
    weights = scores.gather(1, index)
    if normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return ChosenExperts(weights * scale, index)


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    normalises: bool,
    scale: float,
    has_shared: bool = False,
    backend: str = "auto",
) -> RoutedTokens:
    """Experts of every token and their weights; one node for `torch.compile`, no gradient.

    Args:
        x: `[T, H]`, last dimension contiguous.
        weight: `[E, H]`, dtype of `x`.
        bias: `[E]` float32, added to the scores for the choice only.
        top_k: experts a token, in [1, E]; E is at most 512.
        normalises: whether a token's weights are divided by their sum.
        scale: factor of all weights.
        has_shared: every token has expert E, too, with weight 1: `top_k + 1` of them.
        backend: `auto`, `reference` or `triton`.
    """
    rule = (top_k, normalises, scale, has_shared, backend)
    return RoutedTokens(*_route_tokens_op(x, weight, bias, *rule))


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    normalises: bool,
    scale: float,
    backend: str = "auto",
) -> ChosenExperts:
    """The experts of every token by its logits `[T, E]`, float32 and contiguous; no gradient.

    One node for `torch.compile`. The other arguments are those of `route_tokens`.
    """
    return ChosenExperts(*_choose_experts_op(logits, bias, top_k, normalises, scale, backend))


@torch.library.custom_op("mtp_research::route_tokens", mutates_args=())
def _route_tokens_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    normalises: bool,
    scale: float,
    has_shared: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    checks.check_rank("x", x, letters="[T, H]")
    checks.check_rank("weight", weight, letters="[E, H]")
    checks.check_shape("weight", weight, shape=(len(weight), x.shape[1]), letters="[E, H]")
    checks.check_dtype("weight", weight, dtype=x.dtype)
    checks.check_device("weight", weight, device=x.device)
    logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
    _check_choice(logits, bias, top_k)
    rule = {"top_k": top_k, "normalises": normalises, "scale": scale}
    if checks.resolve_backend(backend, tensor=x, kernel=router_logits_kernel) == "reference":
        logits = router_logits_ref(x, weight)
        weights, index = choose_experts_ref(logits, bias, **rule)
        if has_shared:
            weights, index = _with_column(weights, 1.0), _with_column(index, len(weight))
        return logits, weights, index
    checks.check_kernel_dtype("x", x, kernel=router_logits_kernel)
    checks.check_last_dim_contiguous("x", x)
    if not len(x):
        return logits, *_empty_choice(logits, top_k + has_shared)
    parts = _launch_logits(x, weight)
    return logits, *_launch_choice(parts, bias, logits=logits, has_shared=has_shared, **rule)


@_route_tokens_op.register_fake
def _route_tokens_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    normalises: bool,
    scale: float,
    has_shared: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    return logits, *_empty_choice(logits, top_k + has_shared)


def _with_column(rows: Tensor, value: float) -> Tensor:
    return torch.cat((rows, torch.full_like(rows[:, :1], value)), dim=1)


def _launch_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Parts `[PARTS, T, E]` of the logits; their sum has the same bits for any number of parts."""
    num_slices = max(1, ceil_div(x.shape[1], LOGITS_BLOCKS["SLICE"]))
    num_parts = num_slices if len(x) <= _MOST_SLICED else 1
    parts = x.new_empty(num_parts, len(x), len(weight), dtype=torch.float32)
    blocks = (LOGITS_BLOCKS["BLOCK_T"], LOGITS_BLOCKS["BLOCK_E"])
    grid = (ceil_div(len(x), blocks[0]), ceil_div(len(weight), blocks[1]), num_parts)
    with checks.launch_device(x):
        router_logits_kernel[grid](
            x,
            weight.contiguous(),
            parts,
            *parts.shape[1:],
            x.stride(0),
            HIDDEN=x.shape[1],
            SLICES=num_slices // num_parts,
            LINE=LINE_BYTES // x.element_size(),
            **LOGITS_BLOCKS,
            **checks.overlapping(x.device),
            num_warps=LOGITS_WARPS,
            num_stages=LOGITS_STAGES,
        )
    return parts


@torch.library.custom_op("mtp_research::choose_experts", mutates_args=())
def _choose_experts_op(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    normalises: bool,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_choice(logits, bias, top_k)
    rule = {"top_k": top_k, "normalises": normalises, "scale": scale}
    if checks.resolve_backend(backend, tensor=logits, kernel=router_choice_kernel) == "reference":
        return tuple(choose_experts_ref(logits, bias, **rule))
    if not len(logits):
        return _empty_choice(logits, top_k)
    return _launch_choice(logits.contiguous()[None], bias, logits=None, **rule)


@_choose_experts_op.register_fake
def _choose_experts_fake(
    logits: Tensor, bias: Tensor, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    return _empty_choice(logits, top_k)


def _launch_choice(
    parts: Tensor,
    bias: Tensor,
    *,
    logits: Tensor | None,
    top_k: int,
    normalises: bool,
    scale: float,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights and experts by logits in parts `[PARTS, T, E]`; puts their sum in `logits`."""
    num_parts, num_tokens, num_experts = parts.shape
    weights, index = _empty_choice(parts[0], top_k + has_shared)
    sizes = choice_constants(num_experts, top_k, has_shared=has_shared)
    with checks.launch_device(parts):
        router_choice_kernel[(ceil_div(num_tokens, sizes["BLOCK_T"]),)](
            parts,
            bias.contiguous(),
            logits,
            weights,
            index,
            num_tokens,
            num_experts,
            scale,
            LEAST_SUM,
            NORMALISES=normalises,
            PARTS=num_parts,
            **sizes,
            **checks.overlapping(parts.device),
            num_warps=4,
        )
    return weights, index


def _empty_choice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k)
    return weights, torch.empty_like(weights, dtype=torch.int64)


def choice_constants(num_experts: int, top_k: int, *, has_shared: bool = False) -> dict[str, int]:
    """The compile-time sizes of the choice, by parameter name."""
    padded = 1 << (num_experts - 1).bit_length()
    return {
        "TOP_K": top_k,
        "SHARED": int(has_shared),
        "PADDED_TOP_K": 1 << (top_k + has_shared - 1).bit_length(),
        "PADDED_EXPERTS": padded,
        "BLOCK_T": max(1, _SCORES_A_PROGRAM // padded),
    }


def _check_choice(logits: Tensor, bias: Tensor, top_k: int) -> None:
    checks.check_rank("logits", logits, letters="[T, E]")
    num_experts = logits.shape[1]
    checks.check_shape("bias", bias, shape=(num_experts,), letters="[E]")
    for name, tensor in (("logits", logits), ("bias", bias)):
        checks.check_dtype(name, tensor, dtype=torch.float32)
    checks.check_device("bias", bias, device=logits.device)
    if not 1 <= top_k <= num_experts <= MAX_ROUTED_EXPERTS:
        raise ValueError(
            f"top_k and E must satisfy 1 <= top_k <= E <= {MAX_ROUTED_EXPERTS}, got top_k={top_k} "
            f"and E={num_experts}."
        )
