"""Models by shape: published sizes with random weights, for measuring speed without a checkpoint.

Sizes are those of the configs on the hub, cut where noted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_research.models.target import Target, wrap_target


@dataclass(frozen=True)
class Shape:
    """A published size.

    Attributes:
        model_type: of the Hugging Face config.
        arguments: of the Hugging Face config.
        note: what differs from the published model.
    """

    model_type: str
    arguments: Mapping[str, object]
    note: str = ""


_LONG = {"max_position_embeddings": 32_768, "tie_word_embeddings": False}
_ONE_GROUP = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_DENSE_1B = _LONG | {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
}
_MIMO_7B = _LONG | {
    "vocab_size": 151_680,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
_GLM_AIR = {
    **_LONG,
    **_ONE_GROUP,
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_GLM_FLASH = {
    **_LONG,
    **_ONE_GROUP,
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
_LAB_BASE = {
    **_ONE_GROUP,
    "vocab_size": 16_384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "use_qk_norm": True,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LAB_SMALL = _LAB_BASE | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES: dict[str, Shape] = {
    "dense_1b": Shape("qwen3", _DENSE_1B, "no published model; 20 layers as in our tables"),
    "mimo_7b": Shape("qwen2", _MIMO_7B, "MiMo-7B, whose layers are Qwen2's"),
    "glm45_air_8": Shape("glm4_moe", _GLM_AIR, "GLM-4.5-Air, 8 of 46 layers"),
    "glm47_flash": Shape("glm4_moe_lite", _GLM_FLASH, "GLM-4.7-Flash"),
    "lab_base": Shape("glm4_moe", _LAB_BASE, "conf/model/lab_base.yaml, untrained"),
    "lab_small": Shape("glm4_moe", _LAB_SMALL, "conf/model/lab_small.yaml, untrained"),
    "tiny": Shape("qwen3", _DENSE_1B | _TINY, "for trying the commands on a CPU"),
    "tiny_experts": Shape(
        "glm4_moe",
        _GLM_AIR
        | _TINY
        | {"moe_intermediate_size": 32, "n_routed_experts": 8}
        | {"num_experts_per_tok": 2},
        "likewise, with experts",
    ),
}


def random_target(
    name: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0, experts: str = "auto"
) -> Target:
    """A target of shape `name` with random weights, initialised where it lives."""
    shape = SHAPES[name]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(shape.model_type, **shape.arguments)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return wrap_target(model, path=f"random:{name}", experts=experts)
