"""Drafting: who proposes the next K tokens, and the MTP drafter that executes a policy's row plan.

A drafter gets the verified step and returns K tokens a request. `MTPDrafter` runs K passes of
`policy.plan_pass`; `NullDrafter` and `OracleDrafter` are the two ends every evaluation can be
checked against: length 1 and length K+1.

Letters: R requests, T rows of a pass, K drafts per step, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtp_research.decode.audit import Auditor
from mtp_research.decode.batch import StepInputs
from mtp_research.decode.kv_cache import HiddenRing, KVCache
from mtp_research.decode.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.verify import PADDING_TOKEN_ID
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.paged import PagedContext
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy import (
    HiddenKind,
    HiddenPolicy,
    ModuleSchedule,
    PassPlan,
    StepState,
    plan_pass,
)


@dataclass(frozen=True)
class VerifiedStep:
    """What drafting may use of a step.

    Attributes:
        inputs: the step's inputs.
        state: where each request stands after verification.
        target_hidden: hidden states of the step's packed rows, each `[1, T, D]`.
        params: sampling parameters of the requests.
        request_ids: for the auditor.
    """

    inputs: StepInputs
    state: StepState
    target_hidden: TargetHidden
    params: SamplingTensors
    request_ids: list[str]


class Drafter(Protocol):
    """Proposes K tokens a request.

    Attributes:
        num_kv_layers: KV layers it needs beside the target's.
        num_extra_slots: positions it writes beyond `policy.num_slots_needed`.
    """

    @property
    def num_kv_layers(self) -> int:
        """See the class."""
        ...

    @property
    def num_extra_slots(self) -> int:
        """See the class."""
        ...

    def draft(self, step: VerifiedStep, *, cache: KVCache, ring: HiddenRing) -> Tensor:
        """Draft token ids `[R, K]` int64, -1 for drafts to reject and requests that do not draft.

        Writes the drafter's KV layers, appends the drafts to `ring.text` and, when drafts are
        sampled, keeps their distributions in the ring.
        """
        ...


@dataclass(frozen=True)
class MTPDrafter:
    """Runs MTP modules under a hidden-state policy.

    Attributes:
        heads: the modules.
        policy: row plan.
        num_speculative_tokens: K, >= 1.
        first_kv_layer: index of the first draft layer in the cache.
        schedule: which module runs which pass.
        sample_drafts: draw drafts from the draft distribution (with the request's sampling
            parameters) instead of argmax.
        backend: kernel backend.
        auditor: records every row, or None.
    """

    heads: MTPHeads
    policy: HiddenPolicy
    num_speculative_tokens: int
    first_kv_layer: int
    schedule: ModuleSchedule = "cycle"
    sample_drafts: bool = False
    backend: str = "auto"
    auditor: Auditor | None = None
    num_extra_slots: int = 0

    @property
    def num_kv_layers(self) -> int:
        """KV layers the policy needs."""
        return self.policy.num_kv_layers(
            self.num_speculative_tokens, self.heads.spec.num_mtp_modules
        )

    def draft(self, step: VerifiedStep, *, cache: KVCache, ring: HiddenRing) -> Tensor:
        """See `Drafter.draft`. One module pass per draft, whose rows follow `plan_pass`."""
        target_hidden = self.heads.source(step.target_hidden)[0]  # [T, D]
        chain: Tensor | None = None  # the previous pass's output, for policies that chain
        recycled: list[Tensor] = []
        drafts: list[Tensor] = []
        for draft_step in range(self.num_speculative_tokens):
            plan = plan_pass(
                self.policy,
                step.state,
                draft_step=draft_step,
                num_speculative_tokens=self.num_speculative_tokens,
                num_mtp_modules=self.heads.spec.num_mtp_modules,
                schedule=self.schedule,
            )
            if len(plan.position) == 0:
                drafts.append(torch.full_like(step.state.frontier, PADDING_TOKEN_ID))
                continue
            hidden = _gather_hidden(
                plan, step, target_hidden=target_hidden, ring=ring, chain=chain, recycled=recycled
            )
            token_ids = ring.read_text(step.inputs.slots[plan.request_index], plan.token_position)
            if self.auditor is not None:
                self.auditor.record(plan, token_ids=token_ids, request_ids=step.request_ids)
            output = self.heads.run_module(
                plan.module_idx,
                token_ids=token_ids[None],
                prev_hidden_states=hidden[None],
                position_ids=plan.position.clamp(min=0)[None],
                context=self._context(plan, step.inputs, cache),
            )
            own_output = self.heads.recycled(output)[0]
            chain = own_output if self.policy.hidden == "chain" else None
            sampled_rows = plan.last_rows.clamp(min=0)
            recycled.append(own_output[sampled_rows])
            logits = self.heads.logits(output.post_norm[0, sampled_rows])  # [R, V]
            token_ids = self._choose(logits, step, draft_step, ring)
            drafts.append(token_ids.masked_fill(~step.state.drafting, PADDING_TOKEN_ID))
            ring.write_text(
                step.inputs.slots,
                positions=(step.state.num_known_tokens + draft_step)[:, None],
                token_ids=drafts[-1][:, None],
                keep=step.state.drafting[:, None],
            )
        _store_ring(step, target_hidden, ring)
        return torch.stack(drafts, dim=1)

    def _context(self, plan: PassPlan, inputs: StepInputs, cache: KVCache) -> PagedContext:
        return PagedContext(
            pool=cache,
            slot_mapping=inputs.slot_mapping(plan.request_index, plan.position, writes=plan.writes),
            block_table=inputs.block_table,
            seq_lens=plan.seq_lens,
            query_start_loc=plan.query_start_loc,
            max_query_len=plan.max_query_len,
            backend=self.backend,
            kv_layer=self.first_kv_layer + plan.kv_layer,
        )

    def _choose(
        self, logits: Tensor, step: VerifiedStep, draft_step: int, ring: HiddenRing
    ) -> Tensor:
        """Draft tokens `[R]` of draft logits `[R, V]`; a non-finite row gives -1."""
        finite = torch.isfinite(logits).all(dim=-1)
        if not self.sample_drafts:
            return torch.where(finite, logits.argmax(dim=-1), PADDING_TOKEN_ID)
        probs = target_probabilities(
            logits.masked_fill(~finite[:, None], 0.0)[:, None], step.params
        )[:, 0]
        ring.write_draft_probs(step.inputs.slots, draft_step=draft_step, probs=probs)
        # Keyed by the step too: a later step drafts this position anew (see verify_block).
        first = step.state.num_known_tokens
        noise = uniform_noise(step.params.seed, first, Stream.DRAFT, index=draft_step)
        token_ids = sample_from(probs, noise)
        return torch.where(finite, token_ids, PADDING_TOKEN_ID)


@dataclass(frozen=True)
class NullDrafter:
    """Proposes only drafts that must be rejected: length 1, at the cost of verifying K rows."""

    num_speculative_tokens: int
    num_kv_layers: int = 0
    num_extra_slots: int = 0

    def draft(self, step: VerifiedStep, *, cache: KVCache, ring: HiddenRing) -> Tensor:
        """See `Drafter.draft`."""
        shape = (len(step.state.frontier), self.num_speculative_tokens)
        device = step.state.frontier.device
        return torch.full(shape, PADDING_TOKEN_ID, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class OracleDrafter:
    """Drafts with the target itself: under greedy verification the length is exactly K+1.

    K target passes over one row a request write provisional KV at the draft positions; the verify
    step overwrites it.
    """

    target: Target
    num_speculative_tokens: int
    backend: str = "auto"
    num_kv_layers: int = 0
    num_extra_slots: int = (
        1  # its last pass reads the draft before the last one, a row that no module ever runs
    )

    def draft(self, step: VerifiedStep, *, cache: KVCache, ring: HiddenRing) -> Tensor:
        """See `Drafter.draft`."""
        inputs, state = step.inputs, step.state
        rows = torch.arange(len(inputs.slots), device=inputs.slots.device)
        query_start_loc = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        drafts = []
        for draft_step in range(self.num_speculative_tokens):
            positions = state.num_known_tokens - 1 + draft_step
            context = PagedContext(
                pool=cache,
                slot_mapping=inputs.slot_mapping(rows, positions, writes=state.drafting),
                block_table=inputs.block_table,
                seq_lens=(positions + 1).int(),
                query_start_loc=query_start_loc,
                max_query_len=1,
                backend=self.backend,
            )
            token_ids = ring.read_text(inputs.slots, positions)
            hidden = self.target.forward(
                token_ids[None], position_ids=positions[None], context=context
            )
            drafts.append(self.target.logits(hidden.post_norm[0]).argmax(dim=-1))
            ring.write_text(
                inputs.slots,
                positions=(positions + 1)[:, None],
                token_ids=drafts[-1][:, None],
                keep=state.drafting[:, None],
            )
        return torch.stack(drafts, dim=1)


def _gather_hidden(
    plan: PassPlan,
    step: VerifiedStep,
    *,
    target_hidden: Tensor,
    ring: HiddenRing,
    chain: Tensor | None,
    recycled: list[Tensor],
) -> Tensor:
    """Hidden vector `[T, D]` of every row of a pass, from where the plan says."""
    if chain is not None:
        return chain[plan.hidden_index]
    inputs, state = step.inputs, step.state
    first_fresh = state.first_fresh[plan.request_index]
    packed = inputs.query_start_loc[plan.request_index].long() + plan.hidden_index - first_fresh
    fresh = target_hidden[packed.clamp(0, len(target_hidden) - 1)]
    old = ring.read_hidden(inputs.slots[plan.request_index], plan.hidden_index)
    hidden = torch.where((plan.hidden_index >= first_fresh)[:, None], fresh, old)
    if not recycled:
        return hidden
    outputs = torch.stack(recycled)  # [m, R, D]
    own = outputs[(plan.hidden_index - 1).clamp(0, len(recycled) - 1), plan.request_index]
    return torch.where((plan.hidden_kind == HiddenKind.DRAFT)[:, None], own, hidden)


def _store_ring(step: VerifiedStep, target_hidden: Tensor, ring: HiddenRing) -> None:
    """Keep the newest target hidden states, at most K a request."""
    state = step.state
    positions = state.frontier[:, None] - torch.arange(
        ring.num_rows, device=state.frontier.device
    )  # [R, K]
    keep = positions >= state.first_fresh[:, None]
    rows = step.inputs.query_start_loc[:-1, None].long() + positions - state.first_fresh[:, None]
    ring.write_hidden(
        step.inputs.slots,
        positions=positions.clamp(min=0),
        hidden=target_hidden[rows.clamp(0, len(target_hidden) - 1)],
        keep=keep,
    )
