"""The device part of a step: target forward, verification, new frontier, drafts.

The four parts depend on the step's inputs and on the slot-addressed state that they update in
place. With static inputs nothing in them waits for the device, so that they can be captured in a
CUDA graph. `SpecDecoder.step` calls them one by one, a captured graph replays `DeviceStep.run`.
Whoever wants to watch or to alter a part puts a callable of their own in its place.

Letters: R requests, T packed rows, K drafts per step, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.config.schema import VerifyOptions
from mtp_research.decode.draft.draft_length import NOT_DRAFTED
from mtp_research.decode.draft.drafter import Drafter, MTPDrafter, VerifiedStep
from mtp_research.decode.sampling.grammar import apply_bitmask
from mtp_research.decode.sampling.processors import process_logits
from mtp_research.decode.sampling.sampling import (
    LogprobTensors,
    SamplingTensors,
    step_logprobs,
    top_candidates,
)
from mtp_research.decode.schedule.batch import PartCompiler, StepInputs, StepRows
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.decode.verify.verify import VerifyInputs, VerifyOutput, verify_greedy
from mtp_research.decode.verify.verify_rules import Rule, text_is_thinking
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.rank_parts import RankParts, whole_of
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy.plan import DraftPlan, StepState


class StepResult(NamedTuple):
    """What the host wants to know of a step."""

    # `[R, 1 + J + K]` int64, one tensor because each costs a copy: whether logits were finite, J
    # sampled tokens (-1 padded; meaningless where nothing was sampled), K drafts
    rounds: Tensor
    num_sampled: int  # J, at most K + 1
    logprobs: LogprobTensors | None = None  # of the emitted tokens; None where no request asks

    @classmethod
    def of(cls, verified: "Verified", drafts: Tensor) -> "StepResult":
        """The result of a step that decided and drafted this."""
        tokens, logprobs = verified
        sampled = tokens.sampled_token_ids
        rounds = torch.cat([tokens.is_finite[:, None].long(), sampled, drafts], dim=1)
        return cls(rounds, sampled.shape[1], logprobs)

    def columns(self) -> tuple[list[bool], list[list[int]], list[list[int]]]:
        """By request, on the host: whether logits were finite, tokens decided, drafts made."""
        rounds, first = self.rounds.numpy(), 1 + self.num_sampled
        rows = rounds.tolist()
        ends = 1 + (rounds[:, 1:first] >= 0).sum(1)  # of the tokens
        draft_ends = first + (rounds[:, first:] != NOT_DRAFTED).sum(1)
        emitted = [row[1:end] for row, end in zip(rows, ends.tolist(), strict=True)]
        drafts = [row[first:end] for row, end in zip(rows, draft_ends.tolist(), strict=True)]
        return (rounds[:, 0] == 1).tolist(), emitted, drafts


class TargetRows(NamedTuple):
    """What the target computed."""

    hidden: TargetHidden  # hidden states of the step's packed rows, each `[1, T, D]`
    # `[R (K+1), V]` of the rows that decide tokens, a request's together; where ranks split the
    # target this rank's columns
    logits: Tensor


class Verified(NamedTuple):
    """What was decided; `logprobs` is None where no request asks."""

    tokens: VerifyOutput
    logprobs: LogprobTensors | None


class DeviceParts(NamedTuple):
    """The parts of a step on the device, in the order of their calls."""

    target: Callable[[StepInputs], TargetRows]
    verify: Callable[[StepInputs, TargetRows, SamplingTensors], Verified]
    advance: Callable[[StepInputs, Verified], StepState]
    draft: Callable[[VerifiedStep], Tensor]

    def inside(self, context: AbstractContextManager[object]) -> "DeviceParts":
        """The same parts, each run in a context that can be entered again."""
        return DeviceParts(*(_inside(part, context) for part in self))


@dataclass
class DeviceStep:
    """One step of the loop on the device."""

    target: Target  # the frozen model
    drafter: Drafter | None  # who proposes; None without drafts
    cache: KVCache  # pages of target and draft layers
    slot_state: SlotState  # texts, lengths, drafts and recent hidden states by slot
    plan: DraftPlan  # what is drafted
    rule: Rule  # verification rule
    options: VerifyOptions = field(default_factory=VerifyOptions)  # its settings
    backend: str = "auto"  # kernel backend
    # what is called; the methods below unless somebody replaced them
    parts: DeviceParts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.parts = DeviceParts(self._target, self._verify, self._advance, self._draft)

    def of_first_passes(self, number: int) -> "DeviceStep":
        """The step that runs the first `number` passes of a round, as one with K = `number` does.

        It shares state and pages, and has `parts` of its own. Modules must draft.
        """
        assert isinstance(self.drafter, MTPDrafter), "nobody else drafts in passes"
        plan = replace(self.plan, num_speculative_tokens=number)
        drafter = replace(self.drafter, plan=plan) if number else None
        return replace(self, plan=plan, drafter=drafter)

    @property
    def heads(self) -> MTPHeads | None:
        """The modules that draft; None where others propose, or nobody."""
        return self.drafter.heads if isinstance(self.drafter, MTPDrafter) else None

    def captured_inputs(
        self,
        rows: StepRows,
        block_table: Tensor,
        *,
        num_drafts: int,
        compiler: PartCompiler | None,
    ) -> StepInputs:
        """Inputs of a captured step in which no request verifies more than `num_drafts`."""
        layout, make = rows.layout, _make_inputs
        is_even = layout.rows_each is not None
        if compiler is not None and (is_even or compiler.serves_uneven_rows):
            make = compiler.compiled(make)
            if compiler.serves_uneven_rows:
                rows = rows._replace(layout=layout.of_any_rows())
        are_all = num_drafts == self.slot_state.draft_token_ids.shape[1]
        inputs = make(self, rows, block_table, num_drafts=None if are_all else num_drafts)
        return replace(
            inputs, static=is_even, max_query_len=layout.max_query_len, compiler=compiler
        )

    def run(self, inputs: StepInputs, params: SamplingTensors, *, draft_limit: int) -> StepResult:
        """All four parts, as `SpecDecoder.step` calls them."""
        return self.finish(inputs, self.parts.target(inputs), params, draft_limit=draft_limit)

    def finish(
        self, inputs: StepInputs, target: TargetRows, params: SamplingTensors, *, draft_limit: int
    ) -> StepResult:
        """The parts behind the target pass: those that need the masks of grammars.

        With `inputs.compiler` they are compiled. Steps with prompt rows call them with tensors like
        those of other steps, so that they share the code.
        """
        decide, draft, compiler = _decide, _draft, inputs.compiler
        compiles_own_passes = isinstance(self.drafter, MTPDrafter)
        if compiler is not None:
            decide = compiler.compiled(decide)
            if self.drafter is not None and not compiles_own_passes:
                draft = compiler.compiled(draft)
        verified, state = decide(self, inputs, target, params)
        step = VerifiedStep(inputs, state, target.hidden, params, [], draft_limit)
        return StepResult.of(verified, draft(self, step))

    def join(self) -> None:
        """The step of a rank without requests: its experts on the rows of the ranks that have any.

        Only with `Target.exchange`, which hosts have agreed on.
        """
        exchange = self.target.exchange
        assert exchange is not None, "ranks share nothing"
        exchange.join(self.target.model)
        if self.drafter is not None:
            self.drafter.join(exchange)

    def _target(self, inputs: StepInputs) -> TargetRows:
        """Run the target over the step's rows; writes its KV pages."""
        run, read_logits, compiler = _run_layers, _read_logits, inputs.compiler
        given = inputs.of_compiled_pass()
        if compiler is not None:
            read_logits = compiler.compiled(read_logits)
            if given is not None:
                longest = 0 if inputs.static else inputs.max_query_len
                run = compiler.compiled(run, longest=longest)
        hidden = run(self, given or inputs)
        deciding = hidden.post_norm[0]
        if not inputs.static:  # else every row decides a token
            deciding = deciding[inputs.logits_indices().flatten()]
        return TargetRows(hidden, read_logits(self, deciding))

    def _verify(self, inputs: StepInputs, target: TargetRows, params: SamplingTensors) -> Verified:
        shape = len(inputs.slots), inputs.draft_token_ids.shape[1] + 1, target.logits.shape[1]
        logits, parts = self._needed(target.logits.view(shape), params)
        processed = self._process(logits, inputs, params)
        tokens = self._apply_rule(processed, inputs, params, parts=parts)
        logprobs = step_logprobs(
            logits, processed, sampled_token_ids=tokens.sampled_token_ids, params=params
        )
        return Verified(tokens, logprobs)

    def _needed(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, RankParts | None]:
        """What a step reads of the rows of ranks that split the target, and the ranks' parts.

        Best tokens are exchanged by the rule; of other rows top-k gathers its candidates, and what
        reads all logits gathers them. The choice is the host's, and the same on every rank.
        """
        parts = self.target.parts
        if parts is None:
            return logits, None
        extras = (params.processors, params.bitmask, params.logprobs)
        is_plain = all(extra is None for extra in extras)
        if is_plain and params.all_greedy and self.rule.reads_best:
            return logits, parts
        if is_plain and params.every_top_k and params.top_k_bound is not None and self.rule.samples:
            return top_candidates(logits, params.top_k_bound, parts), None
        return whole_of(logits, parts), None

    def _process(self, logits: Tensor, inputs: StepInputs, params: SamplingTensors) -> Tensor:
        """Apply logit processors and grammar masks to logits `[R, K+1, V]`."""
        if params.processors is not None:
            logits = process_logits(
                logits,
                params.processors,
                text=self.slot_state.text[inputs.slots],
                num_tokens=inputs.num_tokens[:, None] + self._columns(inputs),
            )
        return logits if params.bitmask is None else apply_bitmask(logits, params.bitmask)

    def _apply_rule(
        self,
        logits: Tensor,
        inputs: StepInputs,
        params: SamplingTensors,
        *,
        parts: RankParts | None,
    ) -> VerifyOutput:
        """Apply the verification rule to logits `[R, K+1, V]`."""
        column = self._columns(inputs)
        thinking = self.options.relaxed_thinking_token_ids
        is_thinking = None
        if thinking is not None:
            text = self.slot_state.text[inputs.slots]
            is_thinking = text_is_thinking(
                text, num_tokens=inputs.num_tokens, begin=thinking[0], end=thinking[1]
            )
        verify_inputs = VerifyInputs(
            target_logits=logits,
            draft_token_ids=inputs.draft_token_ids,
            draft_probs=self.slot_state.read_draft_probs(
                inputs.slots, num_drafts=inputs.draft_token_ids.shape[1]
            ),
            params=params,
            positions=inputs.num_tokens[:, None] + column,
            is_thinking=is_thinking,
            options=self.options,
            parts=parts,
        )
        if params.all_greedy and self.rule.is_greedy_at_zero:
            return verify_greedy(verify_inputs)
        return self.rule.function(verify_inputs)

    def _advance(self, inputs: StepInputs, verified: Verified) -> StepState:
        tokens = verified.tokens
        decided = inputs.ends_at_newest_token & tokens.is_finite
        num_accepted = torch.where(
            inputs.ends_at_newest_token, tokens.num_accepted, inputs.num_drafts
        )
        num_sampled = torch.where(decided, tokens.num_accepted + 1, 0)
        column = self._columns(inputs)
        self.slot_state.write_text(
            inputs.slots,
            positions=inputs.num_tokens[:, None] + column,
            token_ids=tokens.sampled_token_ids,
            keep=column < num_sampled[:, None],
        )
        num_known_tokens = inputs.num_tokens + num_sampled
        self.slot_state.num_tokens[inputs.slots] = num_known_tokens
        num_fresh = inputs.num_rows - (inputs.num_drafts - num_accepted)
        # Rows that broke are run again: none of their hidden states may be kept or drafted from.
        num_fresh = torch.where(inputs.ends_at_newest_token & ~tokens.is_finite, 0, num_fresh)
        if self.cache.recurrent is not None:
            self.cache.recurrent.select(inputs.slots, num_rows=inputs.num_rows, num_kept=num_fresh)
        return StepState(
            first_fresh=inputs.first_position,
            frontier=inputs.first_position + num_fresh - 1,
            num_known_tokens=num_known_tokens,
            oldest_hidden=torch.maximum(
                inputs.first_position - self.slot_state.num_rows,
                self.slot_state.first_row[inputs.slots],
            ),
            drafting=decided | inputs.ends_recompute,
            prefilling=inputs.prefilling,
        )

    def _draft(self, step: VerifiedStep) -> Tensor:
        """Propose the next drafts `[R, K]`; `[R, 0]` without a drafter."""
        if self.drafter is None:
            return step.inputs.draft_token_ids
        return self.drafter.draft(step, cache=self.cache, slot_state=self.slot_state)

    def _columns(self, inputs: StepInputs) -> Tensor:
        return torch.arange(inputs.draft_token_ids.shape[1] + 1, device=inputs.slots.device)


def _make_inputs(
    step: DeviceStep, rows: StepRows, block_table: Tensor, *, num_drafts: int | None
) -> StepInputs:
    step.slot_state.num_tokens[step.slot_state.spare_slot :].fill_(1)  # padding must not grow
    return StepInputs.of_rows(
        rows,
        block_table,
        slot_state=step.slot_state,
        block_size=step.cache.block_size,
        num_drafts=num_drafts,
    )


def _run_layers(step: DeviceStep, inputs: StepInputs) -> TargetHidden:
    position_ids = inputs.positions[None]
    if inputs.axis_positions is not None:
        position_ids = inputs.axis_positions[:, None]
    return step.target.forward(
        inputs.input_ids[None],
        position_ids=position_ids,
        context=inputs.target_context(step.cache, backend=step.backend),
    )


def _read_logits(step: DeviceStep, deciding: Tensor) -> Tensor:
    return step.target.own_logits(deciding)


def _decide(
    step: DeviceStep, inputs: StepInputs, target: TargetRows, params: SamplingTensors
) -> tuple[Verified, StepState]:
    inputs.require_requests(inputs.draft_token_ids, params.seed)
    if torch.compiler.is_compiling():
        # Compiled anew for each K: torch 2.11 takes R (K + 1) and R K + R for two sizes, and fails
        # where the best of many tokens is found by two kernels.
        torch._dynamo.mark_static(inputs.draft_token_ids, 1)
    verified = step.parts.verify(inputs, target, params)
    return verified, step.parts.advance(inputs, verified)


def _draft(step: DeviceStep, verified: VerifiedStep) -> Tensor:
    return step.parts.draft(verified)


def _inside(part: Callable, context: AbstractContextManager[object]) -> Callable:
    def run(*args: object) -> object:
        if torch.compiler.is_compiling():  # see `regions`: compiled code has its own arithmetic
            return part(*args)
        with context:
            return part(*args)

    return run
