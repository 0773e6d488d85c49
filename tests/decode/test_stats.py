"""`DecodeStats` against a recount that walks over every draft of every round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.decode.stats import DecodeStats, RequestRecord

# (accepted, drafted) of a round.
ROUND = st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
HISTORIES = st.lists(st.lists(ROUND, max_size=8), max_size=6)


def record(name: str, rounds: list[tuple[int, int]], *, num_plain_steps: int = 0) -> RequestRecord:
    num_steps = len(rounds) + num_plain_steps
    return RequestRecord(
        request_id=name,
        num_prompt_tokens=4,
        output_token_ids=tuple(range(1 + num_steps + sum(accepted for accepted, _ in rounds))),
        finish_reason="length",
        num_accepted_per_round=tuple(accepted for accepted, _ in rounds),
        num_drafted_per_round=tuple(drafted for _, drafted in rounds),
        num_target_forwards=num_steps,
        ttft_s=0.1,
        decode_s=1.0,
    )


def stats_of(history: list[list[tuple[int, int]]], *, num_plain_steps: int = 0) -> DecodeStats:
    records = [
        record(str(i), rounds, num_plain_steps=num_plain_steps) for i, rounds in enumerate(history)
    ]
    return DecodeStats(records=records)


def recount(history: list[list[tuple[int, int]]]) -> dict[str, dict[int, int]]:
    """Drafts one by one: which were made, which were looked at, which stayed."""
    made: dict[int, int] = {}
    reached: dict[int, int] = {}
    kept: dict[int, int] = {}
    for rounds in history:
        for accepted, drafted in rounds:
            stays = True
            for position in range(1, drafted + 1):
                made[position] = made.get(position, 0) + 1
                if stays:
                    reached[position] = reached.get(position, 0) + 1
                stays = position <= accepted
                if stays:
                    kept[position] = kept.get(position, 0) + 1
    return {"made": made, "reached": reached, "kept": kept}


@given(history=HISTORIES)
def test_rates_equal_a_recount_draft_by_draft(history: list[list[tuple[int, int]]]) -> None:
    stats, counts = stats_of(history), recount(history)
    num_rounds = sum(len(rounds) for rounds in history)
    positions = sorted(counts["made"])
    kept = [counts["kept"].get(i, 0) for i in positions]
    assert list(stats.acceptance_rate_per_position) == [k / num_rounds for k in kept]
    assert list(stats.draft_rate_per_position) == [
        counts["made"][i] / num_rounds for i in positions
    ]
    assert list(stats.conditional_acceptance_rate_per_position) == [
        counts["kept"].get(i, 0) / counts["reached"][i] for i in positions if i in counts["reached"]
    ]
    total_made = sum(counts["made"].values())
    assert stats.acceptance_rate == (sum(kept) / total_made if total_made else None)


@given(history=HISTORIES, num_plain_steps=st.integers(0, 3))
def test_length_is_one_plus_the_rates_and_tokens_per_round(
    history: list[list[tuple[int, int]]], num_plain_steps: int
) -> None:
    stats = stats_of(history, num_plain_steps=num_plain_steps)
    num_rounds = sum(len(rounds) for rounds in history)
    if num_rounds:
        expected = 1 + sum(stats.acceptance_rate_per_position)
        assert stats.acceptance_length == pytest.approx(expected, abs=1e-12)
    else:
        assert stats.acceptance_length is None
    # Every decode step gives its accepted drafts and one more token.
    num_steps = num_rounds + num_plain_steps * len(history)
    num_accepted = sum(accepted for rounds in history for accepted, _ in rounds)
    if num_steps + num_accepted:
        expected = num_steps / (num_steps + num_accepted)
        assert stats.target_forwards_per_token == pytest.approx(expected)
    else:
        assert stats.target_forwards_per_token is None


def test_conditional_rate_divides_by_rounds_that_made_the_draft() -> None:
    # Two rounds stop after one draft, both accepted: they say nothing about draft 2.
    stats = stats_of([[(1, 1), (1, 1), (2, 2), (1, 2)]])
    assert stats.acceptance_rate_per_position == (1.0, 0.25)
    assert stats.conditional_acceptance_rate_per_position == (1.0, 0.5)
    assert stats.draft_rate_per_position == (1.0, 0.5)


def test_nothing_decoded_gives_no_rate_and_no_division_by_zero() -> None:
    stats = DecodeStats()
    assert stats.acceptance_length is None
    assert stats.acceptance_rate is None
    assert stats.acceptance_rate_per_position == ()
    assert stats.conditional_acceptance_rate_per_position == ()
    assert stats.target_forwards_per_token is None
    assert stats.rows_per_step is None
    assert stats.tokens_per_s is None
    assert stats.audit is None


def test_tokens_per_second_and_rows_per_step_are_plain_ratios() -> None:
    stats = DecodeStats(num_steps=4, num_target_rows=10, num_emitted_tokens=30, busy_s=2.0)
    assert (stats.rows_per_step, stats.tokens_per_s) == (2.5, 15.0)
