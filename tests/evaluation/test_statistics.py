import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.evaluation.stats.statistics import (
    acceptance_statistics,
    paired_differences,
    statistics_per_domain,
)
from mtp_research.runtime.errors import IntegrityError
from tests.evaluation.generations import generation, random_generations

K = 4
ROUND = st.integers(1, K).flatmap(
    lambda drafted: st.tuples(st.integers(0, drafted), st.just(drafted))
)
GENERATIONS = st.lists(st.lists(ROUND, max_size=12), min_size=1, max_size=12).map(
    lambda prompts: [
        generation(f"q{i}", [a for a, _ in rounds], drafted=[d for _, d in rounds])
        for i, rounds in enumerate(prompts)
    ]
)


def test_hand_written_example_gives_the_formulas():
    records = [generation("a", [3, 0]), generation("b", [1], drafted=[2], num_plain_steps=1)]
    figures = acceptance_statistics(records, num_speculative_tokens=3, num_draws=10)
    assert figures.num_rounds == 3
    assert figures.num_rounds_two_rejected == 1
    assert (figures.num_accepted, figures.num_drafted) == (4, 8)
    assert figures.acceptance_length_micro.value == pytest.approx(1 + 4 / 3)
    assert figures.acceptance_length_macro.value == pytest.approx((2.5 + 2.0) / 2)
    assert figures.acceptance_rate.value == pytest.approx(4 / 8)
    unconditional = [p.value for p in figures.acceptance_rate_per_position]
    assert unconditional == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    conditional = [p.value for p in figures.conditional_acceptance_rate_per_position]
    assert conditional == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert figures.target_forwards_per_token.value == pytest.approx(4 / 8)


@settings(max_examples=60, deadline=None)
@given(records=GENERATIONS)
def test_length_equals_one_plus_sum_of_positions(records):
    figures = acceptance_statistics(records, num_speculative_tokens=K, num_draws=5)
    if figures.num_rounds:
        positions = [p.value for p in figures.acceptance_rate_per_position]
        assert abs(figures.acceptance_length_micro.value - 1 - math.fsum(positions)) < 1e-9
        assert 1.0 <= figures.acceptance_length_micro.value <= K + 1
        assert positions == sorted(positions, reverse=True)


@settings(max_examples=60, deadline=None)
@given(records=GENERATIONS)
def test_conditionals_divide_by_rounds_that_made_the_draft_and_reached_it(records):
    figures = acceptance_statistics(records, num_speculative_tokens=K, num_draws=5)
    rounds = [
        pair
        for record in records
        for pair in zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    ]
    for i, rate in enumerate(figures.conditional_acceptance_rate_per_position, start=1):
        reached = [accepted >= i for accepted, drafted in rounds if accepted >= i - 1 < drafted]
        expected = sum(reached) / len(reached) if reached else None
        assert rate.value == (None if expected is None else pytest.approx(expected))


@settings(max_examples=60, deadline=None)
@given(records=GENERATIONS)
def test_conditionals_multiply_to_the_unconditional_if_all_rounds_make_k_drafts(records):
    records = [
        dataclasses.replace(record, num_drafted_per_round=(K,) * len(record.num_drafted_per_round))
        for record in records
    ]
    figures = acceptance_statistics(records, num_speculative_tokens=K, num_draws=5)
    product = 1.0
    for plain, conditional in zip(
        figures.acceptance_rate_per_position,
        figures.conditional_acceptance_rate_per_position,
        strict=True,
    ):
        if conditional.value is None:
            assert not plain.value
            break
        product *= conditional.value
        assert product == pytest.approx(plain.value)


@settings(max_examples=40, deadline=None)
@given(records=GENERATIONS, seed=st.integers(0, 2**31))
def test_paired_difference_of_identical_data_is_exactly_zero(records, seed):
    shuffled = random.Random(seed).sample(records, len(records))
    differences = paired_differences(
        records, shuffled, num_speculative_tokens=K, seed=seed, num_draws=50
    )
    wanted = {(0.0, 0.0, 0.0), (None,) * 3}
    if len(records) == 1:
        wanted.add((0.0, None, None))
    assert all(tuple(figure) in wanted for figure in differences.values())


def test_interval_is_reproducible_by_seed():
    records = random_generations(90, probability=0.6, seed=0)
    first, again, other = (
        acceptance_statistics(records, num_speculative_tokens=3, seed=seed) for seed in (5, 5, 6)
    )
    assert first == again
    assert first.acceptance_length_micro.low != other.acceptance_length_micro.low


@pytest.mark.parametrize("seed", range(4))
def test_interval_contains_the_estimate(seed: int):
    records = random_generations(90, probability=0.6, seed=seed)
    figures = acceptance_statistics(records, num_speculative_tokens=3, seed=seed)
    for figure in (
        figures.acceptance_length_micro,
        figures.acceptance_length_macro,
        figures.acceptance_rate,
        figures.target_forwards_per_token,
        *figures.acceptance_rate_per_position,
        *figures.conditional_acceptance_rate_per_position,
    ):
        assert figure.low < figure.value < figure.high


def test_interval_covers_the_truth_about_as_often_as_it_says():
    truth = 1 + 0.6 + 0.6**2 + 0.6**3
    covered = 0
    for seed in range(100):
        figures = acceptance_statistics(
            random_generations(80, probability=0.6, seed=seed),
            num_speculative_tokens=3,
            seed=seed,
            num_draws=400,
        )
        covered += (
            figures.acceptance_length_micro.low <= truth <= figures.acceptance_length_micro.high
        )
    assert 87 <= covered <= 100  # 95 expected, 3.5 standard deviations


def test_interval_is_over_prompts_and_not_over_rounds():
    """40 equal rounds of a prompt tell no more than one: the interval must not shrink."""
    once = [generation(f"q{i}", [i % 4]) for i in range(100)]
    often = [generation(f"q{i}", [i % 4] * 40) for i in range(100)]
    narrow, wide = (
        acceptance_statistics(records, num_speculative_tokens=3).acceptance_length_micro
        for records in (often, once)
    )
    assert narrow == pytest.approx(wide)


def test_paired_interval_is_narrower_than_the_difference_of_two_intervals():
    """Every prompt gains exactly one accepted draft per round, so the difference has no spread."""
    low = [generation(f"q{i}", [i % 3] * 5) for i in range(90)]
    high = [generation(f"q{i}", [i % 3 + 1] * 5) for i in range(90)]
    differences = paired_differences(high, low, num_speculative_tokens=3)
    assert tuple(differences["acceptance_length_micro"]) == pytest.approx((1.0, 1.0, 1.0))


def test_paired_difference_of_other_prompts_is_refused():
    with pytest.raises(ValueError, match="2 on one side only"):
        paired_differences([generation("a", [1])], [generation("b", [1])], num_speculative_tokens=3)


def test_paired_difference_of_a_repeated_prompt_is_refused():
    twice = [generation("a", [1]), generation("a", [2])]
    with pytest.raises(ValueError, match="two of a"):
        paired_differences(twice, twice, num_speculative_tokens=3)


@pytest.mark.parametrize("finish_reason", ["non_finite", "abort"])
def test_nothing_finished_gives_none_and_a_warning(finish_reason: str):
    records = [generation("a", [1, 2], finish_reason=finish_reason)]
    figures = acceptance_statistics(records, num_speculative_tokens=2 + 1)
    assert figures.acceptance_length_micro.value is None
    assert figures.acceptance_length_macro.value is None
    assert figures.acceptance_rate.value is None
    assert figures.target_forwards_per_token.value is None
    assert [p.value for p in figures.acceptance_rate_per_position] == [None] * 3
    assert figures.num_unfinished == 1
    assert "no generation finished" in " ".join(figures.warnings)


def test_no_records_give_none():
    figures = acceptance_statistics([], num_speculative_tokens=3)
    assert figures.acceptance_length_micro.value is None
    assert figures.num_prompts == 0


@pytest.mark.parametrize("num_drafts", [0, 3], ids=["baseline", "no head"])
def test_length_is_exactly_one_where_nothing_is_drafted(num_drafts: int):
    records = [generation(f"q{i}", [], num_plain_steps=i + 1) for i in range(5)]
    figures = acceptance_statistics(records, num_speculative_tokens=num_drafts)
    assert tuple(figures.acceptance_length_micro) == (1.0, 1.0, 1.0)
    assert tuple(figures.acceptance_length_macro) == (1.0, 1.0, 1.0)
    assert tuple(figures.target_forwards_per_token) == (1.0, 1.0, 1.0)
    assert figures.acceptance_rate.value is None


def test_length_is_exactly_k_plus_one_where_all_is_accepted():
    records = [generation(f"q{i}", [3] * (i + 1)) for i in range(5)]
    figures = acceptance_statistics(records, num_speculative_tokens=3)
    assert tuple(figures.acceptance_length_micro) == (4.0, 4.0, 4.0)
    assert tuple(figures.acceptance_length_macro) == (4.0, 4.0, 4.0)
    assert tuple(figures.acceptance_rate) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("num_prompts", "is_warned"), [(79, True), (80, False)])
def test_few_prompts_warn(num_prompts: int, is_warned: bool):
    records = [generation(f"q{i}", [1]) for i in range(num_prompts)]
    figures = acceptance_statistics(records, num_speculative_tokens=3, num_draws=10)
    assert bool(figures.warnings) is is_warned
    assert all("only 79 prompts" in warning for warning in figures.warnings)


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [([4], [4]), ([2], [1]), ([-1], [1]), ([0], [0]), ([1], [1, 1])],
    ids=["more than K", "more than drafted", "negative", "round without drafts", "two lengths"],
)
def test_contradictory_counters_are_refused(accepted: list[int], drafted: list[int]):
    record = generation("bad one", [1])
    record = type(record)(
        **{
            **vars(record),
            "num_accepted_per_round": tuple(accepted),
            "num_drafted_per_round": tuple(drafted),
        }
    )
    with pytest.raises(IntegrityError, match="record bad one"):
        acceptance_statistics([record], num_speculative_tokens=3)


def test_domains_are_separate():
    records = [generation("a", [3]), generation("b", [0]), generation("c", [1])]
    domains = {"a": "x", "b": "y", "c": "y"}
    by_domain = statistics_per_domain(records, domains, num_speculative_tokens=3)
    assert list(by_domain) == ["x", "y"]
    assert by_domain["x"].acceptance_length_micro.value == 4.0
    assert by_domain["y"].acceptance_length_micro.value == 1.5
