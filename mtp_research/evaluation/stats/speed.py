"""Speed of a condition: rates over its passes, latencies, and where a step's time goes.

Third stage of the flow: prompts -> decode loop -> statistics -> report. What speed-up a condition's
acceptance and its own costs give:

    predicted ratio = tau / (1 + K c + v)

tau is the acceptance length. The unit is what a K = 0 step of the same batch size and temperature
spends on target and verification; c is one draft pass, v what a step with drafts spends on target
and verification beyond that unit. Host time is in neither, so it is the first thing to look at
where the measured ratio lies below the predicted one.

Source of the model: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, with the cost of
verification added. Letter: K drafts per step.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord, StepParts

MAX_DRIFT = 0.05  # of the baseline's rate between the halves of its passes, before a warning


@dataclass(frozen=True)
class Speed:
    """Rates in tokens/s, times in s; None where nothing was measured.

    End to end counts every output token over the wall time of a pass; decode only counts the tokens
    and the seconds of steps without prompt chunks; full counts those of them that took every place
    of the batch. A rate is the median over the passes that have it, low and high the least and the
    most of a pass. The ratios are to the baseline's medians. Time to first token and between tokens
    are of the first pass, per prompt: median, and nearest-rank 95th percentile.
    """

    first: PassRecord  # the first pass
    end_to_end: Estimate
    decode: Estimate
    full: Estimate
    ratio_end_to_end: float | None
    ratio_decode: float | None
    ratio_full: float | None
    ttft_s_median: float | None
    inter_token_s_median: float | None
    inter_token_s_p95: float | None
    num_passes: int
    device_s: float | None  # median over the passes
    # Of a baseline: median rate of the second half of its passes over that of the first, minus 1;
    # one pass that a neighbour disturbed is not a drift
    drift: float | None


class _Rates(NamedTuple):
    """Tokens per second of every pass that has them, in the order of the passes."""

    end_to_end: tuple[float, ...]
    decode: tuple[float, ...]
    full: tuple[float, ...]


def speed_of(condition: ConditionResult, *, baseline: ConditionResult | None) -> Speed:
    """The figures of one condition; ratios are to `baseline`, the K = 0 condition of its group.

    Latencies count only if the first pass was not interrupted; only a baseline has a drift.
    """
    passes, records, rates = condition.passes, condition.records, _rates_of(condition)
    is_whole = passes[0].wall_s is not None
    ttft = [record.ttft_s for record in records] if is_whole else []
    between = [
        record.decode_s / (len(record.output_token_ids) - 1)
        for record in records
        if is_whole and len(record.output_token_ids) > 1
    ]
    end_to_end, decode, full = map(_spread, rates)
    plain = _Rates((), (), ()) if baseline is None else _rates_of(baseline)
    is_baseline = condition.num_speculative_tokens == 0
    has_drift = is_baseline and len(rates.end_to_end) == len(passes) > 1
    return Speed(
        first=passes[0],
        end_to_end=end_to_end,
        decode=decode,
        full=full,
        ratio_end_to_end=divide(end_to_end.value, _median(plain.end_to_end)),
        ratio_decode=divide(decode.value, _median(plain.decode)),
        ratio_full=divide(full.value, _median(plain.full)),
        ttft_s_median=_median(ttft),
        inter_token_s_median=_median(between),
        inter_token_s_p95=_percentile_95(between),
        num_passes=len(passes),
        device_s=_median(_known(one.device_s for one in passes)),
        drift=_drift(rates.end_to_end) if has_drift else None,
    )


def _rates_of(condition: ConditionResult) -> _Rates:
    """Rates of the passes; those that were interrupted have none."""
    passes = condition.passes
    num_tokens = sum(len(record.output_token_ids) for record in condition.records)
    return _Rates(
        end_to_end=_known(divide(num_tokens, one.wall_s) for one in passes),
        decode=_known(divide(one.num_decode_tokens, one.decode_wall_s) for one in passes),
        full=_known(divide(one.num_full_tokens, one.full_wall_s) for one in passes),
    )


def _spread(rates: Sequence[float]) -> Estimate:
    return Estimate(_median(rates), min(rates, default=None), max(rates, default=None))


def _drift(rates: Sequence[float]) -> float:
    half = len(rates) // 2
    return statistics.median(rates[half:]) / statistics.median(rates[:half]) - 1


def divide(top: float | None, bottom: float | None) -> float | None:
    """`top / bottom`, or None where either is missing or the bottom is 0."""
    return None if top is None or not bottom else top / bottom


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentile_95(values: Sequence[float]) -> float | None:
    """Nearest rank: the smallest value that at least 95 % of the values do not exceed."""
    if not values:
        return None
    rank = -(-95 * len(values) // 100)  # ceiling, in 1 .. len(values)
    return sorted(values)[rank - 1]


@dataclass(frozen=True)
class StepCost:
    """Mean seconds of a step without prompt rows by part, and the acceptance model."""

    target_s: float  # see `StepParts`; this and the next three per step
    verify_s: float
    draft_s: float
    host_s: float
    # c, one draft pass in units of the baseline's target + verify; None without one
    draft_cost: float | None
    verify_cost: float | None  # v, target + verify beyond one unit; None without a baseline
    host_cost: float | None  # host time in the same units; None without a baseline
    # tau / (1 + K c + v); None without a baseline or acceptance length
    predicted_ratio: float | None


def cost_of(
    parts: StepParts | None,
    baseline: StepParts | None,
    *,
    num_speculative_tokens: int,
    acceptance_length: float | None,
) -> StepCost | None:
    """Mean step by part and the acceptance model; None where the parts were not measured."""
    if parts is None or not parts.num_steps:
        return None
    target, verify, draft, host = (
        seconds / parts.num_steps
        for seconds in (parts.target_s, parts.verify_s, parts.draft_s, parts.host_s)
    )
    unit = None
    if baseline is not None:
        unit = divide(baseline.target_s + baseline.verify_s, baseline.num_steps)
    if not unit:
        return StepCost(target, verify, draft, host, None, None, None, None)
    draft_cost = draft / unit / num_speculative_tokens if num_speculative_tokens else 0.0
    verify_cost = (target + verify) / unit - 1
    step = 1 + num_speculative_tokens * draft_cost + verify_cost
    ratio = divide(acceptance_length, step)
    return StepCost(target, verify, draft, host, draft_cost, verify_cost, host / unit, ratio)
