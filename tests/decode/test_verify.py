"""Greedy and standard verification: slow reference, distribution, planted bugs, bad rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_research.config.schema import ARGMAX_RULES, VERIFY_RULES, VerifyOptions
from mtp_research.decode.sampling.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    sampling_tensors,
    uniform_noise,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify.verify import (
    PADDING_TOKEN_ID,
    VerifyInputs,
    verify_greedy,
    verify_standard,
)
from mtp_research.decode.verify.verify_options import check_options
from mtp_research.decode.verify.verify_rules import RULES, is_lossless
from mtp_research.runtime.errors import ConfigError
from tests.decode.markov import CPU, column_p_value, decode, text_p_value

SAMPLINGS = {
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=3),
    "top-p": SamplingParams(temperature=1.4, top_p=0.8),
    "both": SamplingParams(temperature=0.9, top_k=4, top_p=0.9),
}


def make_inputs(
    logits: Tensor,
    drafts: list[list[int]],
    *,
    draft_probs: Tensor | None = None,
    temperature: float = 1.0,
    options: VerifyOptions | None = None,
    seed: int = 0,
) -> VerifyInputs:
    """Inputs of a batch whose requests have seeds `seed`, `seed + 1`, ... and ten tokens each."""
    one = sampling_tensors([SamplingParams(temperature=temperature)], device=CPU)
    seeds = torch.arange(seed, seed + len(drafts))
    params = SamplingTensors(*(p.expand(len(drafts)) for p in one[:4]), seeds, *one[5:])
    return VerifyInputs(
        target_logits=logits,
        draft_token_ids=torch.tensor(drafts, dtype=torch.int64).view(len(drafts), -1),
        draft_probs=draft_probs,
        params=params,
        positions=10 + torch.arange(logits.shape[1]).expand(len(drafts), -1),
        options=options or VerifyOptions(),
    )


def options_for(rule: str, num_drafts: int) -> VerifyOptions:
    """Options under which a rule accepts readily."""
    if rule == "synthetic":
        return VerifyOptions(synthetic_rates=(1.0,) * num_drafts)
    return VerifyOptions()


def _slow_greedy(logits: list[list[float]], drafts: list[int]) -> tuple[int, list[int]]:
    emitted: list[int] = []
    for row, values in enumerate(logits):
        best = values.index(max(values))
        emitted.append(best)
        if row == len(drafts) or drafts[row] != best:
            break
    return len(emitted) - 1, emitted + [PADDING_TOKEN_ID] * (len(logits) - len(emitted))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    drafts=st.integers(0, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.integers(-2, 6), min_size=k, max_size=k), min_size=1, max_size=4
        )
    ),
)
def test_greedy_any_batch_equals_slow_reference(seed: int, drafts: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that ties and accepted drafts are common.
    shape = (len(drafts), len(drafts[0]) + 1, 4)
    logits = torch.randint(0, 3, shape, generator=generator).float()
    output = verify_greedy(make_inputs(logits, drafts, temperature=0.0))
    for row, row_drafts in enumerate(drafts):
        count, emitted = _slow_greedy(logits[row].tolist(), row_drafts)
        assert int(output.num_accepted[row]) == count
        assert output.sampled_token_ids[row].tolist() == emitted
    assert output.is_finite.all()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sample_drafts", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_standard_text_is_distributed_as_the_target(
    name: str, sample_drafts: bool, seed: int
) -> None:
    decoded = decode(
        verify_standard, seed=seed, sampling=SAMPLINGS[name], sample_drafts=sample_drafts
    )
    if name == "plain":
        assert len(decoded.first.num_accepted.unique()) == 4  # each of the K+1 lengths occurs
    assert text_p_value(decoded) > 1e-3
    assert column_p_value(decoded) > 1e-3


@pytest.mark.parametrize("sample_drafts", [False, True], ids=["one-hot", "sampled"])
def test_standard_accept_noise_used_again_for_the_residual_is_found(
    sample_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = VerifyInputs.noise
    monkeypatch.setattr(VerifyInputs, "noise", lambda self, _: noise(self, Stream.ACCEPT))
    decoded = decode(
        verify_standard, seed=1, sampling=SAMPLINGS["plain"], sample_drafts=sample_drafts
    )
    assert text_p_value(decoded) < 1e-9
    assert column_p_value(decoded) < 1e-9


def test_standard_draft_and_residual_sharing_a_noise_stream_is_found() -> None:
    decoded = decode(
        verify_standard,
        seed=1,
        sampling=SAMPLINGS["plain"],
        sample_drafts=True,
        noise=lambda params, position, *_: uniform_noise(params.seed, position, Stream.RESAMPLE),
    )
    assert text_p_value(decoded) < 1e-9
    assert column_p_value(decoded) < 1e-9


def test_standard_rejections_drawn_from_the_target_itself_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mtp_research.decode.verify.verify.sample_residual",
        lambda _, probs, *, uniform: sample_from(probs, uniform),
    )
    decoded = decode(verify_standard, seed=1, sampling=SAMPLINGS["plain"], sample_drafts=True)
    assert text_p_value(decoded) < 1e-9


def test_standard_temperature_zero_equals_greedy() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(0, 3, (64, 4, 5), generator=generator).float()
    drafts = torch.randint(-1, 6, (64, 3), generator=generator).tolist()
    inputs = make_inputs(logits, drafts, temperature=0.0)
    for mine, expected in zip(verify_standard(inputs), verify_greedy(inputs), strict=True):
        assert torch.equal(mine, expected)


def test_standard_drafts_of_the_target_itself_are_all_accepted() -> None:
    logits = torch.randn(200, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = torch.randint(0, 7, (200, 3), generator=torch.Generator().manual_seed(1))
    probs = torch.softmax(logits[:, :-1], dim=-1)
    output = verify_standard(make_inputs(logits, drafts.tolist(), draft_probs=probs))
    assert output.num_accepted.tolist() == [3] * 200


@pytest.mark.parametrize("rule", RULES)
def test_drafts_outside_the_vocabulary_are_rejected_and_never_emitted(rule: str) -> None:
    logits = torch.zeros(5, 3, 4)
    logits[..., 2] = 5.0
    drafts = [[-1, 2], [2, -1], [4, 2], [2, 10**12], [-(10**12), -1]]
    probs = torch.full((5, 2, 4), 0.25)
    for draft_probs in (None, probs):
        inputs = make_inputs(
            logits, drafts, draft_probs=draft_probs, options=options_for(rule, 2), temperature=0.2
        )
        output = RULES[rule].function(inputs)
        assert (output.num_accepted <= torch.tensor([0, 1, 0, 1, 0])).all()
        assert int(output.num_accepted.sum()) > 0
        emitted = output.sampled_token_ids
        assert emitted.min() >= PADDING_TOKEN_ID
        assert emitted.max() < 4
        column = torch.arange(3)
        assert torch.equal(emitted >= 0, column <= output.num_accepted[:, None])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("rule", RULES)
def test_non_finite_row_ends_its_request_alone(rule: str, bad: float) -> None:
    logits = torch.zeros(3, 3, 4)
    logits[..., 1] = 30.0
    clean = RULES[rule].function(
        make_inputs(logits, [[1, 1]] * 3, options=options_for(rule, 2), temperature=0.5)
    )
    logits[1, 0] = bad
    output = RULES[rule].function(
        make_inputs(logits, [[1, 1]] * 3, options=options_for(rule, 2), temperature=0.5)
    )
    assert output.is_finite.tolist() == [True, False, True]
    assert output.num_accepted[1] == 0
    assert output.sampled_token_ids[1].tolist() == [-1, -1, -1]
    for row in (0, 2):
        assert torch.equal(output.sampled_token_ids[row], clean.sampled_token_ids[row])


@pytest.mark.parametrize("rule", RULES)
def test_non_finite_row_behind_a_rejected_draft_does_no_harm(rule: str) -> None:
    logits = torch.zeros(1, 3, 4)
    logits[..., 1] = 30.0
    logits[:, 1:] = torch.nan
    options = VerifyOptions(synthetic_rates=(0.0, 0.0)) if rule == "synthetic" else None
    inputs = make_inputs(logits, [[3, 1]], temperature=0.5, options=options)
    output = RULES[rule].function(inputs)
    assert output.is_finite.all()
    assert output.sampled_token_ids[0].tolist() == [1, -1, -1]


@pytest.mark.parametrize("rule", RULES)
def test_masked_tokens_are_never_emitted(rule: str) -> None:
    logits = torch.full((50, 2, 6), -torch.inf)
    logits[..., 2:4] = 0.0
    options = VerifyOptions(synthetic_rates=(0.0,)) if rule == "synthetic" else None
    output = RULES[rule].function(make_inputs(logits, [[5]] * 50, options=options))
    assert output.is_finite.all()
    assert set(output.sampled_token_ids[:, 0].tolist()) <= {2, 3}
    assert not output.num_accepted.any()


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_every_rule_emits_one_token(rule: str) -> None:
    output = RULES[rule].function(make_inputs(torch.randn(3, 1, 6), [[], [], []], temperature=0.0))
    assert output.num_accepted.tolist() == [0, 0, 0]
    assert output.sampled_token_ids.min() >= 0


@pytest.mark.parametrize("rule", RULES)
def test_batch_order_and_company_do_not_matter(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 4, 5, generator=generator)
    drafts = torch.randint(0, 5, (6, 3), generator=generator)
    probs = torch.softmax(torch.randn(6, 3, 5, generator=generator), dim=-1)
    inputs = make_inputs(logits, drafts.tolist(), draft_probs=probs, options=options_for(rule, 3))
    together = RULES[rule].function(inputs)
    for row in range(6):
        alone = make_inputs(
            logits[row : row + 1],
            drafts[row : row + 1].tolist(),
            draft_probs=probs[row : row + 1],
            options=options_for(rule, 3),
            seed=row,
        )
        output = RULES[rule].function(alone)
        assert torch.equal(output.sampled_token_ids[0], together.sampled_token_ids[row])


def test_rules_of_the_table_and_of_the_configuration_agree() -> None:
    lossless = [name for name in (*VERIFY_RULES, "unknown", None) if is_lossless(name)]
    assert lossless == ["block", "greedy", "standard"]
    assert set(VERIFY_RULES) == set(RULES)
    assert all(RULES.values())
    assert set(ARGMAX_RULES) == {name for name, rule in RULES.items() if not rule.samples}


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("typical", VerifyOptions(relaxed_top_n=3), "relaxed_top_n must be left alone.*=relaxed"),
        ("standard", VerifyOptions(synthetic_rates=(0.5,)), "synthetic_rates must be left alone"),
        ("synthetic", VerifyOptions(), "must hold spec.k=3 rates, got 0"),
        ("synthetic", VerifyOptions(synthetic_rates=(0.5,)), "must hold spec.k=3 rates, got 1"),
        ("synthetic", VerifyOptions(synthetic_length=4.5), r"in \[1, K \+ 1 = 4\], got 4.5"),
        (
            "synthetic",
            VerifyOptions(synthetic_length=2, synthetic_rates=(0.5, 0.5, 0.5)),
            "must be empty where synthetic_length is set",
        ),
        ("typical", VerifyOptions(synthetic_length=2.0), "synthetic_length must be left alone"),
    ],
)
def test_options_that_a_rule_ignores_or_lacks_are_refused(
    rule: str, options: VerifyOptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(rule, options, num_speculative_tokens=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"relaxed_top_n": 0},
        {"relaxed_delta": 1.5},
        {"typical_epsilon": 0.0},
        {"typical_delta": -1.0},
        {"synthetic_rates": (0.5, 0.6)},
        {"synthetic_rates": (1.1,)},
        {"synthetic_rates": (0.5, -0.1)},
        {"synthetic_rates": (float("nan"),)},
        {"synthetic_length": 0.5},
        {"synthetic_schedule": "geometric"},
        {"synthetic_schedule": "flat", "synthetic_length": 2.0},
    ],
)
def test_options_out_of_range_name_the_field(fields: dict) -> None:
    with pytest.raises(ConfigError, match=f"spec.{next(iter(fields))} must be"):
        check_options("synthetic", VerifyOptions(**fields), num_speculative_tokens=3)
