"""Replay walk and DP: hand examples, a simulated loop, Monte-Carlo."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.training.walk.acceptance import (
    AnchorRange,
    accepted_prefix,
    bootstrap_error,
    others_proxies,
    pooled_length,
    replay_dp,
    replay_walk,
    response_ranges,
)


def simulate_loop(draft_hits: np.ndarray, *, num_prompt_tokens: int, num_tokens: int) -> list[int]:
    """A decode loop in words: known tokens, drafts at the frontier, verify, append, repeat.

    Rounds are cut where the text lacks one of the K tokens that the verifier would look at.
    """
    num_drafts = draft_hits.shape[1]
    accepted_per_round = []
    known = num_prompt_tokens + 1  # the prefill emitted x_P
    while True:
        frontier = known - 2
        verified = [known + i for i in range(num_drafts)]  # positions of the drafted tokens
        if verified[-1] > num_tokens - 1:
            return accepted_per_round
        accepted = 0
        while accepted < num_drafts and draft_hits[frontier, accepted]:
            accepted += 1
        accepted_per_round.append(accepted)
        known += accepted + 1


@st.composite
def hit_matrices(draw):
    num_tokens = draw(st.integers(1, 40))
    num_depths = draw(st.integers(1, 5))
    num_prompt_tokens = draw(st.integers(1, num_tokens))
    rate = draw(st.floats(0.0, 1.0))
    seed = draw(st.integers(0, 2**16))
    hits = np.random.default_rng(seed).random((num_tokens, num_depths)) < rate
    return hits, num_prompt_tokens


@settings(max_examples=200, deadline=None)
@given(hit_matrices())
def test_replay_walk_random_hits_equals_simulated_loop(case):
    hits, num_prompt_tokens = case
    num_tokens, num_depths = hits.shape
    walk = replay_walk(hits, start=num_prompt_tokens - 1, stop=num_tokens - num_depths - 1)
    loop = simulate_loop(hits, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens)
    assert list(walk.accepted_per_round) == loop
    assert walk.num_rounds == len(loop)
    assert walk.num_accepted == sum(loop)


def test_replay_walk_hand_example():
    hits = np.zeros((9, 2), dtype=bool)
    hits[3] = hits[6] = [True, True]
    hits[5] = [True, False]
    walk = replay_walk(hits, start=3, stop=7)
    assert walk == (2, 4, (2, 2), 3.0)


def test_replay_walk_hit_after_a_miss_is_not_accepted():
    hits = torch.tensor([[False, True, True], [True, False, True], [True, True, True]])
    assert replay_walk(hits, start=0, stop=3).accepted_per_round == (0, 1)


@pytest.mark.parametrize(("value", "length"), [(False, 1.0), (True, 4.0)], ids=["never", "always"])
def test_replay_walk_constant_hits_reach_the_bounds(value, length):
    hits = np.full((20, 3), value)
    assert replay_walk(hits, start=0, stop=16).acceptance_length == length


def test_replay_walk_without_known_round_has_no_length():
    walk = replay_walk(np.ones((4, 3), dtype=bool), start=2, stop=0)
    assert walk.num_rounds == 0
    assert math.isnan(walk.acceptance_length)


def test_replay_dp_zero_or_one_probabilities_equals_walk():
    hits = np.random.default_rng(0).random((60, 3)) < 0.6
    walk = replay_walk(hits, start=4, stop=56)
    expected = replay_dp(hits.astype(float), start=4, stop=56)
    assert expected.num_rounds == walk.num_rounds
    assert expected.num_accepted == walk.num_accepted


def test_replay_dp_random_probabilities_matches_monte_carlo():
    generator = np.random.default_rng(1)
    accept = generator.random((50, 3)) ** 0.5
    expected = replay_dp(accept, start=5, stop=46)
    # A walk looks at each anchor at most once, so one draw of all flags is one run of the loop.
    walks = [
        replay_walk(generator.random(accept.shape) < accept, start=5, stop=46) for _ in range(4000)
    ]
    rounds = np.array([walk.num_rounds for walk in walks], dtype=float)
    accepted = np.array([walk.num_accepted for walk in walks], dtype=float)
    for got, samples in ((expected.num_rounds, rounds), (expected.num_accepted, accepted)):
        assert abs(got - samples.mean()) < 3 * samples.std(ddof=1) / math.sqrt(len(samples))
    pooled = 1 + accepted.sum() / rounds.sum()
    assert abs(expected.acceptance_length - pooled) < 0.01


def test_others_proxies_hand_example():
    hits = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1]], dtype=bool)
    proxies = others_proxies(hits, ranges=[AnchorRange(0, 2), AnchorRange(2, 4)])
    assert proxies.product_of_marginals == pytest.approx(1 + 0.5 + 0.25)
    assert proxies.uniform_joint_prefix == pytest.approx(1 + 3 / 4)


def test_others_proxies_clustered_hits_differ_from_the_walk():
    hits = np.zeros((32, 3), dtype=bool)
    hits[:16] = True  # an easy half: rounds hop over its anchors
    walk = replay_walk(hits, start=0, stop=32)
    proxies = others_proxies(hits, ranges=[AnchorRange(0, 32)])
    assert walk.acceptance_length == pytest.approx(1 + 12 / 20)
    assert proxies.uniform_joint_prefix == pytest.approx(2.5)


def test_response_ranges_two_turns():
    #           bos usr usr ast a  a  a  end usr ast b  b
    loss_mask = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert response_ranges(loss_mask, num_depths=1) == [AnchorRange(3, 6), AnchorRange(9, 10)]
    assert response_ranges(loss_mask, num_depths=2) == [AnchorRange(3, 5)]
    assert response_ranges([1, 1, 1], num_depths=1) == [AnchorRange(0, 1)]


def test_accepted_prefix_counts_leading_hits():
    hits = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    assert accepted_prefix(hits).tolist() == [2, 0, 3]


def test_bootstrap_error_matches_the_analytic_error():
    generator = np.random.default_rng(3)
    rounds = np.full(400, 10.0)
    accepted = generator.binomial(10, 0.4, size=400).astype(float)
    error = bootstrap_error(accepted, rounds)
    analytic = (accepted / 10).std(ddof=1) / math.sqrt(400)
    assert error == pytest.approx(analytic, rel=0.1)
    assert pooled_length(accepted, rounds) == pytest.approx(1 + accepted.mean() / 10)
    assert math.isnan(bootstrap_error([3.0], [2.0]))
