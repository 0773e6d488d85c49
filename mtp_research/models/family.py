"""The records of the family table: a family, the names of its MTP tensors, what its layers cache.

A layer either keeps keys and values per key-value head, or one latent vector beside the rotary key
(multi-head latent attention), from which keys and values of all heads follow. Layers of one model
may differ: sliding layers of some families have more heads than their full layers.

Letters: Hkv key-value heads, Dk / Dv head dims.
Source: tensor names of the releases, as vLLM, SGLang and Megatron-Bridge read and write them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

from torch import Tensor, nn

NormPoint = Literal["pre_norm", "post_norm"]
ConcatOrder = Literal["embedding_first", "hidden_first"]
SharedTensor = Literal["embed_tokens", "lm_head"]


@dataclass(frozen=True)
class NativeLayout:
    """Names of MTP tensors in published checkpoints.

    In `prefix` and `names`, `{module}` stands for the module index and `{layer}` for the number of
    target layers plus the module index. `names` are beginnings of a tensor's name, here and, after
    the prefix, there; the first pair that fits is used. `copies` are names after the prefix under
    which a release may repeat a tensor of the target.
    """

    prefix: str  # what the name of every MTP tensor begins with
    names: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, SharedTensor], ...] = ()
    count_field: str | None = None  # config field with the number of modules

    @property
    def numbers_modules(self) -> bool:
        """Whether the names tell modules apart, so that a checkpoint may hold several."""
        return any("{" in self.prefix + there for _, there in self.names)


# Qwen's names. Also for heads of families that ship none, and never taught a serving engine others.
NEUTRAL_LAYOUT = NativeLayout(
    prefix="mtp.",
    names=(
        ("enorm.", "pre_fc_norm_embedding."),
        ("hnorm.", "pre_fc_norm_hidden."),
        ("eh_proj.", "fc."),
        ("shared_head.norm.", "norm."),
        ("block.", "layers.0."),
    ),
)


@dataclass(frozen=True)
class Family:
    """One model family. A block is the decoder layer of an MTP module; see `models/block.py`."""

    model_types: tuple[str, ...]  # values of `config.model_type` that belong to this family
    # Config fields set, in this order, before a block is built with `layer_idx` 0; then fields set
    # from another one, where the config has it; of a list (an entry a module) the first entry.
    block_overrides: dict[str, object] = field(default_factory=dict)
    block_fields: dict[str, str] = field(default_factory=dict)
    final_norm: str = "norm"  # attribute of the base model
    attention: str = "self_attn"  # attribute of a decoder layer
    latent_attention: bool = False  # whether that is multi-head latent attention
    sparse_attention: bool = False  # a learned index selects keys; see `models/attention/paged.py`
    norm_eps: str = "rms_norm_eps"  # config field
    stacks_layers: bool = False  # a layer is attention, recurrent layer or MLP; a block is several
    composes_block: bool = False  # a layer holds two attentions and MLPs, a block one each
    # Axes of the rotary positions: 3 in families that also place images, whose text rows have the
    # same position on each.
    num_position_axes: int = 1
    block_layer_type: str | None = None  # whose rotary embedding blocks take, where layers differ
    mixer: str | None = None  # attribute of a decoder layer that holds its recurrent layer
    hidden_source: NormPoint = "post_norm"  # target hidden state that the first module reads
    recycle_norm: NormPoint = "post_norm"  # of the module's own norm: what the next pass gets
    concat_order: ConcatOrder = "embedding_first"  # of the halves of `eh_proj`'s input
    owns_norm: bool = True  # before the head; else the target's final norm stands there
    owns_lm_head: bool = False  # published modules have heads of their own: decoded, not trained
    native: NativeLayout = NEUTRAL_LAYOUT  # where published checkpoints keep their modules
    loads_as: str | None = None  # model type that loads this one, which the library does not have


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


KVKind = Literal["heads", "latent"]


class LayerGeometry(NamedTuple):
    """What a cache layer holds per token."""

    kind: KVKind  # heads, keys and values; latent, one vector whose first Dv entries are the value
    num_kv_heads: int  # Hkv; 1 for latent, 0 for a layer without attention, which holds nothing
    key_dim: int  # Dk; for latent the latent size plus the rotary key size
    value_dim: int  # Dv; for latent the latent size


# Of a layer's `block_type`: some families keep attention, recurrent layers and MLPs under one name.
ATTENTION_BLOCK, MIXER_BLOCK = "full_attention", "linear_attention"
NO_PAGES = LayerGeometry("heads", 0, 1, 1)


class KVPages(NamedTuple):
    """The pages of one layer, writable views of the pool."""

    keys: Tensor  # [num_blocks, block_size, Hkv, Dk]
    values: Tensor  # [num_blocks, block_size, Hkv, Dv]; for latent the front part of keys
    kind: KVKind  # of the layer


class KVStack(NamedTuple):
    """The pages of all layers of one geometry, and which of them is meant."""

    keys: Tensor  # [L, num_blocks, block_size, Hkv, Dk]
    values: Tensor  # [L, num_blocks, block_size, Hkv, Dv]
    kind: KVKind
    index: int  # 0..L-1

    @property
    def pages(self) -> KVPages:
        """Those of this layer."""
        return KVPages(self.keys[self.index], self.values[self.index], self.kind)


def attention_geometry(attention: nn.Module, *, latent: bool) -> LayerGeometry:
    """Geometry of the attention of a Hugging Face layer, `latent` as `Family.latent_attention`."""
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
