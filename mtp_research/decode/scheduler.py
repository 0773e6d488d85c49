"""Who runs in the next step: admission, chunks, decoding, preemption; and the bookkeeping after it.

Requests that decode come first, then prompt chunks, then admissions, all under one token budget.
Sizes are in tokens.

Letters: R requests, K drafts per step.
Source: continuous batching (Orca, OSDI 2022); counters named as in vLLM v1.
"""

import heapq
import itertools
import time
from typing import NamedTuple

from mtp_research.decode.batch import Scheduled
from mtp_research.decode.block_manager import BlockManager
from mtp_research.decode.request import FinishReason, Request, Status
from mtp_research.errors import ConfigError
from mtp_research.policy import num_slots_needed


class Schedule(NamedTuple):
    """One step's work.

    Attributes:
        entries: rows to run.
        admitted: requests with a fresh slot, whose text must be written before the step.
        preempted: requests whose pages and slot were taken away.
    """

    entries: list[Scheduled]
    admitted: list[Request]
    preempted: list[Request]


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
    ) -> None:
        if max_num_batched_tokens < num_slots * (num_speculative_tokens + 1):
            raise ConfigError(
                f"engine.max_num_batched_tokens must be >= max_num_requests * (K + 1) = "
                f"{num_slots * (num_speculative_tokens + 1)}, got {max_num_batched_tokens}; "
                "raise it."
            )
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_chunk = max_prefill_chunk
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.num_extra_slots = num_extra_slots
        self.running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._free_slots = list(range(num_slots))
        self._arrivals: dict[str, int] = {}
        self._num_arrived = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: empty prompt, id in use, prompt beyond the context, or a text that can
                never fit into the pool.
        """
        request_id, num_prompt = request.request_id, request.num_prompt_tokens
        if request_id in self._arrivals:
            raise ConfigError(
                f"request_id must be unique among live requests, {request_id!r} is taken."
            )
        if num_prompt == 0:
            raise ConfigError(
                f"request {request_id}: the prompt must hold at least one token, got none."
            )
        if num_prompt >= self.max_model_len:
            raise ConfigError(
                f"request {request_id}: the prompt must be shorter than "
                f"engine.max_model_len={self.max_model_len}, got {num_prompt} tokens; "
                "shorten it or raise engine.max_model_len."
            )
        longest = min(num_prompt + request.sampling.max_new_tokens, self.max_model_len)
        needed = self.blocks.num_blocks_for(self._num_slots(longest))
        if needed > self.blocks.num_blocks:
            raise ConfigError(
                f"request {request_id} can never fit: it needs {needed} blocks, the pool has "
                f"{self.blocks.num_blocks}; "
                "raise engine.num_blocks or lower sampling.max_new_tokens."
            )
        self._arrivals[request_id] = next(self._num_arrived)
        self._push(request)

    def requests(self) -> list[Request]:
        """Every live request."""
        return self.running + [request for _, _, request in self._waiting]

    def schedule(self) -> Schedule:
        """Choose the rows of the next step and reserve their blocks; may preempt."""
        budget = self.max_num_batched_tokens
        entries: list[Scheduled] = []
        preempted: list[Request] = []
        for request in sorted(self.running, key=lambda r: (r.is_prefilling, self._rank(r))):
            if request.status is not Status.RUNNING or budget == 0:
                continue  # preempted by an earlier one, or left for the next step
            preempted += self._make_room(
                request, keep={entry.request.request_id for entry in entries}
            )
            if request.status is not Status.RUNNING:
                continue
            self.blocks.reserve(request, self._num_slots(request.num_tokens))
            count = self._num_rows(request, budget)
            entries.append(Scheduled(request, count))
            budget -= count
        admitted = []
        # A request preempted in this step must not come back in it: the shortage would only move.
        while self._waiting and self._free_slots and budget > 0 and not preempted:
            request = self._waiting[0][2]
            if not self.blocks.can_reserve(request, self._num_slots(request.num_tokens)):
                break
            heapq.heappop(self._waiting)
            self._admit(request)
            admitted.append(request)
            count = self._num_rows(request, budget)
            entries.append(Scheduled(request, count))
            budget -= count
        return Schedule(entries, admitted, preempted)

    def commit(
        self,
        request: Request,
        *,
        num_scheduled_tokens: int,
        emitted: list[int] | None,
        drafts: list[int],
        is_finite: bool,
    ) -> None:
        """Apply a step's result to one request.

        Args:
            request: a scheduled request.
            num_scheduled_tokens: rows it had.
            emitted: accepted drafts and the bonus token; None where nothing was sampled.
            drafts: proposals for the next step; ignored while prompt rows are missing.
            is_finite: False where target logits were not finite; ends a request that had no drafts.
        """
        decoding = not request.is_prefilling
        request.num_target_forwards += decoding
        if emitted is None:
            request.num_computed_tokens += num_scheduled_tokens
            if not request.is_prefilling:  # recomputed after a preemption: the next token is known
                request.draft_token_ids = self._usable(drafts, request)
            return
        if not is_finite and not request.draft_token_ids:
            self.finish(request, FinishReason.NON_FINITE)
            return
        now = time.perf_counter()
        request.first_token_s = request.first_token_s if request.first_token_s is not None else now
        if request.draft_token_ids:
            request.num_accepted_per_round.append(max(len(emitted) - 1, 0))
            request.num_drafted_per_round.append(len(request.draft_token_ids))
        if not is_finite:
            # A draft can break the rows before it: attention weighs its value by 0, and 0 * NaN is
            # NaN. The newest token's row is run again alone; it ends the request if it breaks.
            request.draft_token_ids = []
            return
        kept, reason = self._cut(request, emitted)
        request.token_ids.extend(kept)
        request.num_computed_tokens = request.num_tokens - 1
        request.draft_token_ids = self._usable(drafts, request)
        if reason is not None:
            self.finish(request, reason)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back its blocks and slot."""
        request.finish_reason = reason
        request.finish_s = time.perf_counter()
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
        request.status = Status.FINISHED
        self._arrivals.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps."""
        self.blocks.check_integrity(self.requests())
        slots = [request.slot for request in self.running if request.slot is not None]
        assert len(slots) == len(self.running), "a running request has no slot"
        assert sorted(slots + self._free_slots) == list(
            range(len(slots) + len(self._free_slots))
        ), f"slots in use: {slots}"
        for request in self.running:
            assert min(request.token_ids) >= 0, f"{request.request_id} holds a placeholder token"
            assert request.num_computed_tokens < request.num_tokens, (
                f"{request.request_id} is ahead of its text"
            )
            covered = len(request.block_ids) * self.blocks.block_size
            assert covered >= request.num_computed_tokens, (
                f"{request.request_id} owns {covered} slots, too few"
            )
        for _, _, request in self._waiting:
            assert not request.block_ids, f"{request.request_id} waits and holds blocks"
            assert request.slot is None, f"{request.request_id} waits and holds a slot"

    def _cut(self, request: Request, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `emitted` that stays, and why the request ends, if it does."""
        limit = (
            min(request.num_prompt_tokens + request.sampling.max_new_tokens, self.max_model_len)
            - request.num_tokens
        )
        kept = emitted[:limit]
        for index, token_id in enumerate(kept):
            if token_id in request.sampling.stop_token_ids:
                return kept[: index + 1], FinishReason.STOP
        return kept, FinishReason.LENGTH if len(emitted) >= limit else None

    def _usable(self, drafts: list[int], request: Request) -> list[int]:
        """Drafts whose target rows stay inside the context."""
        return drafts[: self.max_model_len - request.num_tokens]

    def _num_slots(self, num_tokens: int) -> int:
        return num_slots_needed(num_tokens, self.num_speculative_tokens) + self.num_extra_slots

    def _num_rows(self, request: Request, budget: int) -> int:
        if request.is_prefilling:
            missing = request.num_prefill_tokens - request.num_computed_tokens
            return min(missing, budget, self.max_prefill_chunk)
        return request.num_tokens - request.num_computed_tokens + len(request.draft_token_ids)

    def _make_room(self, request: Request, *, keep: set[str]) -> list[Request]:
        """Preempt the lowest ranks, at worst this one, until `request` can reserve its step."""
        preempted = []
        while request.status is Status.RUNNING and not self.blocks.can_reserve(
            request, self._num_slots(request.num_tokens)
        ):
            victim = max((r for r in self.running if r.request_id not in keep), key=self._rank)
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    def _admit(self, request: Request) -> None:
        self.blocks.reserve(request, self._num_slots(request.num_tokens))
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        """Free everything; the text is recomputed when the request is admitted again.

        Once it has an output, the recompute stops short of the newest token. That token then gets
        the drafts it would have had, so that a preempted request decides every token as an
        undisturbed one does.
        """
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        has_output = request.num_tokens > request.num_prompt_tokens
        request.num_prefill_tokens = request.num_tokens - has_output
        request.draft_token_ids = []
        request.num_preemptions += 1
        self._push(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None, f"{request.request_id} does not run"
        self.blocks.free(request)
        self._free_slots.append(request.slot)
        request.slot = None

    def _rank(self, request: Request) -> tuple[int, int]:
        return request.priority, self._arrivals[request.request_id]

    def _push(self, request: Request) -> None:
        heapq.heappush(self._waiting, (*self._rank(request), request))
