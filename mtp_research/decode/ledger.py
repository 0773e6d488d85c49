"""The host's bookkeeping after a step: tokens into requests, counters, audit, records.

Beside the scheduler nobody else moves a request on. A step's result comes to the host in one copy,
which is started when the step is launched. With deferred output the ledger holds the step that runs
and applies the one before it: at the end of a call of the loop, or in the middle of it where masks
of grammars are made of its tokens.

Letters: K drafts per step.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.draft.draft_length import RecentRounds, StepKind
from mtp_research.decode.sampling.sampling import HostLogprobs
from mtp_research.decode.schedule.request import FinishReason, Request, Schedule, Scheduled, Status
from mtp_research.decode.schedule.scheduler import Scheduler, cut_emitted
from mtp_research.decode.slot_state import map_tensors
from mtp_research.decode.stats import DecodeStats, record_of
from mtp_research.decode.step import StepResult
from mtp_research.policy.audit import Auditor


def commit_entry(
    scheduler: Scheduler,
    entry: Scheduled,
    *,
    is_finite: bool,
    emitted: list[int],
    drafts: list[int],
) -> tuple[int, int]:
    """Apply a step's result to a request that is live.

    Returns:
        Drafts that the step verified, and those of them that it accepted.
    """
    request = entry.request
    request.num_target_forwards += not entry.is_prefill
    if not (entry.ends_at_newest_token or entry.ends_recompute):
        if request.slot is not None:
            scheduler.blocks.publish(request, num_rows=entry.end_position)
        return 0, 0
    request.num_in_flight -= 1
    if not entry.ends_at_newest_token:  # recomputed after a preemption: the next token is known
        _continue(scheduler, request, drafts)
        return 0, 0
    num_drafted = len(request.draft_token_ids)
    if num_drafted >= entry.num_scheduled_tokens and not entry.is_prefill:
        num_drafted = entry.num_scheduled_tokens - 1  # others were not verified
    if not is_finite and not num_drafted:
        if entry.is_prefill:
            request.num_computed_tokens = entry.first_position  # these rows broke
        scheduler.finish(request, FinishReason.NON_FINITE)
        return 0, 0
    num_accepted = request.note_round(num_drafted=num_drafted, num_emitted=len(emitted))
    if not is_finite:
        # A draft can break the rows before it: attention weighs its value by 0, and 0 * NaN is
        # NaN. The newest token's row is run again alone; it ends the request if it breaks.
        _continue(scheduler, request, [])
        return num_drafted, num_accepted
    kept, reason = cut_emitted(request, emitted)
    request.token_ids.extend(kept)
    _continue(scheduler, request, drafts)
    if reason is not None:
        scheduler.finish(request, reason)
    return num_drafted, num_accepted


def _continue(scheduler: Scheduler, request: Request, drafts: list[int]) -> None:
    if request.slot is None:  # preempted while the step ran
        request.restart()
        return
    num_tokens = len(request.token_ids)
    request.num_computed_tokens = num_tokens - 1
    scheduler.blocks.publish(request, num_rows=num_tokens - 1)
    room = scheduler.max_model_len - num_tokens
    request.draft_token_ids = drafts if len(drafts) <= room else drafts[:room]


def note_emitted(request: Request, *, since: int, logprobs: HostLogprobs | None, row: int) -> None:
    """Move the grammar on, and keep the log-probabilities."""
    kept = request.token_ids[since:]
    if request.matcher is not None:
        request.matcher.follow(kept)
    if logprobs is not None and request.sampling.logprobs is not None:
        request.token_logprobs += logprobs.of_request(
            row, num_tokens=len(kept), num_top=request.sampling.logprobs
        )


class PendingResult:
    """A step's result on its way to the host.

    The copy is queued behind the step at once: a captured step overwrites its result when it is
    replayed, and with deferred output that happens before the host looks.
    """

    def __init__(self, result: StepResult) -> None:
        is_cuda = result.rounds.is_cuda
        self._result = map_tensors(_start_copy, result) if is_cuda else result
        self._done = torch.cuda.Event() if is_cuda else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> StepResult:
        """The result on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._result


def _start_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Launched(NamedTuple):
    """A step that the host has not committed yet."""

    entries: list[Scheduled]  # what was scheduled
    pending: PendingResult  # its result, on the way to the host
    draft_limit: int  # most drafts that each request was given
    num_passes: int  # that it ran
    num_prompt_rows: int  # prompt rows among those that were scheduled

    @property
    def kind(self) -> tuple[StepKind, int]:
        """What its time is kept by, beside its size."""
        return StepKind(self.num_passes, self.num_prompt_rows > 0), self.draft_limit


@dataclass
class Ledger:
    """Applies the results of steps to requests and counters.

    With deferred output `commit` applies the step before the one that it is handed, unless
    `catch_up` has.
    """

    scheduler: Scheduler
    stats: DecodeStats
    recent: RecentRounds
    auditor: Auditor | None
    in_flight: Launched | None = None
    caught_up: Launched | None = None  # applied in this call of the loop, not accounted for yet
    starting: list[Scheduled] = field(default_factory=list)  # of the step that is being launched
    waited: float = 0.0  # seconds for the device, in this call of the loop

    def begin(self, schedule: Schedule) -> None:
        """Note who was preempted and who was admitted, before the step is launched."""
        self.starting = schedule.entries
        self.stats.num_launched_prompt_rows += schedule.num_prompt_rows
        self.stats.num_launched_entries += len(schedule.entries)
        for request in schedule.preempted:
            self.stats.num_preemptions += 1
            if self.auditor is not None:
                self.auditor.forget(request.request_id)
        for request in schedule.admitted:
            self.stats.num_cached_tokens += request.num_cached_tokens

    def catch_up(self) -> None:
        """Apply the step before now, while a part of the next one runs that needs none of it."""
        if self.in_flight is not None:
            self.caught_up, self.in_flight = self.in_flight, None
            self.apply(self.caught_up)

    def commit(self, schedule: Schedule, result: StepResult | None, *, draft_limit: int) -> None:
        """Apply this step, or with deferred output the one before it, and account for the time."""
        launched, self.starting = None, []
        if result is not None:
            launched = Launched(
                schedule.entries,
                PendingResult(result),
                draft_limit,
                self.recent.num_passes,
                schedule.num_prompt_rows,
            )
            if self.auditor is not None:
                self.auditor.end_step()
        started, caught_up = launched, self.caught_up
        if self.scheduler.deferred:
            launched, self.in_flight = self.in_flight, launched
        assert launched or self.in_flight or not self.scheduler.has_work, "no request can go on"
        self.caught_up = None
        if launched is not None:
            self.apply(launched)
        committed = caught_up or launched
        self._end_step(committed, started, seconds=time.perf_counter() - schedule.started_s)

    def apply(self, launched: Launched) -> None:
        """Wait for the one device-to-host copy of a step, and apply it."""
        waiting = time.perf_counter()
        result = launched.pending.wait()
        waited = time.perf_counter() - waiting
        self.waited += waited
        self.stats.wait_s += waited
        logprobs = None if result.logprobs is None else result.logprobs.read()
        self.stats.num_steps += 1
        self.stats.num_prompt_rows += launched.num_prompt_rows
        self.stats.num_entries += len(launched.entries)
        if self.auditor is not None:
            self.auditor.apply_step()
        num_target_rows = num_emitted = 0
        ended: list[tuple[int, int]] = []  # of rounds, drafts verified and accepted
        decided = zip(launched.entries, *result.columns(), strict=True)
        for row, (entry, is_finite, emitted, drafts) in enumerate(decided):
            request = entry.request
            num_target_rows += entry.num_scheduled_tokens
            if request.finish_reason is not None:
                continue  # it ended while the step ran
            if request.matcher is not None and request.matcher.error is not None:
                request.error = f"the grammar raised {request.matcher.error}"
                self.finish(request, FinishReason.ERROR)  # its masks could not be made
                continue
            num_tokens = len(request.token_ids)
            counts = commit_entry(
                self.scheduler, entry, is_finite=is_finite, emitted=emitted, drafts=drafts
            )
            if counts[0] > request.num_full_passes:  # others drafted without draft KV
                counts = request.num_full_passes, min(counts[1], request.num_full_passes)
            ended.append(counts)
            if logprobs is not None or request.matcher is not None:
                note_emitted(request, since=num_tokens, logprobs=logprobs, row=row)
            num_emitted += len(request.token_ids) - num_tokens
            if self.auditor is not None or request.finish_reason is not None:
                self._after_commit(entry)
        for (num_drafted, num_accepted), count in Counter(ended).items():
            self.recent.add_rounds(count, num_drafted=num_drafted, num_accepted=num_accepted)
        self.stats.num_target_rows += num_target_rows
        self.stats.num_emitted_tokens += num_emitted
        num_decoding = len(launched.entries)
        if launched.num_prompt_rows:
            num_decoding = sum(not entry.is_prefill for entry in launched.entries)
        self.recent.add_step(
            launched.num_prompt_rows,
            num_decoding=num_decoding,
            num_passes=launched.num_passes,
            num_tokens=num_emitted,
        )

    def _end_step(
        self, committed: Launched | None, started: Launched | None, *, seconds: float
    ) -> None:
        """Account for the seconds of a call of the loop that started a step and committed one.

        Where the host is one step late, a call commits a step and starts the next one, so that its
        time is that of n drafts only if both made n, and both had prompt rows or neither.
        """
        self.stats.busy_s += seconds
        waited, self.waited = self.waited, 0.0
        if committed is None:
            return
        if started is not None:
            self.recent.add_call(
                seconds - waited,
                has_prompts=started.num_prompt_rows > 0,
                batch_size=len(started.entries),
            )
        is_alike = started is not None and started.kind == committed.kind
        if not committed.num_prompt_rows:
            self.recent.end_step(
                num_drafts=committed.draft_limit,
                seconds=seconds if is_alike else None,
                batch_size=len(committed.entries),
            )
        elif is_alike:
            num_rows = sum(entry.num_scheduled_tokens for entry in committed.entries)
            self.recent.times.note(
                *committed.kind,
                size=num_rows,
                batch_size=len(committed.entries),
                seconds=seconds,
            )

    def drop_in_flight(self) -> None:
        """Forget the step that runs: none of its requests is live."""
        self.in_flight, self.caught_up, self.starting, self.waited = None, None, [], 0.0
        if self.auditor is not None:
            self.auditor.drop_steps()

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a live request from outside a step."""
        self.scheduler.finish(request, reason)
        self._retire(request)

    def _after_commit(self, entry: Scheduled) -> None:
        request = entry.request
        if request.status is Status.FINISHED:
            self._retire(request)
            return
        drafted = request.status is Status.RUNNING and (
            entry.ends_at_newest_token or entry.ends_recompute
        )
        if self.auditor is not None and drafted:
            self.auditor.end_round(
                request.request_id, request.token_ids, frontier=request.num_tokens - 2
            )

    def _retire(self, request: Request) -> None:
        self.stats.records.append(record_of(request))
        if request.num_tokens > request.num_prompt_tokens:
            self.recent.add_text(is_stopped=request.finish_reason is not FinishReason.LENGTH)
        if self.auditor is None:
            return
        in_flight = self.in_flight.entries if self.in_flight is not None else self.starting
        # Prompt rows count as computed once they are scheduled; the auditor has not seen these yet.
        unseen = [e.first_position for e in in_flight if e.request is request and e.is_prefill]
        num_seen = min(request.num_computed_tokens, request.num_tokens - 1, *unseen)
        self.auditor.finish(request.request_id, request.token_ids, frontier=num_seen - 1)
