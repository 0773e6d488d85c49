"""Where published checkpoints keep their MTP modules, family by family.

Source: tensor names of the releases, as vLLM, SGLang and Megatron-Bridge read and write them.
"""

from dataclasses import replace

from mtp_research.models.family import NEUTRAL_LAYOUT, NativeLayout

_COUNT = "num_nextn_predict_layers"
_INPUTS = (("enorm.", "enorm."), ("hnorm.", "hnorm."), ("eh_proj.", "eh_proj."))

DEEPSEEK = NativeLayout(
    prefix="model.layers.{layer}.",
    names=(*_INPUTS, ("shared_head.norm.", "shared_head.norm."), ("block.", "")),
    copies=(("embed_tokens.weight", "embed_tokens"), ("shared_head.head.weight", "lm_head")),
    count_field=_COUNT,
)
ERNIE = NativeLayout(
    prefix="model.mtp_",
    names=(
        ("enorm.", "emb_norm.{module}."),
        ("hnorm.", "hidden_norm.{module}."),
        ("eh_proj.", "linear_proj.{module}."),
        ("block.", "block.{module}."),
    ),
    count_field=_COUNT,
)
EXAONE = replace(NEUTRAL_LAYOUT, count_field=_COUNT)
HUNYUAN = NativeLayout(
    prefix="model.layers.{layer}.",
    names=(
        *_INPUTS,
        ("shared_head.norm.", "final_layernorm."),
        ("block.mlp.gate.", "mlp.router.gate."),
        ("block.mlp.e_score_correction_bias", "mlp.expert_bias"),
        ("block.mlp.shared_experts.", "mlp.shared_mlp."),
        ("block.", ""),
    ),
    count_field=_COUNT,
)
LONGCAT = NativeLayout(
    prefix="model.mtp.",
    names=(
        ("enorm.", "layers.0.enorm.m."),
        ("hnorm.", "layers.0.hnorm.m."),
        ("eh_proj.", "layers.0.eh_proj."),
        ("shared_head.norm.", "norm."),
        ("block.mlp.", "layers.0.transformer_layer.mlp."),
        ("block.", "layers.0."),
    ),
    copies=(("embed_tokens.weight", "embed_tokens"),),
    count_field=_COUNT,
)
MIMO = NativeLayout(
    prefix="model.mtp_layers.{module}.",
    names=(
        ("enorm.", "token_layernorm."),
        ("hnorm.", "hidden_layernorm."),
        ("eh_proj.", "input_proj."),
        ("shared_head.norm.", "final_layernorm."),
        ("block.", ""),
    ),
    count_field=_COUNT,
)
MIMO_V2 = NativeLayout(
    prefix="model.mtp.layers.{module}.",
    names=(
        *_INPUTS,
        ("shared_head.norm.", "final_layernorm."),
        ("block.post_attention_layernorm.", "pre_mlp_layernorm."),
        ("block.self_attn.sinks", "self_attn.attention_sink_bias"),
        ("block.", ""),
    ),
)
NEMOTRON = NativeLayout(
    prefix="mtp.layers.",
    names=(
        ("enorm.", "0.enorm."),
        ("hnorm.", "0.hnorm."),
        ("eh_proj.", "0.eh_proj."),
        ("shared_head.norm.", "1.final_layernorm."),
        ("block.layers.", ""),
    ),
    count_field=_COUNT,
)
QWEN3_5 = replace(NEUTRAL_LAYOUT, count_field="mtp_num_hidden_layers")
STEP = NativeLayout(
    prefix="model.layers.{layer}.",
    names=(
        *_INPUTS,
        ("shared_head.norm.", "transformer.shared_head.norm."),
        ("shared_head.head.", "transformer.shared_head.output."),
        ("block.", ""),
    ),
    # For heads that were trained on the target's lm_head: engines look for one per module.
    copies=(("transformer.shared_head.output.weight", "lm_head"),),
    count_field=_COUNT,
)
