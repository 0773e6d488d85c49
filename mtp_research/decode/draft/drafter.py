"""Who proposes the next K tokens: what a drafter is, and the two ends to check evaluations against.

A drafter gets the verified step and returns K tokens a request. `NullDrafter` gives length 1,
`OracleDrafter` length K + 1; between them stands `draft.MTPDrafter`.

Letters: R requests, T packed rows, K drafts per step, D hidden.
"""

import copy
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling import SamplingTensors
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.decode.verify.verify import PADDING_TOKEN_ID
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.recurrent import with_states
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy.plan import DraftPlan, StepState

Heads = MTPHeads | Literal["null", "oracle"] | None


@dataclass(frozen=True)
class VerifiedStep:
    """What drafting may use of a step."""

    inputs: StepInputs  # the step's inputs
    state: StepState  # where each request stands after verification
    target_hidden: TargetHidden  # hidden states of the step's packed rows, each `[1, T, D]`
    params: SamplingTensors  # sampling parameters of the requests
    request_ids: list[str]  # for the auditor
    draft_limit: int  # most drafts of each request in this step, 0..K


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

    def draft(self, step: VerifiedStep, *, cache: KVCache, slot_state: SlotState) -> Tensor:
        """Draft token ids `[R, K]` int64: -1 is a draft to reject, `NOT_DRAFTED` none at all.

        Writes the drafter's KV layers, appends the drafts to `slot_state.text` and, when drafts are
        sampled, keeps their distributions.
        """
        ...


@dataclass(frozen=True)
class NullDrafter:
    """Proposes only drafts that must be rejected: length 1, at the cost of verifying K rows."""

    plan: DraftPlan
    num_kv_layers: int = 0
    num_extra_slots: int = 0

    def draft(self, step: VerifiedStep, *, cache: KVCache, slot_state: SlotState) -> Tensor:
        """See `Drafter.draft`."""
        shape = (len(step.state.frontier), self.plan.num_speculative_tokens)
        device = step.state.frontier.device
        return torch.full(shape, PADDING_TOKEN_ID, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class OracleDrafter:
    """Drafts with the target itself: under greedy verification the length is exactly K+1.

    K target passes over one row a request write provisional KV at the draft positions; the verify
    step overwrites it. States of recurrent layers are moved on in a copy.
    """

    target: Target
    plan: DraftPlan
    backend: str = "auto"
    num_kv_layers: int = 0
    num_extra_slots: int = (
        1  # its last pass reads the draft before the last one, a row that no module ever runs
    )

    def draft(self, step: VerifiedStep, *, cache: KVCache, slot_state: SlotState) -> Tensor:
        """See `Drafter.draft`."""
        inputs, state = step.inputs, step.state
        rows = torch.arange(len(inputs.slots), device=inputs.slots.device)
        query_start_loc = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        states = copy.deepcopy(cache.recurrent)
        one_row = torch.ones_like(rows)
        drafts = []
        for draft_step in range(self.plan.num_speculative_tokens):
            positions = state.num_known_tokens - 1 + draft_step
            paged = PagedContext(
                pool=cache,
                slot_mapping=inputs.slot_mapping(rows, positions, writes=state.drafting),
                block_table=inputs.block_table,
                seq_lens=(positions + 1).int(),
                query_start_loc=query_start_loc,
                max_query_len=1,
                backend=self.backend,
            )
            context = with_states(
                paged,
                states=states,
                slots=inputs.slots,
                first_position=positions,
                num_rows=(1,) * len(rows),
            )
            token_ids = slot_state.read_text(inputs.slots, positions)
            hidden = self.target.forward(
                token_ids[None], position_ids=positions[None], context=context
            )
            if states is not None:
                states.select(inputs.slots, num_rows=one_row, num_kept=one_row)
            drafts.append(self.target.logits(hidden.post_norm[0]).argmax(dim=-1))
            slot_state.write_text(
                inputs.slots,
                positions=(positions + 1)[:, None],
                token_ids=drafts[-1][:, None],
                keep=state.drafting[:, None],
            )
        return torch.stack(drafts, dim=1).masked_fill(~state.drafting[:, None], PADDING_TOKEN_ID)
