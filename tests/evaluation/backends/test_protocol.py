"""Records from what the steps of an engine add."""

import pytest

from mtp_research.evaluation.backends.protocol import StepLog, token_ids_sha256
from mtp_research.runtime.errors import IntegrityError


def log(num_drafts: int = 3) -> StepLog:
    made = StepLog("engine", num_drafts=num_drafts)
    made.begin("a", [1, 2])
    return made


def test_steps_are_rounds_behind_the_first_token_and_count_the_kept_drafts() -> None:
    one = log()
    for piece in ([], [7], [8, 9, 10, 11], [], [12], [13, 14]):
        one.add("a", piece)
    one.end("a", "length")
    record = one.record("a")
    assert record.output_token_ids == tuple(range(7, 15))
    assert record.num_accepted_per_round == (3, 0, 1)
    assert record.num_drafted_per_round == (3, 3, 3)
    assert (record.num_target_forwards, record.num_prompt_tokens) == (3, 2)
    assert record.finish_reason == "length"
    assert record.ttft_s >= 0
    assert record.decode_s > 0


def test_plain_steps_are_forwards_and_no_rounds() -> None:
    one = log(num_drafts=0)
    for token in (7, 8, 9):
        one.add("a", [token])
    one.end("a", "stop")
    record = one.record("a")
    assert (record.num_target_forwards, record.num_accepted_per_round) == (2, ())
    assert record.finish_reason == "stop"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[7, 8]], "at most 1 tokens at K = 3, got 2 behind 0 additions"),
        ([[7], [1, 2, 3, 4, 5]], "at most 4 tokens at K = 3, got 5 behind 1 additions"),
    ],
)
def test_outputs_of_several_steps_are_refused(pieces: list[list[int]], message: str) -> None:
    one = log()
    *before, last = pieces
    for piece in before:
        one.add("a", piece)
    with pytest.raises(IntegrityError, match=message):
        one.add("a", last)


def test_another_prompt_than_the_one_asked_is_refused() -> None:
    one = log()
    one.confirm("a", [1, 2])
    with pytest.raises(IntegrityError, match="request a: expected the prompt's 2 token ids"):
        one.confirm("a", [2, 1])


def test_hash_of_prompts_tells_their_order_and_bounds() -> None:
    asked = [[1, 2], [3]]
    others = ([[3], [1, 2]], [[1], [2, 3]], [[1, 2, 3]])
    assert token_ids_sha256(asked) == token_ids_sha256([(1, 2), (3,)])
    assert all(token_ids_sha256(other) != token_ids_sha256(asked) for other in others)
