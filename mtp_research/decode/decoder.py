"""SpecDecoder: the speculative decode loop. `step()` is the page to read.

K = 0 is the plain autoregressive baseline through the same loop.

Letters: K drafts per step, V' draft vocabulary, D hidden.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.build import (
    build_drafter,
    build_products,
    build_state,
    kernel_backend,
    shallow_passes,
)
from mtp_research.decode.draft.draft_length import ExpectedGainLength, RecentRounds, StepKind
from mtp_research.decode.draft.drafter import Heads, MTPDrafter, VerifiedStep
from mtp_research.decode.ledger import Ledger
from mtp_research.decode.sampling.arguments import (
    Prompt,
    plain_text,
    prompt_ids,
    prompt_list,
    whole_number,
)
from mtp_research.decode.sampling.grammar import start_matcher
from mtp_research.decode.sampling.sampling import BatchSampling, SamplingTensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import StepInputs, build_inputs, start_texts
from mtp_research.decode.schedule.blocks import CacheStats
from mtp_research.decode.schedule.request import (
    FinishReason,
    Request,
    RequestFeed,
    Schedule,
    Scheduled,
    Status,
    StreamEvent,
)
from mtp_research.decode.settings import (
    SpecSettings,
    check_heads,
    check_positions,
    check_request,
    require_type,
)
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.decode.step import DeviceParts, DeviceStep, StepResult
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ArgumentTypeError, ConfigError, DecoderClosed

if TYPE_CHECKING:  # loaded where steps are captured
    from mtp_research.decode.graphs.capture import StepShape
    from mtp_research.decode.graphs.decode_graphs import StepGraphs
    from mtp_research.runtime.captures import Captured

_MAX_NEW_TOKENS = 256  # where the caller names none


def _closing_on_error(step: "Callable[[SpecDecoder], None]") -> "Callable[[SpecDecoder], None]":
    """A step whose exception closes the decoder: requests may have been moved on by half."""

    @functools.wraps(step)
    def guarded(self: "SpecDecoder") -> None:
        if self._fault is not None:
            self._reopen()
        try:
            step(self)
        except BaseException as error:
            self._fault = f"{type(error).__name__}: {error}"
            raise

    return guarded


class SpecDecoder:
    """Decodes requests with a target and drafts from MTP heads under a hidden-state policy.

    Args:
        target: the frozen model.
        heads: MTP heads; `"null"` (drafts that are always rejected), `"oracle"` (the target drafts
            for itself) or None (only with K = 0).
        spec: what is speculated and how.
        engine: pool, batch and backend settings.

    Attributes:
        stats: counters since the decoder was built, and the records of finished requests.
        auditor: watches the draft KV, or None.
        max_model_len: longest text in tokens.

    Raises:
        ConfigError: a setting is out of range or does not fit the others.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads = None,
        *,
        spec: SpecSettings | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        spec = SpecSettings() if spec is None else spec
        engine = EngineConfig() if engine is None else engine
        require_type("target", target, Target, call="load_target")
        check_heads(heads, spec=spec, engine=engine)
        plan = spec.plan(heads)
        self.target, self.spec, self.engine = target, spec, engine
        self.max_model_len = engine.max_model_len or target.config.max_position_embeddings
        self.drafter, self.auditor = build_drafter(target, heads, spec=spec, engine=engine)
        self.cache, self.slot_state, self.scheduler = build_state(
            target, self.drafter, plan=plan, engine=engine, max_model_len=self.max_model_len
        )
        self.device_step = DeviceStep(
            target=target,
            drafter=self.drafter,
            cache=self.cache,
            slot_state=self.slot_state,
            plan=plan,
            rule=spec.rule,
            options=spec.step_options,
            backend=kernel_backend(engine),
        )
        numbers = shallow_passes(self.device_step, spec=spec, engine=engine)
        steps = [self.device_step, *map(self.device_step.of_first_passes, numbers)]
        if (products := build_products(target, heads, engine=engine)) is not None:
            for step in steps:
                step.parts = step.parts.inside(products)
        graphs: list[StepGraphs] | list[None] = [None] * len(steps)
        if engine.cuda_graphs:
            from mtp_research.decode.graphs.decode_graphs import build_graphs

            graphs = build_graphs(steps, engine=engine, max_model_len=self.max_model_len)
        # by number of passes, K first
        self._devices = {
            step.plan.num_speculative_tokens: _Device(step, step.parts, one)
            for step, one in zip(steps, graphs, strict=True)
        }
        self._limits = frozenset(spec.draft_length.limits(plan.num_speculative_tokens))
        self._sampling = BatchSampling(
            plan,
            vocab_size=target.config.vocab_size,
            device=target.device,
            draws_at_zero=not spec.rule.is_greedy_at_zero,
        )
        self.stats = DecodeStats(auditor=self.auditor)
        self.recent = RecentRounds(plan, max_rows=engine.max_num_batched_tokens)
        self._ledger = Ledger(self.scheduler, self.stats, self.recent, self.auditor)
        self._numbers = itertools.count()
        self._fault: str | None = None  # of the step that closed the decoder

    def __repr__(self) -> str:
        """One line: what is speculated, for whom, and how many requests are live."""
        policy = self.spec.policy if isinstance(self.spec.policy, str) else self.spec.policy.name
        return (
            f"SpecDecoder(K={self.num_speculative_tokens}, policy={policy!r}, {self.target!r}, "
            f"{len(self.live_requests)} live requests, {len(self.stats.records)} finished)"
        )

    @_closing_on_error
    @torch.inference_mode()
    def step(self) -> None:
        """One step: every scheduled request gets a prompt chunk done or 1..K+1 tokens.

        With deferred output the tokens of a step are known to the host at the end of the next call.

        Raises:
            DecoderClosed: a step failed before, and requests that were live then still are.
        """
        schedule = self.scheduler.schedule()
        if not schedule.entries:
            self._join_peers()
            self._ledger.commit(schedule, None, draft_limit=0)
            return
        schedule, params, limit, shape = self._begin(schedule)
        result = self._replay(schedule.entries, params, shape)
        if result is None:  # the device's part of the step was not captured
            parts = self._device.step.parts
            inputs = self._inputs(schedule)
            target = parts.target(inputs)
            if params.bitmask is not None:
                bitmask = self._bitmask(schedule.entries).to(self.target.device, non_blocking=True)
                params = params._replace(bitmask=bitmask)
            verified = parts.verify(inputs, target, params)
            state = parts.advance(inputs, verified)
            ids = [entry.request.request_id for entry in schedule.entries]
            step = VerifiedStep(inputs, state, target.hidden, params, ids, limit)
            drafts = parts.draft(step)
            result = StepResult.of(verified, drafts)
        self._ledger.commit(schedule, result, draft_limit=limit)

    def add_request(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        position_ids: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> Request:
        """Queue a prompt; `max_new_tokens=0` ends at once with no output.

        Args:
            prompt: text that is to be continued, messages (`{"role": ..., "content": ...}`) that
                are to be answered, or token ids, at least one. Words take the target's tokenizer.
            sampling: default greedy.
            request_id: unique among live requests; default `request-<number>`.
            priority: smaller is served first, see `WaitingQueue` for how far that reaches.
            cache_salt: with prefix caching, texts with different salts share nothing.
            position_ids: `[axes, prompt]` rotary positions of the prompt, for a target whose
                positions have several axes (M-RoPE). Generated tokens follow the greatest of them
                by 1 each, on every axis. None: 0, 1, 2, ... on all axes.

        Returns:
            The request, which goes on with every `step`. Its `output_token_ids` are the output so
            far; its `token_ids` begin with the prompt.

        Raises:
            ConfigError: an argument of another type, an empty prompt, one that can never fit, an id
                in use or outside the vocabulary, or a temperature, grammar or positions that do not
                fit.
            DecoderClosed: see `step`.
        """
        if self._fault is not None:
            self._reopen()
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        request = self.check(
            prompt,
            sampling=sampling,
            request_id=name,
            priority=priority,
            cache_salt=cache_salt,
        )
        if position_ids is not None:
            request.axis_positions = check_positions(
                position_ids,
                num_axes=self.target.family.num_position_axes,
                num_prompt_tokens=request.num_prompt_tokens,
                max_model_len=self.max_model_len,
                engine=self.engine,
            )
        self.scheduler.add(request)
        if request.sampling.max_new_tokens == 0:
            self._ledger.finish(request, FinishReason.LENGTH)
        return request

    def check(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        request_id: str = "request",
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """The request that `add_request` would queue or refuse: to be asked before a capture."""
        sampling = SamplingParams() if sampling is None else sampling
        vocab_size = self.target.config.vocab_size
        token_ids = prompt_ids(prompt, target=self.target)
        check_request(
            token_ids,
            sampling,
            rule=self.spec.rule,
            vocab_size=vocab_size,
        )
        if self.target.parts is not None and sampling.temperature > 0 and sampling.seed is None:
            raise ConfigError(
                "seed must be set for a target that ranks split, each of which would draw by its "
                "own; set SamplingParams(seed=0) (command line: seed=0)."
            )
        request = Request(
            plain_text(request_id, key="request_id"),
            token_ids,
            sampling.with_seed(),
            priority=whole_number(priority, key="priority"),
            cache_salt=plain_text(cache_salt, key="cache_salt"),
            decode=self.target.decode,
        )
        self.scheduler.check(request)
        request.matcher = start_matcher(sampling, vocab_size=vocab_size)
        return request

    @torch.inference_mode()
    def serve_peers(self) -> None:
        """Go on with steps until no rank has a request, where ranks share a target's experts.

        Each of them calls it when its own requests are finished, or if it has none; `generate` and
        `stream` do. Elsewhere nothing happens.
        """
        while self._join_peers():
            if self.has_work:
                self.step()

    def abort(self, request: Request) -> None:
        """End a live request; its tokens so far stay in its record.

        Raises:
            ArgumentTypeError: it is none, but its id, say.
        """
        if not isinstance(request, Request):
            raise ArgumentTypeError(
                f"request must be what add_request returned, got {request!r}; one of live_requests "
                "may have this request_id."
            )
        if request.status is not Status.FINISHED:
            self._ledger.finish(request, FinishReason.ABORT)

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> Iterator[RequestRecord]:
        """Decode prompts in a continuous batch and yield outputs as requests finish.

        An output has `text` and `token_ids`, `request_id`, `finish_reason` and counters.

        Args:
            prompts: text, messages or token ids each, see `add_request`; request ids are their
                indices. Prompts not finished when the caller stops listening are aborted.
            sampling: parameters for all. Default: greedy, ending at the target's own stop tokens.
            max_new_tokens: limit of the default `sampling`; None means 256.

        Raises:
            ConfigError: both are given; see `add_request`.
        """
        sampling = self.chosen_sampling(sampling, max_new_tokens)
        records = self.stats.records
        num_seen = len(records)
        requests: list[Request] = []
        try:
            for index, prompt in enumerate(prompt_list(prompts)):
                requests.append(self.add_request(prompt, sampling=sampling, request_id=str(index)))
            live, unseen = deque(requests), {request.request_id for request in requests}
            while True:
                finished, num_seen = records[num_seen:], len(records)
                for record in finished:
                    if record.request_id in unseen:
                        unseen.remove(record.request_id)  # others may be given the id from now on
                        yield record
                if num_seen < len(records):  # the caller has run steps since, in a stream say
                    continue
                while live and live[0].status is Status.FINISHED:
                    live.popleft()
                if not live:
                    self.serve_peers()
                    return
                self.step()
        finally:  # a bad prompt, or a caller who stops listening, must leave nothing behind
            for request in requests:
                self.abort(request)

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Iterator[StreamEvent]:
        """Decode one prompt and yield its output as steps decide it; queued at the first `next`.

        Events have `text` and `token_ids`. `sampling` and `max_new_tokens` as in `generate`.

        Other requests go on beside it. Leaving the iterator early aborts the request.

        Raises:
            ConfigError: both are given; see `add_request`.
        """
        sampling = self.chosen_sampling(sampling, max_new_tokens)
        request = self.add_request(
            prompt, sampling=sampling, request_id=request_id, priority=priority
        )
        feed = RequestFeed(request)
        try:
            while request.status is not Status.FINISHED:
                if (event := feed.read()) is not None:
                    yield event
                self.step()
            if (event := feed.read()) is not None:
                yield event
            self.serve_peers()
        finally:
            self.abort(request)

    def chosen_sampling(
        self, sampling: SamplingParams | None, max_new_tokens: int | None
    ) -> SamplingParams:
        """`sampling`, or the usual one with a limit; ConfigError for both."""
        if sampling is None:
            return self.usual_sampling(max_new_tokens)
        if max_new_tokens is not None:
            raise ConfigError(
                "expected sampling or max_new_tokens, got both; set max_new_tokens in "
                "SamplingParams."
            )
        return sampling

    def usual_sampling(self, max_new_tokens: int | None = None) -> SamplingParams:
        """Greedy, ending at the target's own stop tokens; None for 256 new tokens at most."""
        return SamplingParams(
            max_new_tokens=_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
            stop_token_ids=self.target.stop_token_ids,
        )

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return self.spec.num_speculative_tokens

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    @property
    def live_requests(self) -> list[Request]:
        """Requests that run, by rank, then those that wait."""
        return self.scheduler.requests()

    @property
    def num_waiting(self) -> int:
        """Live requests that do not run."""
        return len(self.scheduler.waiting)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that requests can own."""
        return self.scheduler.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Those that nobody holds, cached ones included."""
        return self.scheduler.blocks.num_free_blocks

    @property
    def pool_bytes(self) -> int:
        """Size of the page pool."""
        return self.cache.num_bytes

    @property
    def prefix_cache_stats(self) -> CacheStats | None:
        """Counters of the prefix cache; None without one."""
        prefix_cache = self.scheduler.blocks.prefix_cache
        return None if prefix_cache is None else prefix_cache.stats

    @property
    def graphs(self) -> "StepGraphs | None":
        """The captured steps that run all passes; None where none is captured."""
        return self._devices[self.num_speculative_tokens].graphs

    @property
    def is_captured(self) -> bool:
        """Whether decode steps are replayed as CUDA graphs."""
        return self.graphs is not None

    @property
    def capture_s(self) -> float | None:
        """Seconds of compiling and capturing so far; None without graphs."""
        return None if self.graphs is None else sum(one.capture_s for one in self._all_graphs)

    @property
    def num_builds(self) -> int | None:
        """Captures and compilations so far, which end once all is ready; None without graphs."""
        if self.graphs is None:
            return None
        first, *others = self._all_graphs
        return first.num_builds + sum(graphs.num_graphs for graphs in others)

    @property
    def step_seconds(self) -> dict[int, dict[int, float]]:
        """Seconds of captured steps of all passes by batch size and number of drafts; else {}."""
        return {} if self.graphs is None else self.graphs.step_seconds

    @property
    def newest_capture(self) -> "Captured | None":
        """The decode step that was captured last, for a look at it alone; None without graphs."""
        return None if self.graphs is None else self.graphs.newest

    @property
    def draft_head(self) -> Tensor:
        """Weights that draft logits are made with: `[V, D]`, or `[V', D]` of the first module.

        Where ranks split the target, this rank's rows of them.
        """
        vocabulary = self.drafter.vocabulary if isinstance(self.drafter, MTPDrafter) else None
        own = cast(Tensor, self.target.lm_head.weight)
        return own if vocabulary is None else vocabulary.weights[0]

    def bytes_per_token(self, layer: int) -> int:
        """Bytes that a token takes in a KV layer, the target's layers first, then the drafter's."""
        return self.cache.bytes_per_token(layer)

    def warm_up(
        self,
        sampling: SamplingParams,
        *,
        num_requests: int | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Touch the pool's pages and capture every step of requests sampled like this.

        Ranks that share a target's experts all call it.

        Args:
            sampling: like all of theirs, but for the seed.
            num_requests: how many there will be at most; None for as many as a batch holds.
            log: is handed a line after each captured batch size, which can take minutes.
        """
        self.cache.fill(0.0)
        for number, device in self._devices.items():
            if device.graphs is None:
                return
            has_all = number == self.num_speculative_tokens
            limits = self.spec.draft_length.limits(number) if has_all else [number]
            with torch.inference_mode():
                device.graphs.prepare(
                    sampling,
                    draft_limits=limits,
                    num_requests=num_requests,
                    is_timed=not has_all or len(limits) > 1,
                    log=log if has_all else None,
                )
            prices = self.recent.times.prices
            prices[StepKind(number, False)] = device.graphs.step_seconds
            prices[StepKind(number, True)] = device.graphs.mixed_step_seconds
            if log is not None and not has_all:
                log(f"captured steps of {number} passes: {self.capture_s:.0f} s so far")

    def forget_texts(self) -> None:
        """Choose drafts from now on as if no text had been decoded; what steps take stays known.

        Behind texts that are unlike those to come, such as a warm-up's.
        """
        self.recent.forget_texts()

    def observe(self, wrap: Callable[[DeviceParts], DeviceParts] | None) -> None:
        """Put wrapped parts in the place of the step's own; None puts these back.

        A captured step calls its parts once, when it is captured: wrap them before.
        """
        for device in self._devices.values():
            device.step.parts = device.own_parts if wrap is None else wrap(device.own_parts)

    def rehearse(self) -> None:
        """Run a decoding step of the running requests behind the host's back.

        For a look at the models inside; the decoder is of no use afterwards.
        """
        self.cache.runs_regions = False  # compiled layers would call no hook inside them
        requests = self.scheduler.running
        # The device is ahead of the host, by the step in flight and by graphs replayed for a look.
        num_tokens = self.slot_state.num_tokens.tolist()
        for request in requests:
            needed = self.device_step.plan.num_slots_needed(num_tokens[cast(int, request.slot)])
            self.scheduler.blocks.reserve(request, needed + self.scheduler.num_extra_slots)
        params = self._sampling.tensors(requests)
        num_rows = self.num_speculative_tokens + 1
        entries = [Scheduled(r, num_rows, 0, False, True, False) for r in requests]
        inputs = build_inputs(
            entries, slot_state=self.slot_state, block_size=self.engine.block_size, deferred=True
        )
        if self.target.exchange is not None:
            self._agree(entries, params, draft_limit=self.num_speculative_tokens, replays=False)
        with torch.inference_mode():
            self.device_step.run(inputs, params, draft_limit=self.num_speculative_tokens)

    def check_integrity(self) -> None:
        """Assert the invariants of requests, blocks and slots that hold between steps."""
        self.scheduler.check_integrity()

    def _reopen(self) -> None:
        """Go on after a failed step once none of its requests is left.

        New requests start from their prompts, in slots and blocks of which all are free. Captured
        steps hold state of their own, of which the host cannot tell.
        """
        closed = f"decoder closed after an error in step() ({self._fault}): build a new one"
        if self.graphs is not None or self.has_work:
            way = "." if self.graphs is not None else ", or abort all of its requests."
            raise DecoderClosed(f"{closed}{way}")
        try:
            self.check_integrity()
        except AssertionError as error:
            raise DecoderClosed(f"{closed}.") from error
        self._ledger.drop_in_flight()
        self._fault = None

    def _begin(self, schedule: Schedule) -> "_Begun":
        """Give admitted requests their texts; what the step runs.

        The draft limit holds for the drafts that are verified too. Where the host is a step late it
        says how many rows that takes; else the host knows the drafts themselves.
        """
        self._ledger.begin(schedule)
        start_texts(schedule.admitted, slot_state=self.slot_state)
        entries = schedule.entries
        requests = [entry.request for entry in entries]
        is_new_batch = len(schedule.admitted) == len(self.scheduler.running)
        self.recent.begin_step(is_new_batch=is_new_batch)
        self._settle_passes(schedule, is_new_batch=is_new_batch)
        rule, recent = self.spec.draft_length, self.recent
        recent.num_drafts = rule.num_drafts(batch_size=len(requests), recent=recent)
        if recent.num_drafts not in self._limits:
            raise ConfigError(
                f"{type(rule).__name__}.num_drafts must be one of its limits, "
                f"{sorted(self._limits)}, got {recent.num_drafts!r}; let both say the same."
            )
        limit = min(recent.num_drafts, recent.num_passes)
        params, shape = self._sampling.tensors(requests), None
        rows = self._verifying(entries, limit)
        if self.target.exchange is not None:
            shape = self._agree(entries, params, draft_limit=limit).shape
        elif (graphs := self._device.graphs) is not None:
            shape = graphs.wish(rows, params, draft_limit=limit).shape()
        if shape is not None and shape.draft_limit != limit:  # another rank's
            limit = shape.draft_limit
            rows = self._verifying(entries, limit)
        return _Begun(schedule._replace(entries=rows), params, limit, shape)

    def _settle_passes(self, schedule: Schedule, *, is_new_batch: bool) -> None:
        """How many passes of a round run from now on; see `ExpectedGainLength.num_passes`."""
        rule, recent, running = self.spec.draft_length, self.recent, self.scheduler.running
        if len(self._devices) == 1:
            return
        before, admitted = recent.num_passes, schedule.admitted
        num_tokens = [request.num_tokens for request in admitted]
        recent.add_admissions(num_tokens, is_queue=self.num_waiting > 0)
        if is_new_batch and before < self.num_speculative_tokens:  # nobody lacks draft KV
            recent.run_passes(self.num_speculative_tokens)
        if isinstance(rule, ExpectedGainLength):
            chosen = rule.num_passes(
                running=running,
                waiting=self.scheduler.waiting,
                is_admitting=bool(admitted),
                recent=recent,
            )
            if chosen != recent.num_passes:
                recent.run_passes(chosen)
        for request in admitted:
            request.num_full_passes = recent.num_passes
        if recent.num_passes < before:
            for request in running:
                request.num_full_passes = min(request.num_full_passes, recent.num_passes)
        self.scheduler.num_drafts = recent.num_passes

    @property
    def _device(self) -> "_Device":
        return self._devices[self.recent.num_passes]

    @property
    def _all_graphs(self) -> "list[StepGraphs]":
        return [one.graphs for one in self._devices.values() if one.graphs is not None]

    def _verifying(self, entries: Sequence[Scheduled], limit: int) -> list[Scheduled]:
        # Those that decode come first, and have as many rows each.
        if not entries or not self.scheduler.deferred or entries[0].verifying(limit) is entries[0]:
            return list(entries)
        return [entry.verifying(limit) for entry in entries]

    def _agree(
        self,
        entries: Sequence[Scheduled],
        params: SamplingTensors | None = None,
        *,
        draft_limit: int = 0,
        replays: bool = True,
    ) -> "_Agreed":
        """Tell the ranks that share experts what this step runs, and settle with them how.

        Without `replays` it runs as it comes, on all ranks.
        """
        exchange, graphs = self.target.exchange, self.graphs
        assert exchange is not None, "ranks share nothing"
        rows = self._verifying(entries, draft_limit)
        counts = [entry.num_scheduled_tokens for entry in rows]
        is_prefill = [entry.is_prefill for entry in rows]
        said = [self.device_step.plan.most_rows(counts, is_prefill=is_prefill), int(self.has_work)]
        if graphs is not None:
            wish = graphs.wish(entries, params, draft_limit=draft_limit)
            wish = wish._replace(is_unknown=wish.is_unknown or not replays)
            said += graphs.say(wish, params)
        num_rows, goes_on, *others = exchange.most(said)
        shape = None if graphs is None else graphs.agreed(others)
        exchange.num_rows = num_rows if shape is None else None
        return _Agreed(shape, bool(goes_on))

    def _join_peers(self) -> bool:
        """A step without requests here: take part in that of the ranks that share experts, if any.

        Returns whether any rank has work; False where nothing is shared.
        """
        exchange = self.target.exchange
        if exchange is None:
            return False
        shape, goes_on = self._agree([])
        if shape is not None:
            self._replay([], None, shape)
        elif exchange.num_rows:
            self.device_step.join()
        return goes_on

    def _replay(
        self, entries: list[Scheduled], params: SamplingTensors | None, shape: "StepShape | None"
    ) -> StepResult | None:
        """The result of a captured step; None where it runs as it comes."""
        graphs = self._device.graphs
        if graphs is None or shape is None:
            return None
        return graphs.run(shape, entries, params, make_bitmask=lambda: self._bitmask(entries))

    def _bitmask(self, entries: list[Scheduled]) -> Tensor:
        """Masks of the requests' grammars `[R, K+1, W]` on the host, made while the target runs.

        They depend on what the step before decided and drafted, which is waited for.
        """
        self._ledger.catch_up()
        return self._sampling.bitmask([entry.request for entry in entries])

    def _inputs(self, schedule: Schedule) -> StepInputs:
        return build_inputs(
            schedule.entries,
            slot_state=self.slot_state,
            block_size=self.engine.block_size,
            deferred=self.engine.deferred_output,
        )


class _Device(NamedTuple):
    """The device's part of steps that run so many passes."""

    step: DeviceStep
    own_parts: DeviceParts  # those that no observer has replaced
    graphs: "StepGraphs | None"


class _Begun(NamedTuple):
    """What a step runs."""

    schedule: Schedule
    params: SamplingTensors
    draft_limit: int
    shape: "StepShape | None"  # in which it is replayed; None: it runs as it comes


class _Agreed(NamedTuple):
    """What ranks that share experts say before a step."""

    shape: "StepShape | None"  # in which all replay it; None: it runs as it comes
    goes_on: bool  # some rank has work
