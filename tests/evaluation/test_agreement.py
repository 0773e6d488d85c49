"""Equal texts and equal rounds of two engines, and who is compared with whom."""

import dataclasses

import pytest

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.agreement import (
    agreement,
    agreements,
    partner_of,
    rounds_by_place,
    without_last_round,
)
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord
from mtp_research.evaluation.stats.summary import baseline_of, compare_to_reference
from tests.evaluation.generations import generation


def condition(
    label: str, records: list[RequestRecord], *, backend: str = "own 1", **more: object
) -> ConditionResult:
    num_drafts = 3 if any(record.num_accepted_per_round for record in records) else 0
    made = ConditionResult(
        label=label,
        policy=None,
        num_speculative_tokens=num_drafts,
        records=tuple(records),
        passes=(PassRecord(wall_s=1.0, backend=backend),),
        lossless="",
        head="h" if num_drafts else None,
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def texts(*accepted: list[int]) -> list[RequestRecord]:
    """Requests a, b, ... of equal length, whatever their rounds are."""
    made = [generation(name, list(rounds)) for name, rounds in zip("abcd", accepted, strict=False)]
    return [dataclasses.replace(one, output_token_ids=tuple(range(20))) for one in made]


def test_rounds_have_a_place_in_the_text() -> None:
    (one,) = texts([2, 0, 1])
    assert rounds_by_place(one) == {(1, 2), (4, 0), (5, 1)}
    assert without_last_round(one).num_accepted_per_round == (2, 0)
    assert without_last_round(one).num_drafted_per_round == (3, 3)
    assert without_last_round(generation("a", [])).num_accepted_per_round == ()


def test_rounds_are_counted_in_equal_texts_where_they_begin() -> None:
    ours = condition("own as vllm", texts([2, 0, 1], [1, 1], [0, 0, 2], [3]))
    theirs = texts([2, 0, 1], [1, 0], [1, 2], [3])
    theirs[3] = dataclasses.replace(theirs[3], output_token_ids=(9,))
    found = agreement(condition("vllm", theirs, backend="vllm 0.24.0"), ours)
    assert (found.num_texts, found.num_equal_texts, found.num_whole_texts) == (4, 3, 1)
    # c: the round at token 3 keeps 2 on both sides, though it is the second one of theirs.
    assert (found.num_rounds, found.num_equal_rounds) == (3 + 2 + 3, 3 + 1 + 1)


def some_conditions() -> dict[str, ConditionResult]:
    drafted, plain = texts([1, 1], [2]), texts([], [])
    vllm = {"backend": "vllm 0.24.0"}
    made = [
        condition("baseline", plain),
        condition("eagle", drafted),
        condition("own as vllm other", drafted, conventions="vllm", head="other"),
        condition("own as vllm", drafted, conventions="vllm"),
        condition("own as transformers", drafted, conventions="transformers"),
        condition("vllm baseline", plain, **vllm),
        condition("vllm", drafted, **vllm),
    ]
    return {one.label: one for one in made}


@pytest.mark.parametrize(
    ("label", "partner"),
    [
        ("vllm", "own as vllm"),
        ("vllm baseline", "baseline"),
        ("eagle", None),
        ("own as vllm", None),
        ("baseline", None),
    ],
)
def test_engine_is_held_against_our_loop_by_its_conventions(
    label: str, partner: str | None
) -> None:
    found = some_conditions()
    other = partner_of(found[label], list(found.values()))
    assert (other and other.label) == partner


def test_engine_of_another_batch_size_has_no_partner() -> None:
    found = some_conditions()
    found["vllm"] = dataclasses.replace(found["vllm"], max_num_requests=8)
    assert partner_of(found["vllm"], list(found.values())) is None
    assert [one.condition for one in agreements(list(found.values()))] == ["vllm baseline"]


def test_pairs_are_to_the_reference_and_of_each_engine_to_its_partner() -> None:
    pairs = compare_to_reference(list(some_conditions().values()), reference=None, seed=0)
    found = [(pair.condition, pair.reference) for pair in pairs]
    assert ("vllm", "eagle") in found
    assert ("vllm", "own as vllm") in found
    assert ("eagle", "eagle") not in found
    assert len(found) == len(set(found)) == 5


def test_pair_with_the_reference_is_not_said_twice() -> None:
    conditions = list(some_conditions().values())
    pairs = compare_to_reference(conditions, reference="own as vllm", seed=0)
    found = [(pair.condition, pair.reference) for pair in pairs]
    assert found.count(("vllm", "own as vllm")) == 1


def test_baseline_is_of_the_same_engine() -> None:
    found = some_conditions()
    labels = {name: baseline_of(one, list(found.values())) for name, one in found.items()}
    assert labels["vllm"] is found["vllm baseline"]
    assert labels["eagle"] is found["baseline"]
    assert labels["own as vllm"] is found["baseline"]
