"""Step-3.5 as a causal language model, which transformers 5.17 to 5.23 has as a text model only.

The library loads Step-3.7, whose text part is Step-3.5's model inside an image model. Here the same
text model gets an lm_head and the names of Step-3.5's release. Importing registers the two classes
under a model type of our own: the library takes no second class for a configuration of its own.

Letters: B batch rows, S row length.
Source: Step-3.5-Flash, as in the library's `models/step3p7`; its tensor names as in the library's
conversion for Step-3.7, less the level of the image model.
"""

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
)

STEP_MODEL_TYPE = "mtp_research_step3p5"


class StepConfig(Step3p7TextConfig):
    """The library's configuration under a model type of our own."""

    model_type = STEP_MODEL_TYPE


class StepForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The library's text model with an lm_head.

    Args:
        config: sizes.
    """

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
    """How tensors of the release become the library's: its experts are stacked already."""
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
