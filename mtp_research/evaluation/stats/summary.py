"""From the generations of a condition to its published figures.

Third stage of the flow: prompts -> decode loop -> statistics -> report. A *condition* is one
decoding of the whole prompt set; the one with K = 0 is the baseline. Letter: K drafts per round.

Paired differences between conditions: the same prompts, resampled together.

Third stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.speed import (
    PassTiming,
    Rates,
    Speed,
    StepCost,
    StepParts,
    cost_of,
    rates_of,
    speed_of,
)
from mtp_research.evaluation.stats.statistics import (
    AcceptanceStatistics,
    acceptance_statistics,
    paired_differences,
    statistics_per_domain,
)


@dataclass(frozen=True)
class ConditionResult:
    """One decoding of the whole prompt set, as the loop left it.

    Attributes:
        label: unique column title, such as `eagle`.
        policy: hidden-state policy; None for the baseline.
        num_speculative_tokens: K; 0 makes this the baseline.
        records: one per prompt, of the first pass.
        wall_s: seconds for the whole set, prefill included, warm-up excluded; like every time of
            the first pass and its steps, None if the pass was interrupted and resumed.
        num_steps: steps of the loop.
        rows_per_step: mean packed rows of a target step.
        lossless: verdict on the outputs, such as `identical 153/153` (tables show 24 characters).
        decode_wall_s: seconds of the calls of the loop that neither started nor committed a step
            with prompt rows; None if not measured.
        num_decode_tokens: tokens emitted in those calls; None if not measured.
        full_wall_s: seconds of those of them whose steps, the started and the committed one, held
            `max_num_requests` requests; None without such a call, or if not measured.
        num_full_tokens: tokens emitted in those; None likewise.
        audit: slots by finding (WRONG, MIXED, HOLE, PROVISIONAL) and `slots`, the number looked at;
            None if the auditor was off.
        peak_memory_bytes: of the device; None on a CPU and with several passes, which hold the
            pools of all conditions of a group.
        head: name of the heads, `oracle`, or None.
        max_num_requests: batch size; None if unknown, like the next three.
        temperature: of the target's sampling.
        verify: verification rule.
        draft_sampling: how drafts were chosen.
        is_resumed: the first pass was interrupted, and finished by a later process.
        device_s: seconds of the first pass on the GPU's clock; None on a CPU.
        num_warm_ups: uncounted decodings before the first pass.
        capture_s: seconds of compiling and capturing steps before them; None without captured ones.
        repeats: later passes.
        parts: where the time of the steps without prompt rows went; None where it was not measured.
    """

    label: str
    policy: str | None
    num_speculative_tokens: int
    records: tuple[RequestRecord, ...]
    wall_s: float | None
    num_steps: int | None
    rows_per_step: float | None
    lossless: str
    decode_wall_s: float | None = None
    num_decode_tokens: int | None = None
    full_wall_s: float | None = None
    num_full_tokens: int | None = None
    audit: dict[str, int] | None = None
    peak_memory_bytes: int | None = None
    head: str | None = None
    max_num_requests: int | None = None
    temperature: float | None = None
    verify: str | None = None
    draft_sampling: str | None = None
    is_resumed: bool = False
    device_s: float | None = None
    num_warm_ups: int = 1
    capture_s: float | None = None
    repeats: tuple[PassTiming, ...] = ()
    parts: StepParts | None = None

    @property
    def group(self) -> tuple[int | None, float | None]:
        """Batch size and temperature: conditions that share them share a baseline."""
        return self.max_num_requests, self.temperature


@dataclass(frozen=True)
class ConditionSummary:
    """Every published figure of one condition; see `ConditionResult` for the copied fields.

    Attributes:
        acceptance: over all prompts.
        per_domain: the same by domain.
        speed: rates and latencies.
        cost: mean step by part and the acceptance model; None where it was not measured.
        num_prompts: prompts asked, finished or not.
        num_outputs_equal_to_baseline: prompts with the baseline's token ids; None without baseline.
    """

    label: str
    policy: str | None
    num_speculative_tokens: int
    acceptance: AcceptanceStatistics
    per_domain: dict[str, AcceptanceStatistics]
    speed: Speed
    cost: StepCost | None
    num_prompts: int
    num_outputs_equal_to_baseline: int | None
    num_steps: int | None
    rows_per_step: float | None
    lossless: str
    audit: dict[str, int] | None
    peak_memory_bytes: int | None
    head: str | None
    max_num_requests: int | None
    temperature: float | None
    verify: str | None
    draft_sampling: str | None
    is_resumed: bool

    @property
    def group(self) -> tuple[int | None, float | None]:
        """Batch size and temperature: conditions that share them share a baseline."""
        return self.max_num_requests, self.temperature


def summarise(
    condition: ConditionResult,
    *,
    baseline: ConditionResult | None,
    domains: Mapping[str, str],
    seed: int,
) -> ConditionSummary:
    """Every published figure of one condition.

    Args:
        condition: the decoding.
        baseline: the K = 0 decoding of the same prompts at the same batch size and temperature, if
            there is one.
        domains: domain by request id.
        seed: of the bootstrap.
    """
    num_drafts = condition.num_speculative_tokens
    acceptance = acceptance_statistics(
        condition.records, num_speculative_tokens=num_drafts, seed=seed
    )
    return ConditionSummary(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=num_drafts,
        acceptance=acceptance,
        per_domain=statistics_per_domain(
            condition.records, domains, num_speculative_tokens=num_drafts, seed=seed
        ),
        speed=_speed(condition, baseline),
        cost=cost_of(
            condition.parts,
            baseline and baseline.parts,
            num_speculative_tokens=num_drafts,
            acceptance_length=acceptance.acceptance_length_micro.value,
        ),
        num_prompts=len(condition.records),
        num_outputs_equal_to_baseline=_num_equal_outputs(condition, baseline),
        num_steps=condition.num_steps,
        rows_per_step=condition.rows_per_step,
        lossless=condition.lossless,
        audit=condition.audit,
        peak_memory_bytes=condition.peak_memory_bytes,
        head=condition.head,
        max_num_requests=condition.max_num_requests,
        temperature=condition.temperature,
        verify=condition.verify,
        draft_sampling=condition.draft_sampling,
        is_resumed=condition.is_resumed,
    )


def baseline_of(
    condition: ConditionResult, conditions: Sequence[ConditionResult]
) -> ConditionResult | None:
    """The K = 0 condition of the same batch size and temperature."""
    found = (c for c in conditions if c.num_speculative_tokens == 0 and c.group == condition.group)
    return next(found, None)


def _speed(condition: ConditionResult, baseline: ConditionResult | None) -> Speed:
    return speed_of(
        _first_pass(condition),
        condition.repeats,
        rates=_rates(condition),
        baseline=None if baseline is None else _rates(baseline),
        records=condition.records,
        is_baseline=condition.num_speculative_tokens == 0,
    )


def _first_pass(condition: ConditionResult) -> PassTiming:
    return PassTiming(
        wall_s=condition.wall_s,
        decode_wall_s=condition.decode_wall_s,
        num_decode_tokens=condition.num_decode_tokens,
        device_s=condition.device_s,
        num_texts_equal=len(condition.records),
        full_wall_s=condition.full_wall_s,
        num_full_tokens=condition.num_full_tokens,
    )


def _rates(condition: ConditionResult) -> Rates:
    num_tokens = sum(len(record.output_token_ids) for record in condition.records)
    return rates_of(_first_pass(condition), condition.repeats, num_output_tokens=num_tokens)


def _num_equal_outputs(condition: ConditionResult, baseline: ConditionResult | None) -> int | None:
    if baseline is None:
        return None
    expected = {record.request_id: record.output_token_ids for record in baseline.records}
    return sum(expected.get(r.request_id) == r.output_token_ids for r in condition.records)


@dataclass(frozen=True)
class PairedComparison:
    """Statistics of `condition` minus those of `reference`, over the same resampled prompts."""

    condition: str
    reference: str
    differences: dict[str, Estimate]


def compare_to_reference(
    conditions: Sequence[ConditionResult], *, reference: str | None, seed: int
) -> tuple[PairedComparison, ...]:
    """Paired differences to the reference of every condition that drafts.

    Only conditions of equal K, batch size and temperature are compared. Their reference is the one
    with the label `reference`, else the first with that policy, else the first of them.
    """
    drafting = [condition for condition in conditions if condition.num_speculative_tokens > 0]
    alike: dict[object, list[ConditionResult]] = {}
    for condition in drafting:
        key = (condition.num_speculative_tokens, condition.group)
        alike.setdefault(key, []).append(condition)
    pairs = []
    for members in alike.values():
        wanted = [c for c in members if c.label == reference]
        wanted += [c for c in members if c.policy == reference] if reference else []
        first = [*wanted, *members][0]
        pairs += [paired(c, first, seed=seed) for c in members if c is not first]
    return tuple(pairs)


def paired(
    condition: ConditionResult, reference: ConditionResult, *, seed: int
) -> PairedComparison:
    """`condition` minus `reference`; both asked the same prompts."""
    differences = paired_differences(
        condition.records,
        reference.records,
        num_speculative_tokens=max(
            condition.num_speculative_tokens, reference.num_speculative_tokens
        ),
        seed=seed,
    )
    return PairedComparison(condition.label, reference.label, differences)
