"""Who proposes the next K tokens: MTP heads, or one of the two ends to check evaluations against.

A drafter gets the verified step and returns K tokens a request. `MTPDrafter` runs modules over the
rows that a policy's plan asks for, one pass per draft; `NullDrafter` gives length 1 and
`OracleDrafter` length K + 1.

Letters: R requests, T rows of a step or a pass, K drafts per step, D hidden, V vocabulary, V' draft
vocabulary.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast, get_args

import torch
from torch import Tensor

from mtp_research.decode.draft.draft_length import NOT_DRAFTED, DraftLength, FixedLength
from mtp_research.decode.sampling.processors import process_logits
from mtp_research.decode.sampling.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.schedule.batch import PartCompiler, StepInputs
from mtp_research.decode.slot_state import KVCache, SlotState, to_device
from mtp_research.decode.verify.verify import PADDING_TOKEN_ID
from mtp_research.heads.stack import ModuleOutput, MTPHeads, MTPModule
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.family import KVPages, KVStack
from mtp_research.models.rank_parts import (
    RankParts,
    RowExchange,
    best_of,
    best_probability,
    whole_of,
)
from mtp_research.models.recurrent import with_states
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy.audit import Auditor
from mtp_research.policy.plan import (
    BaseRows,
    DraftPlan,
    HiddenKind,
    PassNumbers,
    PassPlan,
    RowLayout,
    StepState,
    bounded_rows,
)

if TYPE_CHECKING:
    from mtp_research.heads.draft_vocabulary import DraftVocabulary

Heads = MTPHeads | Literal["null", "oracle"] | None
DraftSampling = Literal["greedy", "processed", "sample"]
DRAFT_SAMPLINGS: tuple[DraftSampling, ...] = get_args(DraftSampling)


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
    """Proposes K tokens a request."""

    @property
    def num_kv_layers(self) -> int:
        """KV layers it needs beside the target's."""
        ...

    @property
    def num_extra_slots(self) -> int:
        """Positions it writes beyond `DraftPlan.num_slots_needed`."""
        ...

    def draft(self, step: VerifiedStep, *, cache: KVCache, slot_state: SlotState) -> Tensor:
        """Draft token ids `[R, K]` int64: -1 is a draft to reject, `NOT_DRAFTED` none at all.

        Writes the drafter's KV layers, the drafts to `slot_state` and behind its texts and, when
        drafts are sampled, their distributions.
        """
        ...

    def join(self, exchange: RowExchange) -> None:
        """Run this rank's experts where `draft` runs them on other ranks; see `RowExchange`."""
        ...


def choose_drafts(
    logits: Tensor,
    step: VerifiedStep,
    *,
    draft_step: int | Tensor,
    slot_state: SlotState,
    sampling: DraftSampling,
    vocabulary: "DraftVocabulary | None",
    parts: RankParts | None = None,
) -> Tensor:
    """Draft tokens `[R]` int64 of logits `[R, V]`, or `[R, V']` of a vocabulary; -1 if not finite.

    With `parts` they are this rank's, and gathered where more than the best token is asked for. For
    greedy drafts -inf is a mask, as in verification: one look-up finds what is broken.
    """
    if sampling == "greedy":
        best = best_of(logits, parts)
        token_ids = best.index if vocabulary is None else vocabulary.token_ids[best.index]
        return torch.where(torch.isfinite(best.value), token_ids, PADDING_TOKEN_ID)
    logits = whole_of(logits, parts)
    finite = torch.isfinite(logits).all(dim=-1)
    if vocabulary is not None:
        logits = vocabulary.spread(logits)
    if sampling == "processed" and step.params.processors is not None:
        num_tokens = step.state.num_known_tokens + draft_step
        logits = process_logits(
            logits[:, None],
            step.params.processors,
            text=slot_state.text[step.inputs.slots],
            num_tokens=num_tokens[:, None],
        )[:, 0]
        finite = finite & (logits.amax(dim=-1) > -torch.inf)  # no token may be left
    if sampling == "processed":
        return torch.where(finite, logits.argmax(dim=-1), PADDING_TOKEN_ID)
    safe = logits.masked_fill(~finite[:, None], 0.0)
    probs = target_probabilities(safe[:, None], step.params)[:, 0]
    slot_state.write_draft_probs(step.inputs.slots, draft_step=draft_step, probs=probs)
    # Keyed by the step too: a later step drafts this position anew (see verify_block).
    first = step.state.num_known_tokens
    noise = uniform_noise(step.params.seed, first, Stream.DRAFT, index=draft_step)
    token_ids = sample_from(probs, noise)
    return torch.where(finite, token_ids, PADDING_TOKEN_ID)


@dataclass(frozen=True)
class _OwnPages:
    """The pages of the KV layer of a pass, whichever it is."""

    own: KVPages
    runs_regions: bool  # see `PagePool`

    def pages(self, layer: int) -> KVPages:
        """See `PagePool`."""
        return self.own

    def stack(self, layer: int) -> KVStack:
        """See `PagePool`."""
        return KVStack(self.own.keys[None], self.own.values[None], self.own.kind, 0)


class _Pass(NamedTuple):
    """Which of the passes of a round runs."""

    like: int  # its rows are those of this pass, but for its number; see `DraftPlan.like`
    numbers: PassNumbers
    module: MTPModule
    vocabulary: "DraftVocabulary | None"  # of the module
    makes_draft: bool
    pool: _OwnPages
    base_rows: BaseRows | None  # see `DraftPlan.pass_plan`, as for the layout
    layout: RowLayout | None = None


class _Made(NamedTuple):
    """What the passes of a round have made so far."""

    num_made: Tensor  # `[R]` int64, drafts of each request
    chain: Tensor | None = None  # `[T, D]`, the last pass's output, for policies that chain
    sampled: Tensor | None = None  # `[R, D]`, that of its rows that were sampled


@dataclass(frozen=True)
class MTPDrafter:
    """Runs MTP modules under a hidden-state policy."""

    heads: MTPHeads  # the modules
    plan: DraftPlan  # rows of every pass, K >= 1
    first_kv_layer: int  # index of the first draft layer in the cache
    draft_sampling: DraftSampling = "greedy"  # how a draft is chosen, see `draft_choice`
    backend: str = "auto"  # kernel backend
    auditor: Auditor | None = None  # records every row, or None
    length: DraftLength = field(default_factory=FixedLength)  # how many drafts are made
    vocabulary: "DraftVocabulary | None" = None  # the tokens that may be drafted; None for all
    num_extra_slots: int = 0

    @property
    def num_kv_layers(self) -> int:
        """KV layers the policy needs."""
        return self.plan.num_kv_layers

    def draft(self, step: VerifiedStep, *, cache: KVCache, slot_state: SlotState) -> Tensor:
        """See `Drafter.draft`. One module pass per draft, whose rows follow the plan."""
        target_hidden = self.heads.source(step.target_hidden)[0]  # [T, D]
        compiler, end_round = step.inputs.compiler, _end_round
        if compiler is not None:
            end_round = compiler.compiled(end_round)
        base_rows = self._base_rows(step.inputs)
        made: _Made | None = None
        sampled: list[Tensor] = []
        num_drafts = self.plan.num_speculative_tokens
        for draft_step in range(num_drafts):
            makes_draft = draft_step < step.draft_limit
            kv_layer = self.first_kv_layer + self.plan.kv_layer(draft_step)
            which = _Pass(
                draft_step,
                PassNumbers(draft_step, num_drafts),
                self._module(draft_step),
                self._vocabulary(draft_step),
                makes_draft=makes_draft,
                pool=_OwnPages(cache.pages(kv_layer), cache.runs_regions),
                base_rows=base_rows,
            )
            run_pass, of_pass, inputs = MTPDrafter._run_pass, step, step.inputs
            if compiler is not None and not self.plan.has_base(draft_step):
                inputs = inputs.of_draft_rows()
            given = inputs.of_compiled_pass()
            if compiler is not None and given is not None:
                layout = self._layout(inputs, compiler, which)
                longest = 0 if inputs.static else layout.max_query_len
                run_pass = compiler.compiled(run_pass, longest=longest)
                if compiler.serves_uneven_rows and self.plan.has_base(draft_step):
                    layout = layout.of_any_rows()
                which = which._replace(
                    like=self.plan.like(draft_step),
                    numbers=PassNumbers(compiler.numbers[draft_step], compiler.numbers[num_drafts]),
                    layout=layout,
                    base_rows=None,
                )
                of_pass = replace(step, inputs=given)
            num_read = 0  # without drafts a pass has no row above the frontier
            if makes_draft or self._reads_all_outputs:
                num_read = self.plan.num_outputs_read(draft_step)
            made = run_pass(
                self,
                of_pass,
                slot_state,
                which,
                target_hidden=target_hidden,
                made=made,
                recycled=sampled[max(len(sampled) - num_read, 0) :],
            )
            if made.sampled is not None:
                sampled.append(made.sampled)
        return end_round(step, slot_state, target_hidden)

    def _run_pass(
        self,
        step: VerifiedStep,
        slot_state: SlotState,
        which: _Pass,
        *,
        target_hidden: Tensor,
        made: _Made | None,
        recycled: list[Tensor],
    ) -> _Made:
        """One pass behind what was made, `recycled` being the outputs that its rows may read.

        Compiled, it serves all passes and conditions for which its arguments are alike: no code
        may depend on K or on the pass by itself.
        """
        state, makes_draft = step.state, which.makes_draft
        number = which.numbers.draft_step
        num_made = torch.zeros_like(state.frontier) if made is None else made.num_made
        step.inputs.require_requests(num_made, *state, *recycled)
        drafts = torch.full_like(num_made, NOT_DRAFTED)
        is_open = state.drafting & (num_made == number)
        plan = self.plan.pass_plan(
            self._state(step, is_open),
            which.like,
            static=step.inputs.static,
            num_fresh=step.inputs.max_query_len if step.inputs.static else None,
            base_rows=which.base_rows,
            makes_draft=makes_draft,
            numbers=which.numbers,
            layout=which.layout,
        )
        chain = sampled = None
        if len(plan.position) > 0:
            hidden = _gather_hidden(
                plan,
                step,
                target_hidden=target_hidden,
                slot_state=slot_state,
                chain=None if made is None else made.chain,
                recycled=recycled,
                num_recycled=len(recycled) if self._reads_all_outputs else number,
            )
            output = self._run_module(plan, step, slot_state, which, hidden=hidden)
            own_output = self.heads.recycled(output)[0]
            chain = own_output if self.plan.policy.hidden == "chain" else None
            if makes_draft:
                sampled = plan.layout.last_of(own_output)
                logits = self._logits(plan.layout.last_of(output.post_norm[0]), which)
                token_ids = choose_drafts(
                    logits,
                    step,
                    draft_step=number,
                    slot_state=slot_state,
                    sampling=self.draft_sampling,
                    vocabulary=which.vocabulary,
                    parts=self.heads.target.parts,
                )
                is_made = is_open & self._keeps(logits)
                drafts = torch.where(is_made, token_ids, NOT_DRAFTED)
                num_made = num_made + is_made
        elif (exchange := self.heads.target.exchange) is not None:
            exchange.join(which.module)
        # Where the step broke, the old drafts must not be fed again.
        slot_state.write_draft(
            step.inputs.slots, number, token_ids=drafts, positions=state.num_known_tokens + number
        )
        return _Made(num_made, chain, sampled)

    @property
    def _reads_all_outputs(self) -> bool:
        return self.plan.policy.hidden == "shifted_target"

    def join(self, exchange: RowExchange) -> None:
        """See `Drafter.join`."""
        for draft_step in range(self.plan.num_speculative_tokens):
            exchange.join(self._module(draft_step))

    def _module(self, draft_step: int) -> MTPModule:
        return cast(MTPModule, self.heads.mtp_modules[self.plan.module_idx(draft_step)])

    def _vocabulary(self, draft_step: int) -> "DraftVocabulary | None":
        if self.vocabulary is None:
            return None
        return self.vocabulary.of_module(self.plan.module_idx(draft_step))

    def _run_module(
        self,
        plan: PassPlan,
        step: VerifiedStep,
        slot_state: SlotState,
        which: _Pass,
        *,
        hidden: Tensor,
    ) -> ModuleOutput:
        """Run a pass's module over hidden vectors `[T, D]` and the tokens that its rows consume."""
        inputs, layout = step.inputs, plan.layout
        slots = layout.spread(inputs.slots)
        token_ids = slot_state.read_text(slots, plan.token_position)
        if self.auditor is not None:
            self.auditor.record(plan, token_ids=token_ids, request_ids=step.request_ids)
        axis_positions = None
        if inputs.axis_positions is not None:
            axis_positions = slot_state.read_positions(slots, plan.position)[:, None]
        context = PagedContext(
            pool=which.pool,
            slot_mapping=inputs.slot_mapping(
                layout.request_index, plan.position, writes=plan.writes
            ),
            block_table=inputs.block_table,
            seq_lens=plan.seq_lens,
            query_start_loc=layout.query_start_loc,
            max_query_len=layout.max_query_len,
            has_equal_rows=inputs.static,
            has_one_layer=True,
            backend=self.backend,
        )
        return self.heads.run_module(
            which.module,
            token_ids=token_ids[None],
            prev_hidden_states=hidden[None],
            position_ids=plan.position.clamp(min=0)[None],
            context=context,
            axis_positions=axis_positions,
        )

    def _layout(self, inputs: StepInputs, compiler: PartCompiler, which: _Pass) -> RowLayout:
        """Rows of a compiled pass."""
        step, makes_draft = which.like, which.makes_draft
        if which.base_rows is not None and not inputs.static:
            num_draft = self.plan.num_draft_rows(step, makes_draft=makes_draft)
            return bounded_rows(which.base_rows, num_draft)
        num_fresh = inputs.max_query_len
        num_rows = self.plan.num_static_rows(step, num_fresh=num_fresh, makes_draft=makes_draft)
        return compiler.equal_rows(num_rows, inputs.slots)

    def _base_rows(self, inputs: StepInputs) -> BaseRows | None:
        """Bounds of the base rows of a batch with prompt rows; None where they may be read."""
        if inputs.is_prefill is None:
            return inputs.base_rows
        counts = self.plan.max_base_rows(inputs.row_counts, is_prefill=inputs.is_prefill)
        on_device = to_device(counts, dtype=torch.int64, device=inputs.slots.device)
        return BaseRows(on_device, total=sum(counts), longest=max(counts))

    def _state(self, step: VerifiedStep, is_open: Tensor) -> StepState:
        inputs = step.inputs
        has_bounds = inputs.is_prefill is not None or inputs.base_rows is not None
        if inputs.static or has_bounds or self.plan.policy.draft_rows == "none":
            return step.state
        return step.state._replace(drafting=is_open)

    def _keeps(self, logits: Tensor) -> Tensor | bool:
        """`[R]` bool, the length rule makes a draft of a rank's logits; NaN makes one, as -1."""
        if self.length.keeps is None:
            return True
        probability = best_probability(logits, self.heads.target.parts)
        return self.length.keeps(probability) | probability.isnan()

    def _logits(self, post_norm: Tensor, which: _Pass) -> Tensor:
        """Draft logits of module outputs `[R, D]`: this rank's of V, or of V' of the vocabulary."""
        if which.vocabulary is None:
            return self.heads.own_logits(post_norm, module=which.module)
        return which.vocabulary.logits(post_norm)


def _gather_hidden(
    plan: PassPlan,
    step: VerifiedStep,
    *,
    target_hidden: Tensor,
    slot_state: SlotState,
    chain: Tensor | None,
    recycled: list[Tensor],
    num_recycled: int | Tensor,
) -> Tensor:
    """Hidden vector `[T, D]` of every row of a pass, from where the plan says.

    `recycled` are outputs of the latest passes, the last of `num_recycled`.
    """
    if chain is not None:
        return chain
    own = None
    if recycled:
        if len(recycled) == 1:
            own = plan.layout.spread(recycled[0])
        else:
            first = num_recycled - len(recycled) + 1  # i of the first g_i
            index = (plan.hidden_index - first).clamp(0, len(recycled) - 1)
            own = torch.stack(recycled)[index, plan.layout.request_index]  # of [m, R, D]
        if not plan.has_base:
            return own
    inputs, state = step.inputs, step.state
    first_fresh = plan.layout.spread(state.first_fresh)
    start = plan.layout.spread(inputs.query_start_loc[:-1].long())
    packed = start + plan.hidden_index - first_fresh
    fresh = target_hidden[packed.clamp(0, len(target_hidden) - 1)]
    old = slot_state.read_hidden(plan.layout.spread(inputs.slots), plan.hidden_index)
    hidden = torch.where((plan.hidden_index >= first_fresh)[:, None], fresh, old)
    if own is None:
        return hidden
    return torch.where((plan.hidden_kind == HiddenKind.DRAFT.value)[:, None], own, hidden)


def _end_round(step: VerifiedStep, slot_state: SlotState, target_hidden: Tensor) -> Tensor:
    """Keep the hidden states that the next round reads; returns the drafts `[R, K]`."""
    state = step.state
    positions = state.frontier[:, None] - torch.arange(
        slot_state.num_rows, device=state.frontier.device
    )  # [R, K]
    keep = positions >= state.first_fresh[:, None]
    rows = step.inputs.query_start_loc[:-1, None].long() + positions - state.first_fresh[:, None]
    slot_state.write_hidden(
        step.inputs.slots,
        positions=positions.clamp(min=0),
        hidden=target_hidden[rows.clamp(0, len(target_hidden) - 1)],
        keep=keep,
    )
    return slot_state.draft_token_ids[step.inputs.slots]


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
        drafts = torch.full(shape, PADDING_TOKEN_ID, dtype=torch.int64, device=device)
        slot_state.draft_token_ids[step.inputs.slots] = drafts
        return drafts

    def join(self, exchange: RowExchange) -> None:
        """See `Drafter.join`."""


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
    num_extra_slots: int = 1  # its last pass reads the draft before the last, which no module runs

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
            position_ids = positions[None]
            if inputs.axis_positions is not None:
                position_ids = slot_state.read_positions(inputs.slots, positions)[:, None]
            hidden = self.target.forward(
                token_ids[None], position_ids=position_ids, context=context
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
        found = torch.stack(drafts, dim=1).masked_fill(~state.drafting[:, None], PADDING_TOKEN_ID)
        slot_state.draft_token_ids[inputs.slots] = found
        return found

    def join(self, exchange: RowExchange) -> None:
        """See `Drafter.join`."""
        for _ in range(self.plan.num_speculative_tokens):
            exchange.join(self.target.model)
