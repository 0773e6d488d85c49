"""Speed of a condition: rates over its passes, and latencies.

A *pass* is one decoding of the whole prompt set by one condition. Where a step's time goes:
`step_cost`.

Where a step's time goes, and what speed-up a condition's acceptance and its own costs give.

    predicted ratio = tau / (1 + K c + v)

tau is the acceptance length. The unit is what a K = 0 step of the same batch size and temperature
spends on target and verification; c is one draft pass, v what a step with drafts spends on target
and verification beyond that unit. Host time is in neither, so it is the first thing to look at
where the measured ratio lies below the predicted one.

Source of the model: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, with the cost of
verification added. Letter: K drafts per step.

Tokens per second of a condition as tables show them: the median pass, the slowest, the fastest.

What each rate counts: `speed.Speed`.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import Estimate

MAX_DRIFT = 0.05  # of the baseline's rate between the halves of its passes, before a warning


@dataclass(frozen=True)
class PassTiming:
    """A later pass of a condition.

    Attributes:
        wall_s: seconds for the whole set, prefill included; None if the pass was interrupted.
        decode_wall_s: of it, steps without prompt rows; None likewise.
        num_decode_tokens: tokens emitted in those steps; None likewise.
        device_s: seconds on the GPU's clock from begin to end; None on a CPU.
        num_texts_equal: prompts with the first pass's token ids.
        full_wall_s: of the steps without prompt rows, those that took every place of the batch;
            None without such a step too.
        num_full_tokens: tokens emitted in those; None likewise.
    """

    wall_s: float | None
    decode_wall_s: float | None
    num_decode_tokens: int | None
    device_s: float | None
    num_texts_equal: int
    full_wall_s: float | None = None
    num_full_tokens: int | None = None


@dataclass(frozen=True)
class Speed:
    """Rates in tokens/s, times in s; None where nothing was measured.

    End to end counts every output token over the wall time of a pass; decode only counts the tokens
    and the seconds of steps without prompt chunks; full counts those of them that took every place
    of the batch. A rate is the median over the passes that have it, low and high the least and the
    most of a pass. The ratios are to the baseline's medians. Time to first token and between tokens
    are of the first pass, per prompt: median, and nearest-rank 95th percentile.

    Attributes:
        drift: of a baseline: median rate of the second half of its passes over that of the first,
            minus 1; one pass that a neighbour disturbed is not a drift.
    """

    wall_s: float | None
    decode_wall_s: float | None
    full_wall_s: float | None
    tokens_per_s_end_to_end: float | None
    tokens_per_s_decode: float | None
    tokens_per_s_full: float | None
    ratio_end_to_end: float | None
    ratio_decode: float | None
    ratio_full: float | None
    ttft_s_median: float | None
    inter_token_s_median: float | None
    inter_token_s_p95: float | None
    num_passes: int = 1
    tokens_per_s_end_to_end_low: float | None = None
    tokens_per_s_end_to_end_high: float | None = None
    tokens_per_s_decode_low: float | None = None
    tokens_per_s_decode_high: float | None = None
    tokens_per_s_full_low: float | None = None
    tokens_per_s_full_high: float | None = None
    device_s: float | None = None
    drift: float | None = None


class Rates(NamedTuple):
    """Tokens per second of every pass that has them, in the order of the passes."""

    end_to_end: tuple[float, ...]
    decode: tuple[float, ...]
    full: tuple[float, ...]


def rates_of(first: PassTiming, repeats: Sequence[PassTiming], *, num_output_tokens: int) -> Rates:
    """Rates of the passes; those that were interrupted have none."""
    passes = (first, *repeats)
    return Rates(
        end_to_end=_known(divide(num_output_tokens, one.wall_s) for one in passes),
        decode=_known(divide(one.num_decode_tokens, one.decode_wall_s) for one in passes),
        full=_known(divide(one.num_full_tokens, one.full_wall_s) for one in passes),
    )


def speed_of(
    first: PassTiming,
    repeats: Sequence[PassTiming],
    *,
    rates: Rates,
    baseline: Rates | None,
    records: Sequence[RequestRecord],
    is_baseline: bool,
) -> Speed:
    """The figures of one condition.

    Args:
        first: the first pass; its `num_texts_equal` is not read.
        repeats: the later ones.
        rates: of both.
        baseline: rates of the K = 0 condition of the group; None without one.
        records: of the first pass; their latencies count only if it was not interrupted.
        is_baseline: K is 0; only then is there a drift.
    """
    is_whole = first.wall_s is not None
    ttft = [record.ttft_s for record in records] if is_whole else []
    between = [
        record.decode_s / (len(record.output_token_ids) - 1)
        for record in records
        if is_whole and len(record.output_token_ids) > 1
    ]
    device = [one.device_s for one in (first, *repeats) if one.device_s is not None]
    end_to_end, decode, full = map(_median, rates)
    has_drift = is_baseline and len(rates.end_to_end) == len(repeats) + 1 > 1
    return Speed(
        wall_s=first.wall_s,
        decode_wall_s=first.decode_wall_s,
        full_wall_s=first.full_wall_s,
        tokens_per_s_end_to_end=end_to_end,
        tokens_per_s_decode=decode,
        tokens_per_s_full=full,
        ratio_end_to_end=divide(end_to_end, _median(baseline.end_to_end) if baseline else None),
        ratio_decode=divide(decode, _median(baseline.decode) if baseline else None),
        ratio_full=divide(full, _median(baseline.full) if baseline else None),
        ttft_s_median=_median(ttft),
        inter_token_s_median=_median(between),
        inter_token_s_p95=_percentile_95(between),
        num_passes=len(repeats) + 1,
        tokens_per_s_end_to_end_low=min(rates.end_to_end, default=None),
        tokens_per_s_end_to_end_high=max(rates.end_to_end, default=None),
        tokens_per_s_decode_low=min(rates.decode, default=None),
        tokens_per_s_decode_high=max(rates.decode, default=None),
        tokens_per_s_full_low=min(rates.full, default=None),
        tokens_per_s_full_high=max(rates.full, default=None),
        device_s=_median(device),
        drift=_drift(rates.end_to_end) if has_drift else None,
    )


def _drift(rates: Sequence[float]) -> float:
    """Of two or more passes in their order; see `Speed`."""
    half = len(rates) // 2
    return statistics.median(rates[half:]) / statistics.median(rates[:half]) - 1


def divide(top: float | None, bottom: float | None) -> float | None:
    """`top / bottom`, or None where either is missing or the bottom is 0."""
    return None if top is None or not bottom else top / bottom


def _known(rates: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(rate for rate in rates if rate is not None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentile_95(values: Sequence[float]) -> float | None:
    """Nearest rank: the smallest value that at least 95 % of the values do not exceed."""
    if not values:
        return None
    rank = -(-95 * len(values) // 100)  # ceiling, in 1 .. len(values)
    return sorted(values)[rank - 1]


@dataclass(frozen=True)
class StepParts:
    """Seconds of the steps without prompt rows, over all passes.

    Attributes:
        num_steps: how many there were.
        target_s: target forward and logits.
        verify_s: logit processors, verification, new frontier.
        draft_s: all draft passes.
        host_s: the rest of the steps' wall time.
    """

    num_steps: int
    target_s: float
    verify_s: float
    draft_s: float
    host_s: float


@dataclass(frozen=True)
class StepCost:
    """Mean seconds of a step without prompt rows by part, and the acceptance model.

    Attributes:
        target_s: see `StepParts`; all four per step.
        verify_s: likewise.
        draft_s: likewise.
        host_s: likewise.
        draft_cost: c, one draft pass in units of the baseline's target + verify; None without one.
        verify_cost: v, target + verify beyond one unit; None without a baseline.
        host_cost: host time in the same units; None without a baseline.
        predicted_ratio: tau / (1 + K c + v); None without a baseline or acceptance length.
    """

    target_s: float
    verify_s: float
    draft_s: float
    host_s: float
    draft_cost: float | None
    verify_cost: float | None
    host_cost: float | None
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


def end_to_end_rate(speed: Speed) -> Estimate:
    """Over whole passes."""
    return Estimate(
        speed.tokens_per_s_end_to_end,
        speed.tokens_per_s_end_to_end_low,
        speed.tokens_per_s_end_to_end_high,
    )


def decode_rate(speed: Speed) -> Estimate:
    """Over the steps without prompt rows."""
    return Estimate(
        speed.tokens_per_s_decode, speed.tokens_per_s_decode_low, speed.tokens_per_s_decode_high
    )


def full_rate(speed: Speed) -> Estimate:
    """Over those of them that took every place of the batch."""
    return Estimate(
        speed.tokens_per_s_full, speed.tokens_per_s_full_low, speed.tokens_per_s_full_high
    )
