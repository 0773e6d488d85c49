"""What each attention layer keeps of a token, read from the layers themselves.

A layer either keeps keys and values per key-value head, or one latent vector beside the rotary key
(multi-head latent attention), from which keys and values of all heads follow. Layers of one model
may differ: sliding layers of some families have more heads than their full layers.

Letters: Hkv key-value heads, Dk / Dv head dims.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from torch import Tensor, nn

KVKind = Literal["heads", "latent"]


class LayerGeometry(NamedTuple):
    """What a cache layer holds per token.

    Attributes:
        kind: `heads`, keys and values; `latent`, one vector whose first Dv entries are the value.
        num_kv_heads: Hkv; 1 for `latent`, 0 for a layer without attention, which holds nothing.
        key_dim: Dk; for `latent` the latent size plus the rotary key size.
        value_dim: Dv; for `latent` the latent size.
    """

    kind: KVKind
    num_kv_heads: int
    key_dim: int
    value_dim: int


# Of a layer's `block_type`: some families keep attention, recurrent layers and MLPs under one name.
ATTENTION_BLOCK, MIXER_BLOCK = "full_attention", "linear_attention"
NO_PAGES = LayerGeometry("heads", 0, 1, 1)


class KVPages(NamedTuple):
    """The pages of one layer, writable views of the pool.

    Attributes:
        keys: `[num_blocks, block_size, Hkv, Dk]`.
        values: `[num_blocks, block_size, Hkv, Dv]`; for `latent` the front part of `keys`.
        kind: of the layer.
    """

    keys: Tensor
    values: Tensor
    kind: KVKind


def attention_geometry(attention: nn.Module, *, latent: bool) -> LayerGeometry:
    """Geometry of one attention module of a Hugging Face layer.

    Args:
        attention: module with `k_proj`, `v_proj` and `head_dim`, or a latent one with
            `kv_lora_rank` and `qk_rope_head_dim`.
        latent: which of the two it is (`Family.latent_attention`).
    """
    if latent:
        rank = cast(int, attention.kv_lora_rank)
        return LayerGeometry("latent", 1, rank + cast(int, attention.qk_rope_head_dim), rank)
    key_dim = cast(int, attention.head_dim)
    num_kv_heads = _out_features(attention.k_proj) // key_dim
    return LayerGeometry(
        "heads", num_kv_heads, key_dim, _out_features(attention.v_proj) // num_kv_heads
    )


def layer_geometries(
    layers: Iterable[nn.Module], *, attention: str, latent: bool
) -> tuple[LayerGeometry, ...]:
    """Geometries of cache layers in the order of the decoder layers.

    A layer with a list of attentions has a cache layer for each; one without attention has a cache
    layer that holds nothing (`NO_PAGES`), so that indices stay those of the layers.

    Args:
        layers: decoder layers.
        attention: name of the attention module in a layer (`Family.attention`).
        latent: as in `attention_geometry`.
    """
    geometries: list[LayerGeometry] = []
    for layer in layers:
        module = dict(layer.named_children()).get(attention)
        if module is None or getattr(layer, "block_type", ATTENTION_BLOCK) != ATTENTION_BLOCK:
            geometries.append(NO_PAGES)
            continue
        modules = module if isinstance(module, nn.ModuleList) else [module]
        geometries += [attention_geometry(part, latent=latent) for part in modules]
    return tuple(geometries)


def _out_features(projection: object) -> int:
    return cast(nn.Linear, projection).out_features
