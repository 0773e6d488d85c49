"""Who runs in the next step: admission, chunks, decoding, preemption.

Requests that decode come first, then prompt chunks, then admissions, all under one token budget.
With `engine.mixed_batches=false` a step has either decoding rows or prompt rows: where both wait,
the kind goes that the last step did not have, so that neither waits for more than one step.
What a step did to them is applied by the ledger.

A request of priority p that arrived at step s has rank `s + p * steps_per_priority`; the smaller
rank is served first, ties by arrival. A priority is thus a head start, not a wall: a request can be
overtaken only by requests that arrive less than `(difference of priorities) * steps_per_priority`
steps after it, and never by one of equal or lower priority, however short it is. A rank never
changes, so every request ends up first: then nothing is admitted before it or preempts it.

Letters: K drafts per step. Sizes are in tokens unless a name says blocks.
Source: continuous batching (Orca, OSDI 2022); counters named as in vLLM v1. The rule of service is
ours; linear ageing with a constant rate keeps a heap in order by itself.
"""

import heapq
import itertools
import time
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import FinishReason, Request, Schedule, Scheduled, Status
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError


class Rank(NamedTuple):
    """Place in the order of service; smaller is served first."""

    due_step: int
    arrival: int


class WaitingQueue:
    """Requests that wait, and the ranks of all live ones; a level of priority is >= 1 steps."""

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


def cut_emitted(request: Request, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
    """Cut a step's tokens behind a stop token, or at the limit; what comes first decides.

    Returns:
        What stays, and why the request ends, if it does.
    """
    room = request.max_tokens - len(request.token_ids)
    kept = emitted if len(emitted) <= room else emitted[:room]
    if stop_token_ids := request.sampling.stop_token_ids:
        for index, token_id in enumerate(kept):
            if token_id in stop_token_ids:
                return kept[: index + 1], FinishReason.STOP
    return kept, FinishReason.LENGTH if len(emitted) >= room else None


class Scheduler:
    """Queues, slots and blocks.

    With `engine.deferred_output` the host commits a step after the next one was scheduled. A
    decoding request then always has `num_drafts + 1` rows, because the host does not know its
    drafts: K, or fewer where the loop makes fewer for the time being. A drafter
    writes `num_extra_slots` positions beyond `plan.num_slots_needed`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        plan: DraftPlan,
        *,
        engine: EngineConfig,
        max_model_len: int,
        num_extra_slots: int = 0,
    ) -> None:
        num_rows = engine.max_num_requests * (plan.num_speculative_tokens + 1)
        if engine.max_num_batched_tokens < num_rows:
            raise ConfigError(
                "engine.max_num_batched_tokens must be >= max_num_requests * (K + 1) = "
                f"{num_rows}, got {engine.max_num_batched_tokens}; raise it."
            )
        self.blocks, self.plan, self.num_drafts = blocks, plan, plan.num_speculative_tokens
        self.max_num_batched_tokens = engine.max_num_batched_tokens
        self.max_prefill_chunk = engine.max_prefill_chunk
        self.max_model_len = max_model_len
        self.num_extra_slots = num_extra_slots
        self.deferred, self.mixed_batches = engine.deferred_output, engine.mixed_batches
        self.running: list[Request] = []  # by rank
        self.waiting = WaitingQueue(steps_per_priority=engine.steps_per_priority)
        self.max_num_requests = engine.max_num_requests
        self._admit_together = min(engine.admit_together, engine.max_num_requests)
        self._is_filling = False  # all free places are given away, over several steps if need be
        self._free_slots = list(range(engine.max_num_requests))
        self._num_steps = 0
        self._had_prompts = False  # the last step had prompt rows

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.running or len(self.waiting))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.check(request)
        request.max_tokens = self._max_tokens(request)
        self.waiting.arrive(request, step=self._num_steps)

    def check(self, request: Request) -> None:
        """Refuse a request that could not be queued."""
        name, num_prompt = request.request_id, request.num_prompt_tokens
        if self.waiting.knows(name):
            raise ConfigError(f"request_id must be unique among live requests, {name!r} is taken.")
        if num_prompt == 0:
            raise ConfigError(f"request {name}: the prompt must hold at least one token, got none.")
        if num_prompt >= self.max_model_len:
            raise ConfigError(
                f"request {name}: the prompt must be shorter than "
                f"engine.max_model_len={self.max_model_len}, got {num_prompt} tokens; "
                "shorten it or raise engine.max_model_len."
            )
        num_needed = self.blocks.num_blocks_for(self._num_slots(self._max_tokens(request)))
        if num_needed > self.blocks.num_blocks:
            raise ConfigError(
                f"request {name} can never fit: it needs {num_needed} blocks, the pool has "
                f"{self.blocks.num_blocks}; raise engine.num_blocks or lower "
                "sampling.max_new_tokens."
            )

    def requests(self) -> list[Request]:
        """Every live request."""
        return [*self.running, *self.waiting]

    def schedule(self) -> Schedule:
        """Choose the rows of the next step and reserve their blocks; may preempt."""
        started_s = time.perf_counter()
        self._num_steps += 1
        preempted: list[Request] = []
        entries: list[Scheduled] = []
        admitted: list[Scheduled] = []
        for are_prompts in self._turns():
            entries, moved = self._continued(are_prompts)
            preempted += moved
            # One preempted in this step must not come back in it: the shortage would only move.
            if are_prompts is not False and not preempted:
                admitted = self._admissions(entries)
                entries += admitted
            if entries:
                break
        num_prompt_rows = sum(e.num_scheduled_tokens for e in entries if e.is_prefill)
        self._had_prompts = num_prompt_rows > 0
        return Schedule(
            entries, [entry.request for entry in admitted], preempted, num_prompt_rows, started_s
        )

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
        slots = [request.slot for request in self.running if request.slot is not None]
        assert len(slots) == len(self.running), "a running request has no slot"
        known = [*slots, *self._free_slots]
        assert sorted(known) == list(range(self.max_num_requests)), f"slots in use: {slots}"
        for request in self.running:
            name, num_computed = request.request_id, request.num_computed_tokens
            assert min(request.token_ids) >= 0, f"{name} holds a placeholder token"
            is_behind = num_computed < request.num_tokens + request.num_in_flight
            assert is_behind, f"{name} is ahead of its text"
            covered = len(request.block_ids) * self.blocks.block_size
            assert covered >= num_computed, f"{name} owns {covered} slots, too few"
        for request in self.waiting:
            assert not request.block_ids, f"{request.request_id} waits and holds blocks"
            assert request.slot is None, f"{request.request_id} waits and holds a slot"
        ranks = [self.waiting.rank(request) for request in self.running]
        assert ranks == sorted(ranks), "running requests are not in the order of their ranks"

    def _max_tokens(self, request: Request) -> int:
        most = len(request.prompt_token_ids) + request.sampling.max_new_tokens
        return min(most, self.max_model_len)

    def _num_slots(self, num_tokens: int) -> int:
        needed = self.plan.num_slots_needed(num_tokens, int(self.deferred))
        return needed + self.num_extra_slots

    def _turns(self) -> tuple[bool | None, ...]:
        """Whether a step takes prompt rows, to be tried in this order; None is both kinds."""
        if self.mixed_batches:
            return (None,)
        return (False, True) if self._had_prompts else (True, False)

    def _continued(self, are_prompts: bool | None) -> tuple[list[Scheduled], list[Request]]:
        """Rows of running requests, of one kind or of both, and who was preempted for them."""
        budget = self.max_num_batched_tokens
        entries: list[Scheduled] = []
        preempted: list[Request] = []
        running = self.running
        if are_prompts is not None:
            running = [request for request in running if request.is_prefilling is are_prompts]
        # Asked of every request in every step, so that what is the same for all is asked once.
        num_beyond, block_size = self._num_slots(0), self.blocks.block_size
        for request in sorted(running, key=attrgetter("is_prefilling")):
            if request.slot is None or budget == 0:
                continue  # preempted by an earlier one, or left for the next step
            num_tokens = len(request.token_ids)
            if request.num_in_flight and num_tokens + 1 >= request.max_tokens:
                continue  # the step in flight ends it
            if num_tokens + num_beyond > len(request.block_ids) * block_size:
                preempted += self._make_room(request, keep=entries)
                if request.slot is None:
                    continue
                self.blocks.reserve(request, num_tokens + num_beyond)
            entry = self._entry(request, budget)
            entries.append(entry)
            budget -= entry.num_scheduled_tokens
        return entries, preempted

    def _admissions(self, entries: list[Scheduled]) -> list[Scheduled]:
        """First rows of requests that are admitted beside `entries`."""
        admitted: list[Scheduled] = []
        num_free, num_waiting = len(self._free_slots), len(self.waiting)
        is_enough = not self.running or num_free >= min(self._admit_together, num_waiting)
        if not (self._is_filling or is_enough):
            return admitted
        budget = self.max_num_batched_tokens - sum(e.num_scheduled_tokens for e in entries)
        while len(self.waiting) and self._free_slots and budget > 0:
            request = self.waiting.first()
            if not self._admit(request):
                break  # nobody overtakes it by being shorter
            admitted.append(self._entry(request, budget))
            budget -= admitted[-1].num_scheduled_tokens
        self._is_filling = bool(self._free_slots) and len(self.waiting) > 0
        return admitted

    def _entry(self, request: Request, budget: int) -> Scheduled:
        """The next rows of a request, at most `budget` prompt rows."""
        first, num_prefill = request.num_computed_tokens, request.num_prefill_tokens
        is_prefill = first < num_prefill
        if is_prefill:
            count = min(num_prefill - first, budget, self.max_prefill_chunk)
            request.num_computed_tokens += count
        elif self.deferred:
            count = self.num_drafts + 1
        else:
            count = 1 + len(request.draft_token_ids)
        ends_at_newest_token = first + count >= len(request.token_ids)
        ends_recompute = not ends_at_newest_token and request.num_computed_tokens >= num_prefill
        request.num_in_flight += ends_at_newest_token or ends_recompute
        return Scheduled(request, count, first, is_prefill, ends_at_newest_token, ends_recompute)

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
