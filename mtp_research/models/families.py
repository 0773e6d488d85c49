"""What differs between model families, as one literal table.

A family entry says how to build an MTP block from the family's own Hugging Face decoder layer,
which hidden-state conventions its published heads follow and under which names they are published.
Nothing else in the project branches on a model type.

Source: the families' modeling files in transformers 5.17-5.23; names and conventions as published;
where serving engines disagree, the project's families page gives the reason for the choice.
"""

from dataclasses import replace

from mtp_research.errors import ConfigError
from mtp_research.models.family import NEUTRAL_LAYOUT, Family, NativeLayout

_DEEPSEEK_LAYOUT = NativeLayout(
    prefix="model.layers.{layer}.",
    names=(
        ("enorm.", "enorm."),
        ("hnorm.", "hnorm."),
        ("eh_proj.", "eh_proj."),
        ("shared_head.norm.", "shared_head.norm."),
        ("block.", ""),
    ),
    copies=(("embed_tokens.weight", "embed_tokens"), ("shared_head.head.weight", "lm_head")),
    count_field="num_nextn_predict_layers",
)
_ONE_FULL_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        model_types=("deepseek_v3",),
        block_overrides={"first_k_dense_replace": 0},
        latent_attention=True,
        native=_DEEPSEEK_LAYOUT,
    ),
    "deepseek_v32": Family(
        model_types=("deepseek_v32",),
        block_overrides={"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
        latent_attention=True,
        sparse_attention=True,
        native=_DEEPSEEK_LAYOUT,
    ),
    "ernie4_5_moe": Family(
        model_types=("ernie4_5_moe",),
        block_overrides={"moe_layer_start_index": 1, "moe_layer_end_index": 0},
        recycle_norm="pre_norm",
        hidden_source="pre_norm",
        owns_norm=False,
        native=NativeLayout(
            prefix="model.mtp_",
            names=(
                ("enorm.", "emb_norm.{module}."),
                ("hnorm.", "hidden_norm.{module}."),
                ("eh_proj.", "linear_proj.{module}."),
                ("block.", "block.{module}."),
            ),
            count_field="num_nextn_predict_layers",
        ),
    ),
    "exaone_moe": Family(
        model_types=("exaone_moe",),
        block_overrides={
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
        },
        native=replace(NEUTRAL_LAYOUT, count_field="num_nextn_predict_layers"),
    ),
    "glm4_moe": Family(
        model_types=("glm4_moe",),
        block_overrides={"first_k_dense_replace": 0},
        native=_DEEPSEEK_LAYOUT,
    ),
    "glm4_moe_lite": Family(
        model_types=("glm4_moe_lite",),
        block_overrides={"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
        latent_attention=True,
        native=_DEEPSEEK_LAYOUT,
    ),
    "glm_moe_dsa": Family(
        model_types=("glm_moe_dsa",),
        block_overrides={
            "num_hidden_layers": 1,
            "mlp_layer_types": ["sparse"],
            "indexer_types": ["full"],
        },
        latent_attention=True,
        sparse_attention=True,
        native=_DEEPSEEK_LAYOUT,
    ),
    "hy_v3": Family(
        model_types=("hy_v3",),
        block_overrides={"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
        native=NativeLayout(
            prefix="model.layers.{layer}.",
            names=(
                ("enorm.", "enorm."),
                ("hnorm.", "hnorm."),
                ("eh_proj.", "eh_proj."),
                ("shared_head.norm.", "final_layernorm."),
                ("block.mlp.gate.", "mlp.router.gate."),
                ("block.mlp.e_score_correction_bias", "mlp.expert_bias"),
                ("block.mlp.shared_experts.", "mlp.shared_mlp."),
                ("block.", ""),
            ),
            count_field="num_nextn_predict_layers",
        ),
    ),
    "llama": Family(model_types=("llama",), block_overrides={"num_hidden_layers": 1}),
    "longcat_flash": Family(
        model_types=("longcat_flash",),
        latent_attention=True,
        composes_block=True,
        native=NativeLayout(
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
            count_field="num_nextn_predict_layers",
        ),
    ),
    "mimo": Family(
        model_types=("mimo",),
        block_overrides=_ONE_FULL_LAYER,
        hidden_source="pre_norm",
        concat_order="hidden_first",
        native=NativeLayout(
            prefix="model.mtp_layers.{module}.",
            names=(
                ("enorm.", "token_layernorm."),
                ("hnorm.", "hidden_layernorm."),
                ("eh_proj.", "input_proj."),
                ("shared_head.norm.", "final_layernorm."),
                ("block.", ""),
            ),
            count_field="num_nextn_predict_layers",
        ),
        loads_as="qwen2",
    ),
    "mimo_v2": Family(
        model_types=("mimo_v2_flash",),
        block_overrides={
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
        },
        block_layer_type="sliding_attention",
        hidden_source="pre_norm",
        native=NativeLayout(
            prefix="model.mtp.layers.{module}.",
            names=(
                ("enorm.", "enorm."),
                ("hnorm.", "hnorm."),
                ("eh_proj.", "eh_proj."),
                ("shared_head.norm.", "final_layernorm."),
                ("block.post_attention_layernorm.", "pre_mlp_layernorm."),
                ("block.self_attn.sinks", "self_attn.attention_sink_bias"),
                ("block.", ""),
            ),
        ),
    ),
    "minimax_m2": Family(model_types=("minimax_m2",)),
    "nemotron_h": Family(
        model_types=("nemotron_h",),
        block_overrides={"layers_block_type": ["full_attention", "moe"]},
        final_norm="norm_f",
        norm_eps="layer_norm_epsilon",
        attention="mixer",
        mixer="mixer",
        stacks_layers=True,
        native=NativeLayout(
            prefix="mtp.layers.",
            names=(
                ("enorm.", "0.enorm."),
                ("hnorm.", "0.hnorm."),
                ("eh_proj.", "0.eh_proj."),
                ("shared_head.norm.", "1.final_layernorm."),
                ("block.layers.", ""),
            ),
            count_field="num_nextn_predict_layers",
        ),
    ),
    "qwen3": Family(model_types=("qwen3", "qwen2"), block_overrides=_ONE_FULL_LAYER),
    "qwen3_moe": Family(
        model_types=("qwen3_moe",),
        block_overrides={"mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "qwen3_5": Family(
        model_types=("qwen3_5_text", "qwen3_5_moe_text"),
        block_overrides=_ONE_FULL_LAYER,
        num_position_axes=3,
        mixer="linear_attn",
        native=replace(NEUTRAL_LAYOUT, count_field="mtp_num_hidden_layers"),
    ),
    "qwen3_next": Family(
        model_types=("qwen3_next",),
        block_overrides={**_ONE_FULL_LAYER, "mlp_only_layers": [], "decoder_sparse_step": 1},
        mixer="linear_attn",
    ),
}


def family_of(model_type: str) -> str:
    """Name of the family that a published `model_type` belongs to.

    Raises:
        ConfigError: no entry lists the model type; the message names those that are supported.
    """
    for name, family in FAMILIES.items():
        if model_type in family.model_types:
            return name
    supported = sorted(other for family in FAMILIES.values() for other in family.model_types)
    raise ConfigError(
        f"model.path must hold one of {supported}, got model_type {model_type!r}; "
        "add an entry to mtp_research/models/families.py to support it."
    )
