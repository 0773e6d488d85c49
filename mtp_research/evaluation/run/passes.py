"""The conditions of a group decode the prompt set in turns.

Second stage of the flow: prompts -> decode loop -> statistics -> report. With several passes the
conditions run in the order A B C, C B A, A B C, ...: a machine that slows down evenly slows all of
them alike, and K = 0, which stands first, is measured first and last. Letter: K drafts per step.

A condition's decoder, ready for the clock: built, prompts checked, steps captured, warmed up.

Second stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per step.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mtp_research.decode.build import Heads
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.pool_size import NUM_SPARE_BLOCKS, free_bytes, plan_side_by_side
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.decoders import build_decoder, needs_of, sampling_params
from mtp_research.evaluation.run.journal import Journal, PassOutcome, add_audits
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.run.timed_decode import (
    MAX_WARM_UPS,
    Finished,
    StepClock,
    decode_prompts,
    warm_up,
)
from mtp_research.evaluation.stats.speed import PassTiming, StepParts
from mtp_research.evaluation.stats.summary import ConditionResult
from mtp_research.evaluation.turns import Turns
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

_GIB = 1 << 30


class Prepared(NamedTuple):
    """A decoder and what it took.

    Attributes:
        decoder: idle and warm.
        num_warm_ups: uncounted decodings.
        capture_s: seconds of compiling and capturing its steps; None without captured steps.
    """

    decoder: SpecDecoder
    num_warm_ups: int
    capture_s: float | None


def prepare_decoder(
    condition: Condition,
    target: Target,
    heads: Heads,
    *,
    encoded: EncodedPrompts,
    sampling: Sequence[SamplingParams],
    num_blocks: int | None,
    most_warm_ups: int,
) -> Prepared:
    """Build the decoder and warm it up.

    Args:
        condition: one column of the table.
        target: the frozen model.
        heads: of `spec.head`; not read for K = 0.
        encoded: all prompts of the evaluation; each is checked before minutes of capture.
        sampling: parameters of each.
        num_blocks: of its pool; None leaves them to `engine.num_blocks` or the free memory.
        most_warm_ups: see `warm_up`.

    Raises:
        ConfigError: a setting does not fit the target, the heads or a prompt.
        IntegrityError: the heads' token ranking is damaged.
    """
    decoder = build_decoder(condition, target, heads, num_blocks=num_blocks)
    for prompt, token_ids, params in zip(encoded.prompts, encoded.token_ids, sampling, strict=True):
        decoder.arrivals.checked(token_ids, sampling=params, request_id=prompt.question_id)
    decoder.cache.fill(0.0)  # touch the pool's pages before the clock starts
    capture_s = None
    if decoder.graphs is not None:
        tell = _teller(condition.label)
        tell(_pool_line(decoder))
        with torch.inference_mode():
            decoder.graphs.prepare(sampling[0], tell=tell)
        capture_s = decoder.graphs.capture_s
    num_warm_ups = warm_up(decoder, encoded, sampling, most=most_warm_ups)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    return Prepared(decoder, num_warm_ups, capture_s)


def equal_pools(
    conditions: Sequence[Condition], target: Target, heads: Mapping[str | None, Heads]
) -> int | None:
    """Blocks for each decoder of a group whose decoders all live at once, so that pools are equal.

    Args:
        conditions: the group.
        target: the frozen model, loaded.
        heads: by `spec.head`, loaded.

    Returns:
        Blocks without the spare one; None where `engine.num_blocks` says it, or memory sets no
        limit.

    Raises:
        ConfigError: there is no room for one longest request in every pool.
    """
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


def _teller(label: str) -> Callable[[str], None]:
    """Writes lines about a condition for whoever waits for it."""

    def tell(line: str) -> None:
        sys.stderr.write(f"{label}: {line}\n")
        sys.stderr.flush()

    return tell


def _pool_line(decoder: SpecDecoder) -> str:
    free = free_bytes(decoder.target.device)
    rest = "" if free is None else f"; {free / _GIB:.2f} GiB of the device stay free"
    num_blocks = decoder.scheduler.blocks.num_blocks
    return f"KV pool: {num_blocks} blocks, {decoder.cache.num_bytes / _GIB:.2f} GiB{rest}"


class Workload(NamedTuple):
    """What every condition decodes, with what, and where finished prompts are kept."""

    target: Target
    heads: Mapping[str | None, Heads]  # by `spec.head`
    encoded: EncodedPrompts
    journal: Journal
    turns: Turns


@dataclass(frozen=True)
class Pass:
    """One decoding of the prompt set: a record per prompt, sorted by id, and its measurements."""

    records: tuple[RequestRecord, ...]
    audit: dict[str, int] | None
    outcome: PassOutcome


def run_group(
    conditions: Sequence[Condition], workload: Workload, *, num_passes: int
) -> list[ConditionResult]:
    """Decode the prompts with every condition, `num_passes` times.

    Args:
        conditions: of one batch size and temperature; K = 0 first, if it is there.
        workload: prompts, models and journal.
        num_passes: 1 or even. With 1, one decoder exists at a time; with more, every condition
            keeps its own, pool included, until its last pass, and all pools are equal.

    Raises:
        ConfigError: see `preparation`.
    """
    num_blocks = None
    if num_passes > 1:
        num_blocks = equal_pools(conditions, workload.target, workload.heads)
    runners = {
        c.label: _Runner(c, workload, num_passes=num_passes, num_blocks=num_blocks)
        for c in conditions
    }
    passes: dict[str, list[Pass]] = {condition.label: [] for condition in conditions}
    if num_passes > 1:  # all of them first, so that nobody compiles between two passes
        for runner in runners.values():
            runner.prepare()
    for number in range(num_passes):
        for condition in conditions if number % 2 == 0 else conditions[::-1]:
            runner = runners[condition.label]
            runner.prepare()
            passes[condition.label].append(runner.run_pass(number))
            if number + 1 == num_passes:
                runner.end()
    return [_result(condition, passes[condition.label]) for condition in conditions]


class _Runner:
    """A condition with its decoder, which is built if a pass needs it."""

    def __init__(
        self, condition: Condition, workload: Workload, *, num_passes: int, num_blocks: int | None
    ) -> None:
        self._condition = condition
        self._workload = workload
        self._num_passes = num_passes
        self._num_blocks = num_blocks
        self._prepared: Prepared | None = None

    def prepare(self) -> None:
        """Build the decoder, unless it is there or the journal has all passes."""
        journal, label = self._workload.journal, self._condition.label
        is_done = all(journal.stored(label, n).outcome for n in range(self._num_passes))
        if self._prepared is None and not is_done:
            self._workload.turns.prepare()
            self._prepared = self._start()

    def end(self) -> None:
        """Give back the decoder and its pool."""
        self._prepared = None

    def run_pass(self, number: int) -> Pass:
        """Decode what the journal does not have."""
        journal, label = self._workload.journal, self._condition.label
        records, audit, outcome = journal.stored(label, number)
        if outcome is None:
            self._workload.turns.decode()
            left = self._workload.encoded.without({record.request_id for record in records})
            fresh = self._decode(number, left)
            is_resumed = bool(records)
            records, audit = (*records, *fresh.records), add_audits(audit, fresh.audit)
            outcome = PassOutcome(is_resumed=True) if is_resumed else fresh.outcome
            journal.end_pass(label, number, outcome)
        return Pass(tuple(sorted(records, key=lambda r: r.request_id)), audit, outcome)

    def _decode(self, number: int, left: EncodedPrompts) -> Pass:
        assert self._prepared is not None, "prepare() comes before run_pass()"
        (decoder, num_warm_ups, capture_s), target = self._prepared, self._workload.target
        clock = None
        if decoder.graphs is None:  # a captured step has no parts
            clock = StepClock(target.device)
            decoder.device_step = replace(decoder.device_step, probe=clock)
        journal, label = self._workload.journal, self._condition.label
        sampling = self._sampling()
        counts = decode_prompts(
            decoder,
            left,
            [sampling[prompt.question_id] for prompt in left.prompts],
            salt=f"pass {number}",
            clock=clock,
            finished=Finished(journal, decoder, label=label, number=number),
        )
        measures_memory = target.device.type == "cuda" and self._num_passes == 1
        outcome = PassOutcome(
            wall_s=counts.wall_s,
            decode_wall_s=counts.decode_wall_s,
            num_decode_tokens=counts.num_decode_tokens,
            full_wall_s=counts.full_wall_s,
            num_full_tokens=counts.num_full_tokens,
            num_steps=counts.num_steps,
            rows_per_step=counts.num_target_rows / max(counts.num_steps, 1),
            device_s=counts.device_s,
            peak_memory_bytes=(
                torch.cuda.max_memory_allocated(target.device) if measures_memory else None
            ),
            num_warm_ups=num_warm_ups,
            capture_s=capture_s,
            parts=None if clock is None else clock.parts(),
        )
        return Pass(counts.records, counts.audit, outcome)

    def _start(self) -> Prepared:
        """Build the decoder and warm it up; with several passes until its steps are stable."""
        target, heads, encoded = self._workload[:3]
        head = self._condition.config.spec.head  # not loaded if every condition has K = 0
        has_one_clock = self._condition.config.model.tp_plan == "none"
        return prepare_decoder(
            self._condition,
            target,
            heads.get(head),
            encoded=encoded,
            sampling=[self._sampling()[prompt.question_id] for prompt in encoded.prompts],
            num_blocks=self._num_blocks,
            most_warm_ups=MAX_WARM_UPS if self._num_passes > 1 and has_one_clock else 1,
        )

    def _sampling(self) -> dict[str, SamplingParams]:
        """Parameters by prompt; seeds differ per prompt and agree across conditions."""
        config, prompts = self._condition.config, self._workload.encoded.prompts
        return {
            prompt.question_id: sampling_params(
                config.sampling,
                seed=config.seed * 1_000_003 + index,
                stop_token_ids=self._workload.target.stop_token_ids,
            )
            for index, prompt in enumerate(prompts)
        }


def _result(condition: Condition, passes: Sequence[Pass]) -> ConditionResult:
    """Generations and audit of the first pass, times of all of them."""
    first, spec = passes[0], condition.config.spec
    outcome = first.outcome
    is_drafting = condition.num_speculative_tokens > 0
    return ConditionResult(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=condition.num_speculative_tokens,
        records=first.records,
        wall_s=outcome.wall_s,
        num_steps=outcome.num_steps,
        rows_per_step=outcome.rows_per_step,
        lossless="not checked",
        decode_wall_s=outcome.decode_wall_s,
        num_decode_tokens=outcome.num_decode_tokens,
        full_wall_s=outcome.full_wall_s,
        num_full_tokens=outcome.num_full_tokens,
        audit=first.audit,
        peak_memory_bytes=outcome.peak_memory_bytes,
        head=condition.head,
        max_num_requests=condition.group.max_num_requests,
        temperature=condition.group.temperature,
        verify=spec.verify,
        draft_sampling=spec.draft_sampling if is_drafting else None,
        is_resumed=outcome.is_resumed,
        device_s=outcome.device_s,
        num_warm_ups=outcome.num_warm_ups,
        capture_s=outcome.capture_s,
        repeats=tuple(_timing(later, first) for later in passes[1:]),
        parts=_sum_parts([one.outcome.parts for one in passes]),
    )


def _timing(later: Pass, first: Pass) -> PassTiming:
    texts = {record.request_id: record.output_token_ids for record in first.records}
    equal = sum(texts[record.request_id] == record.output_token_ids for record in later.records)
    outcome = later.outcome
    return PassTiming(
        wall_s=outcome.wall_s,
        decode_wall_s=outcome.decode_wall_s,
        num_decode_tokens=outcome.num_decode_tokens,
        full_wall_s=outcome.full_wall_s,
        num_full_tokens=outcome.num_full_tokens,
        device_s=outcome.device_s,
        num_texts_equal=equal,
    )


def _sum_parts(passes: Sequence[StepParts | None]) -> StepParts | None:
    """The parts of all passes that have them."""
    known = [parts for parts in passes if parts is not None]
    if not known:
        return None
    return StepParts(
        num_steps=sum(parts.num_steps for parts in known),
        target_s=sum(parts.target_s for parts in known),
        verify_s=sum(parts.verify_s for parts in known),
        draft_s=sum(parts.draft_s for parts in known),
        host_s=sum(parts.host_s for parts in known),
    )
