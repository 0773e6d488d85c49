"""SpecDecoder: the speculative decode loop. `step()` is the page to read.

    schedule -> inputs -> target forward -> verify -> advance -> draft -> commit

K = 0 is the plain autoregressive baseline through the same loop.

Letters: R requests, T packed rows, K drafts per step, D hidden, V vocabulary.

Decode prompts in a continuous batch and hand out each one's record as it finishes.

From a prompt to a queued request; `SpecDecoder.add_request` hands prompts over.

What could never run is refused here, before it costs anything.

What a request has said since it was last asked: the events of a stream.

`SpecDecoder.stream` and `AsyncDecoder.generate` hand them out. Tokens are accepted tokens: nothing
that a stream has shown is ever taken back.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.arguments import (
    check_arguments,
    check_request,
    resolve_policy,
    resolve_rule,
)
from mtp_research.decode.build import Heads, build_drafter, build_graphs, build_state
from mtp_research.decode.draft.draft_length import DraftLength, FixedLength, RecentRounds
from mtp_research.decode.draft.mtp_drafter import DraftSampling
from mtp_research.decode.kernel_support import build_products, kernel_backend
from mtp_research.decode.ledger import Launched, Ledger, PendingResult
from mtp_research.decode.sampling.logprobs import TokenLogprobs
from mtp_research.decode.sampling.sampling import BatchSampling
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import build_inputs, start_texts
from mtp_research.decode.schedule.request import FinishReason, Request, Schedule, Status
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.decode.step import DeviceStep
from mtp_research.decode.verify.verify import VerifyOptions
from mtp_research.decode.verify.verify_rules import Rule
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy.plan import HiddenPolicy, ModuleSchedule
from mtp_research.runtime.errors import ConfigError

_MAX_NEW_TOKENS = 256  # where the caller names none


def generate_records(
    decoder: "SpecDecoder",
    prompts: Iterable[Sequence[int]],
    *,
    sampling: SamplingParams | None,
    max_new_tokens: int | None,
) -> Iterator[RequestRecord]:
    """See `SpecDecoder.generate`.

    Raises:
        ConfigError: both `sampling` and `max_new_tokens` are given; see `SpecDecoder.add_request`.
    """
    if sampling is not None and max_new_tokens is not None:
        raise ConfigError(
            "generate() takes sampling or max_new_tokens, got both; "
            "set max_new_tokens in SamplingParams."
        )
    sampling = sampling or SamplingParams(
        max_new_tokens=_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        stop_token_ids=decoder.target.stop_token_ids,
    )
    stats = decoder.stats
    num_seen = len(stats.records)
    requests: list[Request] = []
    try:
        for index, prompt in enumerate(prompts):
            requests.append(decoder.add_request(prompt, sampling=sampling, request_id=str(index)))
        mine = {request.request_id for request in requests}
        while True:
            finished, num_seen = stats.records[num_seen:], len(stats.records)
            yield from (record for record in finished if record.request_id in mine)
            if all(request.status is Status.FINISHED for request in requests):
                return
            decoder.step()
    finally:  # a bad prompt, or a caller who stops listening, must leave nothing behind
        for request in requests:
            decoder.abort(request)


class Arrivals:
    """Makes requests of prompts and queues them.

    Args:
        ledger: ends a request that wants no token; its scheduler has the queue.
        target: whose tokens a prompt may hold.
        rule: verification rule of the loop.
    """

    def __init__(self, ledger: Ledger, target: Target, *, rule: Rule) -> None:
        self._ledger, self._scheduler = ledger, ledger.scheduler
        self._target, self._rule = target, rule
        self._numbers = itertools.count()

    def checked(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """What `SpecDecoder.add_request` would queue: to be asked before minutes of capture.

        Raises:
            ConfigError: see `SpecDecoder.add_request`.
        """
        sampling = sampling or SamplingParams()
        check_request(
            prompt_token_ids,
            sampling,
            rule=self._rule,
            vocab_size=self._target.config.vocab_size,
            deferred=self._scheduler.deferred,
        )
        request = Request(
            request_id=request_id if request_id is not None else f"request-{next(self._numbers)}",
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._scheduler.check(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request that `checked` made; one that wants no token has ended then."""
        if (grammar := request.sampling.grammar) is not None:
            request.matcher = grammar.start(stop_token_ids=request.sampling.stop_token_ids)
        self._scheduler.add(request)
        if request.sampling.max_new_tokens == 0:
            self._ledger.finish(request, FinishReason.LENGTH)


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of a request.

    Attributes:
        request_id: as given to the decoder.
        token_ids: new tokens, in order; at least one unless this is the last event.
        finish_reason: see `decode.request.FinishReason`; None while the request goes on.
        logprobs: of each new token; None unless the request asked for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class RequestFeed:
    """Reads a request from where it was read last.

    Args:
        request: a request that has no output yet.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_read = 0
        self._has_ended = False

    def read(self) -> StreamEvent | None:
        """All that is new; None if nothing is. After the event with a finish reason comes None."""
        request = self._request
        token_ids = tuple(request.token_ids[request.num_prompt_tokens + self._num_read :])
        is_finished = request.status is Status.FINISHED
        if self._has_ended or not (token_ids or is_finished):
            return None
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(request.token_logprobs[self._num_read :])
        self._num_read += len(token_ids)
        self._has_ended = is_finished
        reason = request.finish_reason.value if request.finish_reason is not None else None
        return StreamEvent(request.request_id, token_ids, reason, logprobs)


def stream_events(
    request: Request, *, step: Callable[[], None], abort: Callable[[Request], None]
) -> Iterator[StreamEvent]:
    """Step until the request ends and yield what each step adds; abort it if nobody listens.

    Args:
        request: a queued request.
        step: runs one step of the loop it is queued in.
        abort: ends a request; does nothing to one that has ended.
    """
    feed = RequestFeed(request)
    try:
        while request.status is not Status.FINISHED:
            if (event := feed.read()) is not None:
                yield event
            step()
        if (event := feed.read()) is not None:
            yield event
    finally:
        abort(request)


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
