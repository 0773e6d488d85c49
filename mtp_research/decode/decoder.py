"""SpecDecoder: the speculative decode loop. `step()` is the page to read.

    schedule -> inputs -> target forward -> verify -> advance -> draft -> commit

K = 0 is the plain autoregressive baseline through the same loop.

Letters: R requests, T packed rows, K drafts per step, D hidden, V vocabulary.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from mtp_research.config import EngineConfig
from mtp_research.decode.arguments import check_arguments, resolve_policy, resolve_rule
from mtp_research.decode.arrivals import Arrivals
from mtp_research.decode.build import Heads, build_drafter, build_graphs, build_state
from mtp_research.decode.deterministic import build_products, kernel_backend
from mtp_research.decode.draft_choice import DraftSampling
from mtp_research.decode.draft_length import DraftLength, FixedLength
from mtp_research.decode.generate import generate_records
from mtp_research.decode.ledger import Launched, Ledger
from mtp_research.decode.pending import PendingResult
from mtp_research.decode.recent_rounds import RecentRounds
from mtp_research.decode.request import FinishReason, Request, Status
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.sampling_tensors import BatchSampling
from mtp_research.decode.schedule import Schedule
from mtp_research.decode.schedule_inputs import build_inputs, start_texts
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.decode.step import DeviceStep
from mtp_research.decode.stream_event import StreamEvent, stream_events
from mtp_research.decode.verify_options import VerifyOptions
from mtp_research.decode.verify_rules import Rule
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy import HiddenPolicy, ModuleSchedule


class SpecDecoder:
    """Decodes requests with a target and drafts from MTP heads under a hidden-state policy.

    Args:
        target: the frozen model.
        heads: MTP heads; `"null"` (drafts that are always rejected), `"oracle"` (the target drafts
            for itself) or None (only with `num_speculative_tokens=0`).
        policy: key of `policy.POLICIES`, or any `HiddenPolicy`.
        num_speculative_tokens: K, 0..64.
        engine: pool, batch and backend settings.
        verify: key of `verify_rules.RULES`, or any `Rule`; `standard` rejection sampling equals
            greedy at temperature 0.
        verify_options: settings of the lossy rules.
        draft_sampling: `greedy`, `processed` or `sample`, see `draft_choice`.
        module_schedule: which module runs which draft step.
        draft_length: makes fewer than K drafts where more do not pay; None makes always K.
        draft_token_ids: the tokens that may be drafted, see `heads.draft_vocabulary`; None for all.

    Raises:
        ConfigError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads = None,
        *,
        policy: str | HiddenPolicy = "training",
        num_speculative_tokens: int = 3,
        engine: EngineConfig | None = None,
        verify: str | Rule = "standard",
        verify_options: VerifyOptions | None = None,
        draft_sampling: DraftSampling = "greedy",
        module_schedule: ModuleSchedule = "cycle",
        draft_length: DraftLength | None = None,
        draft_token_ids: Sequence[int] | None = None,
    ) -> None:
        engine = engine or EngineConfig()
        options = verify_options or VerifyOptions()
        check_arguments(
            heads,
            num_speculative_tokens=num_speculative_tokens,
            engine=engine,
            draft_sampling=draft_sampling,
            module_schedule=module_schedule,
            draft_length=draft_length,
            draft_token_ids=draft_token_ids,
        )
        self.rule = resolve_rule(
            verify, options=options, num_speculative_tokens=num_speculative_tokens
        )
        self.target, self.engine = target, engine
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_length = draft_length or FixedLength()
        self.max_model_len = self.engine.max_model_len or target.config.max_position_embeddings
        self.drafter, self.auditor = build_drafter(
            target,
            heads,
            policy=resolve_policy(policy),
            num_speculative_tokens=num_speculative_tokens,
            engine=self.engine,
            draft_sampling=draft_sampling,
            schedule=module_schedule,
            length=self.draft_length,
            draft_token_ids=draft_token_ids,
        )
        self.cache, self.ring, self.scheduler = build_state(
            target,
            self.drafter,
            engine=self.engine,
            max_model_len=self.max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            keep_draft_probs=draft_sampling == "sample" and isinstance(heads, MTPHeads),
        )
        self.device_step = DeviceStep(
            target=target,
            drafter=self.drafter,
            cache=self.cache,
            ring=self.ring,
            num_speculative_tokens=num_speculative_tokens,
            rule=self.rule,
            options=options,
            backend=kernel_backend(engine),
            products=build_products(target, heads, engine=engine),
        )
        self.graphs = build_graphs(
            self.device_step, engine=engine, max_model_len=self.max_model_len
        )
        self._sampling = BatchSampling(
            num_speculative_tokens=num_speculative_tokens,
            vocab_size=target.config.vocab_size,
            device=target.device,
        )
        self.stats = DecodeStats(auditor=self.auditor)
        self.recent = RecentRounds(num_speculative_tokens)
        self._ledger = Ledger(self.scheduler, self.stats, self.recent, self.auditor)
        self.arrivals = Arrivals(self._ledger, target, rule=self.rule)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Queue a prompt; `max_new_tokens=0` ends at once with no output.

        Args:
            prompt_token_ids: at least one token.
            sampling: default greedy.
            request_id: unique among live requests; default `request-<number>`.
            priority: smaller is served first, see `WaitingQueue` for how far that reaches.
            cache_salt: with prefix caching, texts with different salts share nothing.

        Raises:
            ConfigError: see `Scheduler.check`; a token id outside the vocabulary; a temperature
                that the rule ignores.
        """
        request = self.arrivals.checked(
            prompt_token_ids,
            sampling=sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.arrivals.queue(request)
        return request

    def abort(self, request: Request) -> None:
        """End a live request; its tokens so far stay in its record."""
        if request.status is not Status.FINISHED:
            self._ledger.finish(request, FinishReason.ABORT)

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
            sampling: parameters for all. Default: greedy, ending at the target's own stop tokens.
            max_new_tokens: limit of the default `sampling`; None means 256.

        Raises:
            ConfigError: both are given; see `add_request`.
        """
        yield from generate_records(self, prompts, sampling=sampling, max_new_tokens=max_new_tokens)

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Iterator[StreamEvent]:
        """Decode one prompt and yield its tokens as steps decide them; queued at the first `next`.

        Other requests go on beside it. Leaving the iterator early aborts the request.

        Raises:
            ConfigError: see `add_request`.
        """
        request = self.add_request(
            prompt_token_ids, sampling=sampling, request_id=request_id, priority=priority
        )
        yield from stream_events(request, step=self.step, abort=self.abort)

    @torch.inference_mode()
    def step(self) -> None:
        """One step: every scheduled request gets a prompt chunk done or 1..K+1 tokens.

        With deferred output the tokens of a step are known to the host at the end of the next call.
        """
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        launched = self._launch(schedule) if schedule.entries else None
        ledger = self._ledger
        if self.engine.deferred_output:
            launched, ledger.in_flight = ledger.in_flight, launched
        assert launched or ledger.in_flight or not self.scheduler.has_work, "nobody can go on"
        if launched is not None:
            ledger.commit(launched)
        ledger.end_step(launched, seconds=time.perf_counter() - started)

    def _launch(self, schedule: Schedule) -> Launched:
        """Start a step on the device."""
        self._ledger.begin(schedule)
        start_texts(schedule.admitted, ring=self.ring)
        entries = schedule.entries
        params = self._sampling.tensors([entry.request for entry in entries])
        limit = self.draft_length.num_drafts(batch_size=len(entries), recent=self.recent)
        if self.graphs is not None and self.graphs.accepts(entries, params, draft_limit=limit):
            pending = PendingResult(self.graphs.run(entries, params))
            return Launched(entries, pending, limit, schedule.num_prompt_rows)
        block_size, deferred = self.engine.block_size, self.engine.deferred_output
        inputs = build_inputs(entries, ring=self.ring, block_size=block_size, deferred=deferred)
        request_ids = [entry.request.request_id for entry in entries]
        result = self.device_step.run(inputs, params, request_ids=request_ids, draft_limit=limit)
        if self.auditor is not None:
            self.auditor.end_step()
        return Launched(entries, PendingResult(result), limit, schedule.num_prompt_rows)
