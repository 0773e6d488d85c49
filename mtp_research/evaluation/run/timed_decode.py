"""One decoding of prompts by a decoder, with clocks around its steps and finished prompts kept.

Part of the second stage of the flow: prompts -> decode loop -> statistics -> report.

A `StepClock` stands between the parts of a step: target, verification, drafting. On a CPU it reads
the host's clock; on a GPU it records events on the stream and reads them after the run, so that no
step waits for it. Captured steps have no such clock: their parts are one graph.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.drafter import VerifiedStep
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.decode.step import DeviceParts, TargetRows, Verified
from mtp_research.evaluation.run.journal import Journal, add_audits
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.stats.outcome import PassRecord, StepParts
from mtp_research.models.rank_parts import peers_needed
from mtp_research.policy.plan import StepState
from mtp_research.runtime.compiling import old_objects_kept
from mtp_research.runtime.progress import WorkProgress

MAX_WARM_UPS = 8
STABLE = 0.05  # largest change of the median step between two warm-ups that counts as stable
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 4, 8
_PARTS = ("target", "verify", "draft")


class StepClock:
    """Adds up the parts of steps; a step counts once `end_step` keeps it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: dict[str, float | torch.cuda.Event] = {}
        self._kept: list[dict[str, float | torch.cuda.Event]] = []
        self._wall_s = 0.0

    def watch(self, parts: DeviceParts) -> DeviceParts:
        """The same parts of a step, with this clock read where one ends and the next begins."""

        def target(inputs: StepInputs) -> TargetRows:
            self._mark("start")
            rows = parts.target(inputs)
            self._mark("target")
            return rows

        def advance(inputs: StepInputs, verified: Verified) -> StepState:
            state = parts.advance(inputs, verified)
            self._mark("verify")
            return state

        def draft(step: VerifiedStep) -> Tensor:
            drafts = parts.draft(step)
            self._mark("draft")
            return drafts

        return DeviceParts(target, parts.verify, advance, draft)

    def _mark(self, part: str) -> None:
        self._marks[part] = self._now()

    def end_step(self, *, wall_s: float, keep: bool) -> None:
        """Count the step that was started since the last call, if any was, or forget it.

        Args:
            wall_s: seconds of the call of the loop that started it. With deferred output they end
                with the step before, which `keep` must cover too.
            keep: whether neither had prompt rows.
        """
        if keep and self._marks:
            self._kept.append(self._marks)
            self._wall_s += wall_s
        self._marks = {}

    def parts(self) -> StepParts | None:
        """The sums so far; None if no step was kept. Waits for the device."""
        if not self._kept:
            return None
        if self._is_gpu:
            torch.cuda.synchronize()
        target_s, verify_s, draft_s = (
            sum(_seconds(marks[before], marks[after]) for marks in self._kept)
            for before, after in zip(("start", *_PARTS), _PARTS, strict=False)
        )
        host_s = max(self._wall_s - sum((target_s, verify_s, draft_s)), 0.0)
        return StepParts(len(self._kept), target_s, verify_s, draft_s, host_s)

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float), "a step has marks of one clock"
    assert isinstance(end, float), "a step has marks of one clock"
    return end - begin


def device_timer(device: torch.device) -> Callable[[], float | None]:
    """Start an event clock; what is returned waits and gives seconds, or None on a CPU."""
    if device.type != "cuda":
        return lambda: None
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()

    def stop() -> float:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return stop


class Question(NamedTuple):
    """A request that is added while others run."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams


class Decoded(NamedTuple):
    """What one decoding left."""

    # Of the prompts that were decoded, in the order they finished
    records: tuple[RequestRecord, ...]
    audit: dict[str, int] | None  # slots by finding in these; None without an auditor
    times: PassRecord  # without memory and what came before the clock started
    step_s: tuple[float, ...]  # wall seconds of every step


def of_all_ranks(decoded: Decoded) -> Decoded:
    """What ranks that were dealt prompts decoded together, the same on each; all must call.

    Times are those of the rank that took longest, parts of a step the first one's.
    """
    found: list[Decoded] = [decoded] * distributed.get_world_size()
    with peers_needed():
        distributed.all_gather_object(found, decoded)
    times = [one.times for one in found]
    num_steps = max(one.num_steps or 0 for one in times)
    num_rows = sum((one.rows_per_step or 0.0) * (one.num_steps or 0) for one in times)
    longest = ("wall_s", "decode_wall_s", "full_wall_s", "device_s")
    together = {name: max(_known(times, name), default=None) for name in longest}
    for name in ("num_decode_tokens", "num_full_tokens"):
        known = _known(times, name)
        together[name] = sum(known) if known else None
    return Decoded(
        records=tuple(record for one in found for record in one.records),
        audit=functools.reduce(add_audits, (one.audit for one in found)),
        times=replace(
            times[0], **together, num_steps=num_steps, rows_per_step=num_rows / max(num_steps, 1)
        ),
        step_s=decoded.step_s,
    )


def _known(times: Sequence[PassRecord], name: str) -> list:
    return [value for one in times if (value := vars(one)[name]) is not None]


class Finished:
    """Hands the generations that finish to a journal, as those of one pass of a condition.

    What is shown of the progress is drawn here, too: outside the clock.
    """

    def __init__(
        self,
        journal: Journal,
        decoder: SpecDecoder,
        *,
        label: str,
        number: int,
        progress: WorkProgress,
    ) -> None:
        self._journal, self._progress = journal, progress
        self._stats = decoder.stats
        self._label, self._number = label, number
        self._num_kept = len(decoder.stats.records)
        self._audit = decoder.stats.audit
        self.seconds = 0.0

    def keep(self, *, now: bool) -> None:
        """Write what has finished since the last time, if `now` or if that is a while ago."""
        if not now and not self._journal.is_sync_due:
            return
        started = time.perf_counter()
        audit, records = self._stats.audit, self._stats.records[self._num_kept :]
        if not records:
            return
        self._journal.add(
            self._label, self._number, records=records, audit=_since(audit, self._audit)
        )
        self._num_kept += len(records)
        self._audit = audit
        self._progress.advance(len(records), note=self._label)
        self.seconds += time.perf_counter() - started


@old_objects_kept()
def decode_prompts(
    decoder: SpecDecoder,
    encoded: EncodedPrompts,
    sampling: Sequence[SamplingParams],
    *,
    salt: str,
    clock: StepClock | None = None,
    finished: Finished | None = None,
    follow_up: Callable[[RequestRecord], Question | None] = lambda _: None,
) -> Decoded:
    """Run the loop over the prompts.

    Every call ends with the copy of a step's tokens to the host, so host clocks measure finished
    work on a GPU too. With `engine.deferred_output` that is the step that the call before started,
    so a call decodes only, and decodes a full batch, if both steps do.

    Args:
        decoder: idle; what it counted before is subtracted.
        encoded: the prompts.
        sampling: parameters of each.
        salt: prompts of decodings with different salts share no cached prefix.
        clock: the probe of the decoder's step.
        finished: is handed the generations as they end.
        follow_up: makes the next turn from a turn that has ended, outside the clock.
    """
    stats = decoder.stats
    num_records, audit = len(stats.records), stats.audit
    steps_before, rows_before = stats.num_steps, stats.num_target_rows
    stop_device, audited_s = device_timer(decoder.target.device), _audit_seconds(decoder)
    started = time.perf_counter()
    for prompt, token_ids, params in zip(encoded.prompts, encoded.token_ids, sampling, strict=True):
        name = prompt.question_id
        decoder.add_request(token_ids, sampling=params, request_id=name, cache_salt=salt)
    step_s, calls = [], _DecodeCalls(decoder.engine.max_num_requests)
    later = _LaterTurns(decoder, follow_up, salt=salt)
    while decoder.has_work:
        before, checked_s, began = _Counters.of(stats), _audit_seconds(decoder), time.perf_counter()
        decoder.step()
        step_s.append(time.perf_counter() - began - (_audit_seconds(decoder) - checked_s))
        is_decoding = calls.add(step_s[-1], before=before, after=_Counters.of(stats))
        if clock is not None:
            clock.end_step(wall_s=step_s[-1], keep=is_decoding)
        later.ask()
        if finished is not None:
            finished.keep(now=not decoder.has_work)
    decoder.serve_peers()
    other_s = later.seconds + (0.0 if finished is None else finished.seconds)
    other_s += _audit_seconds(decoder) - audited_s
    num_steps = stats.num_steps - steps_before
    times = PassRecord(
        wall_s=time.perf_counter() - started - other_s,
        decode_wall_s=calls.wall_s,
        num_decode_tokens=calls.num_tokens,
        full_wall_s=calls.full_wall_s,
        num_full_tokens=calls.num_full_tokens,
        num_steps=num_steps,
        rows_per_step=(stats.num_target_rows - rows_before) / max(num_steps, 1),
        device_s=stop_device(),
        parts=None if clock is None else clock.parts(),
    )
    records = tuple(stats.records[num_records:])
    return Decoded(records, _since(stats.audit, audit), times, tuple(step_s))


def _audit_seconds(decoder: SpecDecoder) -> float:
    """What the auditor has taken so far, which is no part of decoding, and which K = 0 has none of.

    0 on a GPU: there it waits for rows that the step computes, and its own work is not told apart.
    """
    if decoder.auditor is None or decoder.target.device.type != "cpu":
        return 0.0
    return decoder.auditor.seconds


class _LaterTurns:
    """Adds the turns that finished ones lead to, between steps."""

    def __init__(
        self,
        decoder: SpecDecoder,
        follow_up: Callable[[RequestRecord], Question | None],
        *,
        salt: str,
    ) -> None:
        self._decoder, self._follow_up, self._salt = decoder, follow_up, salt
        self._num_seen = len(decoder.stats.records)
        self.seconds = 0.0

    def ask(self) -> None:
        records = self._decoder.stats.records
        if self._num_seen == len(records):
            return
        started = time.perf_counter()
        for record in records[self._num_seen :]:
            if (question := self._follow_up(record)) is not None:
                name, token_ids, sampling = question
                self._decoder.add_request(
                    token_ids, sampling=sampling, request_id=name, cache_salt=self._salt
                )
        self._num_seen = len(records)
        self.seconds += time.perf_counter() - started


def warm_up(
    decoder: SpecDecoder, encoded: EncodedPrompts, sampling: Sequence[SamplingParams], *, most: int
) -> int:
    """Decode the first prompts until the median step changes by less than 5 %; return how often.

    At most `most` times. On a GPU kernels are compiled for the shapes that they first meet, which
    takes a second where a step takes a millisecond: there as many prompts are decoded as two
    batches hold, the longest of all, whose steps have the most rows.
    """
    count, order = _WARM_UP_PROMPTS, list(range(len(encoded.prompts)))
    if decoder.is_captured:  # two batches that end unevenly meet the shapes of mixed steps
        count = max(count, 2 * decoder.engine.max_num_requests)
        order.sort(key=lambda index: -len(encoded.token_ids[index]))
    chosen = order[:count]
    few = EncodedPrompts(
        tuple(encoded.prompts[index] for index in chosen),
        tuple(encoded.token_ids[index] for index in chosen),
        (),
    )
    spread = _WARM_UP_TOKENS if decoder.is_captured else 1
    short = [
        replace(params, max_new_tokens=min(params.max_new_tokens, _WARM_UP_TOKENS + index % spread))
        for index, params in enumerate(sampling[place] for place in chosen)
    ]
    last = None
    for number in range(1, most + 1):
        step_s = decode_prompts(decoder, few, short, salt=f"warm-up {number}").step_s
        median = statistics.median(step_s)
        if last is not None and abs(median - last) < STABLE * last:
            return number
        last = median
    return most


class _Counters(NamedTuple):
    """Counters between two calls; a pair is that of all started and of all committed steps."""

    prompt_rows: tuple[int, int]
    entries: tuple[int, int]
    num_tokens: int

    @classmethod
    def of(cls, stats: DecodeStats) -> "_Counters":
        return cls(
            prompt_rows=(stats.num_launched_prompt_rows, stats.num_prompt_rows),
            entries=(stats.num_launched_entries, stats.num_entries),
            num_tokens=stats.num_emitted_tokens,
        )


@dataclass
class _DecodeCalls:
    """Seconds and tokens of the calls without prompt rows, and of those with a full batch."""

    num_places: int
    wall_s: float = 0.0
    num_tokens: int = 0
    full_wall_s: float | None = None
    num_full_tokens: int | None = None

    def add(self, wall_s: float, *, before: _Counters, after: _Counters) -> bool:
        """Count a call if neither of its steps had prompt rows; return whether it was so."""
        if before.prompt_rows != after.prompt_rows:
            return False
        num_tokens = after.num_tokens - before.num_tokens
        self.wall_s += wall_s
        self.num_tokens += num_tokens
        if after.entries == tuple(count + self.num_places for count in before.entries):
            self.full_wall_s = (self.full_wall_s or 0.0) + wall_s
            self.num_full_tokens = (self.num_full_tokens or 0) + num_tokens
        return True


def _since(
    audit: Mapping[str, int] | None, before: Mapping[str, int] | None
) -> dict[str, int] | None:
    if audit is None:
        return None
    return {name: count - (before or {}).get(name, 0) for name, count in audit.items()}
