"""Processors against the slow reference, row by row, and the rules that they keep in a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_research.decode.sampling.processors import (
    ProcessorTensors,
    process_logits,
    processor_tensors,
    repetition_lengths,
)
from mtp_research.decode.sampling.sampling_params import MAX_DRY_MATCH, SamplingParams
from mtp_research.decode.slot_state import map_tensors
from mtp_research.runtime.errors import ConfigError
from tests.oracle_processors import processed_row

CPU = torch.device("cpu")
VOCAB = 5
TOKEN = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.3]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_base=st.sampled_from([1.0, 1.75]),
    dry_allowed_length=st.sampled_from([1, 2]),
    dry_breaker_token_ids=st.sampled_from([(), (0,)]),
    logit_bias=st.sampled_from([(), ((1, 2.5), (3, -1.0))]),
    allowed_token_ids=st.sampled_from([None, (0, 2, 3), (1,)]),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (2,), (2, 4)]),
)


def tensors_of(
    params: list[SamplingParams], num_prompt: list[int], vocab_size: int = VOCAB
) -> ProcessorTensors:
    """Stacked processors of requests of which at least one uses some."""
    tensors = processor_tensors(
        params, num_prompt_tokens=num_prompt, vocab_size=vocab_size, device=CPU
    )
    assert tensors is not None, "no request uses a processor"
    return tensors


def process(
    logits: Tensor, params: list[SamplingParams], texts: list[list[int]], num_prompt: list[int]
) -> Tensor:
    """Logits `[R, J, V]` of the last J tokens' rows, and of the one after, of each text."""
    num_drafts = logits.shape[1] - 1
    table = torch.full((len(texts), max(map(len, texts)) + 3), VOCAB - 1)
    for row, text in enumerate(texts):
        table[row, : len(text)] = torch.tensor(text)
    first = torch.tensor([len(text) - num_drafts for text in texts])
    num_tokens = first[:, None] + torch.arange(num_drafts + 1)
    return process_logits(logits, tensors_of(params, num_prompt), text=table, num_tokens=num_tokens)


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(PARAMS, st.lists(TOKEN, min_size=1, max_size=12)), min_size=1, max_size=3
    ),
    num_drafts=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_process_logits_any_batch_equals_slow_reference(
    requests: list[tuple[SamplingParams, list[int]]], num_drafts: int, seed: int
) -> None:
    params = [p for p, _ in requests]
    params[0] = SamplingParams(presence_penalty=0.5) if not params[0].uses_processors else params[0]
    generator = torch.Generator().manual_seed(seed)
    texts = [
        prompt + torch.randint(0, VOCAB, (4 + num_drafts,), generator=generator).tolist()
        for _, prompt in requests
    ]
    num_prompt = [len(prompt) for _, prompt in requests]
    shape = (len(texts), num_drafts + 1, VOCAB)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    processed = process(logits, params, texts, num_prompt)
    for row, text in enumerate(texts):
        for column in range(num_drafts + 1):
            seen = text[: len(text) - num_drafts + column]
            values = logits[row, column].tolist()
            expected = processed_row(values, seen, num_prompt[row], params[row])
            assert processed[row, column].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"repetition_penalty": 2.0}, [2, 1, -2, -4, 1], id="repetition-sees-prompt"),
        pytest.param({"frequency_penalty": 0.5}, [4, 1.5, -1.5, -2, 1], id="frequency-counts"),
        pytest.param({"presence_penalty": 0.5}, [4, 1.5, -1.5, -2, 1], id="presence-once"),
        pytest.param({"logit_bias": ((4, 3.0),)}, [4, 2, -1, -2, 4], id="bias"),
    ],
)
def test_penalties_worked_example(fields: dict, expected: list[float]) -> None:
    # Prompt 0 3, output 1 2: positive logits are divided, negative ones multiplied.
    logits = torch.tensor([[[4.0, 2, -1, -2, 1]]])
    processed = process(logits, [SamplingParams(**fields)], [[0, 3, 1, 2]], [2])
    assert processed[0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("words", "shape"),
    [([(1,)], (1, 1, 0)), ([(1, 2)], (1, 1, 1)), ([(1,), (1, 2, 3, 4), (2,)], (1, 4, 4))],
)
def test_bad_words_of_few_shapes_share_a_captured_step(words: list, shape: tuple) -> None:
    tensors = tensors_of([SamplingParams(bad_words=tuple(words))], [1]).bad_words
    assert tensors is not None
    assert tensors.prefix.shape == shape
    assert int(tensors.is_word.sum()) == len(words)


def test_bad_word_masks_its_end_only_after_its_start() -> None:
    params = SamplingParams(bad_words=((1, 2, 3), (0,)))
    inf = float("inf")
    assert process(torch.zeros(1, 1, VOCAB), [params], [[1, 2]], [1]).tolist() == [
        [[-inf, 0, 0, -inf, 0]]
    ]
    assert process(torch.zeros(1, 1, VOCAB), [params], [[2]], [1]).tolist() == [
        [[-inf, 0, 0, 0, 0]]
    ]


def test_bad_word_of_a_draft_row_sees_the_drafts_before_it() -> None:
    params = SamplingParams(bad_words=((1, 2),))
    processed = process(torch.zeros(1, 3, VOCAB), [params], [[4, 1, 1]], [1])
    assert (processed[0] == -torch.inf).nonzero().tolist() == [[1, 2], [2, 2]]


def test_repetition_lengths_worked_example() -> None:
    text = torch.tensor([[0, 1, 2, 0, 1, 4, 4]])  # A B C A B, and what lies behind
    no_breaker = torch.zeros_like(text, dtype=torch.bool)
    lengths = repetition_lengths(text, no_breaker, num_tokens=torch.tensor([[5]]))
    assert lengths[0, 0].tolist() == [0, 0, 2, 0, 0, 0, 0]
    lengths = repetition_lengths(text, text == 0, num_tokens=torch.tensor([[5]]))
    assert lengths[0, 0].tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_repetition_lengths_longer_than_the_cap_count_as_the_cap() -> None:
    text = torch.zeros(1, 3 * MAX_DRY_MATCH, dtype=torch.int64)
    lengths = repetition_lengths(
        text, torch.zeros_like(text, dtype=torch.bool), num_tokens=torch.tensor([[text.shape[1]]])
    )
    assert int(lengths.max()) == MAX_DRY_MATCH


def test_dry_penalty_however_large_leaves_finite_logits() -> None:
    params = SamplingParams(dry_multiplier=1e30, dry_base=1e30, dry_allowed_length=1)
    processed = process(torch.zeros(1, 1, VOCAB), [params], [[0] * 40], [1])
    assert processed.isfinite().all()
    assert processed[0, 0].argmax() != 0


def test_request_without_processors_keeps_its_logits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, VOCAB, generator=generator)
    greedy = SamplingParams()
    company = SamplingParams(
        repetition_penalty=1.7,
        frequency_penalty=1.0,
        presence_penalty=1.0,
        dry_multiplier=1.0,
        logit_bias=((0, 1.0),),
        allowed_token_ids=(1, 2),
        bad_words=((2,),),
        min_tokens=9,
        stop_token_ids=(1,),
    )
    text = [1, 1, 1, 1, 1, 1, 1]
    processed = process(logits, [greedy, company], [text, text], [1, 1])
    assert torch.equal(processed[0], logits[0])
    alone = process(logits[1:], [company], [text], [1])
    assert torch.equal(processed[1:], alone)


def test_process_logits_changes_no_input() -> None:
    params = [SamplingParams(repetition_penalty=2.0, dry_multiplier=1.0, bad_words=((1,),))]
    logits, text = torch.ones(1, 2, VOCAB), torch.ones(1, 9, dtype=torch.int64)
    tensors = tensors_of(params, [2])
    before = [tensor.clone() for tensor in (logits, text)]
    process_logits(logits, tensors, text=text, num_tokens=torch.tensor([[4, 5]]))
    assert torch.equal(logits, before[0])
    assert torch.equal(text, before[1])


@pytest.mark.parametrize("without", ["", "bad_words", "dry_multiplier", "logit_bias"])
def test_process_logits_is_the_same_to_the_bit_in_compiled_steps_and_padded_batches(
    without: str,
) -> None:
    fields: dict = {
        **{"repetition_penalty": 1.3, "frequency_penalty": 0.37, "presence_penalty": 0.11},
        **{"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_breaker_token_ids": (0,)},
        **{"logit_bias": ((1, 2.5),), "bad_words": ((1, 2), (3,))},
        **{"stop_token_ids": (2,), "min_tokens": 4},
    }
    fields.pop(without, None)
    params = [SamplingParams(**fields), SamplingParams(), SamplingParams(frequency_penalty=-0.7)]
    tensors = tensors_of(params, [2, 1, 3])
    text = torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))
    num_tokens = torch.tensor([[5], [3], [9]]) + torch.arange(3)
    logits = torch.randn(3, 3, VOCAB, generator=torch.Generator().manual_seed(2))

    def process_some(num_requests: int, function=process_logits) -> Tensor:
        own = map_tensors(lambda value: value[:num_requests], tensors)
        cut = {"text": text[:num_requests], "num_tokens": num_tokens[:num_requests]}
        return function(logits[:num_requests], own, **cut)

    compiled = torch.compile(process_logits, backend="aot_eager", fullgraph=True)
    whole = process_some(3)
    assert torch.equal(process_some(3, compiled), whole)
    assert torch.equal(process_some(2), whole[:2])
    assert torch.equal(whole[1], logits[1])


def test_process_logits_non_finite_row_stays_so() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    logits[..., 0] = torch.nan
    params = SamplingParams(allowed_token_ids=(1,), bad_words=((0,),))
    assert process(logits, [params], [[3]], [1])[0, 0, 0].isnan()


def test_processor_tensors_without_any_use_are_none() -> None:
    params = [SamplingParams(temperature=0.8, top_p=0.9, stop_token_ids=(1,)), SamplingParams()]
    assert processor_tensors(params, num_prompt_tokens=[1, 1], vocab_size=VOCAB, device=CPU) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 1.5},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"min_tokens": 65},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": 2.5},
        {"presence_penalty": float("nan")},
        {"dry_multiplier": -1.0},
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"logit_bias": ((1, float("inf")),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"allowed_token_ids": ()},
        {"bad_words": ((1,), ())},
        {"logprobs": -1},
        {"logprobs_kind": "cooked"},
    ],
    ids=str,
)
def test_sampling_params_out_of_range_name_the_field(fields: dict) -> None:
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(fields))} must be"):
        SamplingParams(**fields)
