"""From the generations of a condition to its published figures.

Third stage of the flow: prompts -> decode loop -> statistics -> report. A *condition* is one
decoding of the whole prompt set; the one with K = 0 is the baseline. Letter: K drafts per round.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.statistics import (
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
        records: one per prompt.
        wall_s: seconds for the whole set, prefill included, warm-up excluded.
        num_steps: steps of the loop.
        rows_per_step: mean packed rows of a target step.
        lossless: verdict on the outputs, such as `identical 153/153` (tables show 24 characters).
        decode_wall_s: seconds spent in steps without prompt chunks; None if not measured.
        num_decode_tokens: tokens emitted in those steps; None if not measured.
        audit: slots by finding (WRONG, MIXED, HOLE, PROVISIONAL) and `slots`, the number looked at;
            None if the auditor was off.
        peak_memory_bytes: of the device; None on a CPU.
    """

    label: str
    policy: str | None
    num_speculative_tokens: int
    records: tuple[RequestRecord, ...]
    wall_s: float
    num_steps: int
    rows_per_step: float
    lossless: str
    decode_wall_s: float | None = None
    num_decode_tokens: int | None = None
    audit: dict[str, int] | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Speed:
    """Rates in tokens/s, times in s; None where nothing was measured.

    End to end counts every output token over `wall_s`; decode only counts the tokens and the
    seconds of steps without prompt chunks. The ratios are to the baseline. Time to first token and
    between tokens are per prompt: median, and nearest-rank 95th percentile.
    """

    wall_s: float
    decode_wall_s: float | None
    tokens_per_s_end_to_end: float | None
    tokens_per_s_decode: float | None
    ratio_end_to_end: float | None
    ratio_decode: float | None
    ttft_s_median: float | None
    inter_token_s_median: float | None
    inter_token_s_p95: float | None


@dataclass(frozen=True)
class ConditionSummary:
    """Every published figure of one condition; see `ConditionResult` for the copied fields.

    Attributes:
        acceptance: over all prompts.
        per_domain: the same by domain.
        speed: rates and latencies.
        num_prompts: prompts asked, finished or not.
        num_outputs_equal_to_baseline: prompts with the baseline's token ids; None without baseline.
    """

    label: str
    policy: str | None
    num_speculative_tokens: int
    acceptance: AcceptanceStatistics
    per_domain: dict[str, AcceptanceStatistics]
    speed: Speed
    num_prompts: int
    num_outputs_equal_to_baseline: int | None
    num_steps: int
    rows_per_step: float
    lossless: str
    audit: dict[str, int] | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class PairedComparison:
    """Statistics of `condition` minus those of `reference`, over the same resampled prompts."""

    condition: str
    reference: str
    differences: dict[str, Estimate]


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
        baseline: the K = 0 decoding of the same prompts in the same process, if there is one.
        domains: domain by request id.
        seed: of the bootstrap.
    """
    num_drafts = condition.num_speculative_tokens
    return ConditionSummary(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=num_drafts,
        acceptance=acceptance_statistics(
            condition.records, num_speculative_tokens=num_drafts, seed=seed
        ),
        per_domain=statistics_per_domain(
            condition.records, domains, num_speculative_tokens=num_drafts, seed=seed
        ),
        speed=_speed(condition, baseline),
        num_prompts=len(condition.records),
        num_outputs_equal_to_baseline=_num_equal_outputs(condition, baseline),
        num_steps=condition.num_steps,
        rows_per_step=condition.rows_per_step,
        lossless=condition.lossless,
        audit=condition.audit,
        peak_memory_bytes=condition.peak_memory_bytes,
    )


def compare_to_first(
    conditions: Sequence[ConditionResult], *, seed: int
) -> tuple[PairedComparison, ...]:
    """Paired differences of every condition that drafts to the first that does."""
    drafting = [condition for condition in conditions if condition.num_speculative_tokens > 0]
    return tuple(paired(condition, drafting[0], seed=seed) for condition in drafting[1:])


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


def _speed(condition: ConditionResult, baseline: ConditionResult | None) -> Speed:
    end_to_end, decode = _rate_end_to_end(condition), _rate_decode(condition)
    first = [record.ttft_s for record in condition.records]
    between = [
        record.decode_s / (len(record.output_token_ids) - 1)
        for record in condition.records
        if len(record.output_token_ids) > 1
    ]
    return Speed(
        wall_s=condition.wall_s,
        decode_wall_s=condition.decode_wall_s,
        tokens_per_s_end_to_end=end_to_end,
        tokens_per_s_decode=decode,
        ratio_end_to_end=_divide(end_to_end, baseline and _rate_end_to_end(baseline)),
        ratio_decode=_divide(decode, baseline and _rate_decode(baseline)),
        ttft_s_median=statistics.median(first) if first else None,
        inter_token_s_median=statistics.median(between) if between else None,
        inter_token_s_p95=_percentile_95(between),
    )


def _rate_end_to_end(condition: ConditionResult) -> float | None:
    num_tokens = sum(len(record.output_token_ids) for record in condition.records)
    return _divide(num_tokens, condition.wall_s)


def _rate_decode(condition: ConditionResult) -> float | None:
    return _divide(condition.num_decode_tokens, condition.decode_wall_s)


def _divide(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def _percentile_95(values: Sequence[float]) -> float | None:
    """Nearest rank: the smallest value that at least 95 % of the values do not exceed."""
    if not values:
        return None
    rank = -(-95 * len(values) // 100)  # ceiling, in 1 .. len(values)
    return sorted(values)[rank - 1]


def _num_equal_outputs(condition: ConditionResult, baseline: ConditionResult | None) -> int | None:
    if baseline is None:
        return None
    expected = {record.request_id: record.output_token_ids for record in baseline.records}
    return sum(expected.get(r.request_id) == r.output_token_ids for r in condition.records)
