"""Configurations of tiny targets, one per family: `name: (model_type, keyword arguments)`."""

from mtp_research.models.families import STEP_MODEL_TYPE

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
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
}
_INDEX = {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_STEP_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
_NO_HEAD_DIM = {name: value for name, value in _BASE.items() if name != "head_dim"}
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
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            _NO_HEAD_DIM | _MLA,
            **_MOE,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            rope_parameters=_ROPE,
            rope_interleave=True,
        ),
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        dict(
            _NO_HEAD_DIM | _MLA,
            **_MOE,
            num_hidden_layers=2,
            mlp_layer_types=["dense", "sparse"],
            rope_parameters=_ROPE,
        ),
    ),
    "mimo_v2": (
        "mimo_v2_flash",
        dict(
            {**_BASE, "head_dim": 24},
            **{name: value for name, value in _MOE.items() if name != "n_shared_experts"},
            v_head_dim=16,
            num_hidden_layers=3,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "dense", "sparse"],
        ),
    ),
    "qwen3": ("qwen3", dict(_BASE, num_hidden_layers=2)),
    "mimo": ("qwen2", dict(_NO_HEAD_DIM, num_hidden_layers=2)),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(
            _NO_HEAD_DIM,
            num_hidden_layers=2,
            moe_intermediate_size=32,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            use_bias=False,
        ),
    ),
    "exaone_moe": (
        "exaone_moe",
        dict(
            _BASE,
            **_EXPERTS,
            num_hidden_layers=2,
            sliding_window=4,
            sliding_window_pattern=4,
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
    ),
    "hy_v3": (
        "hy_v3",
        dict(_BASE, **_EXPERTS, num_hidden_layers=2, mlp_layer_types=["dense", "sparse"]),
    ),
    "minimax_m2": (
        "minimax_m2",
        dict(_BASE, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8),
    ),
    "deepseek_v32": (
        "deepseek_v32",
        dict(
            _NO_HEAD_DIM | _MLA,
            **_MOE,
            **_INDEX,
            num_hidden_layers=2,
            mlp_layer_types=["dense", "sparse"],
        ),
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        dict(
            _NO_HEAD_DIM | _MLA,
            **_MOE,
            **_INDEX,
            num_hidden_layers=3,
            mlp_layer_types=["dense", "sparse", "sparse"],
            indexer_types=["full", "full", "shared"],
        ),
    ),
    "longcat_flash": (
        "longcat_flash",
        dict(
            {n: v for n, v in _BASE.items() if n not in ("intermediate_size", "head_dim")} | _MLA,
            num_layers=2,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            head_dim=8,
            moe_topk=2,
            n_routed_experts=8,
            zero_expert_num=4,
            routed_scaling_factor=1.5,
        ),
    ),
    "llama": ("llama", dict(_BASE, num_hidden_layers=2)),
    "gemma": ("gemma", dict(_BASE, num_hidden_layers=2)),
    "gemma3": (
        "gemma3_text",
        dict(
            _BASE,
            num_hidden_layers=3,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=16,
        ),
    ),
    "step3p5": (
        STEP_MODEL_TYPE,
        dict(
            _BASE,
            num_hidden_layers=3,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            share_expert_dim=32,
            moe_router_scaling_factor=1.5,
            sliding_window=4,
            num_sliding_attention_heads=6,
            num_nextn_predict_layers=3,
            layer_types=_STEP_LAYERS + ["sliding_attention"] * 3,
            mlp_layer_types=["dense", "dense", "sparse"] + ["dense"] * 3,
            rope_theta=[5e6, 1e4, 5e6, 1e4, 1e4, 1e4],
            partial_rotary_factors=[0.5, 1.0, 0.5, 1.0, 1.0, 1.0],
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(
            _BASE,
            num_hidden_layers=2,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        ),
    ),
}
# Models of other sizes in the same families.
RECIPES["glm45_air"] = ("glm4_moe", RECIPES["glm4_moe"][1] | {"use_qk_norm": False})
RECIPES["kimi_k2"] = ("deepseek_v3", RECIPES["deepseek_v3"][1] | {"num_nextn_predict_layers": 0})

_RECURRENT = dict(
    _BASE,
    num_hidden_layers=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"],
)
_SHARED_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_NEMOTRON = {
    name: value
    for name, value in _BASE.items()
    if name not in ("rms_norm_eps", "intermediate_size", "tie_word_embeddings")
} | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 16,
    "num_experts_per_tok": 2,
    "use_mamba_kernels": False,
}
# Their passes need the states of models/recurrent.py beside the pages.
RECURRENT_RECIPES: dict[str, tuple[str, dict]] = {
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "qwen3_5": ("qwen3_5_text", dict(_RECURRENT, rope_parameters=_MROPE)),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        dict(_RECURRENT, **_SHARED_EXPERTS, rope_parameters=_MROPE),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(_RECURRENT, **_SHARED_EXPERTS, norm_topk_prob=True, decoder_sparse_step=1),
    ),
}
