"""The rules for the number of drafts, on host numbers and on tensors; no model."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.decode.draft.draft_length import (
    BatchTableLength,
    ConfidenceLength,
    ExpectedGainLength,
    FixedLength,
    RecentRounds,
    StepKind,
    best_num_drafts,
)
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "draft_length.json"
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def _recent(num_drafts: int, **changes: float) -> RecentRounds:
    return RecentRounds(DraftPlan(POLICIES["eagle"], num_drafts, 1), **changes)


def test_fixed_rule_always_drafts_k() -> None:
    recent = _recent(4)
    assert {FixedLength().num_drafts(batch_size=size, recent=recent) for size in (1, 64)} == {4}
    assert FixedLength().keeps is None


def test_confidence_keeps_at_the_bar_and_drops_below_it_and_nan() -> None:
    probability = torch.tensor([0.31, 0.3, 0.29, torch.nan])
    assert ConfidenceLength(0.3).keeps(probability).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("batch_size", "expected"), [(0, 5), (1, 5), (7, 5), (8, 2), (31, 2), (32, 0), (500, 0)]
)
def test_batch_table_holds_from_its_size_on(batch_size: int, expected: int) -> None:
    rule = BatchTableLength(((1, 9), (8, 2), (32, 0)))
    assert rule.num_drafts(batch_size=batch_size, recent=_recent(5)) == expected


@given(rates=RATES, cost_ratio=st.floats(0, 2))
def test_best_number_of_drafts_equals_exhaustive_search(
    rates: list[float], cost_ratio: float
) -> None:
    def tokens_per_cost(n: int) -> float:
        tokens = 1.0
        for i in range(1, n + 1):
            product = 1.0
            for rate in rates[:i]:
                product *= rate
            tokens += product
        return tokens / (1 + cost_ratio * n)

    best = best_num_drafts(rates, costs=[1 + cost_ratio * n for n in range(len(rates) + 1)])
    scores = [tokens_per_cost(n) for n in range(len(rates) + 1)]
    assert scores[best] == pytest.approx(max(scores))
    assert all(score < scores[best] + 1e-12 for score in scores[:best])


def test_expected_gain_worked_example() -> None:
    assert best_num_drafts([0.8, 0.5], costs=[1.0, 1.2, 1.4]) == 2
    assert best_num_drafts([0.8, 0.5], costs=[1.0, 1.4, 1.8]) == 1
    assert best_num_drafts([0.8, 0.5], costs=[1.0, 1.9, 2.8]) == 0
    assert best_num_drafts([1.0, 1.0], costs=[1.0, 1.0, 1.0]) == 2


def test_the_number_stays_unless_another_is_clearly_better() -> None:
    rates = [0.8, 0.5]  # 1, 1.5 and 1.51 or 1.57 tokens per cost
    assert best_num_drafts(rates, costs=[1.0, 1.2, 1.455]) == 2
    assert best_num_drafts(rates, costs=[1.0, 1.2, 1.455], current=1) == 1
    assert best_num_drafts(rates, costs=[1.0, 1.2, 1.4], current=1) == 2


def feed(recent: RecentRounds, rounds: list[tuple[int, int]], *, times: int = 1) -> None:
    for drafted, accepted in rounds * times:
        recent.add_rounds(1, num_drafted=drafted, num_accepted=accepted)
        recent.end_step(num_drafts=drafted, seconds=1.0)


def test_estimate_starts_at_the_prior_and_ends_at_the_rates() -> None:
    recent = _recent(3, half_life_steps=1e9)
    assert recent.counts.conditional_acceptance() == pytest.approx([0.8] * 3)
    # Draft 1 is accepted 3 times in 4, draft 2 once in 3 (made in every round), draft 3 never.
    feed(recent, [(3, 0), (3, 1), (3, 1), (3, 2)], times=500)
    assert recent.counts.conditional_acceptance() == pytest.approx([3 / 4, 1 / 3, 0.0], abs=0.01)


def test_estimate_ignores_positions_that_were_not_drafted() -> None:
    recent = _recent(3, half_life_steps=1e9)
    feed(recent, [(1, 1)], times=1000)
    first, second, third = recent.counts.conditional_acceptance()
    assert first == pytest.approx(1.0, abs=0.01)
    assert (second, third) == (0.8, 0.8)


def test_estimate_forgets_half_in_a_half_life() -> None:
    recent = _recent(1, half_life_steps=10)
    recent.add_rounds(1, num_drafted=1, num_accepted=1)
    for _ in range(10):
        recent.end_step(num_drafts=0, seconds=1.0)
    assert recent.counts.reached == pytest.approx([0.5])
    assert recent.counts.accepted == pytest.approx([0.5])


def test_expected_gain_drops_hopeless_drafts_and_tries_them_again() -> None:
    rule, recent = ExpectedGainLength(cost_ratio=0.2), _recent(3)
    chosen = []
    for _ in range(600):
        n = rule.num_drafts(batch_size=1, recent=recent)
        recent.add_rounds(1, num_drafted=n, num_accepted=min(n, 1))  # draft 2 is never right
        recent.end_step(num_drafts=n, seconds=1.0)
        chosen.append(n)
    assert chosen[0] == 3  # optimism: what was never seen is tried
    later = chosen[100:]
    assert {2, 3} & set(later)  # and again later, in case the text has changed
    assert later.count(1) > 0.9 * len(later)


def test_expected_gain_measures_the_cost_it_was_not_given() -> None:
    rule, recent = ExpectedGainLength(), _recent(4)
    chosen = []
    for _ in range(60):
        n = rule.num_drafts(batch_size=1, recent=recent)
        recent.add_rounds(1, num_drafted=n, num_accepted=n)
        recent.end_step(num_drafts=n, seconds=1.0 + 0.5 * n)
        chosen.append(n)
    assert set(chosen[:24]) == {0, 4}
    assert recent.cost_ratio() == pytest.approx(0.5)
    assert set(chosen[24:]) == {4}  # all accepted: 5 tokens for 3 steps


def test_measured_cost_leaves_out_steps_after_a_change() -> None:
    recent = _recent(2)
    for n, seconds in [(0, 1.0)] * 6 + [(2, 99.0)] + [(2, 1.4)] * 5:
        recent.end_step(num_drafts=n, seconds=seconds)
    assert recent.cost_ratio() == pytest.approx(0.2)
    assert _recent(2).cost_ratio() is None


def test_prices_that_drafts_cannot_pay_end_drafting() -> None:
    rule, recent = ExpectedGainLength(cost_ratio=3.0), _recent(3)
    assert rule.num_drafts(batch_size=1, recent=recent) == 0


def test_batch_table_is_pairs_or_a_mapping() -> None:
    assert BatchTableLength({1: 3, 8: 2}) == BatchTableLength(((1, 3), (8, 2)))
    assert BatchTableLength({1: 3, 8: 2}).table == ((1, 3), (8, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConfidenceLength(1.1), r"spec.draft_p_min must be in \[0, 1\], got 1.1"),
        (lambda: ConfidenceLength(float("nan")), "spec.draft_p_min must be"),
        (lambda: ConfidenceLength("0.3"), "got '0.3'"),
        (lambda: BatchTableLength((1, 8)), r"got \(1, 8\)"),
        (lambda: BatchTableLength({1: None}), "drafts >= 0"),
        (lambda: ExpectedGainLength("0.1"), "got '0.1'"),
        (lambda: BatchTableLength(()), "spec.draft_table must map rising batch sizes"),
        (lambda: BatchTableLength(((2, 3),)), "from 1 on"),
        (lambda: BatchTableLength(((1, 3), (8, 1), (8, 2))), "rising"),
        (lambda: BatchTableLength(((1, 3), (8, -1))), "drafts >= 0"),
        (lambda: ExpectedGainLength(-0.1), "spec.draft_cost_ratio must be >= 0, got -0.1"),
    ],
)
def test_bad_settings_name_the_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=f"batch_{row['batch']}_accept_{row['accept']}_most_{len(row['step_ms']) - 1}"
        )
        for row in json.loads(STORED.read_text())["rows"]
    ],
)
def test_rule_is_as_fast_as_the_best_number_by_times_measured_on_a_gpu(row: dict) -> None:
    """Steps take what they took then, give or take 3 %, and one of a hundred thrice as long."""
    prices = {int(n): ms / 1e3 for n, ms in row["step_ms"].items()}
    rates, batch, most = row["tokens_per_s"], row["batch"], max(prices)
    reach = [row["accept"] ** i for i in range(1, most + 1)]
    tokens = list(itertools.accumulate(reach, initial=1.0))
    recent, draw = _recent(most), random.Random(0)
    recent.times.prices[StepKind(most, has_prompts=False)] = {batch: prices}
    num_tokens = seconds = 0.0
    for _ in range(2000):
        n = ExpectedGainLength().num_drafts(batch_size=batch, recent=recent)
        for _ in range(min(batch, 16)):
            drawn = itertools.takewhile(lambda _: draw.random() < row["accept"], range(n))
            recent.add_rounds(1, num_drafted=n, num_accepted=len(list(drawn)))
        usual = batch * tokens[n] / rates[str(n)]
        noise = draw.gauss(1.0, 0.03) * (3.0 if draw.random() < 0.01 else 1.0)
        recent.end_step(num_drafts=n, seconds=usual * noise, batch_size=batch)
        num_tokens, seconds = num_tokens + batch * tokens[n], seconds + usual
    assert num_tokens / seconds >= 0.98 * rates[row["best"]]
