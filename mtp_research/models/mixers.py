"""Recurrent layers of a target, and how their calls reach the context of a pass.

The library's layers see one text a batch row. A packed row holds several, so the calls are routed:
in decoding to `RecurrentContext.mix`, in training (`DenseContext`) once per document. The layer's
own forward, unmodified, does the work; calls without a context of ours reach it as they are.

Letters: B batch rows, S row length, D hidden.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtp_research.models.attention.attention import AttentionContext, DenseContext
from mtp_research.models.family import MIXER_BLOCK
from mtp_research.models.recurrent import MixerForward, RecurrentContext


def mixers_of(model: PreTrainedModel, name: str | None) -> dict[int, nn.Module]:
    """Recurrent layers by layer index.

    Args:
        model: a causal LM.
        name: attribute of a decoder layer that holds one (`Family.mixer`), None for families
            without.
    """
    if name is None:
        return {}
    layers = cast(nn.ModuleList, model.base_model.layers)
    return {
        index: layer.get_submodule(name)
        for index, layer in enumerate(layers)
        if name in dict(layer.named_children())
        and getattr(layer, "block_type", MIXER_BLOCK) == MIXER_BLOCK
    }


def route_mixers(mixers: Iterable[nn.Module]) -> None:
    """Let calls of recurrent layers reach the context of the pass, in place."""
    for mixer in mixers:
        mixer.forward = partial(_mix, mixer, mixer.forward)


@torch.compiler.disable  # it calls modules of the layer by forwards of its own, and writes states
def _mix(
    mixer: nn.Module,
    forward: MixerForward,
    hidden_states: Tensor,
    *,
    attention_context: AttentionContext | None = None,
    **kwargs: Any,  # the library's
) -> Tensor:
    if attention_context is None:
        return forward(hidden_states, **kwargs)
    if isinstance(attention_context, DenseContext):
        return _mix_documents(forward, hidden_states, attention_context.document_index)
    assert isinstance(attention_context, RecurrentContext), (
        f"a pass through recurrent layers needs a RecurrentContext, got "
        f"{type(attention_context).__name__}"
    )
    return attention_context.mix(mixer, forward, hidden_states)


def _mix_documents(
    forward: MixerForward, hidden_states: Tensor, document_index: Tensor | None
) -> Tensor:
    """Rows `[B, S, D]`, every document from the zero state; None takes a row for one document."""
    if document_index is None:
        return forward(hidden_states)
    output = torch.empty_like(hidden_states)
    for row, documents in enumerate(document_index):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        pieces = hidden_states[row].split(lengths)
        output[row] = torch.cat([forward(piece[None])[0] for piece in pieces])
    return output
