"""From the generations of a condition to its published figures, and from two to their differences.

Third stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.speed import Speed, StepCost, cost_of, speed_of
from mtp_research.evaluation.stats.statistics import (
    AcceptanceStatistics,
    acceptance_statistics,
    paired_differences,
    statistics_per_domain,
)


@dataclass(frozen=True)
class ConditionSummary:
    """A condition and every published figure of it; the properties are those of `result`.

    Attributes:
        result: what was decoded.
        acceptance: over all prompts.
        per_domain: the same by domain.
        speed: rates and latencies.
        cost: mean step by part and the acceptance model; None where it was not measured.
        num_outputs_equal_to_baseline: prompts with the baseline's token ids; None without baseline.
    """

    result: ConditionResult
    acceptance: AcceptanceStatistics
    per_domain: dict[str, AcceptanceStatistics]
    speed: Speed
    cost: StepCost | None
    num_outputs_equal_to_baseline: int | None

    @property
    def label(self) -> str:
        """Unique column title."""
        return self.result.label

    @property
    def policy(self) -> str | None:
        """Hidden-state policy."""
        return self.result.policy

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return self.result.num_speculative_tokens

    @property
    def num_prompts(self) -> int:
        """Prompts asked, finished or not."""
        return len(self.result.records)

    @property
    def lossless(self) -> str:
        """Verdict on the outputs."""
        return self.result.lossless

    @property
    def audit(self) -> dict[str, int] | None:
        """Slots by finding."""
        return self.result.audit

    @property
    def head(self) -> str | None:
        """Name of the heads."""
        return self.result.head

    @property
    def max_num_requests(self) -> int | None:
        """Batch size."""
        return self.result.max_num_requests

    @property
    def temperature(self) -> float | None:
        """Of the target's sampling."""
        return self.result.temperature

    @property
    def verify(self) -> str | None:
        """Verification rule."""
        return self.result.verify

    @property
    def draft_sampling(self) -> str | None:
        """How drafts were chosen."""
        return self.result.draft_sampling

    @property
    def group(self) -> tuple[int | None, float | None]:
        """What conditions share that share a baseline."""
        return self.result.group

    @property
    def rows_per_step(self) -> float | None:
        """Mean packed rows of a target step, first pass."""
        return self.result.first.rows_per_step

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the device, first pass."""
        return self.result.first.peak_memory_bytes


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
        result=condition,
        acceptance=acceptance,
        per_domain=statistics_per_domain(
            condition.records, domains, num_speculative_tokens=num_drafts, seed=seed
        ),
        speed=speed_of(condition, baseline=baseline),
        cost=cost_of(
            condition.parts,
            baseline and baseline.parts,
            num_speculative_tokens=num_drafts,
            acceptance_length=acceptance.acceptance_length_micro.value,
        ),
        num_outputs_equal_to_baseline=(
            None if baseline is None else num_equal_texts(condition.records, baseline.records)
        ),
    )


def baseline_of(
    condition: ConditionResult, conditions: Sequence[ConditionResult]
) -> ConditionResult | None:
    """The K = 0 condition of the same batch size and temperature."""
    found = (c for c in conditions if c.num_speculative_tokens == 0 and c.group == condition.group)
    return next(found, None)


def num_equal_texts(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]) -> int:
    """Prompts of `ours` with equal token ids in `theirs`."""
    expected = {record.request_id: record.output_token_ids for record in theirs}
    return sum(expected.get(r.request_id) == r.output_token_ids for r in ours)


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
