"""A shared expert beside the routed ones, in their two launches, for compiled decoding.

Each token goes through its `top_k` experts and through one that all tokens share. By themselves the
products of the shared one are as small as one expert's, and at a few rows each of its launches
takes longer than the memory needs for its bytes. Where it has an expert's sizes it becomes one more
pair of every token here: the router names it, and the kernels take its weights from where they lie.
With many rows it is a product of a usual size, and goes by itself: as pairs, 128 rows took 3.5 %
longer steps of eight layers of GLM-4.5-Air (one H200).

Without `torch.compile` the modules do what they did. Letter: D hidden.
"""

import functools
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import SiLUActivation
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

from mtp_research.kernels.experts.expert_mlp import SharedExpert, expert_mlp
from mtp_research.kernels.experts.expert_router import route_tokens
from mtp_research.models.experts import (
    EXPERTS_NAME,
    FusedLiteRouter,
    FusedRouter,
    expert_scales,
    rule_of,
)
from mtp_research.models.fp8_layers import Fp8Linear
from mtp_research.models.loading.placement import has_split_experts
from mtp_research.models.rewrites.cpu_layers import variant_of
from mtp_research.models.rewrites.products import MergedFp8Linear, MergedLinear

_BLOCKS = (Glm4MoeMoE, Glm4MoeLiteMoE)
_MOST_JOINED_ROWS = 32
_PRODUCTS = (nn.Linear, MergedLinear, Fp8Linear, MergedFp8Linear)


class JoinedExperts(nn.Module):
    """Marks the classes that `join_shared_experts` makes."""

    library_class: type[nn.Module]
    joins_always: bool  # not only few rows


def join_shared_experts(model: nn.Module, *, always: bool = False) -> int:
    """Let expert layers of `model`, merged and frozen, run both kinds at once, in place.

    With `always` also many rows, so that their number chooses no arithmetic. Returns how many
    layers do. Those are left alone, or put back, whose experts something reads or renumbers on the
    way by now (hooks), and those whose shared expert has other sizes or scales.
    """
    count = 0
    for block in list(model.modules()):
        plain = block.library_class if isinstance(block, JoinedExperts) else type(block)
        if plain in _BLOCKS:
            can_join = _can_join(block)
            block.__class__ = _joined(plain) if can_join else plain
            if isinstance(block, JoinedExperts):
                block.joins_always = always
            count += can_join
    return count


@functools.cache
def _joined(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        router, stack = cast(nn.Module, self.gate), cast(nn.Module, self.experts)
        is_frozen = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        dtypes = {hidden_states.dtype, cast(Tensor, router.weight).dtype}
        is_known = hidden_states.is_cuda and dtypes == {torch.bfloat16}
        # In this order: code compiled for any number of rows must not ask for it.
        joins = cast(JoinedExperts, self).joins_always or (
            hidden_states.numel() <= _MOST_JOINED_ROWS * hidden_states.shape[-1]
        )
        if is_frozen and joins and is_known and _runs_fused(stack):
            return joined_experts(self, hidden_states)
        return plain.forward(self, hidden_states)

    return variant_of(plain, JoinedExperts, forward, library_class=plain)


def _runs_fused(stack: nn.Module) -> bool:
    """Whether the kernels run the routed experts; `route_experts` may say otherwise later."""
    return cast(PreTrainedConfig, stack.config)._experts_implementation == EXPERTS_NAME


def joined_experts(block: nn.Module, hidden_states: Tensor) -> Tensor:
    """Output of a frozen expert layer `[..., D]`, on any device."""
    router, stack = cast(nn.Module, block.gate), cast(nn.Module, block.experts)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    bias = cast(Tensor, router.e_score_correction_bias).float()
    weight, rule = cast(Tensor, router.weight), rule_of(router)
    routed = route_tokens(rows, weight, bias, **rule, has_shared=True)
    output = expert_mlp(
        rows,
        cast(Tensor, stack.gate_up_proj),
        cast(Tensor, stack.down_proj),
        routed.index,
        routed.weights,
        scales=expert_scales(stack),
        shared=_shared_expert(block),
    )
    return output.view(hidden_states.shape)


def _shared_expert(block: nn.Module) -> SharedExpert:
    mlp = cast(nn.Module, block.shared_experts)
    group, down = cast(nn.Module, mlp.gate_proj).merged, cast(nn.Module, mlp.down_proj)
    scales = (group.scale, down.weight_scale) if isinstance(down, Fp8Linear) else (None, None)
    return SharedExpert(group.weight, cast(Tensor, down.weight), *scales)


def _can_join(block: nn.Module) -> bool:
    """Whether the shared expert of a layer is of the kind and sizes of the others."""
    router, stack, mlp = (
        cast(nn.Module, part) for part in (block.gate, block.experts, block.shared_experts)
    )
    gate, down = cast(nn.Module, mlp.gate_proj), cast(nn.Module, mlp.down_proj)
    parts = (router, stack, mlp, gate, cast(nn.Module, mlp.up_proj), down)
    if (
        not isinstance(router, FusedRouter | FusedLiteRouter)
        or not _runs_fused(stack)
        or has_split_experts(cast(PreTrainedConfig, stack.config))
        or not isinstance(gate, MergedLinear | MergedFp8Linear)
        or not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        or type(down) not in _PRODUCTS
        or any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        or any("forward" in vars(part) for part in parts)
        or not (gate.merged.bias is down.bias is None)
    ):
        return False
    scales = expert_scales(stack)
    block_of = [part.block for part in (gate.merged, down) if isinstance(down, Fp8Linear)]
    if block_of != ([] if scales is None else [scales.block] * 2):
        return False
    found = [tensor for tensor in _shared_expert(block) if tensor is not None]
    wanted = (cast(Tensor, stack.gate_up_proj), cast(Tensor, stack.down_proj), *(scales or ())[:2])
    return all(
        own.shape == others.shape[1:]
        and (own.dtype, own.device) == (others.dtype, others.device)
        and own.is_contiguous()
        for own, others in zip(found, wanted, strict=True)
    )
