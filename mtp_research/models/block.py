"""The decoder layer of an MTP module, built from the target's own class.

Two families need more than a layer: LongCat-Flash has two attentions beside an expert shortcut in
a layer and one attention and MLP in its module (`SingleLayer`), Nemotron 3 one part in a layer and
two in its module (`LayerStack`).

Letters: B batch rows, T rows, D hidden.
Source: LongCat-Flash (arXiv:2509.01322); the published MTP tensors of both.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mtp_research.models.attention.paged import route_sparse
from mtp_research.models.experts import EXPERTS_NAME, fuse_routers
from mtp_research.models.family import NO_PAGES, Family, LayerGeometry, layer_geometries
from mtp_research.models.loading.split_layers import cut_block
from mtp_research.models.rank_parts import RankParts


class SingleLayer(nn.Module):
    """Attention and MLP with a norm before each, of the classes in a target's `layer`."""

    def __init__(self, config: PreTrainedConfig, layer: nn.Module) -> None:
        super().__init__()
        parts = {name: cast(nn.ModuleList, part) for name, part in layer.named_children()}
        norm_class = type(parts["input_layernorm"][0])
        self.input_layernorm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = type(parts["self_attn"][0])(config, 0)
        self.mlp = type(parts["mlps"][0])(config)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; keywords are those of the library's layers."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), attention_mask=None, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LayerStack(nn.Module):
    """Layers of the target's own class, one for each entry of `config.layers_block_type`.

    The attention comes first: its rows go to the module's cache layer 0.
    """

    def __init__(self, config: PreTrainedConfig, layer: nn.Module) -> None:
        super().__init__()
        count = len(config.layers_block_type)
        self.layers = nn.ModuleList(type(layer)(config, index) for index in range(count))

    @property
    def mlp(self) -> nn.Module:
        """The feed-forward part, under the name that it has in other blocks."""
        return self.layers[-1].get_submodule("mixer")

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; keywords are those of the library's layers."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states


def build_block(model: PreTrainedModel, family: Family) -> nn.Module:
    """A fresh decoder layer of the target's own class, with the family's overrides for MTP modules.

    On the current default device in the default dtype, initialised as the model's own layers are.
    """
    block = _new_block(model, family)
    # The class's own initialiser covers routers and expert stacks; rules for Linear would not.
    for module in block.modules():
        model._init_weights(module)
    if model.config.get_text_config()._experts_implementation == EXPERTS_NAME:
        fuse_routers(block)
    return block


def layers_like_block(model: PreTrainedModel, family: Family) -> list[int]:
    """Layers of the target that the block of an MTP module can start from, in the block's order.

    The last one; where types of attention differ between layers, the last one of the block's type.
    A block of several layers takes each from the target's last layer of that type.
    """
    last = len(cast(nn.ModuleList, model.base_model.layers)) - 1
    for name in ("layers_block_type", "layer_types"):
        if name in family.block_overrides:
            kinds = list(getattr(model.config.get_text_config(), name) or ())
            wanted = cast(list[str], family.block_overrides[name])
            alike = [[n for n, kind in enumerate(kinds) if kind == one] for one in wanted]
            return [numbers[-1] if numbers else last for numbers in alike]
    return [last]


def kv_layers(model: PreTrainedModel, family: Family) -> tuple[LayerGeometry, ...]:
    """What each decoder layer of `model` keeps of a token, in order."""
    return layer_geometries(
        cast(nn.ModuleList, model.base_model.layers),
        attention=family.attention,
        latent=family.latent_attention,
    )


def block_kv_layer(
    model: PreTrainedModel, family: Family, *, parts: RankParts | None = None
) -> LayerGeometry:
    """What the block of an MTP module, or a rank's part of it, keeps of a token.

    No weights are allocated.
    """
    with torch.device("meta"):
        block = _new_block(model, family)
        if parts is not None:
            cut_block(block, parts)
    layers = cast(nn.ModuleList, block.layers) if family.stacks_layers else [block]
    first, *others = layer_geometries(
        layers, attention=family.attention, latent=family.latent_attention
    )
    assert set(others) <= {NO_PAGES}, "an MTP module keeps rows in one cache layer, its first"
    return first


def _new_block(model: PreTrainedModel, family: Family) -> nn.Module:
    config = _block_config(model.config.get_text_config(), family)
    config._attn_implementation = model.config._attn_implementation
    config._experts_implementation = model.config.get_text_config()._experts_implementation
    last = cast(nn.ModuleList, model.base_model.layers)[-1]
    if family.composes_block:
        block = SingleLayer(config, last)
    elif family.stacks_layers:
        block = LayerStack(config, last)
    else:
        block = type(last)(config, 0)
    if family.sparse_attention:
        route_sparse([block.get_submodule(family.attention)], config=config)
    return block


def _block_config(config: PreTrainedConfig, family: Family) -> PreTrainedConfig:
    """A copy of the target's config with one layer, that of an MTP module."""
    config = copy.deepcopy(config)
    for key, value in family.block_overrides.items():
        setattr(config, key, copy.deepcopy(value))
    for key, source in family.block_fields.items():
        value = getattr(config, source, None)
        if isinstance(value, list) and not isinstance(getattr(config, key), list):
            value = value[0] if value else None
        if value:
            setattr(config, key, copy.deepcopy(value))
    return config
