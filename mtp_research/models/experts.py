"""Which code runs a target's experts: transformers' grouped product, or ours.

transformers reads `config._experts_implementation` at every call of an expert layer. The names that
are registered here run

    frozen experts     by `kernels.expert_mlp`, one node for `torch.compile`
    trained experts    by grouped products between two permutations with backward passes (MTP
                       modules, whose config is a copy of the target's, carry the same name)
    few experts        in dtypes without a grouped product on a GPU: all of them on every row
    FP8 experts        by `kernels.expert_mlp` on any device; nothing else knows their scales

and what neither knows goes back to `grouped_mm`.

Trained: x [T, H] -> rows of pairs sorted by expert -> products and gate -> weighted sum [T, H]. A
pair of a token and an expert occurs once, so both permutations can be read by index in either
direction. Autograd does not know that: for an indexed read it fills a tensor with zeros and adds
rows to it by atomics, in float32 for the weighted outputs, which takes longer than the products of
narrow experts. Both steps are pointwise in the rows, so `torch.compile` makes one kernel of each.

Few: the library's Python loop waits for the device at each expert, some 180 times in a forward of
12 layers of 16 experts, and cannot be captured. Two products over all experts do E / top_k times
more arithmetic and wait for nothing.

Letters: T tokens, P = T top_k pairs, E experts, H hidden size, I inner size of an expert.
Source: permutation and its inverse as in Megatron's token dispatcher.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter

from mtp_research.kernels.experts.expert_mlp import ExpertScales, expert_mlp
from mtp_research.kernels.experts.expert_router import (
    LEAST_SUM,
    MAX_ROUTED_EXPERTS,
    choose_experts,
    route_tokens,
)
from mtp_research.kernels.experts.expert_routing import MAX_EXPERTS
from mtp_research.kernels.products.scaled_weights import FP8
from mtp_research.models.loading.placement import has_split_experts
from mtp_research.runtime.errors import ConfigError

EXPERTS_NAME = "mtp_research_fused"
FP8_PROJECTIONS = ("gate_up_proj", "down_proj")  # parameters of a stack
EXPERTS = ("auto", "fused", "grouped_mm")
_FALLBACK = "grouped_mm"
_TUNED_CAPABILITY = 9  # Hopper: the cards that the tile shapes were chosen on
_SMALLEST_STEP = 16  # sizes must divide by it: rows are read in whole vectors
EVERY_EXPERT_NAME = "mtp_research_every_expert"
MAX_EVERY_EXPERT = 32  # more do too much that is thrown away
_MAX_ROWS = 2048  # at a time: the inner activations of all experts take E / top_k times the memory
_NARROW_IDS = 128  # sorted as one byte: an eighth of the passes of int64


def route_experts(model: PreTrainedModel, *, experts: str = "auto") -> None:
    """Choose what runs the expert layers of `model`, in place; dense models are left alone.

    Args:
        model: the target, where it will stay.
        experts: `auto` (the fused kernel on a Hopper GPU where it knows the family; few experts in
            a dtype other than bfloat16 on a GPU all at once, see `every_expert`), `fused`, or
            `grouped_mm` (transformers'; the loop over experts on a CPU and in other dtypes).
    """
    if experts not in EXPERTS:
        choices = ", ".join(EXPERTS)
        raise ConfigError(f"model.experts must be one of {choices}, got {experts!r}.")
    stacks = expert_stacks(model)
    if any(expert_scales(stack) is not None for stack in stacks):
        _route_fp8(model, stacks, experts=experts)
        return
    if model.device.type == "cpu" or model.dtype != torch.bfloat16:
        # grouped_mm brings nothing on a CPU and knows bfloat16 only on a GPU; the exactness tests
        # run in float64.
        # Some classes know the eager loop only, and take no setting.
        with contextlib.suppress(ValueError):  # and the loop cannot skip other ranks' experts
            model.set_experts_implementation(
                "batched_mm" if has_split_experts(model.config) else "eager"
            )
    if experts == "auto" and model.device.type != "cpu" and all(map(_fits_every_expert, stacks)):
        _set_implementation(stacks, EVERY_EXPERT_NAME)
        return
    if experts == "grouped_mm":
        for stack in stacks:  # the model may have been routed before
            config = cast(PreTrainedConfig, stack.config)
            if config._experts_implementation == EXPERTS_NAME:
                config._experts_implementation = _FALLBACK
        return
    place = model.device
    found = (why_not_fused(stack, device=place) for stack in stacks)
    reason = next(filter(None, found), None)
    if experts == "fused" and (reason is not None or not stacks):
        raise ConfigError(
            f"model.experts=fused needs experts that the kernel knows, got {reason or 'none'}; "
            "set model.experts=auto."
        )
    if reason is None and (
        experts == "fused" or all(_is_tuned_for(stack, place) for stack in stacks)
    ):
        _set_implementation(stacks, EXPERTS_NAME)
        fuse_routers(model)


def _route_fp8(model: PreTrainedModel, stacks: Sequence[nn.Module], *, experts: str) -> None:
    if experts == "grouped_mm":
        raise ConfigError(
            "model.experts=grouped_mm does not know FP8 weights; set model.experts=auto, or "
            "model.keep_fp8=false."
        )
    _set_implementation(stacks, EXPERTS_NAME)
    fuse_routers(model)


def expert_stacks(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward transformers dispatches by name."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def expert_implementations(model: nn.Module) -> set[str]:
    """Names of what runs the expert layers of `model`."""
    configs = (cast(PreTrainedConfig, stack.config) for stack in expert_stacks(model))
    return {str(config._experts_implementation) for config in configs}


class ExpertLoads:
    """Counts the rows that each expert of `model` gets while it trains; padding is a row too.

    Made before the model is compiled: the counters are hooks, which become part of the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[Tensor] = []  # per stack `[E]` float32, since the last `take`
        for stack in expert_stacks(model):
            weights = next(p for p in stack.parameters() if p.dim() > 2)  # [E, out, in]
            count = torch.zeros(weights.shape[0], dtype=torch.float32, device=weights.device)
            stack.register_forward_pre_hook(_count_into(count))
            self.counts.append(count)

    def take(self) -> Tensor:
        """All counts one after the other, `[sum of E]`, and begin again; does not wait."""
        taken = torch.cat(self.counts)
        for count in self.counts:
            count.zero_()
        return taken

    def spread(self, taken: Tensor) -> Tensor:
        """Largest and smallest load / mean load, `[2]`, each of the stack where it is worst."""
        stacks = taken.split([len(count) for count in self.counts])
        loads = [stack / stack.mean() for stack in stacks]
        most, least = [load.max() for load in loads], [load.min() for load in loads]
        return torch.stack([torch.stack(most).max(), torch.stack(least).min()])


def _count_into(count: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training:
            chosen = inputs[1].detach().reshape(-1)
            count.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=count.dtype))

    return add


def why_not_fused(stack: nn.Module, *, device: torch.device | None = None) -> str | None:
    """What the fused kernel does not know of an expert layer; None where it can run it.

    `device` counts as that of layers that were loaded without weights.
    """
    if (form := unknown_form(stack)) is not None:
        return form
    weights = [cast(Tensor, stack.gate_up_proj), cast(Tensor, stack.down_proj)]
    kinds = {
        (str(weight.dtype), _place_of(weight, device).type, weight.is_contiguous())
        for weight in weights
    }
    if kinds != {("torch.bfloat16", "cuda", True)}:
        return f"weights that are not contiguous bfloat16 on a GPU: {sorted(kinds)}"
    num_experts, *sizes = weights[1].shape
    if num_experts > MAX_EXPERTS or any(size % _SMALLEST_STEP for size in sizes):
        return f"{num_experts} experts of sizes {sizes}"
    return None


def unknown_form(stack: nn.Module) -> str | None:
    """What `expert_mlp` does not know of an expert layer, its weights aside; None for nothing."""
    if not _has_usual_layout(stack):
        return f"another layout in {type(stack).__name__}"
    is_usual = type(stack)._apply_gate is moe._default_apply_gate
    if not is_usual or not isinstance(stack.act_fn, nn.SiLU | SiLUActivation):
        return f"another activation in {type(stack).__name__}"
    return None


def expert_scales(stack: nn.Module) -> ExpertScales | None:
    """Scales of FP8 experts, which `fp8_layers.keep_fp8` makes; None for others. Can be traced."""
    if cast(Tensor, stack.down_proj).dtype != FP8:
        return None
    gate_up, down = cast(Tensor, stack.gate_up_proj_scale), cast(Tensor, stack.down_proj_scale)
    return ExpertScales(gate_up, down, cast(int, stack.fp8_block))


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Output `[T, H]` of an expert layer, as `transformers.integrations.moe` calls it.

    Args:
        module: the experts, with the library's names of weights.
        hidden_states: `[T, H]`.
        top_k_index: `[T, top_k]` int64.
        top_k_weights: `[T, top_k]`.
    """
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    if (scales := expert_scales(module)) is not None:
        operands = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
        return expert_mlp(*operands, scales=scales)
    operands = (hidden_states, gate_up_proj, down_proj, top_k_weights)
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    is_half = gate_up_proj.dtype in (torch.bfloat16, torch.float16)
    if is_trained and fits_trained(module, hidden_states):
        return trained_experts(module, hidden_states, top_k_index, top_k_weights)
    if is_trained or not is_half or not hidden_states.is_cuda:
        return ALL_EXPERTS_FUNCTIONS[_FALLBACK](module, *operands[:1], top_k_index, top_k_weights)
    x = hidden_states.to(gate_up_proj.dtype)
    are_away = has_split_experts(cast(PreTrainedConfig, module.config))
    operands = (x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    output = expert_mlp(*operands, some_are_away=are_away)
    return output.to(hidden_states.dtype)


def _set_implementation(stacks: Sequence[nn.Module], name: str) -> None:
    for stack in stacks:
        cast(PreTrainedConfig, stack.config)._experts_implementation = name


def _has_usual_layout(stack: nn.Module) -> bool:
    """Gated experts without biases, gate and up side by side, output features first."""
    is_gated = bool(stack.has_gate and stack.is_concatenated)
    return is_gated and not (stack.is_transposed or stack.has_bias)


def _fits_every_expert(stack: nn.Module) -> bool:
    """Whether `every_expert` knows the layer and nothing faster runs its dtype."""
    weight = cast(Tensor, stack.down_proj)
    is_few = len(weight) <= MAX_EVERY_EXPERT and weight.dtype != torch.bfloat16
    return is_few and _has_usual_layout(stack)


def _place_of(weight: Tensor, device: torch.device | None) -> torch.device:
    return device if weight.is_meta and device is not None else weight.device


def _is_tuned_for(stack: nn.Module, device: torch.device) -> bool:
    place = _place_of(cast(Tensor, stack.down_proj), device)
    return torch.cuda.get_device_capability(place)[0] == _TUNED_CAPABILITY


def every_expert(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As `experts_forward`, all experts on every row: no expert twice in a row of `top_k_index`."""
    if len(hidden_states) > _MAX_ROWS:
        operands = (hidden_states, top_k_index, top_k_weights)
        parts = zip(*(tensor.split(_MAX_ROWS) for tensor in operands), strict=True)
        return torch.cat([every_expert(module, *part) for part in parts])
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    num_experts = len(down_proj)
    shares = hidden_states.new_zeros(len(hidden_states), num_experts + 1)  # the last: elsewhere
    shares = shares.scatter(1, top_k_index, top_k_weights.to(shares.dtype))[:, :num_experts]
    inner = hidden_states @ gate_up_proj.flatten(0, 1).T  # [T, E 2I]
    gated = module._apply_gate(inner.unflatten(1, (num_experts, -1)))  # [T, E, I]
    return torch.einsum("tei,ehi->th", gated * shares[..., None], down_proj)


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts."""

    pair: Tensor  # [P] int64, which pair is at a place; pair p belongs to token p // top_k
    place: Tensor  # [P] int64, the inverse: where a pair is
    ends: Tensor  # [E] int32, exclusive ends of the experts' places


def sort_pairs(top_k_index: Tensor, *, num_experts: int) -> SortedPairs:
    """Sort `[T, top_k]` experts; nothing waits for the device.

    Example: experts `[[1, 0], [1, 2]]` give the pairs 1 | 0 2 | 3 at the places (1, 0, 2, 3) and
    the ends (1, 3, 4).
    """
    experts = top_k_index.flatten()
    if num_experts <= _NARROW_IDS:
        experts = experts.to(torch.int8)
    ordered, pair = torch.sort(experts, stable=True)
    wanted = torch.arange(num_experts, dtype=ordered.dtype, device=ordered.device)
    ends = torch.searchsorted(ordered, wanted, right=True, out_int32=True)
    place = torch.empty_like(pair)
    place[pair] = torch.arange(len(pair), device=pair.device)
    return SortedPairs(pair, place, ends)


def fits_trained(module: nn.Module, x: Tensor) -> bool:
    """Whether `trained_experts` takes this layer, known to have the usual layout, and these rows.

    torch's grouped product knows bfloat16 alone when it is compiled.
    """
    weight = cast(Tensor, module.gate_up_proj)
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def trained_experts(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As `experts_forward`, with gradients, for rows `x` in the dtype of the weights."""
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    pairs = sort_pairs(index, num_experts=len(down_proj))
    rows = cast(Tensor, _Spread.apply(x, pairs.pair, pairs.place, index.shape[1]))
    inner = _grouped(rows, gate_up_proj, ends=pairs.ends)
    gated = cast(nn.Module, module)._apply_gate(inner)
    outputs = _grouped(gated, down_proj, ends=pairs.ends)
    return cast(Tensor, _Combine.apply(outputs, weights, pairs.pair, pairs.place))


def _grouped(rows: Tensor, weight: Tensor, *, ends: Tensor) -> Tensor:
    """Each expert's rows times its `[out, in]` weight."""
    return nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


class _Spread(torch.autograd.Function):
    """`x` `[T, H]` -> rows `[P, H]` in the order of the experts."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, pair: Tensor, place: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[pair // top_k]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        rows = grads[0][place].unflatten(0, (-1, ctx.top_k))
        return rows.sum(dim=1, dtype=_wide(rows)).to(rows.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Outputs `[P, H]` in the order of the experts -> their weighted sums `[T, H]`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        outputs: Tensor,
        weights: Tensor,
        pair: Tensor,
        place: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(outputs, weights, pair, place)
        rows = outputs[place].unflatten(0, weights.shape)
        return (rows * weights[..., None]).sum(dim=1, dtype=_wide(rows)).to(outputs.dtype)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        outputs, weights, pair, place = ctx.saved_tensors
        rows = grads[0][pair // weights.shape[1]]
        by_pair = weights.flatten()[pair]
        products = (rows.to(_wide(rows)) * outputs).sum(dim=1)
        weight_grad = products[place].view_as(weights).to(weights.dtype)
        return (rows * by_pair[:, None]).to(outputs.dtype), weight_grad, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def fuse_routers(model: nn.Module) -> int:
    """Give routers that the kernel knows a class with a `forward` of ours; returns how many.

    Routers of several groups are left alone, and so are those whose `forward` something else has
    replaced, as libraries do that move weights. The choice of experts is then one kernel instead of
    a dozen calls. A frozen router's logits come from a kernel too, which adds up a token's terms in
    an order that its batch does not change, so that deterministic decoding may call it. A trained
    router's logits and weights are PyTorch's, with their gradients.
    """
    known = [module for module in model.modules() if type(module) in _FUSED_ROUTERS]
    fused = [router for router in known if _is_fusable(router)]
    for router in fused:
        router.__class__ = _FUSED_ROUTERS[type(router)]
    return len(fused)


class ChoiceRule(TypedDict):
    """Arguments of `choose_experts` and `route_tokens`."""

    top_k: int
    normalises: bool
    scale: float


class FusedRouter(Glm4MoeTopkRouter):
    """GLM-4.5's router, by the kernel on a GPU."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[T, E]`, weights and indices `[T, top_k]` of `[..., H]`, as the library's."""
        if not hidden_states.is_cuda:
            return super().forward(hidden_states)
        return fused_router(self, hidden_states)


class FusedLiteRouter(Glm4MoeLiteTopkRouter):
    """GLM-4.7-Flash's router, likewise."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `FusedRouter.forward`."""
        if not hidden_states.is_cuda:
            return super().forward(hidden_states)
        return fused_router(self, hidden_states)


# Routers that the kernel was compared with, and theirs of ours; both are DeepSeek-V3's rule.
_FUSED_ROUTERS: dict[type[nn.Module], type[nn.Module]] = {
    Glm4MoeTopkRouter: FusedRouter,
    Glm4MoeLiteTopkRouter: FusedLiteRouter,
}


def fused_router(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `FusedRouter.forward`, on any device."""
    weight = cast(Tensor, router.weight)
    rows = hidden_states.reshape(-1, weight.shape[1])
    is_trained = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    bias = cast(Tensor, router.e_score_correction_bias).float()
    rule = rule_of(router)
    if not is_trained and rows.dtype == weight.dtype == torch.bfloat16:
        return route_tokens(rows, weight, bias, **rule)
    logits = nn.functional.linear(rows.float(), weight.float())
    weights, index = choose_experts(logits.detach(), bias, **rule)
    if is_trained:
        weights = logits.sigmoid().gather(1, index)
        if rule["normalises"]:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
        weights = weights * rule["scale"]
    return logits, weights, index


def rule_of(router: nn.Module) -> ChoiceRule:
    """How a router chooses, as its kernels take it."""
    return {
        "top_k": cast(int, router.top_k),
        "normalises": bool(router.norm_topk_prob),
        "scale": float(cast(float, router.routed_scaling_factor)),
    }


def _is_fusable(router: nn.Module) -> bool:
    has_one_group = (router.num_group, router.topk_group) == (1, 1)
    is_small = cast(int, router.num_experts) <= MAX_ROUTED_EXPERTS
    return has_one_group and is_small and "forward" not in vars(router)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT_NAME, every_expert)
