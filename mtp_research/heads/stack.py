"""MTPHeads: N MTP modules on a target that owns embedding and lm_head, and their conventions.

A module is two norms, a projection, a decoder layer of the target's family, and a last norm:

    u = eh_proj([enorm(Emb(x)); hnorm(prev_hidden)])        (or hidden first, by the head's spec)
    y = block(u)                                            pre-norm output
    z = shared_head.norm(y)                                 post-norm output; logits = lm_head(z)
                                                            (or the target's norm, by the family)

Letters: N modules, B batch rows (1 when decoding), T rows, D hidden, V vocabulary.
Source: DeepSeek-V3 (arXiv:2412.19437), section on Multi-Token Prediction; names as in its
checkpoint.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtp_research.heads.publish import add_card, push_folder, write_head_files
from mtp_research.models.attention.attention import AttentionContext
from mtp_research.models.block import build_block
from mtp_research.models.family import ConcatOrder, NormPoint
from mtp_research.models.loading.source import source_facts
from mtp_research.models.loading.split_layers import cut_block
from mtp_research.models.rank_parts import whole_of
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class HeadSpec:
    """Conventions recorded with a head; a wrong one shows in the acceptance, not in the text."""

    num_mtp_modules: int  # N, at least 1
    hidden_source: NormPoint = "post_norm"  # target hidden state that the first pass reads
    recycle_norm: NormPoint = "post_norm"  # of a module's output, for the next pass
    concat_order: ConcatOrder = "embedding_first"  # of the halves of `eh_proj`'s input
    zero_position_0: bool = False  # no embedding at position 0, a habit of one serving engine
    owns_lm_head: bool = False  # each module has an output head of its own, not the target's
    unroll: str | None = None  # of training, for reports; None for weights of unknown origin
    # Which module ran which depth in training; None: unknown, decoded as `cycle` or as asked.
    module_schedule: ModuleSchedule | None = None


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
    """One trained depth: sizes, norm class and decoder-layer class are the target's.

    `owns_lm_head` gives it an output projection of its own.
    """

    def __init__(
        self, target: Target, *, concat_order: ConcatOrder, owns_lm_head: bool = False
    ) -> None:
        super().__init__()
        hidden_size = target.config.hidden_size
        final_norm = target.final_norm
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
        self.is_split = False  # each rank has its part of them, see `split`
        self.path = ""  # folder that they were loaded from
        self.provenance: Mapping[str, object] = {}  # what its `head.json` says of their training
        # In a tuple, so that nn.Module does not register the target's parameters as ours.
        self._target = (target,)
        # Parameters only: the library keeps the routers' corrections in float32 as well.
        for parameter in self.parameters():
            parameter.data = parameter.data.to(target.dtype)
        self.to(target.device)

    def __repr__(self) -> str:
        """One line, where `nn.Module` prints the tree of modules."""
        spec, count = self.spec, sum(parameter.numel() for parameter in self.parameters())
        modules = f"{spec.num_mtp_modules} module{'s' * (spec.num_mtp_modules != 1)}"
        return (
            f"MTPHeads({modules}, {spec.unroll or 'unknown'} unroll, {count / 1e6:,.1f} M "
            f"parameters, on {self.target!r})"
        )

    @property
    def target(self) -> Target:
        """The frozen target these heads were built for."""
        return self._target[0]

    def split(self) -> None:
        """Leave this rank's parts of modules on a target that ranks split, in place.

        Nothing is done on a whole target, or a second time. A decoder does it when it is built.
        """
        parts = self.target.split
        if parts is None or self.is_split:
            return
        for module in cast(Iterable[MTPModule], self.mtp_modules):
            cut_block(module.block, parts)
            if self.spec.owns_lm_head and parts.exchange is None:
                head = cast(nn.Linear, cast(SharedHead, module.shared_head).head)
                head.weight = nn.Parameter(parts.rows(head.weight.data), requires_grad=False)
                head.out_features = len(head.weight)
        self.is_split = True

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """Write a folder that `load_heads` reads, with a model card; returns it.

        Args:
            folder: created if missing; its files are replaced.
            dtype: of floating tensors; None for their own.

        Raises:
            ConfigError: ranks have parts of the modules.
        """
        if self.is_split:
            raise ConfigError(
                "heads are saved whole, got modules of which each rank of model.tp_plan has a part "
                "since a decoder was built; save them before, or load them with model.tp_plan=none."
            )
        write_head_files(
            Path(folder),
            self.state_dict(),
            spec=dataclasses.asdict(self.spec),
            target=self.target,
            provenance={**source_facts(self.target.path), **self.provenance},
            dtype=dtype,
        )
        add_card(Path(folder), ranking_of=self.path)
        return Path(folder)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Upload what `save_pretrained` writes; `load_heads(repo_id, target)` reads it.

        Args:
            repo_id: NAME or ORGANISATION/NAME; made if it is missing.
            private: of a repository that is made; None for the account's own setting.
            revision: branch, made if it is missing; None for the main one.

        Returns:
            The address of the repository.

        Raises:
            ConfigError: `repo_id` is no name of a repository.
            EnvironmentFault: the hub refuses, or cannot be reached.
        """
        with tempfile.TemporaryDirectory(prefix="mtp-heads-") as folder:
            written = self.save_pretrained(folder)
            return push_folder(written, repo_id, private=private, revision=revision)

    def run_module(
        self,
        module: nn.Module,
        *,
        token_ids: Tensor,
        prev_hidden_states: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        axis_positions: Tensor | None = None,
    ) -> ModuleOutput:
        """Run one module over rows.

        Args:
            module: of `mtp_modules`; compiled code that is given one serves the others, too.
            token_ids: `[B, T]` int64, the token each row consumes.
            prev_hidden_states: `[B, T, D]`.
            position_ids: `[B, T]` int64, position of the row's hidden state.
            context: what the rows attend to.
            axis_positions: `[axes, B, T]` int64, the rotary positions where they differ by axis.
        """
        embeds = self.target.embed_tokens(token_ids)
        if self.spec.zero_position_0:
            embeds = torch.where((position_ids == 0)[..., None], torch.zeros_like(embeds), embeds)
        rotary = position_ids if axis_positions is None else axis_positions
        return module(
            embeds,
            prev_hidden_states=prev_hidden_states,
            position_embeddings=self.target.position_embeddings(embeds, rotary),
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
        are_parts = self.is_split or not self.spec.owns_lm_head
        module = None if module_idx is None else cast(MTPModule, self.mtp_modules[module_idx])
        own = self.own_logits(post_norm, module=module)
        return whole_of(own, self.target.parts if are_parts else None)

    def own_logits(self, post_norm: Tensor, *, module: MTPModule | None = None) -> Tensor:
        """As `logits`, of the tokens whose rows of the output head lie on this rank."""
        if not self.spec.owns_lm_head:
            return self.target.own_logits(post_norm)
        assert module is not None, "modules with heads of their own: say which one"
        return cast(nn.Linear, cast(SharedHead, module.shared_head).head)(post_norm)

    @property
    def output_weights(self) -> tuple[Tensor, ...]:
        """Weights of the output projections, each `[V, D]`: the target's, or one per module.

        Of ones that ranks split, gathered by all of them.
        """
        if not self.spec.owns_lm_head:
            return (self.target.lm_head_weight,)
        heads = [module.shared_head.head for module in self.mtp_modules]
        parts = self.target.parts if self.is_split else None
        return tuple(whole_of(cast(Tensor, head.weight), parts, dim=0) for head in heads)
