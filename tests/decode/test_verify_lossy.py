"""Lossy rules against their definitions, and the schedules of synthetic acceptance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import VerifyOptions
from mtp_research.decode.verify.verify import verify_greedy
from mtp_research.decode.verify.verify_options import rates_of_length
from mtp_research.decode.verify.verify_rules import (
    text_is_thinking,
    thinking_rows,
    verify_relaxed,
    verify_synthetic,
    verify_typical,
)
from mtp_research.runtime.errors import ConfigError
from tests.decode.test_verify import make_inputs

VOCAB = 6
BEGIN, END = 4, 5


def _batch(seed: int, num_drafts: int = 3, num_requests: int = 5):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_requests, num_drafts + 1, VOCAB)
    logits = torch.randint(-3, 3, shape, generator=generator).double() / 2
    drafts = torch.randint(-1, VOCAB, shape[:2], generator=generator)[:, :num_drafts]
    return logits, drafts


def _softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(value / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def _count(judge, drafts: list[int]) -> int:
    """Drafts up to the first that `judge(index)` refuses."""
    return next((i for i in range(len(drafts)) if drafts[i] < 0 or not judge(i)), len(drafts))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    top_n=st.integers(1, 4),
    delta=st.sampled_from([0.0, 0.05, 0.2, 1.0]),
)
def test_relaxed_any_batch_equals_slow_reference(seed: int, top_n: int, delta: float) -> None:
    logits, drafts = _batch(seed)
    options = VerifyOptions(relaxed_top_n=top_n, relaxed_delta=delta)
    inputs = make_inputs(logits, drafts.tolist(), options=options, temperature=0.0)
    output = verify_relaxed(inputs)
    for row, row_drafts in enumerate(drafts.tolist()):

        def judge(i: int, row: int = row, row_drafts: list[int] = row_drafts) -> bool:
            values = logits[row, i].tolist()
            probs = torch.softmax(logits[row, i], dim=-1).tolist()
            draft = row_drafts[i]
            better = sum(p > probs[draft] for p in probs)
            return draft == values.index(max(values)) or (
                better < top_n and probs[draft] >= max(probs) - delta
            )

        count = _count(judge, row_drafts)
        assert int(output.num_accepted[row]) == count
        assert int(output.sampled_token_ids[row, count]) == int(logits[row, count].argmax())


def test_relaxed_strictest_setting_equals_greedy() -> None:
    logits = torch.randn(200, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    drafts = torch.randint(0, VOCAB, (200, 3), generator=torch.Generator().manual_seed(1))
    options = VerifyOptions(relaxed_top_n=1, relaxed_delta=0.0)
    inputs = make_inputs(logits, drafts.tolist(), options=options, temperature=0.0)
    assert torch.equal(
        verify_relaxed(inputs).sampled_token_ids, verify_greedy(inputs).sampled_token_ids
    )


def test_relaxed_holds_only_between_thinking_tokens() -> None:
    # Token 0 is best, 1 is as good as accepted: relaxed takes it, greedy does not.
    logits = torch.tensor([1.0, 0.9, -9, -9, 0.9, 0.9]).expand(3, 4, VOCAB)
    options = VerifyOptions(relaxed_thinking_token_ids=(BEGIN, END))
    inputs = make_inputs(logits, [[1, END, 1], [1, 1, 1], [0, BEGIN, 1]], options=options)
    inputs = inputs._replace(is_thinking=torch.tensor([True, False, False]))
    assert verify_relaxed(inputs).num_accepted.tolist() == [2, 0, 1]


def _slow_thinking(text: list[int], state: bool = False) -> bool:
    for token in text:
        if token in (BEGIN, END):
            state = token == BEGIN
    return state


@given(
    texts=st.lists(st.lists(st.integers(3, 5), min_size=6, max_size=6), min_size=1, max_size=4),
    num_tokens=st.integers(0, 6),
)
def test_thinking_state_any_text_equals_slow_reference(
    texts: list[list[int]], num_tokens: int
) -> None:
    table = torch.tensor(texts)
    lengths = torch.full((len(texts),), num_tokens)
    state = text_is_thinking(table, num_tokens=lengths, begin=BEGIN, end=END)
    assert state.tolist() == [_slow_thinking(text[:num_tokens]) for text in texts]
    rows = thinking_rows(state, table[:, num_tokens:], begin=BEGIN, end=END)
    expected = [[_slow_thinking(text[:j]) for j in range(num_tokens, 6)] for text in texts]
    assert rows.tolist() == expected


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    epsilon=st.sampled_from([0.09, 0.2, 0.5]),
    delta=st.sampled_from([0.3, 1.0]),
    temperature=st.sampled_from([0.4, 1.0]),
)
def test_typical_any_batch_equals_slow_reference(
    seed: int, epsilon: float, delta: float, temperature: float
) -> None:
    logits, drafts = _batch(seed)
    options = VerifyOptions(typical_epsilon=epsilon, typical_delta=delta)
    inputs = make_inputs(logits, drafts.tolist(), options=options, temperature=temperature)
    output = verify_typical(inputs)
    for row, row_drafts in enumerate(drafts.tolist()):

        def judge(i: int, row: int = row, row_drafts: list[int] = row_drafts) -> bool:
            probs = _softmax(logits[row, i].tolist(), temperature)
            entropy = -sum(p * math.log(p) for p in probs)
            return probs[row_drafts[i]] > min(epsilon, delta * math.exp(-entropy))

        assert int(output.num_accepted[row]) == _count(judge, row_drafts)


def test_typical_temperature_zero_equals_greedy() -> None:
    logits, drafts = _batch(3, num_requests=200)
    inputs = make_inputs(logits, drafts.tolist(), temperature=0.0)
    assert torch.equal(
        verify_typical(inputs).sampled_token_ids, verify_greedy(inputs).sampled_token_ids
    )


@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (1.0, 1.0, 0.0), (0.4, 0.4, 0.4)])
def test_synthetic_acceptance_follows_the_rates(rates: tuple[float, ...]) -> None:
    num_requests = 20_000
    logits = torch.zeros(num_requests, 4, 3)
    logits[..., 2] = 50.0  # drafts are wrong, and accepted nevertheless
    options = VerifyOptions(synthetic_rates=rates)
    inputs = make_inputs(logits, [[0, 1, 0]] * num_requests, options=options)
    output = verify_synthetic(inputs)
    for j, rate in enumerate(rates):
        measured = float((output.num_accepted > j).double().mean())
        assert measured == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / num_requests))
    last = output.sampled_token_ids.gather(1, output.num_accepted[:, None])
    assert (last == 2).all()  # the token after them is the target's


@pytest.mark.parametrize(
    ("schedule", "lengths"), [("minimum_variance", {2, 3}), ("geometric", {1, 2, 3, 4})]
)
def test_synthetic_acceptance_by_mean_length(schedule: str, lengths: set[int]) -> None:
    num_requests = 20_000
    options = VerifyOptions(synthetic_length=2.3, synthetic_schedule=schedule)
    logits = torch.zeros(num_requests, 4, 3)
    inputs = make_inputs(logits, [[0, 1, 0]] * num_requests, options=options)
    length = verify_synthetic(inputs).num_accepted.double() + 1
    assert set(length.long().tolist()) == lengths
    spread = float(length.std()) / math.sqrt(num_requests)
    assert float(length.mean()) == pytest.approx(2.3, abs=4 * spread)


def test_synthetic_draft_under_a_mask_is_rejected() -> None:
    logits = torch.zeros(1, 4, 3)
    logits[:, 1, 0] = -torch.inf
    options = VerifyOptions(synthetic_rates=(1.0, 1.0, 1.0))
    output = verify_synthetic(make_inputs(logits, [[0, 0, 0]], options=options))
    assert output.num_accepted.tolist() == [1]


@given(
    num_drafts=st.integers(1, 12),
    fraction=st.floats(0, 1),
    schedule=st.sampled_from(["minimum_variance", "geometric"]),
)
def test_rates_of_length_sum_to_the_length(num_drafts: int, fraction: float, schedule: str) -> None:
    length = 1 + fraction * num_drafts
    rates = rates_of_length(length, num_speculative_tokens=num_drafts, schedule=schedule)
    VerifyOptions(synthetic_rates=rates)  # in range and falling
    assert len(rates) == num_drafts
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)


def test_rates_of_length_schedules_have_their_shape() -> None:
    rates = rates_of_length(3.25, num_speculative_tokens=4, schedule="minimum_variance")
    assert rates == (1.0, 1.0, 0.25, 0.0)
    rates = rates_of_length(2.875, num_speculative_tokens=3, schedule="geometric")
    assert [b / a for a, b in zip((1.0, *rates), rates, strict=False)] == pytest.approx(
        [rates[0]] * 3
    )


@pytest.mark.parametrize("length", [0.9, 4.5, float("nan")])
def test_rates_of_length_out_of_range_names_it(length: float) -> None:
    with pytest.raises(ConfigError, match=r"in \[1, K \+ 1 = 4\]"):
        rates_of_length(length, num_speculative_tokens=3, schedule="geometric")
