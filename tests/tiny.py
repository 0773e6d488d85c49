"""Tiny random targets and heads for tests, and exact float64 versions of them.

Matrices are drawn with std 0.15, so that a wrong slot, order or rollback moves logits by far more
than rounding does.
"""

import types

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import Target, wrap_target

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MOE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
RECIPES: dict[str, tuple[str, dict]] = {
    "glm4_moe": (
        "glm4_moe",
        dict(
            _BASE,
            **_MOE,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        ),
    ),
    "qwen3": ("qwen3", dict(_BASE, num_hidden_layers=2)),
}


def tiny_target(
    recipe: str = "qwen3", *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Target:
    """A random target; float64 ones compute norms and routers in float64 too."""
    torch.manual_seed(seed)
    model_type, kwargs = RECIPES[recipe]
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**kwargs), attn_implementation="eager"
    )
    randomise(model, seed=seed + 1)
    model = model.to(dtype)
    if dtype is torch.float64:
        to_float64(model)
    return wrap_target(model)


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
            tensor.copy_(
                noise if tensor.dim() != 1 else noise + (tensor.float().mean() > 0.5).float()
            )


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
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden_states * scale


def _topk_router(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One expert group only, which is what the recipes use."""
    logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.sigmoid()
    indices = torch.topk(scores + self.e_score_correction_bias, k=self.top_k, dim=-1).indices
    weights = scores.gather(1, indices)
    weights = weights / weights.sum(dim=-1, keepdim=True) * self.routed_scaling_factor
    return logits, weights, indices
