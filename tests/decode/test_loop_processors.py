"""Processors, draft variants and log-probabilities in the whole loop, at once and deferred."""

import copy
import math

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import drafter as draft
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.decode.loops import PROMPTS, draft_rightly, run, small_pool, texts_of
from tests.oracle import target_logits
from tests.oracle_processors import greedy_processed_text, probabilities, processed_row

NUM_NEW = 9
SOME = tuple(range(0, 128, 3))
PARAMS = {
    "repetition": {"repetition_penalty": 1.6},
    "frequency-presence": {"frequency_penalty": 1.2, "presence_penalty": -0.6},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_breaker_token_ids": (9,)},
    "bias-allowed": {"allowed_token_ids": SOME, "logit_bias": ((3, 1.5), (30, -2.0))},
    "bad-words": {"bad_words": (*((token,) for token in range(0, 60, 2)), (3, 5), (7, 9, 9))},
    "min-tokens": {"stop_token_ids": tuple(range(64)), "min_tokens": 5},
}
PARAMS["all"] = {key: value for fields in PARAMS.values() for key, value in fields.items()}

pytestmark = pytest.mark.usefixtures("output_timing")


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


def _params(**fields) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NUM_NEW} | fields))


@pytest.fixture(scope="module")
def expected(target) -> dict[str, dict[str, tuple[int, ...]]]:
    """Greedy text of every processor and prompt, by full recompute."""
    return {
        name: {
            str(index): tuple(greedy_processed_text(target, prompt, _params(**fields)))
            for index, prompt in enumerate(PROMPTS)
        }
        for name, fields in PARAMS.items()
    }


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_greedy_text_equals_full_recompute(
    target, heads, expected, name: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, expected[name], chance=0.7)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=num_drafts))
    assert texts_of(run(decoder, sampling=_params(**PARAMS[name]))) == expected[name]


def test_mixed_batch_in_a_tight_pool_equals_full_recompute(
    target, heads, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("dry", "all", "min-tokens", "repetition")
    right = {str(row): expected[name][str(row)] for row, name in enumerate(names)}
    draft_rightly(monkeypatch, right, chance=0.7)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(num_speculative_tokens=2), engine=small_pool(9)
    )
    params = [_params(**PARAMS[name]) for name in names]
    assert texts_of(run(decoder, sampling=params)) == right
    assert decoder.stats.num_preemptions > 0


def test_processed_drafts_follow_the_processors(target, heads) -> None:
    # Only 7 and 8 are allowed, and neither twice in a row: processed drafts cannot be wrong.
    fields = {"allowed_token_ids": (7, 8), "bad_words": ((7, 7), (8, 8))}
    lengths = {}
    for draft_sampling in ("greedy", "processed"):
        decoder = SpecDecoder(target, heads, spec=SpecSettings(draft_sampling=draft_sampling))
        records = run(decoder, sampling=_params(**fields, max_new_tokens=13))
        lengths[draft_sampling] = decoder.stats.acceptance_length
        for record in records.values():
            first = record.output_token_ids[0]
            alternating = [first, 15 - first] * 7
            assert list(record.output_token_ids) == alternating[:13]
    assert lengths["processed"] == 4
    assert lengths["greedy"] < 1.5


def test_processed_drafts_without_any_token_left_are_rejected(target, heads) -> None:
    fields = {"allowed_token_ids": (7, 8), "bad_words": ((7, 7), (7, 8), (8, 7), (8, 8))}
    decoder = SpecDecoder(target, heads, spec=SpecSettings(draft_sampling="processed"))
    for record in run(decoder, [[5, 9], [11]], sampling=_params(**fields)).values():
        assert record.finish_reason == "non_finite"
        assert len(record.output_token_ids) == 1


def test_drafting_changes_neither_text_nor_parameters(
    target, heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, num_calls = draft.choose_drafts, 0

    def watched(logits, step, *, slot_state, **rest):
        nonlocal num_calls
        before = slot_state.text.clone(), slot_state.num_tokens.clone(), copy.deepcopy(step.params)
        own_logits = logits.clone()
        token_ids = choose(logits, step, slot_state=slot_state, **rest)
        after = slot_state.text, slot_state.num_tokens, step.params
        assert all(torch.equal(old, new) for old, new in zip(before[:2], after[:2], strict=True))
        assert str(before[2]) == str(after[2])
        assert torch.equal(own_logits, logits)
        num_calls += 1
        return token_ids

    monkeypatch.setattr(draft, "choose_drafts", watched)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(draft_sampling="processed"))
    run(decoder, sampling=_params(**PARAMS["all"]))
    assert num_calls > 0


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_logprobs_of_every_token_equal_full_recompute(
    target, heads, kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"temperature": temperature, "top_k": 40, "top_p": 0.95, "seed": 3}
    params = _params(**PARAMS["repetition"], **fields, logprobs=3, logprobs_kind=kind)
    # A neighbour that asks for the other kind and more, and one that does not ask.
    other_kind = "raw" if kind == "processed" else "processed"
    other = _params(logprobs=5, logprobs_kind=other_kind, stop_token_ids=tuple(range(90)))
    sampling = [params, other, params, _params()]
    plain = run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=sampling)
    draft_rightly(monkeypatch, texts_of(plain), chance=0.8)
    records = run(SpecDecoder(target, heads), sampling=sampling)
    assert records["3"].token_logprobs is None
    num_tokens = len(records["1"].output_token_ids)  # a stop token may cut accepted drafts
    assert [len(token.top) for token in records["1"].token_logprobs] == [5] * num_tokens
    accepted = [sum(records[row].num_accepted_per_round) for row in ("0", "2")]
    assert sum(accepted) > 0, "the rows of accepted drafts must be seen too"
    for row in ("0", "2"):
        text, record = list(PROMPTS[int(row)]), records[row]
        assert len(record.token_logprobs) == len(record.output_token_ids)
        for token_id, reported in zip(record.output_token_ids, record.token_logprobs, strict=True):
            logits = target_logits(target, text)[-1].tolist()
            if kind == "processed":
                num_prompt = len(PROMPTS[int(row)])
                logits = processed_row(logits, text, num_prompt, params)
            chosen_from = _params(temperature=1.0)
            if kind == "processed" and temperature > 0:
                chosen_from = params
            logprobs = [math.log(p) if p else -math.inf for p in probabilities(logits, chosen_from)]
            best = sorted(range(len(logits)), key=lambda token: -logprobs[token])[:3]
            best = [token for token in best if logprobs[token] > -math.inf]
            assert reported.logprob == pytest.approx(logprobs[token_id], abs=1e-5)
            assert [token for token, _ in reported.top] == best
            assert [value for _, value in reported.top] == pytest.approx(
                [logprobs[token] for token in best], abs=1e-5
            )
            text.append(token_id)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_no_token_end_their_request_alone(
    target, heads, num_drafts: int, temperature: float
) -> None:
    empty = _params(temperature=temperature, allowed_token_ids=(5,), bad_words=((5,),))
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=num_drafts))
    records = run(decoder, sampling=[empty, _params(), empty, _params()])
    plain = run(
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=_params()
    )
    for name, record in records.items():
        if name in ("0", "2"):
            assert record.finish_reason == "non_finite"
            assert record.output_token_ids == ()
        else:
            assert record.output_token_ids == plain[name].output_token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": ((128, 1.0),)}, r"logit_bias must hold token ids in \[0, 128\)"),
        ({"allowed_token_ids": (3, -1)}, r"allowed_token_ids must .* got \[-1\]"),
        ({"bad_words": ((3, 500),)}, r"bad_words must .* got \[500\]"),
        ({"dry_breaker_token_ids": (128,)}, "dry_breaker_token_ids must"),
        ({"stop_token_ids": (128,), "min_tokens": 1}, "stop_token_ids must"),
        ({"logprobs": 129}, "logprobs must be at most the 128 tokens"),
    ],
)
def test_parameters_that_do_not_fit_the_vocabulary_are_refused(
    target, fields: dict, message: str
) -> None:
    decoder = SpecDecoder(
        target, spec=SpecSettings(num_speculative_tokens=0), engine=EngineConfig()
    )
    with pytest.raises(ConfigError, match=message):
        decoder.add_request([3], sampling=_params(**fields))
    assert not decoder.scheduler.has_work


@pytest.mark.parametrize("heads_name", ["oracle", "null"])
def test_drafters_without_distributions_are_verified_as_one_hot(target, heads_name: str) -> None:
    # Sampled drafts come with their probabilities; these drafters have none to divide by.
    params = [_params(temperature=1.0, seed=seed) for seed in range(4)]
    texts = [
        texts_of(
            run(
                SpecDecoder(target, heads_name, spec=SpecSettings(draft_sampling=kind)),
                sampling=params,
            )
        )
        for kind in ("greedy", "sample")
    ]
    assert texts[0] == texts[1]
