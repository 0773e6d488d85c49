"""Who runs in the next step: admission, chunks, decoding, preemption.

Requests that decode come first, then prompt chunks, then admissions, all under one token budget.
What a step did to them is applied by `commit`.

Letters: K drafts per step. Sizes are in tokens.
Source: continuous batching (Orca, OSDI 2022); counters named as in vLLM v1.
"""

import time
from bisect import insort
from operator import attrgetter

from mtp_research.decode.block_manager import BlockManager
from mtp_research.decode.integrity import check_progress, check_slots, check_waiting
from mtp_research.decode.limits import check_arrival, check_budget, text_limit
from mtp_research.decode.request import FinishReason, Request, Status
from mtp_research.decode.schedule import Schedule, Scheduled
from mtp_research.decode.waiting import WaitingQueue
from mtp_research.policy import num_slots_needed


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
