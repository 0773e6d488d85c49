"""A sigmoid router of a mixture of experts: the logits in one launch, the choice in another.

Where it sits: `models/experts.py` calls it on a GPU, for frozen routers all of it, for
trained ones the choice. As single PyTorch calls the router of one layer takes a dozen launches,
which at a few tokens a step cost as much as the experts' weights, and at many tokens copies all
rows to float32.
Maths: logits = x weight^T in float32; score = sigmoid(logits); the `top_k` experts of highest
score + bias are chosen; their weights are their scores, divided by their sum where asked, times a
scale.
Layout: products of bfloat16 are exact in float32, and all terms of a logit are added up by one
program in an order that follows from H alone: a token's routing does not depend on its batch.
Letters: T tokens, E experts, H hidden size.
Source: DeepSeek-V3's router without groups, as in transformers' `Glm4MoeTopkRouter`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from torch import Tensor

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


LEAST_SUM = 1e-20  # added to the sum of weights before dividing by it
MAX_ROUTED_EXPERTS = 512
LOGITS_BLOCKS = {"BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_K": 256}
LOGITS_WARPS, LOGITS_STAGES = 2, 5
_SCORES_A_PROGRAM = 512


class ChosenExperts(NamedTuple):
    """What a router decides, by falling score + bias; the lower expert first in a tie."""

    weights: Tensor  # [T, top_k] float32
    index: Tensor  # [T, top_k] int64


class RoutedTokens(NamedTuple):
    """The choice, and the logits that it was made by."""

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
    backend: str = "auto",
) -> RoutedTokens:
    """Experts of every token and their weights: `router_logits`, then `choose_experts`."""
    logits = router_logits(x, weight, backend=backend)
    chosen = choose_experts(
        logits, bias, top_k=top_k, normalises=normalises, scale=scale, backend=backend
    )
    return RoutedTokens(logits, *chosen)


def router_logits(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Logits `[T, E]` float32; one node for `torch.compile`, no gradient.

    Args:
        x: `[T, H]`, last dimension contiguous.
        weight: `[E, H]`, dtype of `x`.
        backend: `auto`, `reference` or `triton`.
    """
    return _router_logits_op(x, weight, backend)


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    normalises: bool,
    scale: float,
    backend: str = "auto",
) -> ChosenExperts:
    """The experts of every token by their logits; one node for `torch.compile`, no gradient.

    Args:
        logits: `[T, E]` float32, contiguous.
        bias: `[E]` float32, added to the scores for the choice only.
        top_k: experts a token, in [1, E]; E is at most 512.
        normalises: whether a token's weights are divided by their sum.
        scale: factor of all weights.
        backend: `auto`, `reference` or `triton`.
    """
    return ChosenExperts(*_choose_experts_op(logits, bias, top_k, normalises, scale, backend))


@torch.library.custom_op("mtp_research::router_logits", mutates_args=())
def _router_logits_op(x: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
    checks.check_rank("x", x, letters="[T, H]")
    checks.check_rank("weight", weight, letters="[E, H]")
    checks.check_shape("weight", weight, shape=(len(weight), x.shape[1]), letters="[E, H]")
    checks.check_dtype("weight", weight, dtype=x.dtype)
    checks.check_device("weight", weight, device=x.device)
    if checks.resolve_backend(backend, tensor=x, kernel=router_logits_kernel) == "reference":
        return router_logits_ref(x, weight)
    checks.check_kernel_dtype("x", x, kernel=router_logits_kernel)
    checks.check_last_dim_contiguous("x", x)
    logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
    blocks = (LOGITS_BLOCKS["BLOCK_T"], LOGITS_BLOCKS["BLOCK_E"])
    grid = (ceil_div(len(x), blocks[0]), ceil_div(len(weight), blocks[1]))
    if logits.numel():
        with checks.launch_device(x):
            router_logits_kernel[grid](
                x,
                weight.contiguous(),
                logits,
                *logits.shape,
                x.stride(0),
                HIDDEN=x.shape[1],
                **LOGITS_BLOCKS,
                num_warps=LOGITS_WARPS,
                num_stages=LOGITS_STAGES,
            )
    return logits


@_router_logits_op.register_fake
def _router_logits_fake(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


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
    if checks.resolve_backend(backend, tensor=logits, kernel=router_choice_kernel) == "reference":
        rule = {"top_k": top_k, "normalises": normalises, "scale": scale}
        return tuple(choose_experts_ref(logits, bias, **rule))
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty(num_tokens, top_k)
    index = torch.empty_like(weights, dtype=torch.int64)
    sizes = choice_constants(num_experts, top_k)
    if num_tokens:
        with checks.launch_device(logits):
            router_choice_kernel[(ceil_div(num_tokens, sizes["BLOCK_T"]),)](
                logits.contiguous(),
                bias.contiguous(),
                weights,
                index,
                num_tokens,
                num_experts,
                scale,
                LEAST_SUM,
                NORMALISES=normalises,
                **sizes,
                num_warps=4,
            )
    return weights, index


@_choose_experts_op.register_fake
def _choose_experts_fake(
    logits: Tensor, bias: Tensor, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k)
    return weights, torch.empty_like(weights, dtype=torch.int64)


def choice_constants(num_experts: int, top_k: int) -> dict[str, int]:
    """The compile-time sizes of the choice, by parameter name."""
    padded = 1 << (num_experts - 1).bit_length()
    return {
        "TOP_K": top_k,
        "PADDED_TOP_K": 1 << (top_k - 1).bit_length(),
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
