"""MTPHeads: N modules on a target that owns embedding and lm_head, and their conventions.

Letters: N modules, B batch rows (1 when decoding), T rows, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mtp_research.heads.module import ModuleOutput, MTPModule
from mtp_research.models.attention.attention import AttentionContext
from mtp_research.models.family import ConcatOrder, NormPoint
from mtp_research.models.target import Target, TargetHidden
from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class HeadSpec:
    """Conventions recorded with a head; a wrong one is invisible in the text and costs acceptance.

    Attributes:
        num_mtp_modules: N, at least 1.
        hidden_source: target hidden state that the first pass reads.
        recycle_norm: whether the next pass gets a module's output before or after the module's
            norm.
        concat_order: order of the halves of `eh_proj`'s input.
        zero_position_0: zero the embedding of the row at position 0 (a habit of one serving
            engine).
        owns_lm_head: whether each module has an output head of its own instead of the target's.
        unroll: training unroll, for reports; None for weights of unknown origin.
    """

    num_mtp_modules: int
    hidden_source: NormPoint = "post_norm"
    recycle_norm: NormPoint = "post_norm"
    concat_order: ConcatOrder = "embedding_first"
    zero_position_0: bool = False
    owns_lm_head: bool = False
    unroll: str | None = None


class MTPHeads(nn.Module):
    """N MTP modules on a frozen target.

    Args:
        target: the frozen model; its embedding, rotary embedding and lm_head are used and not
            owned, so they are neither in `parameters()` nor in `state_dict()`.
        spec: conventions of the head.
    """

    def __init__(self, target: Target, *, spec: HeadSpec) -> None:
        super().__init__()
        if spec.num_mtp_modules < 1:
            raise ConfigError(
                f"head.num_mtp_modules must be >= 1, got {spec.num_mtp_modules}; "
                "set head.num_mtp_modules=1."
            )
        self.spec = spec
        self.mtp_modules = nn.ModuleList(
            MTPModule(target, concat_order=spec.concat_order, owns_lm_head=spec.owns_lm_head)
            for _ in range(spec.num_mtp_modules)
        )
        # In a tuple, so that nn.Module does not register the target's parameters as ours.
        self._target = (target,)
        # Parameters only: the library keeps the routers' corrections in float32 as well.
        for parameter in self.parameters():
            parameter.data = parameter.data.to(target.dtype)
        self.to(target.device)

    @property
    def target(self) -> Target:
        """The frozen target these heads were built for."""
        return self._target[0]

    def run_module(
        self,
        module_idx: int,
        *,
        token_ids: Tensor,
        prev_hidden_states: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
    ) -> ModuleOutput:
        """Run one module over rows.

        Args:
            module_idx: 0..N-1.
            token_ids: `[B, T]` int64, the token each row consumes.
            prev_hidden_states: `[B, T, D]`.
            position_ids: `[B, T]` int64, position of the row's hidden state.
            context: what the rows attend to.
        """
        embeds = self.target.embed_tokens(token_ids)
        if self.spec.zero_position_0:
            embeds = torch.where((position_ids == 0)[..., None], torch.zeros_like(embeds), embeds)
        return self.mtp_modules[module_idx](
            embeds,
            prev_hidden_states=prev_hidden_states,
            position_embeddings=self.target.position_embeddings(embeds, position_ids),
            position_ids=position_ids,
            context=context,
        )

    def source(self, hidden: TargetHidden) -> Tensor:
        """The target hidden state that these heads read, `[B, T, D]`."""
        return hidden.pre_norm if self.spec.hidden_source == "pre_norm" else hidden.post_norm

    def recycled(self, output: ModuleOutput) -> Tensor:
        """What a later pass gets from `output`, `[B, T, D]`."""
        return output.pre_norm if self.spec.recycle_norm == "pre_norm" else output.post_norm

    def logits(self, post_norm: Tensor, *, module_idx: int | None = None) -> Tensor:
        """Draft logits `[..., V]` of a module's output: its own head, or the target's lm_head.

        Args:
            post_norm: `[..., D]` output of the module.
            module_idx: which module, 0..N-1; may be left out where all share the target's lm_head.
        """
        if not self.spec.owns_lm_head:
            return self.target.logits(post_norm)
        assert module_idx is not None, "modules with heads of their own: say which one"
        return self.mtp_modules[module_idx].shared_head.head(post_norm)

    @property
    def output_weights(self) -> tuple[Tensor, ...]:
        """Weights of the output projections, each `[V, D]`: the target's, or one per module."""
        if not self.spec.owns_lm_head:
            return (self.target.lm_head_weight,)
        heads = [module.shared_head.head for module in self.mtp_modules]
        return tuple(cast(Tensor, head.weight) for head in heads)
