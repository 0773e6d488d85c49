"""The decoder layer of an MTP module, built from the target's own class."""

import copy
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mtp_research.models.experts import EXPERTS_NAME
from mtp_research.models.family import Family
from mtp_research.models.geometry import NO_PAGES, LayerGeometry, layer_geometries
from mtp_research.models.layer_stack import LayerStack
from mtp_research.models.routers import fuse_routers
from mtp_research.models.single_layer import SingleLayer
from mtp_research.models.sparse import route_sparse


def build_block(model: PreTrainedModel, family: Family) -> nn.Module:
    """A fresh decoder layer of the target's own class, with the family's overrides for MTP modules.

    Args:
        model: the target; its last decoder layer gives the class, its config the sizes.
        family: the family entry.

    Returns:
        The layer on the current default device in the default dtype, initialised as the model's
        own layers are.
    """
    block = _new_block(model, family)
    # The class's own initialiser covers routers and expert stacks; rules for Linear would not.
    for module in block.modules():
        model._init_weights(module)
    if model.config.get_text_config()._experts_implementation == EXPERTS_NAME:
        fuse_routers(block)
    return block


def kv_layers(model: PreTrainedModel, family: Family) -> tuple[LayerGeometry, ...]:
    """What each decoder layer of `model` keeps of a token, in order."""
    return layer_geometries(
        cast(nn.ModuleList, model.base_model.layers),
        attention=family.attention,
        latent=family.latent_attention,
    )


def block_kv_layer(model: PreTrainedModel, family: Family) -> LayerGeometry:
    """What the block of an MTP module keeps of a token; no weights are allocated."""
    with torch.device("meta"):
        block = _new_block(model, family)
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
