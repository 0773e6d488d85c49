"""Who runs in the next step: admission, chunks, decoding, preemption.

Requests that decode come first, then prompt chunks, then admissions, all under one token budget.
What a step did to them is applied by `commit`.

Letters: K drafts per step. Sizes are in tokens.
Source: continuous batching (Orca, OSDI 2022); counters named as in vLLM v1.

The order of service: who is admitted first, who is preempted last.

A request of priority p that arrived at step s has rank `s + p * steps_per_priority`; the smaller
rank is served first, ties by arrival. A priority is thus a head start, not a wall: a request can be
overtaken only by requests that arrive less than `(difference of priorities) * steps_per_priority`
steps after it, and never by one of equal or lower priority, however short it is. A rank never
changes, so every request ends up first: then nothing is admitted before it, and nothing can
preempt it. The bound of the wait is the head start and what those before it still have to say.

Source: the rule is ours; linear ageing with a constant rate keeps a heap in order by itself.

What fits: texts and budgets that are refused, and where emitted tokens are cut.

Sizes are in tokens unless a name says blocks.

Invariants of live requests that hold between steps; `Scheduler.check_integrity` asks.
"""

import heapq
import itertools
import time
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import FinishReason, Request, Schedule, Scheduled, Status
from mtp_research.policy.plan import num_slots_needed
from mtp_research.runtime.errors import ConfigError


class Rank(NamedTuple):
    """Place in the order of service; smaller is served first.

    Attributes:
        due_step: step of arrival, put off by the priority.
        arrival: running number of the request.
    """

    due_step: int
    arrival: int


class WaitingQueue:
    """Requests that wait, and the ranks of all live ones.

    Args:
        steps_per_priority: head start of one level of priority, in steps, >= 1.
    """

    def __init__(self, *, steps_per_priority: int) -> None:
        self.steps_per_priority = steps_per_priority
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting: dict[str, Request] = {}
        self._ranks: dict[str, Rank] = {}
        self._num_arrived = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def knows(self, request_id: str) -> bool:
        """Whether a live request, waiting or running, has this id."""
        return request_id in self._ranks

    def check_new(self, request: Request) -> None:
        """Refuse an id that a live request, waiting or running, has.

        Raises:
            ConfigError: it is taken.
        """
        if self.knows(request.request_id):
            raise ConfigError(
                f"request_id must be unique among live requests, {request.request_id!r} is taken."
            )

    def arrive(self, request: Request, *, step: int) -> None:
        """Rank a new request and queue it."""
        due_step = step + request.priority * self.steps_per_priority
        self._ranks[request.request_id] = Rank(due_step, next(self._num_arrived))
        self.push(request)

    def rank(self, request: Request) -> Rank:
        """Rank of a live request."""
        return self._ranks[request.request_id]

    def push(self, request: Request) -> None:
        """Queue a live request, at the rank it has had since it arrived."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self.rank(request), request))

    def first(self) -> Request:
        """The request to admit next."""
        while self._heap[0][1] is not self._waiting.get(self._heap[0][1].request_id):
            heapq.heappop(self._heap)  # it ended while it waited
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take out the request to admit next."""
        request = self.first()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def leave(self, request: Request) -> None:
        """Forget a request that ends, waiting or not."""
        self._waiting.pop(request.request_id, None)
        self._ranks.pop(request.request_id, None)


class Cut(NamedTuple):
    """The part of a step's tokens that stays, and why the request ends, if it does."""

    kept: list[int]
    reason: FinishReason | None


def text_limit(request: Request, *, max_model_len: int) -> int:
    """Text length at which a request ends at the latest, its prompt included."""
    return min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, max_model_len)


def check_arrival(
    request: Request, *, max_model_len: int, num_needed: int, num_blocks: int
) -> None:
    """Refuse a new request that could not run even if it were alone.

    Args:
        request: the new one.
        max_model_len: longest text.
        num_needed: blocks of its longest possible text.
        num_blocks: blocks of the pool.

    Raises:
        ConfigError: see `check_prompt` and `check_room`.
    """
    check_prompt(request, max_model_len=max_model_len)
    check_room(request, num_needed=num_needed, num_blocks=num_blocks)


def check_prompt(request: Request, *, max_model_len: int) -> None:
    """Refuse a prompt that leaves nothing to decode from, or no room for a token.

    Raises:
        ConfigError: the prompt is empty, or fills the context.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise ConfigError(
            f"request {request.request_id}: the prompt must hold at least one token, got none."
        )
    if num_prompt >= max_model_len:
        raise ConfigError(
            f"request {request.request_id}: the prompt must be shorter than "
            f"engine.max_model_len={max_model_len}, got {num_prompt} tokens; "
            "shorten it or raise engine.max_model_len."
        )


def check_budget(max_num_batched_tokens: int, *, num_rows: int) -> None:
    """Refuse a row budget with which a full batch could not decode.

    Args:
        max_num_batched_tokens: rows of a step.
        num_rows: rows of a full batch that decodes, `max_num_requests * (K + 1)`.

    Raises:
        ConfigError: the budget is too small.
    """
    if max_num_batched_tokens < num_rows:
        raise ConfigError(
            f"engine.max_num_batched_tokens must be >= max_num_requests * (K + 1) = {num_rows}, "
            f"got {max_num_batched_tokens}; raise it."
        )


def check_room(request: Request, *, num_needed: int, num_blocks: int) -> None:
    """Refuse a text that would not fit even if the request were alone.

    Args:
        request: the new one.
        num_needed: blocks of its longest possible text.
        num_blocks: blocks of the pool.

    Raises:
        ConfigError: the pool is too small.
    """
    if num_needed > num_blocks:
        raise ConfigError(
            f"request {request.request_id} can never fit: it needs {num_needed} blocks, the pool "
            f"has {num_blocks}; raise engine.num_blocks or lower sampling.max_new_tokens."
        )


def cut_emitted(request: Request, emitted: list[int], *, max_model_len: int) -> Cut:
    """Cut a step's tokens behind a stop token, or at the limit; what comes first decides."""
    room = text_limit(request, max_model_len=max_model_len) - len(request.token_ids)
    kept = emitted[:room]
    if stop_token_ids := request.sampling.stop_token_ids:
        for index, token_id in enumerate(kept):
            if token_id in stop_token_ids:
                return Cut(kept[: index + 1], FinishReason.STOP)
    return Cut(kept, FinishReason.LENGTH if len(emitted) >= room else None)


def check_slots(running: Sequence[Request], *, free_slots: Sequence[int]) -> None:
    """Assert that every running request has a slot of its own, and that no slot is lost."""
    slots = [request.slot for request in running if request.slot is not None]
    assert len(slots) == len(running), "a running request has no slot"
    assert sorted([*slots, *free_slots]) == list(range(len(slots) + len(free_slots))), (
        f"slots in use: {slots}"
    )


def check_progress(running: Sequence[Request], *, block_size: int) -> None:
    """Assert that requests hold accepted tokens only, and pages for every row they computed."""
    for request in running:
        assert min(request.token_ids) >= 0, f"{request.request_id} holds a placeholder token"
        assert request.num_computed_tokens < request.num_tokens + request.num_in_flight, (
            f"{request.request_id} is ahead of its text"
        )
        covered = len(request.block_ids) * block_size
        assert covered >= request.num_computed_tokens, (
            f"{request.request_id} owns {covered} slots, too few"
        )


def check_waiting(waiting: Iterable[Request]) -> None:
    """Assert that requests that wait hold nothing."""
    for request in waiting:
        assert not request.block_ids, f"{request.request_id} waits and holds blocks"
        assert request.slot is None, f"{request.request_id} waits and holds a slot"


class Scheduler:
    """Queues, slots and blocks.

    Args:
        blocks: owner of the pages.
        num_slots: most requests running at once.
        max_num_batched_tokens: row budget of a step, at least `num_slots * (K + 1)` so that
            decoding never starves.
        max_prefill_chunk: most prompt rows of one request in a step.
        max_model_len: longest text.
        num_speculative_tokens: K.
        num_extra_slots: positions the drafter writes beyond `num_slots_needed`.
        steps_per_priority: head start of one level of priority, see `WaitingQueue`.
        deferred: the host commits a step after the next one was scheduled. A decoding request then
            always has K+1 rows, because the host does not know its drafts.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        max_prefill_chunk: int,
        max_model_len: int,
        num_speculative_tokens: int,
        num_extra_slots: int = 0,
        steps_per_priority: int = 1000,
        deferred: bool = False,
    ) -> None:
        check_budget(max_num_batched_tokens, num_rows=num_slots * (num_speculative_tokens + 1))
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_chunk = max_prefill_chunk
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.num_extra_slots = num_extra_slots
        self.deferred = deferred
        self.running: list[Request] = []  # by rank
        self.waiting = WaitingQueue(steps_per_priority=steps_per_priority)
        self._free_slots = list(range(num_slots))
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.running or len(self.waiting))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: see `check`.
        """
        self.check(request)
        self.waiting.arrive(request, step=self._num_steps)

    def check(self, request: Request) -> None:
        """Refuse a request that could not be queued.

        Raises:
            ConfigError: empty prompt, id in use, prompt beyond the context, or a text that can
                never fit into the pool.
        """
        self.waiting.check_new(request)
        longest = text_limit(request, max_model_len=self.max_model_len)
        num_needed = self.blocks.num_blocks_for(self._num_slots(longest))
        check_arrival(
            request,
            max_model_len=self.max_model_len,
            num_needed=num_needed,
            num_blocks=self.blocks.num_blocks,
        )

    def requests(self) -> list[Request]:
        """Every live request."""
        return [*self.running, *self.waiting]

    def schedule(self) -> Schedule:
        """Choose the rows of the next step and reserve their blocks; may preempt."""
        self._num_steps += 1
        budget = self.max_num_batched_tokens
        entries: list[Scheduled] = []
        preempted: list[Request] = []
        # Asked of every request in every step, so that what is the same for all is asked once.
        num_beyond, block_size = self._num_slots(0), self.blocks.block_size
        for request in sorted(self.running, key=attrgetter("is_prefilling")):
            if request.status is not Status.RUNNING or budget == 0:
                continue  # preempted by an earlier one, or left for the next step
            num_tokens = len(request.token_ids)
            if request.num_in_flight and num_tokens + 1 >= text_limit(
                request, max_model_len=self.max_model_len
            ):
                continue  # the step in flight ends it
            if num_tokens + num_beyond > len(request.block_ids) * block_size:
                preempted += self._make_room(request, keep=entries)
                if request.status is not Status.RUNNING:
                    continue
                self.blocks.reserve(request, num_tokens + num_beyond)
            entry = self._entry(request, budget)
            entries.append(entry)
            budget -= entry.num_scheduled_tokens
        admitted = []
        # A request preempted in this step must not come back in it: the shortage would only move.
        while len(self.waiting) and self._free_slots and budget > 0 and not preempted:
            request = self.waiting.first()
            if not self._admit(request):
                break  # nobody overtakes it by being shorter
            admitted.append(request)
            entries.append(self._entry(request, budget))
            budget -= entries[-1].num_scheduled_tokens
        num_prompt_rows = sum(e.num_scheduled_tokens for e in entries if e.is_prefill)
        return Schedule(entries, admitted, preempted, num_prompt_rows)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back its blocks and slot."""
        request.finish_reason = reason
        request.finish_s = time.perf_counter()
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request, is_sound=reason is not FinishReason.NON_FINITE)
        self.waiting.leave(request)
        request.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps."""
        self.blocks.check_integrity(self.requests())
        check_slots(self.running, free_slots=self._free_slots)
        check_progress(self.running, block_size=self.blocks.block_size)
        check_waiting(self.waiting)
        ranks = [self.waiting.rank(request) for request in self.running]
        assert ranks == sorted(ranks), "running requests are not in the order of their ranks"

    def _num_slots(self, num_tokens: int) -> int:
        needed = num_slots_needed(num_tokens, self.num_speculative_tokens, int(self.deferred))
        return needed + self.num_extra_slots

    def _entry(self, request: Request, budget: int) -> Scheduled:
        """The next rows of a request, at most `budget` prompt rows."""
        first, num_prefill = request.num_computed_tokens, request.num_prefill_tokens
        is_prefill = first < num_prefill
        if is_prefill:
            count = min(num_prefill - first, budget, self.max_prefill_chunk)
            request.num_computed_tokens += count
        elif self.deferred:
            count = self.num_speculative_tokens + 1
        else:
            count = 1 + len(request.draft_token_ids)
        samples = first + count >= len(request.token_ids)
        resumes = not samples and request.num_computed_tokens >= num_prefill
        request.num_in_flight += samples or resumes
        return Scheduled(request, count, first, is_prefill, samples, resumes)

    def _make_room(self, request: Request, *, keep: list[Scheduled]) -> list[Request]:
        """Preempt the lowest ranks, at worst this one, until `request` can reserve its step."""
        preempted = []
        while request.status is Status.RUNNING and not self.blocks.can_reserve(
            request, self._num_slots(request.num_tokens)
        ):
            kept = {entry.request.request_id for entry in keep}
            movable = (other for other in self.running if other.request_id not in kept)
            victim = max(movable, key=self.waiting.rank)
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    def _admit(self, request: Request) -> bool:
        """Start the first waiting request, with what is cached of its text, if there is room."""
        cached = self.blocks.find_cached(request)
        num_slots = self._num_slots(request.num_tokens)
        if not self.blocks.can_reserve(request, num_slots, cached=cached):
            return False
        self.waiting.pop()
        self.blocks.take_cached(request, cached)
        self.blocks.reserve(request, num_slots)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=self.waiting.rank)
        return True

    def _preempt(self, request: Request) -> None:
        """Free everything; the text is recomputed when the request is admitted again.

        Once it has an output, the recompute stops short of the newest token. That token then gets
        the drafts it would have had, so that a preempted request decides every token as an
        undisturbed one does.
        """
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.restart()
        request.num_preemptions += 1
        self.waiting.push(request)

    def _release(self, request: Request, *, is_sound: bool = True) -> None:
        assert request.slot is not None, f"{request.request_id} does not run"
        self.blocks.free(request, forget=not is_sound)
        self._free_slots.append(request.slot)
        request.slot = None
