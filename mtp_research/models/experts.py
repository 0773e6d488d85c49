"""Which code runs a target's experts: transformers' grouped product, or our fused kernel.

transformers reads `config._experts_implementation` at every call of an expert layer. The name that
is registered here runs frozen experts by `kernels.expert_mlp`, one node for `torch.compile`, and
trained ones by `trained_experts`: MTP modules, whose config is a copy of the target's, carry the
same name. What neither knows goes back to `grouped_mm`.

Letters: T tokens, E experts, H hidden size, I inner size of an expert.
"""

import contextlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mtp_research.errors import ConfigError
from mtp_research.kernels.expert_mlp import expert_mlp
from mtp_research.kernels.expert_routing import MAX_EXPERTS
from mtp_research.models.every_expert import EVERY_EXPERT_NAME, MAX_EVERY_EXPERT
from mtp_research.models.routers import fuse_routers
from mtp_research.models.tensor_parallel import has_split_experts
from mtp_research.models.trained_experts import fits_trained, trained_experts

EXPERTS_NAME = "mtp_research_fused"
EXPERTS = ("auto", "fused", "grouped_mm")
_FALLBACK = "grouped_mm"
_TUNED_CAPABILITY = 9  # Hopper: the cards that the tile shapes were chosen on
_SMALLEST_STEP = 16  # sizes must divide by it: rows are read in whole vectors


def route_experts(model: PreTrainedModel, *, experts: str = "auto") -> None:
    """Choose what runs the expert layers of `model`, in place; dense models are left alone.

    Args:
        model: the target, where it will stay.
        experts: `auto` (the fused kernel on a Hopper GPU where it knows the family; few experts in
            a dtype other than bfloat16 on a GPU all at once, see `every_expert`), `fused`, or
            `grouped_mm` (transformers'; the loop over experts on a CPU and in other dtypes).

    Raises:
        ConfigError: another name, or `fused` for experts that the kernel does not know.
    """
    if experts not in EXPERTS:
        choices = ", ".join(EXPERTS)
        raise ConfigError(f"model.experts must be one of {choices}, got {experts!r}.")
    if model.device.type == "cpu" or model.dtype != torch.bfloat16:
        # grouped_mm brings nothing on a CPU and knows bfloat16 only on a GPU; the exactness tests
        # run in float64.
        # Some classes know the eager loop only, and take no setting.
        with contextlib.suppress(ValueError):  # and the loop cannot skip other ranks' experts
            model.set_experts_implementation("batched_mm" if has_split_experts(model) else "eager")
    stacks = expert_stacks(model)
    if experts == "auto" and model.device.type != "cpu" and all(map(_fits_every_expert, stacks)):
        _set_implementation(stacks, EVERY_EXPERT_NAME)
        return
    if experts == "grouped_mm":
        for stack in stacks:  # the model may have been routed before
            config = cast(PreTrainedConfig, stack.config)
            if config._experts_implementation == EXPERTS_NAME:
                config._experts_implementation = _FALLBACK
        return
    reason = next((found for stack in stacks if (found := why_not_fused(stack))), None)
    if experts == "fused" and (reason is not None or not stacks):
        raise ConfigError(
            f"model.experts=fused needs experts that the kernel knows, got {reason or 'none'}; "
            "set model.experts=auto."
        )
    if reason is None and (experts == "fused" or all(map(_is_tuned_for, stacks))):
        _set_implementation(stacks, EXPERTS_NAME)
        fuse_routers(model)


def expert_stacks(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward transformers dispatches by name."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def why_not_fused(stack: nn.Module) -> str | None:
    """What the fused kernel does not know of an expert layer; None where it can run it.

    Args:
        stack: a module of `expert_stacks`.
    """
    if not _has_usual_layout(stack):
        return f"another layout in {type(stack).__name__}"
    is_usual = type(stack)._apply_gate is moe._default_apply_gate
    if not is_usual or not isinstance(stack.act_fn, nn.SiLU | SiLUActivation):
        return f"another activation in {type(stack).__name__}"
    weights = [cast(Tensor, stack.gate_up_proj), cast(Tensor, stack.down_proj)]
    if any(isinstance(weight.data, DTensor) for weight in weights):
        return "experts split over ranks"
    kinds = {(str(weight.dtype), weight.device.type, weight.is_contiguous()) for weight in weights}
    if kinds != {("torch.bfloat16", "cuda", True)}:
        return f"weights that are not contiguous bfloat16 on a GPU: {sorted(kinds)}"
    num_experts, *sizes = weights[1].shape
    if num_experts > MAX_EXPERTS or any(size % _SMALLEST_STEP for size in sizes):
        return f"{num_experts} experts of sizes {sizes}"
    return None


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
    operands = (hidden_states, gate_up_proj, down_proj, top_k_weights)
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    is_half = gate_up_proj.dtype in (torch.bfloat16, torch.float16)
    if is_trained and fits_trained(module, hidden_states):
        return trained_experts(module, hidden_states, top_k_index, top_k_weights)
    if is_trained or not is_half or not hidden_states.is_cuda:
        return ALL_EXPERTS_FUNCTIONS[_FALLBACK](module, *operands[:1], top_k_index, top_k_weights)
    x = hidden_states.to(gate_up_proj.dtype)
    output = expert_mlp(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    return output.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


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
    is_whole = not isinstance(weight.data, DTensor)
    is_few = len(weight) <= MAX_EVERY_EXPERT and weight.dtype != torch.bfloat16
    return is_whole and is_few and _has_usual_layout(stack)


def _is_tuned_for(stack: nn.Module) -> bool:
    device = cast(Tensor, stack.down_proj).device
    return torch.cuda.get_device_capability(device)[0] == _TUNED_CAPABILITY
