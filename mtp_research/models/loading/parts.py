"""A target without most of its decoder layers, for heads that train from cached hidden states.

Such a training runs the embedding, the final norm, the rotary embedding and lm_head. Layers that
are left out stay on the meta device: they keep the classes and sizes that the block of an MTP
module is built from, take no memory, and none of their tensors is read. The library loads what is
in a model, so they are taken out of it before, and put back afterwards.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mtp_research.models.block import layers_like_block
from mtp_research.models.family import Family

Layers = Literal["all", "last", "none"]  # last: those that the block of a module can start from
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass
class LayerFilter:
    """Takes layers out of a model of `config` while the library builds it."""

    config: PreTrainedConfig
    family: Family
    layers: Layers  # `last` or `none`
    left_out: dict[int, nn.Module] = field(default_factory=dict)  # filled by loading

    def loader(self) -> Callable[..., object]:
        """`from_pretrained` of the model's own class, without the layers."""
        with torch.device("meta"):
            own = type(cast(PreTrainedModel, AutoModelForCausalLM.from_config(self.config)))

        def build(model: PreTrainedModel, config: PreTrainedConfig, *rest: object) -> None:
            own.__init__(model, config, *rest)
            self._take_out(model)

        # The library finds its renaming rules by the name of the class and its module.
        parts = type(own.__name__, (own,), {"__init__": build, "__module__": own.__module__})
        return parts.from_pretrained

    def _take_out(self, model: PreTrainedModel) -> None:
        layers = cast(nn.ModuleList, model.base_model.layers)
        kept = layers_like_block(model, self.family) if self.layers == "last" else []
        self.left_out = {n: layer for n, layer in enumerate(layers) if n not in kept}
        for number in self.left_out:
            layers[number] = nn.Identity()

    def put_back(self, model: PreTrainedModel) -> PreTrainedModel:
        """The loaded model, whose layers that were left out are on the meta device, in place."""
        layers = cast(nn.ModuleList, model.base_model.layers)
        for number, layer in self.left_out.items():
            layers[number] = layer.to("meta")
        model.__class__ = type(model).__mro__[1]
        return model

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to a layer that was left out."""
        match = _LAYER_NUMBER.search(name)
        return match is not None and int(match[1]) in self.left_out
