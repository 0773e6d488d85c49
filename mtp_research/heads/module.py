"""One MTP module: two norms, a projection, a decoder layer of the target's family, a last norm.

    u = eh_proj([enorm(Emb(x)); hnorm(prev_hidden)])        (or hidden first, by the head's spec)
    y = block(u)                                            pre-norm output
    z = shared_head.norm(y)                                 post-norm output; logits = lm_head(z)
                                                            (or the target's norm, by the family)

Letters: B batch rows (1 when decoding), T rows, D hidden.
Source: DeepSeek-V3 (arXiv:2412.19437), section on Multi-Token Prediction; names as in its
checkpoint.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtp_research.models.attention.attention import AttentionContext
from mtp_research.models.block import build_block
from mtp_research.models.family import ConcatOrder
from mtp_research.models.target import Target


class ModuleOutput(NamedTuple):
    """Output of one module, before and after its own norm, each `[B, T, D]`."""

    pre_norm: Tensor
    post_norm: Tensor


class SharedHead(nn.Module):
    """The part of the output head that a module owns: its norm, in some families a projection.

    Elsewhere the projection is the target's.
    """

    def __init__(self, norm: nn.Module, head: nn.Linear | None) -> None:
        super().__init__()
        self.norm = norm
        self.head = head


class MTPModule(nn.Module):
    """One trained depth.

    Args:
        target: gives the sizes, the norm class and the decoder-layer class.
        concat_order: order of the halves of `eh_proj`'s input.
        owns_lm_head: whether it has an output projection of its own.
    """

    def __init__(
        self, target: Target, *, concat_order: ConcatOrder, owns_lm_head: bool = False
    ) -> None:
        super().__init__()
        hidden_size = target.config.hidden_size
        final_norm = getattr(target.model.base_model, target.family.final_norm)
        norm_class = type(final_norm)
        eps = getattr(target.config, target.family.norm_eps)
        self.concat_order = concat_order
        self.enorm = norm_class(hidden_size, eps=eps)
        self.hnorm = norm_class(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = build_block(target.model, target.family)
        self.shared_head: SharedHead | None = None
        if target.family.owns_norm:
            shape = (hidden_size, target.config.vocab_size)
            head = nn.Linear(*shape, bias=False) if owns_lm_head else None
            self.shared_head = SharedHead(norm_class(hidden_size, eps=eps), head)
        # In a tuple, so that nn.Module does not register the target's norm as ours.
        self._final_norm = (final_norm,)
        nn.init.normal_(self.eh_proj.weight, std=target.config.initializer_range)

    def forward(
        self,
        token_embeds: Tensor,
        *,
        prev_hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        position_ids: Tensor,
        context: AttentionContext,
    ) -> ModuleOutput:
        """Run the module over rows.

        Args:
            token_embeds: `[B, T, D]` embeddings of the tokens the rows consume.
            prev_hidden_states: `[B, T, D]` target hidden state or the output of an earlier pass.
            position_embeddings: rotary cos and sin, each `[B, T, rotary_dim]`.
            position_ids: `[B, T]` int64.
            context: what the rows attend to.
        """
        embedding, hidden = self.enorm(token_embeds), self.hnorm(prev_hidden_states)
        halves = (embedding, hidden)
        if self.concat_order == "hidden_first":
            halves = (hidden, embedding)
        output = self.block(
            self.eh_proj(torch.cat(halves, dim=-1)),
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            past_key_values=context if hasattr(context, "update") else None,
            attention_context=context,
        )
        if isinstance(output, tuple):  # some layers hand on what the next one attends to
            output = output[0]
        norm = self._final_norm[0] if self.shared_head is None else self.shared_head.norm
        return ModuleOutput(pre_norm=output, post_norm=norm(output))
