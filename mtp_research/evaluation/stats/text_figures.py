"""Figures that depend on what the text says: rounds inside its thinking part, and right answers.

Third stage of the flow: prompts -> decode loop -> statistics -> report. numpy only.

The *thinking part* of an answer lies between a begin and an end token, or starts with the answer
where the chat template has opened it. A round belongs to the part that the text is in where the
round starts: one that holds the end token is the last of the thinking part. A step without drafts
leaves no round behind, so under a draft-length rule the place of a round is a lower bound.

A *score* is 1 for a right answer and 0 for a wrong one; figures of it are in points, 0 to 100.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.bootstrap import (
    Estimate,
    Floats,
    Ratio,
    estimate,
    estimate_difference,
)
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.statistics import is_finished, prompts_of

POINTS = 100.0  # of a share of 1


class Thinking(NamedTuple):
    """How the thinking part of an answer is told."""

    begin_token_id: int
    end_token_id: int
    opened: Collection[str]  # ids of prompts whose template has begun it


@dataclass(frozen=True)
class ThinkingSplit:
    """Acceptance inside and outside the thinking parts; the rounds add up to all rounds."""

    num_rounds_thinking: int  # that start inside
    num_rounds_answer: int  # that start outside
    acceptance_length_thinking: Estimate  # 1 + accepted / rounds, with its interval over prompts
    acceptance_length_answer: Estimate  # the same outside


@dataclass(frozen=True)
class TaskScore:
    """Right answers of one condition."""

    num_prompts: int  # that have a score
    num_right: int
    points: Estimate  # right answers per 100 prompts
    # Own points minus those of K = 0 over the prompts that both have, in pairs; None without it
    points_to_baseline: Estimate | None


def thinking_split(
    condition: ConditionResult, *, thinking: Thinking | None, seed: int
) -> ThinkingSplit | None:
    """Acceptance of one condition by part of the text.

    None where the parts cannot be told or no round of a finished prompt starts inside.
    """
    if thinking is None:
        return None
    found = [_Sums(), _Sums()]  # outside, inside
    for turns in prompts_of(condition.records, condition.prompt_of):
        if not is_finished(turns):
            continue
        is_open = turns[0].request_id in thinking.opened
        for sums, is_inside in zip(found, (False, True), strict=True):
            counts = [
                accepted
                for record in turns
                for accepted, inside in zip(
                    record.num_accepted_per_round,
                    rounds_in_thinking(record, thinking, is_open=is_open),
                    strict=True,
                )
                if inside == is_inside
            ]
            sums.add(len(counts), sum(counts))
    outside, inside = found
    if not sum(inside.rounds):
        return None
    ratios = {"thinking": inside.ratio(), "answer": outside.ratio()}
    lengths = estimate(ratios, seed=seed)
    return ThinkingSplit(
        num_rounds_thinking=sum(inside.rounds),
        num_rounds_answer=sum(outside.rounds),
        acceptance_length_thinking=lengths["thinking"],
        acceptance_length_answer=lengths["answer"],
    )


class _Sums:
    """Rounds and accepted drafts of each prompt."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self._accepted: list[int] = []

    def add(self, num_rounds: int, num_accepted: int) -> None:
        self.rounds.append(num_rounds)
        self._accepted.append(num_accepted)

    def ratio(self) -> Ratio:
        rounds = np.array(self.rounds, dtype=np.float64)
        return Ratio(rounds + np.array(self._accepted, dtype=np.float64), rounds)


def rounds_in_thinking(
    record: RequestRecord, thinking: Thinking, *, is_open: bool
) -> tuple[bool, ...]:
    """For each round of a request, whether it starts inside the thinking part.

    `is_open`: the prompt has begun it. The first token is the prefill's; the first round gives
    output token 1, and each round one token more than it accepted.
    """
    is_inside = [is_open]  # before output token 0, 1, ...
    for token_id in record.output_token_ids:
        is_inside.append(
            (is_inside[-1] or token_id == thinking.begin_token_id)
            and token_id != thinking.end_token_id
        )
    flags, place = [], 1
    for accepted in record.num_accepted_per_round:
        flags.append(is_inside[min(place, len(is_inside) - 1)])
        place += accepted + 1
    return tuple(flags)


def task_score(
    condition: ConditionResult, baseline: ConditionResult | None, *, seed: int
) -> TaskScore | None:
    """Points of one condition and their difference to `baseline`; None if nothing was scored."""
    ours = condition.scores
    if not ours:
        return None
    theirs = None if baseline is None or baseline is condition else baseline.scores
    both = [name for name in ours if name in theirs] if theirs else []
    return TaskScore(
        num_prompts=len(ours),
        num_right=sum(ours.values()),
        points=estimate({"points": _points(ours, list(ours))}, seed=seed)["points"],
        points_to_baseline=None
        if theirs is None
        else estimate_difference(
            {"points": _points(ours, both)}, {"points": _points(theirs, both)}, seed=seed
        )["points"],
    )


def _points(scores: Mapping[str, int], names: Sequence[str]) -> Ratio:
    right: Floats = np.array([scores[name] for name in names], dtype=np.float64)
    return Ratio(POINTS * right, np.ones(len(names)))
