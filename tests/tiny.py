"""Tiny random targets and heads for tests, and exact float64 versions of them.

Matrices are drawn with std 0.15, so that a wrong slot, order or rollback moves logits by far more
than rounding does.
"""

import types

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.families import FAMILIES
from mtp_research.models.target import Target, wrap_target
from tests.recipes import RECIPES, RECURRENT_RECIPES


def tiny_target(
    recipe: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **changes: object,  # of the recipe
) -> Target:
    """A random target; float64 ones compute norms and routers in float64 too."""
    torch.manual_seed(seed)
    model_type, kwargs = (RECIPES | RECURRENT_RECIPES)[recipe]
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**kwargs | changes), attn_implementation="eager"
    )
    randomise(model, seed=seed + 1)
    model = model.to(dtype)
    if dtype is torch.float64:
        to_float64(model)
    return wrap_target(model, family_name=recipe if recipe in FAMILIES else None)


def tiny_heads(
    target: Target, *, num_mtp_modules: int = 3, seed: int = 7, **spec: object
) -> MTPHeads:
    """Random heads on `target`."""
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=num_mtp_modules, **spec))
    randomise(heads, seed=seed)
    if target.dtype is torch.float64:
        to_float64(heads)
    return heads.eval().requires_grad_(False)


def randomise(module: nn.Module, *, seed: int) -> None:
    """Matrices N(0, 0.15), norms near 1, biases and router corrections non-zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [
            *module.parameters(),
            *(b for n, b in module.named_buffers() if "correction" in n),
        ]:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) * 0.15
            tensor.copy_(noise if tensor.dim() != 1 else noise + float(tensor.float().mean() > 0.5))


def to_float64(module: nn.Module) -> None:
    """Keep float64 where the library's norms and routers drop to float32, for tests to 1e-10."""
    for child in module.modules():
        name = type(child).__name__
        if name.endswith("RMSNorm"):
            child.forward = types.MethodType(_rms_norm, child)
        elif name.endswith("TopkRouter"):
            child.forward = types.MethodType(_topk_router, child)
            child.e_score_correction_bias = child.e_score_correction_bias.double()


def _rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
    width = hidden_states.shape[-1:]
    return torch.rms_norm(hidden_states, width, self.weight, self.variance_epsilon)


def _topk_router(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One expert group only, which is what the recipes use."""
    logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.sigmoid()
    indices = torch.topk(scores + self.e_score_correction_bias, k=self.top_k, dim=-1).indices
    weights = scores.gather(1, indices)
    weights = weights / weights.sum(dim=-1, keepdim=True) * self.routed_scaling_factor
    return logits, weights, indices
