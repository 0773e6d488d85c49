"""From the per-round counters of finished generations to ratios of sums over prompts.

A *round* is one verify step of one request that had drafts. Letters: P prompts, K drafts per round.
The formulas are named in `statistics.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtp_research.errors import IntegrityError
from mtp_research.evaluation.bootstrap import Ratio

FINISHED = ("stop", "length")  # the finish reasons of a generation that ran to its end


class Rounds(Protocol):
    """The part of `decode.stats.RequestRecord` that acceptance is computed from."""

    @property
    def request_id(self) -> str:
        """The prompt's id."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Generated tokens."""
        ...

    @property
    def finish_reason(self) -> str:
        """Why the generation ended."""
        ...

    @property
    def num_accepted_per_round(self) -> Sequence[int]:
        """Accepted drafts of each round, bonus not counted."""
        ...

    @property
    def num_drafted_per_round(self) -> Sequence[int]:
        """Verified drafts of each round."""
        ...

    @property
    def num_target_forwards(self) -> int:
        """Decode steps the request took part in."""
        ...


def acceptance_ratios(
    records: Sequence[Rounds], *, num_speculative_tokens: int
) -> dict[str, Ratio]:
    """Every acceptance statistic as a ratio of two sums over prompts.

    Args:
        records: P finished generations.
        num_speculative_tokens: K, >= the drafts of any round; 0 for the baseline.

    Returns:
        `acceptance_length_micro`, `acceptance_length_macro`, `acceptance_rate`,
        `target_forwards_per_token`, and `p_1`, `p_1/p_0`, ..., `p_K`, `p_K/p_{K-1}`; the
        prompts keep their order.

    Raises:
        IntegrityError: a record drafts more than K, accepts more than it drafts or has two lengths.
    """
    for record in records:
        _check_record(record, num_speculative_tokens)
    rounds = _column(len(record.num_accepted_per_round) for record in records)
    accepted = _column(sum(record.num_accepted_per_round) for record in records)
    drafted = _column(sum(record.num_drafted_per_round) for record in records)
    forwards = _column(record.num_target_forwards for record in records)
    later_tokens = _column(max(len(record.output_token_ids) - 1, 0) for record in records)
    # Where nothing was ever drafted, each decode step is a round that gave its one token.
    rounds_or_steps = rounds if rounds.any() else forwards
    has_rounds = (rounds_or_steps > 0).astype(np.float64)
    own_length = has_rounds + accepted / np.maximum(rounds_or_steps, 1.0)
    ratios = {
        "acceptance_length_micro": Ratio(rounds_or_steps + accepted, rounds_or_steps),
        "acceptance_length_macro": Ratio(own_length, has_rounds),
        "acceptance_rate": Ratio(accepted, drafted),
        "target_forwards_per_token": Ratio(forwards, later_tokens),
    }
    for i in range(1, num_speculative_tokens + 1):
        kept = _column(sum(a >= i for a in record.num_accepted_per_round) for record in records)
        ratios[f"p_{i}"] = Ratio(kept, rounds)
        ratios[f"p_{i}/p_{i - 1}"] = Ratio(kept, _column(_reached(r, i) for r in records))
    return ratios


def _reached(record: Rounds, position: int) -> int:
    """Rounds that made the draft of this position and accepted all before it."""
    pairs = zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    return sum(a >= position - 1 and d >= position for a, d in pairs)


def _column(values: Iterable[int]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)


def num_rounds_two_rejected(record: Rounds) -> int:
    """Rounds with r >= 2 rejected drafts; only after such a round can policies differ."""
    pairs = zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    return sum(drafted - accepted >= 2 for accepted, drafted in pairs)


def _check_record(record: Rounds, num_speculative_tokens: int) -> None:
    accepted, drafted = record.num_accepted_per_round, record.num_drafted_per_round
    if len(accepted) != len(drafted):
        raise IntegrityError(
            f"record {record.request_id}: expected one drafted count per round, got {len(drafted)} "
            f"for {len(accepted)} rounds; the record was not written by this decode loop."
        )
    pairs = zip(accepted, drafted, strict=True)
    if not all(0 <= a <= d and 1 <= d <= num_speculative_tokens for a, d in pairs):
        raise IntegrityError(
            f"record {record.request_id}: expected 0 <= accepted <= drafted and 1 <= drafted <= K "
            f"= {num_speculative_tokens} in every round, got accepted {tuple(accepted)[:8]} of "
            f"{tuple(drafted)[:8]}; pass the K that the records were decoded with."
        )
