"""Block verification: its definition draft by draft, its distribution, noise used twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.decode.sampling.sampling import (
    Stream,
    sampling_tensors,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify import verify as module
from mtp_research.decode.verify.verify import VerifyInputs, verify_block, verify_standard
from tests.decode.markov import CPU, decode, text_p_value
from tests.decode.test_verify import SAMPLINGS, make_inputs


def _slow_block(
    target: list[list[float]], draft: list[list[float]], drafts: list[int], noise: list[float]
) -> tuple[int, list[float]]:
    """Accepted count of one request and the distribution of the token after it."""
    valid = next((i for i, d in enumerate(drafts) if d < 0), len(drafts))
    weight, count = 1.0, 0
    after = residual_of(target[0], draft[0], weight) if valid else target[0]
    for i in range(1, valid + 1):
        token = drafts[i - 1]
        weight = min(1.0, weight * target[i - 1][token] / draft[i - 1][token])
        if i == valid:
            passing, rest = weight, target[i]
        else:
            rest = residual_of(target[i], draft[i], weight)
            mass = sum(rest)
            passing = mass / (mass + 1 - weight) if mass + 1 - weight else 1.0
        if noise[i] < passing:
            count, after = i, rest
    return count, after


def residual_of(target: list[float], draft: list[float], weight: float) -> list[float]:
    return [max(weight * p - q, 0.0) for p, q in zip(target, draft, strict=True)]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    num_drafts=st.integers(1, 5),
    num_valid=st.integers(0, 5),
    sampled=st.booleans(),
    spread=st.sampled_from([0.2, 1.0]),
)
def test_block_any_batch_equals_slow_reference(
    seed: int, num_drafts: int, num_valid: int, sampled: bool, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_requests, vocab = 6, 4
    logits = torch.randn(num_requests, num_drafts + 1, vocab, generator=generator) * spread
    probs = torch.randn(num_requests, num_drafts, vocab, generator=generator) * spread
    probs = torch.softmax(probs.double(), dim=-1)
    drafts = torch.randint(0, vocab, (num_requests, num_drafts), generator=generator)
    one_hot = torch.nn.functional.one_hot(drafts, vocab).double()
    drafts[0, num_valid:] = -1
    inputs = make_inputs(logits, drafts.tolist(), draft_probs=probs if sampled else None, seed=seed)
    output = verify_block(inputs)
    target = target_probabilities(logits, inputs.params)
    proposals = (probs if sampled else one_hot).tolist()
    for row in range(num_requests):
        noise = [
            float(uniform_noise(torch.tensor(seed + row), torch.tensor(10), Stream.ACCEPT, index=i))
            for i in range(num_drafts + 1)
        ]
        count, after = _slow_block(
            target[row].tolist(), proposals[row], drafts[row].tolist(), noise
        )
        assert int(output.num_accepted[row]) == count
        emitted = output.sampled_token_ids[row].tolist()
        assert emitted[:count] == drafts[row, :count].tolist()
        assert emitted[count + 1 :] == [-1] * (num_drafts - count)
        position = torch.tensor(10 + count)
        uniform = float(uniform_noise(torch.tensor(seed + row), position, Stream.RESAMPLE))
        assert emitted[count] == _pick(after, uniform)


def _pick(weights: list[float], uniform: float) -> int:
    threshold, total = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if total > threshold:
            return token
    raise AssertionError("no token has weight")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sample_drafts", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_block_text_is_distributed_as_the_target(name: str, sample_drafts: bool, seed: int) -> None:
    decoded = decode(verify_block, seed=seed, sampling=SAMPLINGS[name], sample_drafts=sample_drafts)
    assert text_p_value(decoded) > 1e-3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_block_accepts_more_than_standard(seed: int) -> None:
    means = [
        decode(rule, seed=seed, sampling=SAMPLINGS["plain"], sample_drafts=True, num_tokens=2)
        .first.num_accepted.double()
        .mean()
        for rule in (verify_standard, verify_block)
    ]
    assert means[1] > means[0] + 0.01


def test_block_single_draft_accepts_with_the_standard_chance() -> None:
    counts = [
        int(
            decode(
                rule, seed=4, sampling=SAMPLINGS["plain"], sample_drafts=True, num_drafts=1
            ).first.num_accepted.sum()
        )
        for rule in (verify_standard, verify_block)
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.02)


def test_block_test_noise_keyed_by_position_alone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stale(inputs: VerifyInputs):
        # The test of prefix i decides about draft i, whose position is one before its row's.
        return uniform_noise(inputs.params.seed[:, None], inputs.positions - 1, Stream.ACCEPT)

    monkeypatch.setattr(module, "_test_noise", stale)
    decoded = decode(verify_block, seed=2, sampling=SAMPLINGS["plain"])
    assert text_p_value(decoded) < 1e-9


def test_block_draft_noise_keyed_by_position_alone_is_found() -> None:
    decoded = decode(
        verify_block,
        seed=3,
        sampling=SAMPLINGS["plain"],
        sample_drafts=True,
        noise=lambda params, position, *_: uniform_noise(params.seed, position, Stream.DRAFT),
    )
    assert text_p_value(decoded) < 1e-9


def test_block_temperature_zero_equals_greedy_choice() -> None:
    logits = torch.randn(80, 4, 3, generator=torch.Generator().manual_seed(0))
    drafts = torch.randint(0, 3, (80, 3), generator=torch.Generator().manual_seed(1))
    params = sampling_tensors([SamplingParams()] * 80, device=CPU)
    inputs = make_inputs(logits, drafts.tolist())._replace(params=params)
    output = verify_block(inputs)
    expected = verify_standard(inputs)
    assert torch.equal(output.num_accepted, expected.num_accepted)
    assert torch.equal(output.sampled_token_ids, expected.sampled_token_ids)
