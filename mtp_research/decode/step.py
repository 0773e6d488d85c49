"""The device part of a step: target forward, verification, new frontier, drafts.

A pure function of the step's inputs and of the slot-addressed state it updates in place. With
static inputs nothing in it waits for the device, so that it can be captured in a CUDA graph.

Letters: R requests, T packed rows, K drafts per step, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.draft.drafter import Drafter, VerifiedStep
from mtp_research.decode.sampling.grammar import apply_bitmask
from mtp_research.decode.sampling.logprobs import LogprobTensors, step_logprobs
from mtp_research.decode.sampling.processors import process_logits
from mtp_research.decode.sampling.sampling import SamplingTensors
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import HiddenRing, KVCache
from mtp_research.decode.verify.verify import (
    VerifyInputs,
    VerifyOptions,
    VerifyOutput,
    verify_greedy,
)
from mtp_research.decode.verify.verify_rules import Rule, text_is_thinking
from mtp_research.models.target import Target
from mtp_research.policy.plan import StepState


class StepResult(NamedTuple):
    """What the host wants to know of a step.

    Attributes:
        sampled_token_ids: `[R, K+1]` int64, -1 padded; meaningless where nothing was sampled.
        is_finite: `[R]` bool.
        draft_token_ids: `[R, K]` int64.
        logprobs: of the emitted tokens; None where no request asks.
    """

    sampled_token_ids: Tensor
    is_finite: Tensor
    draft_token_ids: Tensor
    logprobs: LogprobTensors | None = None


@dataclass
class DeviceStep:
    """One step of the loop on the device.

    Attributes:
        target: the frozen model.
        drafter: who proposes; None without drafts.
        cache: pages of target and draft layers.
        ring: texts, lengths, drafts and recent hidden states by slot.
        num_speculative_tokens: K.
        rule: verification rule.
        options: its settings.
        backend: kernel backend.
        products: entered for the whole step, for deterministic decoding; None otherwise.
        probe: told that the step starts and which part of it ends; never in a captured step.
        tie: hands on a part's last values, given all that the part made; what a captured step has
            instead of a probe, see `bench.bench_split`.
    """

    target: Target
    drafter: Drafter | None
    cache: KVCache
    ring: HiddenRing
    num_speculative_tokens: int
    rule: Rule
    options: VerifyOptions = field(default_factory=VerifyOptions)
    backend: str = "auto"
    products: AbstractContextManager[object] | None = None
    probe: Callable[[str], None] | None = None
    tie: Callable[[Tensor, list[Tensor]], Tensor] | None = None

    def run(
        self,
        inputs: StepInputs,
        params: SamplingTensors,
        *,
        request_ids: list[str],
        draft_limit: int,
    ) -> StepResult:
        """Run target, verification and drafting.

        Args:
            inputs: rows of the step.
            params: sampling parameters of its requests.
            request_ids: for the auditor.
            draft_limit: most drafts of each request, 0..K.
        """
        if self.products is None:  # compiled steps must see no context
            return self._run(inputs, params, request_ids=request_ids, draft_limit=draft_limit)
        with self.products:
            return self._run(inputs, params, request_ids=request_ids, draft_limit=draft_limit)

    def _run(
        self,
        inputs: StepInputs,
        params: SamplingTensors,
        *,
        request_ids: list[str],
        draft_limit: int,
    ) -> StepResult:
        self._mark("start")
        context = inputs.target_context(self.cache, backend=self.backend)
        hidden = self.target.forward(
            inputs.input_ids[None], position_ids=inputs.positions[None], context=context
        )
        logits = self.target.logits(
            hidden.post_norm[0, inputs.logits_indices(self.num_speculative_tokens)]
        )
        logits = self._tied(logits)
        self._mark("target")
        processed = self._process(logits, inputs, params)
        verified = self._verify(processed, inputs, params)
        verified = VerifyOutput(self._tied(verified.num_accepted, *verified[1:]), *verified[1:])
        logprobs = step_logprobs(
            logits, processed, sampled_token_ids=verified.sampled_token_ids, params=params
        )
        state = self._advance(inputs, verified)
        self._mark("verify")
        drafts = inputs.draft_token_ids  # [R, 0] without a drafter
        if self.drafter is not None:
            step = VerifiedStep(
                inputs=inputs,
                state=state,
                target_hidden=hidden,
                params=params,
                request_ids=request_ids,
                draft_limit=draft_limit,
            )
            drafts = self.drafter.draft(step, cache=self.cache, ring=self.ring)
            self.ring.draft_token_ids[inputs.slots] = drafts
        self._mark("draft")
        return StepResult(verified.sampled_token_ids, verified.is_finite, drafts, logprobs)

    def _mark(self, part: str) -> None:
        if self.probe is not None:
            self.probe(part)

    def _tied(self, values: Tensor, *made: Tensor) -> Tensor:
        return values if self.tie is None else self.tie(values, list(made))

    def _process(self, logits: Tensor, inputs: StepInputs, params: SamplingTensors) -> Tensor:
        """Apply logit processors and grammar masks to logits `[R, K+1, V]`."""
        if params.processors is not None:
            column = torch.arange(self.num_speculative_tokens + 1, device=logits.device)
            logits = process_logits(
                logits,
                params.processors,
                text=self.ring.text[inputs.slots],
                num_tokens=inputs.num_tokens[:, None] + column,
            )
        return logits if params.bitmask is None else apply_bitmask(logits, params.bitmask)

    def _verify(self, logits: Tensor, inputs: StepInputs, params: SamplingTensors) -> VerifyOutput:
        """Apply the verification rule to logits `[R, K+1, V]`."""
        column = torch.arange(self.num_speculative_tokens + 1, device=logits.device)
        thinking = self.options.relaxed_thinking_token_ids
        is_thinking = None
        if thinking is not None:
            text = self.ring.text[inputs.slots]
            is_thinking = text_is_thinking(
                text, num_tokens=inputs.num_tokens, begin=thinking[0], end=thinking[1]
            )
        verify_inputs = VerifyInputs(
            target_logits=logits,
            draft_token_ids=inputs.draft_token_ids,
            draft_probs=self.ring.read_draft_probs(inputs.slots),
            params=params,
            positions=inputs.num_tokens[:, None] + column,
            is_thinking=is_thinking,
            options=self.options,
        )
        # At temperature 0 the lossless rules coincide.
        return (
            verify_greedy(verify_inputs)
            if self.rule.lossless and params.all_greedy
            else self.rule.function(verify_inputs)
        )

    def _advance(self, inputs: StepInputs, verified: VerifyOutput) -> StepState:
        """Append the emitted tokens to the text and move each request's frontier."""
        decided = inputs.samples & verified.is_finite
        num_accepted = torch.where(inputs.samples, verified.num_accepted, inputs.num_drafts)
        num_sampled = torch.where(decided, verified.num_accepted + 1, 0)
        column = torch.arange(self.num_speculative_tokens + 1, device=num_sampled.device)
        self.ring.write_text(
            inputs.slots,
            positions=inputs.num_tokens[:, None] + column,
            token_ids=verified.sampled_token_ids,
            keep=column < num_sampled[:, None],
        )
        num_known_tokens = inputs.num_tokens + num_sampled
        self.ring.num_tokens[inputs.slots] = num_known_tokens
        num_fresh = inputs.num_rows - (inputs.num_drafts - num_accepted)
        # Rows that broke are run again: none of their hidden states may be kept or drafted from.
        num_fresh = torch.where(inputs.samples & ~verified.is_finite, 0, num_fresh)
        if self.cache.recurrent is not None:
            self.cache.recurrent.select(inputs.slots, num_rows=inputs.num_rows, num_kept=num_fresh)
        return StepState(
            first_fresh=inputs.first_position,
            frontier=self._tied(inputs.first_position + num_fresh - 1, num_known_tokens),
            num_known_tokens=num_known_tokens,
            oldest_hidden=torch.maximum(
                inputs.first_position - self.ring.num_rows, self.ring.first_row[inputs.slots]
            ),
            drafting=decided | inputs.resumes,
            prefilling=inputs.prefilling,
        )
