"""The two-level bootstrap against sums by hand, against the one-level one, and on made-up seeds."""

import numpy as np
import pytest

from mtp_research.evaluation.stats.bootstrap import (
    Draws,
    Ratio,
    difference,
    estimate,
    estimate_of,
    lengths,
    make_draws,
)

ACCEPTED = np.array([[4, 0, 6], [2, 2, 2]])
ROUNDS = np.array([[4, 5, 3], [4, 4, 1]])


def test_length_is_the_mean_over_seeds_and_follows_the_drawn_counts() -> None:
    # Second draw: the first seed twice, prompts 1, 2 and 2.
    draws = Draws(seeds=np.array([[1, 1], [2, 0.0]]), prompts=np.array([[1, 1, 1], [0, 1, 2.0]]))
    found = lengths(ACCEPTED, ROUNDS, draws)
    whole = [1 + 10 / 12, 1 + 6 / 9]
    assert found.by_seed.tolist() == pytest.approx(whole)
    assert found.value == pytest.approx(sum(whole) / 2)
    assert found.draws.tolist() == pytest.approx([sum(whole) / 2, 1 + 12 / 11])


def test_draws_take_as_many_seeds_and_prompts_as_there_are_and_repeat_by_seed() -> None:
    draws = make_draws(3, 20, seed=1, num_draws=50)
    assert (draws.seeds.shape, draws.prompts.shape) == ((50, 3), (50, 20))
    assert set(draws.seeds.sum(axis=1)) == {3}
    assert set(draws.prompts.sum(axis=1)) == {20}
    again, other = (make_draws(3, 20, seed=seed, num_draws=50) for seed in (1, 2))
    assert np.array_equal(draws.prompts, again.prompts)
    assert not np.array_equal(draws.prompts, other.prompts)


def test_one_seed_gives_the_interval_of_the_prompt_bootstrap() -> None:
    generator = np.random.default_rng(0)
    rounds = generator.integers(5, 30, size=(1, 100))
    accepted = generator.binomial(rounds * 3, 0.4)
    ours = estimate_of(lengths(accepted, rounds, make_draws(1, 100, seed=0)))
    ratio = {"length": Ratio((accepted + rounds)[0] * 1.0, rounds[0] * 1.0)}
    theirs = estimate(ratio, seed=0)["length"]
    assert ours.value == pytest.approx(theirs.value, abs=1e-12)
    assert [ours.low, ours.high] == pytest.approx([theirs.low, theirs.high], abs=0.01)


def test_seeds_that_differ_widen_the_interval_and_pairing_takes_prompts_out() -> None:
    rounds = np.full((3, 200), 10)
    accepted = np.array([[10], [14], [18]]) + np.tile([0, 4], 100)
    draws = make_draws(3, 200, seed=0)
    all_seeds = lengths(accepted, rounds, draws)
    one = estimate_of(lengths(accepted[1:2], rounds[1:2], make_draws(1, 200, seed=0)))
    three = estimate_of(all_seeds)
    assert three.high - three.low > 4 * (one.high - one.low)
    shifted = difference(lengths(accepted + 1, rounds, draws), all_seeds)
    assert list(shifted) == pytest.approx([0.1, 0.1, 0.1])


def test_prompts_without_rounds_are_undefined_and_not_zero() -> None:
    found = lengths([[0, 3]], [[0, 3]], make_draws(1, 2, seed=0))
    assert np.isnan(found.draws).any()
    assert estimate_of(found) == (2.0, 2.0, 2.0)
    assert estimate_of(lengths([[0]], [[0]], make_draws(1, 1, seed=0))).value is None
