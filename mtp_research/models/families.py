"""What differs between model families, as one literal table.

A family entry says how to build an MTP block from the family's own Hugging Face decoder layer and
which hidden-state conventions its published heads follow. Nothing else in the project branches on a
model type.

Source: the families' modeling files in transformers 5.17-5.23; engines compared in the project's
families page.
"""

import copy
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mtp_research.errors import ConfigError

NormPoint = Literal["pre_norm", "post_norm"]
ConcatOrder = Literal["embedding_first", "hidden_first"]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_types: values of `config.model_type` that belong to this family.
        block_overrides: config fields set before the decoder layer of an MTP module is built with
            `layer_idx` 0.
        final_norm: attribute of the base model that holds the final norm.
        hidden_source: which target hidden state the first module reads.
        recycle_norm: whether the next pass gets a module's output before or after the module's own
            norm.
        concat_order: order of the two halves of `eh_proj`'s input.
    """

    model_types: tuple[str, ...]
    block_overrides: dict[str, object] = field(default_factory=dict)
    final_norm: str = "norm"
    hidden_source: NormPoint = "post_norm"
    recycle_norm: NormPoint = "post_norm"
    concat_order: ConcatOrder = "embedding_first"


FAMILIES: dict[str, Family] = {
    "glm4_moe": Family(model_types=("glm4_moe",), block_overrides={"first_k_dense_replace": 0}),
    "qwen3": Family(
        model_types=("qwen3", "qwen2"),
        block_overrides={"layer_types": ["full_attention"], "num_hidden_layers": 1},
    ),
}


def family_of(config: PreTrainedConfig) -> str:
    """Name of the family that `config` belongs to.

    Raises:
        ConfigError: no entry lists the model type; the message names those that are supported.
    """
    for name, family in FAMILIES.items():
        if config.model_type in family.model_types:
            return name
    supported = sorted(
        model_type for family in FAMILIES.values() for model_type in family.model_types
    )
    raise ConfigError(
        f"model.path must hold one of {supported}, got model_type {config.model_type!r}; "
        "add an entry to mtp_research/models/families.py to support it."
    )


def build_block(model: PreTrainedModel, family: Family) -> nn.Module:
    """A fresh decoder layer of the target's own class, with the family's overrides for MTP modules.

    Args:
        model: the target; its last decoder layer gives the class, its config the sizes.
        family: the family entry.

    Returns:
        The layer on the CPU in the default dtype, weights as its constructor leaves them (see
        `init_block`).
    """
    config = copy.deepcopy(model.config.get_text_config())
    for key, value in family.block_overrides.items():
        setattr(config, key, copy.deepcopy(value))
    config._attn_implementation = model.config._attn_implementation
    config._experts_implementation = model.config._experts_implementation
    layers = cast(nn.ModuleList, model.base_model.layers)
    block = type(layers[-1])(config, 0)
    # The class's own initialiser covers routers and expert stacks; rules for Linear would not.
    for module in block.modules():
        model._init_weights(module)
    return block
