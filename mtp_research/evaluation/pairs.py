"""Paired differences between conditions: the same prompts, resampled together.

Third stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.statistics import paired_differences
from mtp_research.evaluation.summary import ConditionResult


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
