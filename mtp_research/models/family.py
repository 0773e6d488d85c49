"""The record types of the family table: a family, and where its checkpoints keep MTP modules."""

from dataclasses import dataclass, field
from typing import Literal

NormPoint = Literal["pre_norm", "post_norm"]
ConcatOrder = Literal["embedding_first", "hidden_first"]
SharedTensor = Literal["embed_tokens", "lm_head"]


@dataclass(frozen=True)
class NativeLayout:
    """Names of MTP tensors in published checkpoints.

    In `prefix` and `names`, `{module}` stands for the module index and `{layer}` for the number of
    target layers plus the module index.

    Attributes:
        prefix: what the name of every MTP tensor begins with.
        names: beginnings of a tensor's name, here and, after the prefix, there; the first pair that
            fits is used.
        copies: names after the prefix under which a release may repeat a tensor of the target.
        count_field: config field with the number of modules; None for families without one.
    """

    prefix: str
    names: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, SharedTensor], ...] = ()
    count_field: str | None = None


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
    """One model family.

    Attributes:
        model_types: values of `config.model_type` that belong to this family.
        block_overrides: config fields set before the decoder layer of an MTP module is built with
            `layer_idx` 0, in this order.
        block_fields: config fields set after them from another field, where the config has it; of
            a list (one entry a module) that is no list there, the first entry.
        final_norm: attribute of the base model that holds the final norm.
        attention: attribute of a decoder layer that holds its attention.
        latent_attention: whether that is multi-head latent attention.
        sparse_attention: whether a learned index selects keys; see `models/sparse.py`.
        norm_eps: config field with the epsilon of the norms.
        stacks_layers: whether a layer holds one part only (attention, recurrent layer or MLP), so
            that the block of an MTP module is several; see `models/layer_stack.py`.
        composes_block: whether a layer holds two attentions and MLPs, of which an MTP module has
            one each; see `models/single_layer.py`.
        num_position_axes: axes of the rotary positions; 3 in families that also place images, whose
            text rows have the same position on each.
        block_layer_type: layer type whose rotary embedding the MTP blocks take, in families where
            it differs between layers.
        mixer: attribute of a decoder layer that holds its recurrent layer, in families that mix
            recurrent and attention layers.
        hidden_source: which target hidden state the first module reads.
        recycle_norm: whether the next pass gets a module's output before or after the module's own
            norm.
        concat_order: order of the two halves of `eh_proj`'s input.
        owns_norm: whether a module has a norm of its own before the head; if not, the target's
            final norm stands there.
        owns_lm_head: whether each published module has an output head of its own. They are decoded
            and not trained.
        native: where published checkpoints keep their modules.
        loads_as: model type whose classes load this family's published model type, where the
            library has none of its own.
    """

    model_types: tuple[str, ...]
    block_overrides: dict[str, object] = field(default_factory=dict)
    block_fields: dict[str, str] = field(default_factory=dict)
    final_norm: str = "norm"
    attention: str = "self_attn"
    latent_attention: bool = False
    sparse_attention: bool = False
    norm_eps: str = "rms_norm_eps"
    stacks_layers: bool = False
    composes_block: bool = False
    num_position_axes: int = 1
    block_layer_type: str | None = None
    mixer: str | None = None
    hidden_source: NormPoint = "post_norm"
    recycle_norm: NormPoint = "post_norm"
    concat_order: ConcatOrder = "embedding_first"
    owns_norm: bool = True
    owns_lm_head: bool = False
    native: NativeLayout = NEUTRAL_LAYOUT
    loads_as: str | None = None
