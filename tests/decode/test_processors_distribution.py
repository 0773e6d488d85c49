"""Texts sampled with processors are distributed as plain decoding with them, for lossless rules."""

import pytest
import torch

from mtp_research.decode.sampling import processors
from mtp_research.decode.sampling.sampling import Stream, uniform_noise
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify.verify import verify_block, verify_standard
from tests.decode.markov import decode, processed_text_p_value

RULES = {"standard": verify_standard, "block": verify_block}
DRAFTS = {
    "one-hot": {},
    "processed": {"process_drafts": True},
    "sampled": {"sample_drafts": True},
}
SAMPLINGS = {
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "dry-top-p": SamplingParams(
        temperature=1.0, top_p=0.9, dry_multiplier=1.5, dry_allowed_length=1
    ),
    "words-min-p": SamplingParams(
        temperature=1.2, min_p=0.1, bad_words=((1, 2), (3, 3), (0, 4, 1)), logit_bias=((2, 0.8),)
    ),
    "early-stop-top-k": SamplingParams(
        temperature=0.9,
        top_k=3,
        allowed_token_ids=(0, 1, 3, 4),
        stop_token_ids=(3,),
        min_tokens=2,
        presence_penalty=1.0,
    ),
}


@pytest.mark.parametrize(
    ("name", "rule", "drafts"),
    [
        ("penalties", "standard", "one-hot"),
        ("penalties", "standard", "sampled"),
        ("penalties", "standard", "processed"),
        ("penalties", "block", "sampled"),
        ("dry-top-p", "standard", "sampled"),
        ("dry-top-p", "block", "processed"),
        ("words-min-p", "standard", "one-hot"),
        ("words-min-p", "standard", "processed"),
        ("words-min-p", "block", "sampled"),
        ("early-stop-top-k", "standard", "sampled"),
        ("early-stop-top-k", "block", "one-hot"),
    ],
)
def test_text_with_processors_is_distributed_as_the_target(
    name: str, rule: str, drafts: str
) -> None:
    sampling = SAMPLINGS[name]
    seed = 1 + list(SAMPLINGS).index(name)
    decoded = decode(RULES[rule], seed=seed, sampling=sampling, **DRAFTS[drafts])
    assert len(decoded.first.num_accepted.unique()) >= 3
    assert processed_text_p_value(decoded, seed=seed, sampling=sampling) > 1e-3


@pytest.mark.parametrize("name", ["penalties", "words-min-p"])
def test_rows_that_do_not_see_the_drafts_before_them_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = processors.process_logits

    def stale(logits, tensors, *, text, num_tokens):
        rows = [
            whole(logits[:, j : j + 1], tensors, text=text, num_tokens=num_tokens[:, :1])
            for j in range(logits.shape[1])
        ]
        return torch.cat(rows, dim=1)

    monkeypatch.setattr("tests.decode.markov.process_logits", stale)
    sampling = SAMPLINGS[name]
    decoded = decode(verify_standard, seed=1, sampling=sampling)
    assert processed_text_p_value(decoded, seed=1, sampling=sampling) < 1e-6


def test_draft_and_residual_noise_shared_with_processors_is_found() -> None:
    sampling = SAMPLINGS["penalties"]
    decoded = decode(
        verify_standard,
        seed=1,
        sampling=sampling,
        sample_drafts=True,
        noise=lambda params, position, *_: uniform_noise(params.seed, position, Stream.RESAMPLE),
    )
    assert processed_text_p_value(decoded, seed=1, sampling=sampling) < 1e-9
