"""SpecDecoder: the speculative decode loop. `step()` is the page to read.

    schedule -> inputs -> target forward -> verify -> advance -> draft -> commit

K = 0 is the plain autoregressive baseline through the same loop.

Letters: R requests, T packed rows, K drafts per step, D hidden, V vocabulary.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mtp_research.config import MAX_SPECULATIVE_TOKENS, EngineConfig
from mtp_research.decode.batch import StepInputs
from mtp_research.decode.build import Heads, build_drafter, build_state
from mtp_research.decode.draft import VerifiedStep
from mtp_research.decode.request import FinishReason, Request, SamplingParams, Status
from mtp_research.decode.sampling import SamplingTensors, sampling_tensors
from mtp_research.decode.scheduler import Schedule
from mtp_research.decode.stats import DecodeStats, RequestRecord, record_of
from mtp_research.decode.verify import VerifyInputs, VerifyOptions, VerifyOutput, verify_greedy
from mtp_research.decode.verify_lossy import text_is_thinking
from mtp_research.decode.verify_rules import RULES, check_options
from mtp_research.errors import ConfigError
from mtp_research.models.target import Target
from mtp_research.policy import MODULE_SCHEDULES, POLICIES, ModuleSchedule, StepState


class SpecDecoder:
    """Decodes requests with a target and drafts from MTP heads under a hidden-state policy.

    Args:
        target: the frozen model.
        heads: MTP heads; `"null"` (drafts that are always rejected), `"oracle"` (the target drafts
            for itself) or None (only with `num_speculative_tokens=0`).
        policy: key of `policy.POLICIES`.
        num_speculative_tokens: K, 0..64.
        engine: pool, batch and backend settings.
        verify: key of `verify_rules.RULES`; `standard` rejection sampling equals greedy at
            temperature 0.
        verify_options: settings of the lossy rules.
        draft_sampling: `greedy` (argmax drafts) or `sample` (drawn with the request's sampling
            parameters).
        module_schedule: which module runs which draft step.

    Raises:
        ConfigError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads = None,
        *,
        policy: str = "training",
        num_speculative_tokens: int = 3,
        engine: EngineConfig | None = None,
        verify: str = "standard",
        verify_options: VerifyOptions | None = None,
        draft_sampling: str = "greedy",
        module_schedule: ModuleSchedule = "cycle",
    ) -> None:
        if isinstance(heads, str):
            _check_choice("spec.head", heads, ("null", "oracle"))
        _check_choice("spec.policy", policy, POLICIES)
        _check_choice("spec.verify", verify, RULES)
        _check_choice("spec.draft_sampling", draft_sampling, ("greedy", "sample"))
        _check_choice("spec.module_schedule", module_schedule, MODULE_SCHEDULES)
        if not 0 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"spec.k must be in 0..{MAX_SPECULATIVE_TOKENS}, got {num_speculative_tokens}; "
                "set spec.k."
            )
        if num_speculative_tokens > 0 and heads is None:
            raise ConfigError(
                "spec.k > 0 needs heads; pass MTP heads, 'null' or 'oracle', or set spec.k=0."
            )
        self.target = target
        self.engine = engine or EngineConfig()
        self.num_speculative_tokens = num_speculative_tokens
        self.verify_options = verify_options or VerifyOptions()
        if num_speculative_tokens > 0:
            check_options(
                verify, self.verify_options, num_speculative_tokens=num_speculative_tokens
            )
        # Without drafts every rule only samples the target.
        self.verify_rule = verify if num_speculative_tokens > 0 else "standard"
        self.max_model_len = self.engine.max_model_len or target.config.max_position_embeddings
        sample_drafts = draft_sampling == "sample"
        self.drafter, self.auditor = build_drafter(
            target,
            heads,
            policy=POLICIES[policy],
            num_speculative_tokens=num_speculative_tokens,
            engine=self.engine,
            sample_drafts=sample_drafts,
            schedule=module_schedule,
        )
        self.cache, self.ring, self.scheduler = build_state(
            target,
            self.drafter,
            engine=self.engine,
            max_model_len=self.max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            keep_draft_probs=sample_drafts,
        )
        self.stats = DecodeStats()
        self._names = itertools.count()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a prompt; `max_new_tokens=0` ends at once with no output.

        Raises:
            ConfigError: see `Scheduler.add`; a token id outside the vocabulary; a temperature that
                the rule ignores.
        """
        vocab_size = self.target.config.vocab_size
        outside = [token for token in prompt_token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(
                f"prompt token ids must be in [0, {vocab_size}), got {outside[:5]}; "
                "check the tokenizer."
            )
        sampling = sampling or SamplingParams()
        if sampling.temperature > 0 and not RULES[self.verify_rule].samples:
            raise ConfigError(
                f"sampling.temperature must be 0 for spec.verify={self.verify_rule}, "
                f"got {sampling.temperature}; set spec.verify=standard."
            )
        request = Request(
            request_id=request_id if request_id is not None else f"request-{next(self._names)}",
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            priority=priority,
        )
        self.scheduler.add(request)
        if request.sampling.max_new_tokens == 0:
            self._finish(request, FinishReason.LENGTH)
        return request

    def abort(self, request: Request) -> None:
        """End a live request; its tokens so far stay in its record."""
        if request.status is not Status.FINISHED:
            self._finish(request, FinishReason.ABORT)

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> Iterator[RequestRecord]:
        """Decode prompts in a continuous batch and yield records as requests finish.

        Args:
            prompts: token ids of each prompt; request ids are their indices. Prompts not finished
                when the caller stops listening are aborted.
            sampling: parameters for all; default greedy.
            max_new_tokens: shorthand for greedy sampling with this limit and no stop token; pass
                `sampling` with `stop_token_ids=target.stop_token_ids` to end at the model's own.
        """
        if sampling is None:
            sampling = (
                SamplingParams()
                if max_new_tokens is None
                else SamplingParams(max_new_tokens=max_new_tokens)
            )
        num_seen = len(self.stats.records)
        requests: list[Request] = []
        try:
            for index, prompt in enumerate(prompts):
                requests.append(self.add_request(prompt, sampling=sampling, request_id=str(index)))
            mine = {request.request_id for request in requests}
            while True:
                finished, num_seen = self.stats.records[num_seen:], len(self.stats.records)
                yield from (record for record in finished if record.request_id in mine)
                if all(request.status is Status.FINISHED for request in requests):
                    return
                self.step()
        finally:  # a bad prompt, or a caller who stops listening, must leave nothing behind
            for request in requests:
                self.abort(request)

    @torch.inference_mode()
    def step(self) -> None:
        """One step: every scheduled request gets a prompt chunk done or 1..K+1 tokens."""
        schedule = self.scheduler.schedule()
        self._begin(schedule)
        inputs = StepInputs.build(
            schedule.entries,
            ring=self.ring,
            block_size=self.engine.block_size,
            num_speculative_tokens=self.num_speculative_tokens,
        )
        params = sampling_tensors(
            [entry.request.sampling for entry in schedule.entries], device=self.target.device
        )
        context = inputs.target_context(self.cache, backend=self.engine.backend)
        hidden = self.target.forward(
            inputs.input_ids[None], position_ids=inputs.positions[None], context=context
        )
        logits = self.target.logits(
            hidden.post_norm[0, inputs.logits_indices(self.num_speculative_tokens)]
        )
        verified = self._verify(logits, inputs, params)
        state = self._advance(inputs, verified)
        drafts = None
        if self.drafter is not None:
            request_ids = [entry.request.request_id for entry in schedule.entries]
            step = VerifiedStep(
                inputs=inputs,
                state=state,
                target_hidden=hidden,
                params=params,
                request_ids=request_ids,
            )
            drafts = self.drafter.draft(step, cache=self.cache, ring=self.ring)
        self._commit(schedule, inputs, verified, drafts)

    def _verify(self, logits: Tensor, inputs: StepInputs, params: SamplingTensors) -> VerifyOutput:
        """Apply the verification rule to logits `[R, K+1, V]`."""
        rule = RULES[self.verify_rule]
        column = torch.arange(self.num_speculative_tokens + 1, device=logits.device)
        thinking = self.verify_options.relaxed_thinking_token_ids
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
            options=self.verify_options,
        )
        # At temperature 0 the lossless rules coincide.
        return (
            verify_greedy(verify_inputs)
            if rule.lossless and params.all_greedy
            else rule.function(verify_inputs)
        )

    def _advance(self, inputs: StepInputs, verified: VerifyOutput) -> StepState:
        """Append the emitted tokens to the text table and move each request's frontier."""
        num_accepted = torch.where(inputs.samples, verified.num_accepted, inputs.num_drafts)
        num_sampled = torch.where(inputs.samples & verified.is_finite, verified.num_accepted + 1, 0)
        column = torch.arange(self.num_speculative_tokens + 1, device=num_sampled.device)
        self.ring.write_text(
            inputs.slots,
            positions=inputs.num_tokens[:, None] + column,
            token_ids=verified.sampled_token_ids,
            keep=column < num_sampled[:, None],
        )
        num_fresh = inputs.num_rows - (inputs.num_drafts - num_accepted)
        # Rows that broke are run again: none of their hidden states may be kept or drafted from.
        num_fresh = torch.where(inputs.samples & ~verified.is_finite, 0, num_fresh)
        return StepState(
            first_fresh=inputs.first_position,
            frontier=inputs.first_position + num_fresh - 1,
            num_known_tokens=inputs.num_tokens + num_sampled,
            oldest_hidden=(inputs.first_position - self.ring.num_rows).clamp(min=0),
            drafting=(inputs.samples & verified.is_finite) | inputs.resumes,
            prefilling=inputs.prefilling,
        )

    def _commit(
        self,
        schedule: Schedule,
        inputs: StepInputs,
        verified: VerifyOutput,
        draft_token_ids: Tensor | None,
    ) -> None:
        """The one device-to-host copy of a step, then the host's bookkeeping."""
        sampled = verified.sampled_token_ids.tolist()
        finite = verified.is_finite.tolist()
        samples = inputs.samples.tolist()
        drafts = draft_token_ids.tolist() if draft_token_ids is not None else [[]] * len(sampled)
        self.stats.num_steps += 1
        self.stats.num_target_rows += len(inputs.positions)
        for row, (request, num_scheduled) in enumerate(schedule.entries):
            num_tokens = request.num_tokens
            self.stats.num_prompt_rows += num_scheduled if request.is_prefilling else 0
            self.scheduler.commit(
                request,
                num_scheduled_tokens=num_scheduled,
                emitted=[token for token in sampled[row] if token >= 0] if samples[row] else None,
                drafts=drafts[row],
                is_finite=finite[row],
            )
            self.stats.num_emitted_tokens += request.num_tokens - num_tokens
            if request.status is Status.FINISHED:
                self._retire(request)
            elif self.auditor is not None and not request.is_prefilling:
                self.auditor.end_round(
                    request.request_id, request.token_ids, frontier=request.num_tokens - 2
                )

    def _begin(self, schedule: Schedule) -> None:
        """Write the texts of admitted requests into their slots; forget preempted ones."""
        assert schedule.entries, "the scheduler has work and scheduled none of it"
        for request in schedule.preempted:
            self.stats.num_preemptions += 1
            if self.auditor is not None:
                self.auditor.forget(request.request_id)
        for request in schedule.admitted:
            tokens = torch.tensor(
                request.token_ids, dtype=torch.int64, device=self.ring.text.device
            )
            self.ring.text[request.slot, : len(tokens)] = tokens

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Record a finished request."""
        self.stats.records.append(record_of(request))
        frontier = min(request.num_computed_tokens, request.num_tokens - 1) - 1
        if self.auditor is not None and frontier >= 0:
            self.auditor.finish(request.request_id, request.token_ids, frontier=frontier)


def _check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} must be one of {sorted(choices)}, got {value!r}; set {key}.")
