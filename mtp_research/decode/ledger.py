"""The host's bookkeeping after a step: tokens into requests, counters, audit, records."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from mtp_research.decode.audit import Auditor
from mtp_research.decode.commit import commit_entry
from mtp_research.decode.draft_length import drafts_made
from mtp_research.decode.emitted import note_emitted
from mtp_research.decode.pending import PendingResult
from mtp_research.decode.recent_rounds import RecentRounds
from mtp_research.decode.request import FinishReason, Request, Status
from mtp_research.decode.schedule import Schedule, Scheduled
from mtp_research.decode.scheduler import Scheduler
from mtp_research.decode.stats import DecodeStats, record_of


class Launched(NamedTuple):
    """A step that the host has not committed yet.

    Attributes:
        entries: what was scheduled.
        pending: its result, on the way to the host.
        draft_limit: most drafts that each request was given.
        num_prompt_rows: prompt rows among those that were scheduled.
    """

    entries: list[Scheduled]
    pending: PendingResult
    draft_limit: int
    num_prompt_rows: int


@dataclass
class Ledger:
    """Applies the results of steps to requests and counters.

    Attributes:
        scheduler: who owns the requests.
        stats: counters since the decoder was built.
        recent: fading estimate of acceptance and cost, for draft-length rules.
        auditor: shadow of the draft KV, or None.
        in_flight: the step that runs while the host is one step late, or None.
    """

    scheduler: Scheduler
    stats: DecodeStats
    recent: RecentRounds
    auditor: Auditor | None
    in_flight: Launched | None = None

    def begin(self, schedule: Schedule) -> None:
        """Note who was preempted and who was admitted, before the step is launched."""
        self.stats.num_launched_prompt_rows += schedule.num_prompt_rows
        self.stats.num_launched_entries += len(schedule.entries)
        for request in schedule.preempted:
            self.stats.num_preemptions += 1
            if self.auditor is not None:
                self.auditor.forget(request.request_id)
        for request in schedule.admitted:
            self.stats.num_cached_tokens += request.num_cached_tokens

    def commit(self, launched: Launched) -> None:
        """Wait for the one device-to-host copy of a step, and apply it."""
        waiting = time.perf_counter()
        result = launched.pending.wait()
        self.stats.wait_s += time.perf_counter() - waiting
        sampled, finite, drafts = (tensor.tolist() for tensor in result[:3])
        self.stats.num_steps += 1
        self.stats.num_prompt_rows += launched.num_prompt_rows
        self.stats.num_entries += len(launched.entries)
        if self.auditor is not None:
            self.auditor.apply_step()
        num_target_rows = num_emitted = 0
        for row, entry in enumerate(launched.entries):
            request = entry.request
            num_target_rows += entry.num_scheduled_tokens
            if request.status is Status.FINISHED:
                continue  # it ended while the step ran
            num_tokens, num_rounds = len(request.token_ids), len(request.num_drafted_per_round)
            commit_entry(
                self.scheduler,
                entry,
                emitted=[token for token in sampled[row] if token >= 0],
                drafts=drafts_made(drafts[row]),
                is_finite=finite[row],
            )
            self.recent.add_rounds(request, since=num_rounds)
            if result.logprobs is not None or request.matcher is not None:
                note_emitted(request, since=num_tokens, logprobs=result.logprobs, row=row)
            num_emitted += len(request.token_ids) - num_tokens
            if self.auditor is not None or request.status is Status.FINISHED:
                self._after_commit(entry)
        self.stats.num_target_rows += num_target_rows
        self.stats.num_emitted_tokens += num_emitted

    def end_step(self, launched: Launched | None, *, seconds: float) -> None:
        """Account for the time of a call of the loop.

        Steps with prompt rows say nothing about drafts. Where the host is one step late, a call
        commits a step and starts the next one, so that its time is that of n drafts only if both
        made n and neither had prompt rows.

        Args:
            launched: the step that was committed, or None.
            seconds: of the whole call.
        """
        self.stats.busy_s += seconds
        if launched is None or launched.num_prompt_rows:
            return
        started = self.in_flight if self.scheduler.deferred else launched
        is_alike = (
            started is not None
            and not started.num_prompt_rows
            and started.draft_limit == launched.draft_limit
        )
        self.recent.end_step(num_drafts=launched.draft_limit, seconds=seconds if is_alike else None)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a live request from outside a step."""
        self.scheduler.finish(request, reason)
        self._retire(request)

    def _after_commit(self, entry: Scheduled) -> None:
        """Record a request that ended, or audit the round of one that goes on."""
        request = entry.request
        if request.status is Status.FINISHED:
            self._retire(request)
            return
        drafted = request.status is Status.RUNNING and (entry.samples or entry.resumes)
        if self.auditor is not None and drafted:
            self.auditor.end_round(
                request.request_id, request.token_ids, frontier=request.num_tokens - 2
            )

    def _retire(self, request: Request) -> None:
        self.stats.records.append(record_of(request))
        if self.auditor is None:
            return
        in_flight = self.in_flight.entries if self.in_flight is not None else []
        # Prompt rows count as computed once they are scheduled; the auditor has not seen these yet.
        unseen = [e.first_position for e in in_flight if e.request is request and e.is_prefill]
        num_seen = min(request.num_computed_tokens, request.num_tokens - 1, *unseen)
        self.auditor.finish(request.request_id, request.token_ids, frontier=num_seen - 1)
