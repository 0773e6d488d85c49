import dataclasses

import pytest

from mtp_research.evaluation.stats.statistics import acceptance_by_context
from tests.evaluation.generations import generation


def test_rounds_fall_where_their_text_ended() -> None:
    # 5 prompt tokens and the first: rounds at 6, 9 (2 drafts and the bonus), 10 and 14.
    (bucket, later) = acceptance_by_context([generation("q0", [2, 0, 3, 1])], seed=0)
    assert (bucket.low, bucket.high, bucket.num_rounds) == (4, 8, 1)
    assert bucket.acceptance_length.value == 3.0
    assert (later.low, later.num_rounds) == (8, 3)
    assert later.acceptance_length.value == pytest.approx(1 + 4 / 3)


def test_round_at_a_power_of_two_opens_the_next_bucket() -> None:
    # Rounds at 6 and, after a draft and the bonus, at 8.
    buckets = acceptance_by_context([generation("q0", [1, 0])], seed=0)
    assert [(bucket.low, bucket.num_rounds) for bucket in buckets] == [(4, 1), (8, 1)]


def test_buckets_add_up_to_all_rounds_of_finished_generations() -> None:
    records = [generation(f"q{i}", [i % 4] * 30) for i in range(6)]
    aborted = dataclasses.replace(records[0], request_id="gone", finish_reason="abort")
    buckets = acceptance_by_context([*records, aborted], seed=0)
    assert sum(bucket.num_rounds for bucket in buckets) == 6 * 30
    kept = sum((b.acceptance_length.value - 1) * b.num_rounds for b in buckets)
    assert round(kept) == 30 * (0 + 1 + 2 + 3 + 0 + 1)
    assert all(b.acceptance_length.low <= b.acceptance_length.value for b in buckets)


def test_nothing_drafted_gives_no_bucket() -> None:
    assert acceptance_by_context([], seed=0) == ()
    assert acceptance_by_context([generation("q0", [], num_plain_steps=4)], seed=0) == ()


def test_contexts_of_32k_tokens_have_buckets_of_their_own() -> None:
    # Rounds at 32,767 and, after the bonus, at 32,768.
    record = dataclasses.replace(generation("q0", [0, 2]), num_prompt_tokens=32_766)
    buckets = acceptance_by_context([record], seed=0)
    assert [(b.low, b.num_rounds, b.acceptance_length.value) for b in buckets] == [
        (16_384, 1, 1.0),
        (32_768, 1, 3.0),
    ]
