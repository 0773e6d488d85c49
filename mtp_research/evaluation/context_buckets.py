"""Acceptance by the length of the text at which a round was verified.

A round stands at context c when c tokens come before its first draft: the prompt and all tokens
emitted so far. It falls into the bucket [2^n, 2^(n+1)) that holds c. A step without drafts leaves
no round behind, so under a draft-length rule c is a lower bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.bootstrap import Estimate, Ratio, estimate
from mtp_research.evaluation.rounds import FINISHED


@dataclass(frozen=True)
class ContextBucket:
    """Acceptance over the rounds at a context of [low, high) tokens.

    Attributes:
        low: fewest tokens.
        high: one more than the most tokens.
        num_prompts: generations with a round here.
        num_rounds: rounds here.
        acceptance_length: 1 + accepted / rounds, with its interval over prompts.
    """

    low: int
    high: int
    num_prompts: int
    num_rounds: int
    acceptance_length: Estimate


def acceptance_by_context(
    records: Iterable[RequestRecord], *, seed: int
) -> tuple[ContextBucket, ...]:
    """Buckets that hold at least one round of a finished generation, from short to long."""
    sums = [_sums_by_bucket(record) for record in records if record.finish_reason in FINISHED]
    buckets = sorted({low for one in sums for low in one})
    ratios = {str(low): _ratio([one.get(low, (0, 0)) for one in sums]) for low in buckets}
    estimates = estimate(ratios, seed=seed) if ratios else {}
    return tuple(
        ContextBucket(
            low=low,
            high=2 * low,
            num_prompts=sum(low in one for one in sums),
            num_rounds=sum(one[low][0] for one in sums if low in one),
            acceptance_length=estimates[str(low)],
        )
        for low in buckets
    )


def _sums_by_bucket(record: RequestRecord) -> dict[int, tuple[int, int]]:
    """Rounds and accepted drafts of one generation by the low end of the bucket."""
    sums: dict[int, tuple[int, int]] = {}
    context = record.num_prompt_tokens + 1  # the prefill gave the first token
    for accepted in record.num_accepted_per_round:
        low = 1 << (context.bit_length() - 1)
        rounds, kept = sums.get(low, (0, 0))
        sums[low] = (rounds + 1, kept + accepted)
        context += accepted + 1
    return sums


def _ratio(sums: Sequence[tuple[int, int]]) -> Ratio:
    rounds = np.array([one[0] for one in sums], dtype=np.float64)
    accepted = np.array([one[1] for one in sums], dtype=np.float64)
    return Ratio(rounds + accepted, rounds)
