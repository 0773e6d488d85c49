"""What differs between model families, as one literal table.

A family entry says how to build an MTP block from the family's own Hugging Face decoder layer,
which hidden-state conventions its published heads follow and under which names they are published
(`models/family.py`). Nothing else in the project branches on a model type.

Source: the families' modeling files in transformers 5.17-5.23; names and conventions as published;
where serving engines disagree, the project's families page gives the reason for the choice.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
)

from mtp_research.models import family as layouts
from mtp_research.models.family import Family
from mtp_research.runtime.errors import ConfigError

STEP_MODEL_TYPE = "mtp_research_step3p5"
_ONE_FULL_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
_ONE_SLIDING_DENSE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "mlp_layer_types": ["dense"],
}
_ONE_SPARSE_LAYER = {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        model_types=("deepseek_v3",),
        block_overrides={"first_k_dense_replace": 0},
        latent_attention=True,
        native=layouts.DEEPSEEK,
    ),
    "deepseek_v32": Family(
        model_types=("deepseek_v32",),
        block_overrides=_ONE_SPARSE_LAYER,
        latent_attention=True,
        sparse_attention=True,
        native=layouts.DEEPSEEK,
    ),
    "ernie4_5_moe": Family(
        model_types=("ernie4_5_moe",),
        block_overrides={"moe_layer_start_index": 1, "moe_layer_end_index": 0},
        recycle_norm="pre_norm",
        hidden_source="pre_norm",
        owns_norm=False,
        native=layouts.ERNIE,
    ),
    "exaone_moe": Family(
        model_types=("exaone_moe",),
        # Of the full attention, which knows no positions, unless the release says otherwise.
        block_overrides={**_ONE_FULL_LAYER, "mlp_layer_types": ["dense"]},
        block_fields={"layer_types": "mtp_layer_types", "sliding_window": "mtp_sliding_windows"},
        native=layouts.EXAONE,
    ),
    "gemma": Family(model_types=("gemma",), block_overrides={"num_hidden_layers": 1}),
    "gemma3": Family(
        model_types=("gemma3_text",),
        block_overrides=_ONE_FULL_LAYER,
        block_layer_type="full_attention",
    ),
    "glm4_moe": Family(
        model_types=("glm4_moe",),
        block_overrides={"first_k_dense_replace": 0},
        native=layouts.DEEPSEEK,
    ),
    "glm4_moe_lite": Family(
        model_types=("glm4_moe_lite",),
        block_overrides=_ONE_SPARSE_LAYER,
        latent_attention=True,
        native=layouts.DEEPSEEK,
    ),
    "glm_moe_dsa": Family(
        model_types=("glm_moe_dsa",),
        block_overrides={**_ONE_SPARSE_LAYER, "indexer_types": ["full"]},
        latent_attention=True,
        sparse_attention=True,
        native=layouts.DEEPSEEK,
    ),
    "hy_v3": Family(
        model_types=("hy_v3",), block_overrides=_ONE_SPARSE_LAYER, native=layouts.HUNYUAN
    ),
    "kimi_k2": Family(
        model_types=("kimi_k2",),
        block_overrides={"first_k_dense_replace": 0},
        latent_attention=True,
        native=layouts.DEEPSEEK,
        loads_as="deepseek_v3",
    ),
    "llama": Family(model_types=("llama",), block_overrides={"num_hidden_layers": 1}),
    "longcat_flash": Family(
        model_types=("longcat_flash",),
        latent_attention=True,
        composes_block=True,
        native=layouts.LONGCAT,
    ),
    "mimo": Family(
        model_types=("mimo",),
        block_overrides=_ONE_FULL_LAYER,
        hidden_source="pre_norm",
        concat_order="hidden_first",
        native=layouts.MIMO,
        loads_as="qwen2",
    ),
    "mimo_v2": Family(
        model_types=("mimo_v2_flash",),
        block_overrides=_ONE_SLIDING_DENSE_LAYER,
        block_layer_type="sliding_attention",
        hidden_source="pre_norm",
        native=layouts.MIMO_V2,
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
        native=layouts.NEMOTRON,
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
        native=layouts.QWEN3_5,
    ),
    "qwen3_next": Family(
        model_types=("qwen3_next",),
        block_overrides={**_ONE_FULL_LAYER, "mlp_only_layers": [], "decoder_sparse_step": 1},
        mixer="linear_attn",
    ),
    "step3p5": Family(
        model_types=("step3p5",),
        block_overrides={
            "per_layer_config": None,  # before the heads, which it makes a field of each layer
            **_ONE_SLIDING_DENSE_LAYER,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        },
        block_fields={"num_attention_heads": "num_sliding_attention_heads"},
        block_layer_type="sliding_attention",
        hidden_source="pre_norm",
        recycle_norm="pre_norm",
        owns_lm_head=True,
        native=layouts.STEP,
        loads_as=STEP_MODEL_TYPE,
    ),
}

_IMAGES = "it is a model of images and text"
_STREAMS = "its layers hand on several residual streams (hyper-connections)"
REFUSED: Mapping[str, str] = {
    "deepseek_v4": f"{_STREAMS}, and what DeepSeek-V4.1 calls mtp.* are DSpark stages",
    "gemma2": "its attention caps scores (attn_logit_softcapping), the paged kernels do not",
    "gemma3": f"{_IMAGES}; sizes of text alone have model_type gemma3_text",
    "gemma3n": "it caps logits and adds embeddings in every layer",
    "gemma4": _IMAGES,
    "hy_v4": _STREAMS,
    "kimi_k25": _IMAGES,
    "mimo_v2": "its releases (V2.5, V2-Pro) store queries, keys and values as one sharded tensor",
    "qwen4_exp": _STREAMS,
    "step3p7": f"{_IMAGES}; Step-3.5 is supported",
}
REFUSED_FIELDS: Mapping[str, str] = {
    "attn_logit_softcapping": "capped attention scores, which the paged kernels do not compute",
    "final_logit_softcapping": "capped logits, which the losses do not compute",
    "use_bidirectional_attention": "attention to later tokens, which no text can be decoded with",
}

_LONG_ROPE = "longrope"
_BY_LENGTH = ("dynamic", _LONG_ROPE)  # rotary kinds whose frequencies follow the longest text


def family_of(model_type: str) -> str:
    """Name of the family that a published `model_type` belongs to."""
    require_supported(model_type)
    for name, family in FAMILIES.items():
        if model_type in family.model_types:
            return name
    raise ConfigError(
        f"model.path must hold one of {_supported()}, got model_type {model_type!r}; "
        "add an entry to mtp_research/models/families.py to support it."
    )


def require_supported(model_type: str) -> None:
    """Refuse model types of which it is known why they would fail (`ConfigError`)."""
    if model_type in REFUSED:
        raise ConfigError(
            f"model.path must hold one of {_supported()}, got model_type {model_type!r}: "
            f"{REFUSED[model_type]}."
        )


def require_exact(config: PreTrainedConfig) -> None:
    """Refuse (`ConfigError`) settings of a supported text config that are not computed here."""
    for field, reason in REFUSED_FIELDS.items():
        if value := getattr(config, field, None):
            raise ConfigError(
                f"model.path must hold a model without {field}, got {value}: {reason}; set "
                "model.path to another model."
            )


def fix_rotary(model: PreTrainedModel) -> None:
    """Keep rotary frequencies at those of short texts where the library changes them, in place.

    `dynamic` and `longrope` take others when any row of a pass lies beyond a length. A text would
    then depend on its batch, and cached keys would keep the rotation that they once got. Up to
    `exact_rotary_tokens` nothing changes.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or not hasattr(rotary, "rope_type"):
        return
    kinds = rotary.rope_type  # one, or one for each layer type
    if isinstance(kinds, dict):
        fixed = {name: "default" if kind in _BY_LENGTH else kind for name, kind in kinds.items()}
        rotary.rope_type = fixed
    elif kinds in _BY_LENGTH:
        rotary.rope_type = "default"


def exact_rotary_tokens(config: PreTrainedConfig) -> int | None:
    """Longest text whose rotary frequencies `fix_rotary` leaves as they are; None: any."""
    parameters = getattr(config, "rope_parameters", None) or {}
    every = [parameters] if "rope_type" in parameters else parameters.values()
    limits = [
        part.get("original_max_position_embeddings", config.max_position_embeddings)
        if part["rope_type"] == _LONG_ROPE
        else config.max_position_embeddings
        for part in every
        if isinstance(part, dict) and part.get("rope_type") in _BY_LENGTH
    ]
    return min(limits, default=None)


def _supported() -> list[str]:
    return sorted(other for family in FAMILIES.values() for other in family.model_types)


class StepConfig(Step3p7TextConfig):
    """The library's configuration under a model type of our own.

    transformers 5.17 to 5.23 has Step-3.5's model only as the text part of Step-3.7, inside an
    image model, and takes no second class for a configuration of its own.
    """

    model_type = STEP_MODEL_TYPE


class StepForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """Step-3.5: the text model of the library's `models/step3p7` with an lm_head."""

    config: StepConfig
    config_class = StepConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, the library's

    def __init__(self, config: StepConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs: object) -> CausalLMOutputWithPast:
        """Logits `[B, S, V]` of `[B, S]` tokens; keywords are those of the library's models."""
        kwargs.pop("logits_to_keep", None)
        output = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(output.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def _release_names() -> list[WeightConverter | WeightRenaming]:
    """How tensors of the release become the library's: its experts are stacked already.

    As in the library's conversion for Step-3.7, less the level of the image model.
    """
    return [
        WeightRenaming(r"\.moe\.gate\.weight", ".mlp.gate.weight"),
        WeightRenaming(r"\.moe\.router_bias", ".mlp.gate.e_score_correction_bias"),
        WeightRenaming(r"\.moe\.down_proj\.weight", ".mlp.experts.down_proj"),
        WeightRenaming(r"\.share_expert\.", ".mlp.shared_experts."),
        WeightConverter(
            ["moe.gate_proj.weight", "moe.up_proj.weight"],
            "mlp.experts.gate_up_proj",
            operations=[Concatenate(dim=1)],
        ),
    ]


AutoConfig.register(STEP_MODEL_TYPE, StepConfig)
AutoModelForCausalLM.register(StepConfig, StepForCausalLM)
register_checkpoint_conversion_mapping("StepForCausalLM", _release_names())
