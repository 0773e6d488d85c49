"""How far two engines agree on the same prompts: equal texts, and equal rounds in these.

Third stage of the flow: prompts -> decode loop -> statistics -> report. Greedy engines write one
text up to rounding: near ties of the target tip over with another order of additions, so rounds are
compared in equal texts only. A round is equal if it begins at the same token on both sides and
keeps as many drafts. An engine's own counts are held against those of our loop run by the engine's
conventions: what is left between them is no difference of conventions.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtp_research.config.schema import OWN
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.outcome import ConditionResult

LAST_ROUND_NOTE = (
    "rounds: the last one of each request is in no figure of this run, because its end is cut by "
    "the end of the text, and engines differ in whether they say what they accepted behind it"
)


@dataclass(frozen=True)
class Agreement:
    """Texts and rounds of a condition that are those of a reference."""

    condition: str  # labels
    reference: str
    num_texts: int  # requests of both
    num_equal_texts: int
    num_whole_texts: int  # of the equal ones, with all rounds equal
    num_rounds: int  # of the equal ones; of the side that has more of them in a text
    num_equal_rounds: int


def without_last_round(record: RequestRecord) -> RequestRecord:
    """The record with the counts of those rounds alone that the end of the text cannot cut."""
    return replace(
        record,
        num_accepted_per_round=record.num_accepted_per_round[:-1],
        num_drafted_per_round=record.num_drafted_per_round[:-1],
    )


def partner_of(
    condition: ConditionResult, conditions: Sequence[ConditionResult]
) -> ConditionResult | None:
    """Our loop run by the conventions of the engine that decoded `condition`.

    For K = 0, which has no conventions, our own K = 0. None for our own conditions, and where there
    is no such one.
    """
    if condition.engine_name == OWN:
        return None
    num_drafts = condition.num_speculative_tokens
    conventions = condition.engine_name if num_drafts else None
    found = (
        one
        for one in conditions
        if one.engine_name == OWN
        and one.group == condition.group
        and one.num_speculative_tokens == num_drafts
        and (one.conventions, one.head) == (conventions, condition.head)
    )
    return next(found, None)


def agreements(conditions: Sequence[ConditionResult]) -> tuple[Agreement, ...]:
    """Every condition of another engine against its partner."""
    pairs = ((one, partner_of(one, conditions)) for one in conditions)
    return tuple(agreement(one, partner) for one, partner in pairs if partner is not None)


def agreement(condition: ConditionResult, reference: ConditionResult) -> Agreement:
    """Equal texts and rounds of two decodings of the same requests, by their ids."""
    theirs = {record.request_id: record for record in reference.records}
    pairs = [
        (record, theirs[record.request_id])
        for record in condition.records
        if record.request_id in theirs
    ]
    equal = [
        (rounds_by_place(ours), rounds_by_place(others))
        for ours, others in pairs
        if ours.output_token_ids == others.output_token_ids
    ]
    return Agreement(
        condition=condition.label,
        reference=reference.label,
        num_texts=len(pairs),
        num_equal_texts=len(equal),
        num_whole_texts=sum(ours == others for ours, others in equal),
        num_rounds=sum(max(len(ours), len(others)) for ours, others in equal),
        num_equal_rounds=sum(len(ours & others) for ours, others in equal),
    )


def rounds_by_place(record: RequestRecord) -> set[tuple[int, int]]:
    """For each round, the output token that it begins at and how many drafts it keeps.

    The first token is the prefill's: rounds that keep 2, 0 and 1 drafts are (1, 2), (4, 0), (5, 1).
    """
    kept = record.num_accepted_per_round
    begins = itertools.accumulate((count + 1 for count in kept), initial=1)
    return set(zip(begins, kept, strict=False))
