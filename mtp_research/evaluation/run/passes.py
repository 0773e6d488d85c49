"""The conditions of a group decode the prompt set in turns, each with a decoder that is warm.

Second stage of the flow: prompts -> decode loop -> statistics -> report. With several passes the
conditions run in the order A B C, C B A, A B C, ...: a machine that slows down evenly slows all of
them alike, and K = 0, which stands first, is measured first and last. Before the clock starts a
decoder is built, its prompts are checked, and its steps are captured and warmed up.
Letter: K drafts per step.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mtp_research.decode.build import Heads
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.pool_size import NUM_SPARE_BLOCKS, free_bytes, plan_side_by_side
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.conversations import Conversations, Dialogue
from mtp_research.evaluation.run.decoders import build_decoder, needs_of
from mtp_research.evaluation.run.journal import Journal, add_audits
from mtp_research.evaluation.run.settings_check import sampling_params
from mtp_research.evaluation.run.timed_decode import (
    MAX_WARM_UPS,
    Finished,
    Question,
    StepClock,
    decode_prompts,
    warm_up,
)
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord
from mtp_research.evaluation.stats.summary import num_equal_texts
from mtp_research.models.target import Target
from mtp_research.runtime.compiling import num_since
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.progress import WorkProgress

_GIB = 1 << 30


class Workload(NamedTuple):
    """What every condition decodes, with what, and where finished prompts are kept."""

    target: Target
    heads: Mapping[str | None, Heads]  # by `spec.head`
    conversations: Conversations
    journal: Journal
    progress: WorkProgress  # of the prompts of all conditions and passes


class Pass(NamedTuple):
    """One decoding of the prompt set: a record per turn, sorted by id, and its measurements."""

    records: tuple[RequestRecord, ...]
    audit: dict[str, int] | None
    times: PassRecord


def run_group(
    conditions: Sequence[Condition], workload: Workload, *, num_passes: int
) -> list[ConditionResult]:
    """Decode the prompts with every condition, `num_passes` times.

    Args:
        conditions: of one batch size and temperature; K = 0 first, if it is there.
        workload: prompts, models and journal.
        num_passes: 1 or even. With 1, one decoder exists at a time; with more, every condition
            keeps its own, pool included, until its last pass, and all pools are equal.
    """
    conditions = [_with_room(one, workload) for one in conditions]
    num_blocks = None if num_passes == 1 else _equal_pools(conditions, workload)
    runners = [
        _Runner(c, workload, num_passes=num_passes, num_blocks=num_blocks) for c in conditions
    ]
    if num_passes > 1:  # all of them first, so that nobody compiles between two passes
        for runner in runners:
            runner.prepare()
    for number in range(num_passes):
        for runner in runners if number % 2 == 0 else runners[::-1]:
            runner.prepare()
            runner.run_pass(number)
            if number + 1 == num_passes:
                runner.end()
    return [_result(one.condition, one.passes, workload.conversations) for one in runners]


def _with_room(condition: Condition, workload: Workload) -> Condition:
    """The condition with room for the texts of its prompts, where no length is asked for.

    A pool for texts as long as the target's positions would take gigabytes for a few short prompts.
    """
    config, target = condition.config, workload.target
    if config.engine.max_model_len is not None:
        return condition
    longest = workload.conversations.longest_text(config.sampling.max_new_tokens)
    limit = min(longest, target.config.max_position_embeddings)
    engine = replace(config.engine, max_model_len=limit)
    return replace(condition, config=replace(config, engine=engine))


class _Runner:
    """A condition with its passes so far and its decoder, which is built if a pass needs it."""

    def __init__(
        self, condition: Condition, workload: Workload, *, num_passes: int, num_blocks: int | None
    ) -> None:
        self.condition = condition
        self.passes: list[Pass] = []
        self._workload = workload
        self._num_passes = num_passes
        self._num_blocks = num_blocks
        self._prepared: _Prepared | None = None

    def prepare(self) -> None:
        """Build and warm up the decoder, unless it is there or the journal has all passes."""
        journal, label = self._workload.journal, self.condition.label
        is_done = all(journal.stored(label, n).times for n in range(self._num_passes))
        if self._prepared is None and not is_done:
            has_one_clock = self.condition.config.model.tp_plan == "none"
            self._prepared = _prepare(
                self.condition,
                self._workload,
                num_blocks=self._num_blocks,
                # With several passes until the steps are stable; ranks would not agree on that.
                most_warm_ups=MAX_WARM_UPS if self._num_passes > 1 and has_one_clock else 1,
            )

    def end(self) -> None:
        """Give back the decoder and its pool."""
        self._prepared = None

    def run_pass(self, number: int) -> None:
        """Decode what the journal does not have."""
        journal, label = self._workload.journal, self.condition.label
        records, audit, times = journal.stored(label, number)
        if times is None:
            fresh, is_resumed = self._decode(number, records), bool(records)
            records, audit = (*records, *fresh.records), add_audits(audit, fresh.audit)
            times = PassRecord(wall_s=None, is_resumed=True) if is_resumed else fresh.times
            journal.end_pass(label, number, times, num_records=len(records))
        self.passes.append(Pass(tuple(sorted(records, key=lambda r: r.request_id)), audit, times))

    def _decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        assert self._prepared is not None, "prepare() comes before run_pass()"
        decoder, num_warm_ups, capture_s = self._prepared
        device, journal = self._workload.target.device, self._workload.journal
        clock = None
        if not decoder.is_captured:  # a captured step has no parts
            clock = StepClock(device)
            decoder.observe(clock.watch)
        dialogue = self._workload.conversations.begin(done, max_model_len=decoder.max_model_len)
        sampling = _sampling(self.condition, self._workload)
        num_builds = decoder.num_builds
        decoded = decode_prompts(
            decoder,
            dialogue.left,
            [sampling[prompt.question_id] for prompt in dialogue.left.prompts],
            salt=f"pass {number}",
            clock=clock,
            finished=Finished(
                journal,
                decoder,
                label=self.condition.label,
                number=number,
                progress=self._workload.progress,
            ),
            follow_up=lambda record: _question(dialogue, record, sampling),
        )
        peak = None
        if device.type == "cuda" and self._num_passes == 1:
            peak = torch.cuda.max_memory_allocated(device)
        times = replace(
            decoded.times,
            peak_memory_bytes=peak,
            num_warm_ups=num_warm_ups,
            capture_s=capture_s,
            num_late_builds=num_since(num_builds, decoder.num_builds),
        )
        return Pass(decoded.records, decoded.audit, times)


def _question(
    dialogue: Dialogue, record: RequestRecord, sampling: Mapping[str, SamplingParams]
) -> Question | None:
    asked = dialogue.next_turn(record)
    return None if asked is None else Question(*asked, sampling[asked.request_id])


def _result(
    condition: Condition, passes: Sequence[Pass], conversations: Conversations
) -> ConditionResult:
    first, *later = passes
    prompt_of = conversations.prompt_of
    is_drafting = condition.num_speculative_tokens > 0
    return ConditionResult(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=condition.num_speculative_tokens,
        records=first.records,
        passes=(
            first.times,
            *(
                replace(
                    one.times,
                    num_texts_equal=num_equal_texts(
                        one.records, first.records, prompt_of=prompt_of
                    ),
                )
                for one in later
            ),
        ),
        lossless="not checked",
        audit=first.audit,
        head=condition.head,
        max_num_requests=condition.group.max_num_requests,
        temperature=condition.group.temperature,
        verify=condition.config.spec.verify,
        draft_sampling=condition.config.spec.draft_sampling if is_drafting else None,
        prompt_of=prompt_of,
        cut_prompts=conversations.cut_prompts(first.records),
    )


def _equal_pools(conditions: Sequence[Condition], workload: Workload) -> int | None:
    """Blocks, without the spare one, for each decoder of a group whose decoders all live at once.

    None where `engine.num_blocks` says it, or memory sets no limit.
    """
    target, heads = workload.target, workload.heads
    engine, free = conditions[0].config.engine, free_bytes(target.device)
    if engine.num_blocks is not None or free is None:
        return None
    needs = [needs_of(c, target, heads.get(c.config.spec.head)) for c in conditions]
    try:
        planned = plan_side_by_side(needs, free=free, memory_fraction=engine.memory_fraction)
    except ConfigError as fault:
        raise ConfigError(
            f"with timing.passes > 1 the pools of {len(needs)} conditions live at once: {fault} "
            "With timing.passes=1 there is one at a time."
        ) from None
    return None if planned is None else planned - NUM_SPARE_BLOCKS


class _Prepared(NamedTuple):
    """An idle, warm decoder, its uncounted decodings and the seconds of capturing its steps."""

    decoder: SpecDecoder
    num_warm_ups: int
    capture_s: float | None


def _prepare(
    condition: Condition, workload: Workload, *, num_blocks: int | None, most_warm_ups: int
) -> _Prepared:
    """Build the decoder; check all prompts before minutes of capture; warm it up."""
    target, encoded = workload.target, workload.conversations.encoded
    heads = workload.heads.get(condition.config.spec.head)  # not loaded if every K is 0
    by_id = _sampling(condition, workload)
    sampling = [by_id[prompt.question_id] for prompt in encoded.prompts]
    decoder = build_decoder(condition, target, heads, num_blocks=num_blocks)
    for prompt, token_ids, params in zip(encoded.prompts, encoded.token_ids, sampling, strict=True):
        decoder.check(token_ids, sampling=params, request_id=prompt.question_id)

    def log(line: str) -> None:
        sys.stderr.write(f"{condition.label}: {line}\n")
        sys.stderr.flush()

    if decoder.is_captured:
        log(_pool_line(decoder))
    decoder.warm_up(sampling[0], num_requests=len(sampling), log=log)
    num_warm_ups = warm_up(decoder, encoded, sampling, most=most_warm_ups)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    return _Prepared(decoder, num_warm_ups, decoder.capture_s)


def _pool_line(decoder: SpecDecoder) -> str:
    free = free_bytes(decoder.target.device)
    rest = "" if free is None else f"; {free / _GIB:.2f} GiB of the device stay free"
    return f"KV pool: {decoder.num_blocks} blocks, {decoder.pool_bytes / _GIB:.2f} GiB{rest}"


def _sampling(condition: Condition, workload: Workload) -> dict[str, SamplingParams]:
    """Parameters by request id; seeds differ per turn and agree across conditions."""
    config = condition.config
    return {
        name: sampling_params(
            config.sampling,
            seed=config.seed * 1_000_003 + index,
            stop_token_ids=workload.target.stop_token_ids,
        )
        for index, name in enumerate(workload.conversations.request_ids)
    }
