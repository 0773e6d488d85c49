"""Routers of known families, with the choice of experts in one kernel instead of a dozen calls.

The layer calls its router as a module, so the module's `forward` is replaced on the instance. A
frozen router's logits come from a kernel too, which adds up a token's terms in an order that its
batch does not change, so that deterministic decoding may call it. A trained router's logits and
weights are PyTorch's, with their gradients; only the choice, which has none, is the kernel's.

Letters: T tokens, E experts, H hidden size.
"""

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter

from mtp_research.kernels.experts.expert_router import (
    LEAST_SUM,
    MAX_ROUTED_EXPERTS,
    choose_experts,
    router_logits,
)

# Classes that the kernel was compared with; both are DeepSeek-V3's rule.
_KNOWN = (Glm4MoeTopkRouter, Glm4MoeLiteTopkRouter)


def fuse_routers(model: nn.Module) -> int:
    """Replace the `forward` of routers that the kernel knows, in place; returns how many.

    Routers of several groups are left alone, and so are those whose `forward` something else has
    replaced, as libraries do that move weights.
    """
    known = [module for module in model.modules() if type(module) in _KNOWN]
    fused = [router for router in known if _is_fusable(router)]
    for router in fused:
        router.forward = MethodType(router_forward, router)
    return len(fused)


def router_forward(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[T, E]`, weights and indices `[T, top_k]`, as the class's own `forward` gives them.

    Args:
        router: a module of a known class.
        hidden_states: `[..., H]`.
    """
    if not hidden_states.is_cuda:
        return type(router).forward(router, hidden_states)
    return fused_router(router, hidden_states)


def fused_router(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `router_forward`, on any device."""
    weight = cast(Tensor, router.weight)
    rows = hidden_states.reshape(-1, weight.shape[1])
    is_trained = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    if is_trained or rows.dtype != weight.dtype or weight.dtype != torch.bfloat16:
        logits = functional.linear(rows.float(), weight.float())
    else:
        logits = router_logits(rows, weight)
    normalises, scale = (
        bool(router.norm_topk_prob),
        float(cast(float, router.routed_scaling_factor)),
    )
    weights, index = choose_experts(
        logits.detach(),
        cast(Tensor, router.e_score_correction_bias).float(),
        top_k=cast(int, router.top_k),
        normalises=normalises,
        scale=scale,
    )
    if is_trained:
        weights = logits.sigmoid().gather(1, index)
        if normalises:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
        weights = weights * scale
    return logits, weights, index


def _is_fusable(router: nn.Module) -> bool:
    has_one_group = (router.num_group, router.topk_group) == (1, 1)
    is_small = cast(int, router.num_experts) <= MAX_ROUTED_EXPERTS
    return has_one_group and is_small and "forward" not in vars(router)
