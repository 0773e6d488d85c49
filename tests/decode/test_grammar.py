"""Structured output: masks per draft position, the matcher as it was, the whole loop, xgrammar."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.grammar import (
    GuardedMatcher,
    StepMasks,
    XGrammarCompiler,
    apply_bitmask,
    start_matcher,
)
from mtp_research.decode.sampling.sampling_params import Grammar, SamplingParams
from mtp_research.decode.schedule.request import Schedule
from mtp_research.decode.settings import SpecSettings
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from tests import tiny
from tests.decode.loops import PROMPTS, draft_rightly, run, small_pool, texts_of
from tests.decode.toy_grammar import NOTHING, PAIRS, WORD, ToyMatcher

STOP = (1, 2)
VOCAB = 128


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


def _sampling(grammar: Grammar | None, **fields) -> SamplingParams:
    settings = {"max_new_tokens": 10, "stop_token_ids": STOP} | fields
    return SamplingParams(grammar=grammar, **settings)


def _follows(grammar, text: tuple[int, ...]) -> bool:
    matcher = grammar.start(stop_token_ids=STOP)
    return all(matcher.accept_token(token) for token in text)


@given(
    accepted=st.lists(st.sampled_from([10, 60, 127]), max_size=4),
    drafts=st.lists(st.sampled_from([10, 12, 60, 127, 1, 5, -1, 500]), max_size=4),
)
def test_step_masks_every_row_equals_a_fresh_matcher(
    accepted: list[int], drafts: list[int]
) -> None:
    matcher = PAIRS.start(stop_token_ids=STOP)
    text = [token for token in accepted if matcher.accept_token(token)]
    before = list(matcher.history)
    masks = StepMasks(num_speculative_tokens=4, vocab_size=VOCAB)
    bitmask = masks.make([None, GuardedMatcher(matcher)], [drafts, drafts])
    assert matcher.history == before
    assert (bitmask[0] == -1).all()
    allowed = apply_bitmask(torch.zeros(2, 5, VOCAB), bitmask)[1] == 0
    for row in range(len(drafts) + 1):
        fresh = PAIRS.start(stop_token_ids=STOP)
        if not all(fresh.accept_token(token) for token in text + drafts[:row]):
            break  # a draft before this row is rejected
        if fresh.is_terminated:
            break
        expected = set(fresh.moves[fresh.history[-1]])
        assert set(allowed[row].nonzero()[:, 0].tolist()) == expected


@dataclass
class SharingMatcher(ToyMatcher):
    """Pairs whose masks a library makes in one call; `calls` notes the rows of each call."""

    calls: ClassVar[list[list[int]]] = []
    is_broken: bool = False

    @property
    def fill_many(self) -> Callable:
        return fill_all

    def fill_bitmask(self, bitmask: torch.Tensor, *, row: int) -> None:
        if self.is_broken:
            raise ValueError("broken matcher")
        super().fill_bitmask(bitmask, row=row)


def fill_all(matchers: list[SharingMatcher], bitmask: torch.Tensor, places: list[int]) -> None:
    SharingMatcher.calls.append(places)
    for matcher, place in zip(matchers, places, strict=True):
        matcher.fill_bitmask(bitmask, row=place)


STEPS = st.lists(
    st.lists(
        st.lists(st.sampled_from([10, 60, 1, 5, -1, 500]), max_size=3), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


@given(steps=STEPS)
def test_step_masks_in_the_same_memory_equal_masks_in_memory_of_their_own(
    steps: list[list[list[int]]],
) -> None:
    moves = PAIRS.start(stop_token_ids=STOP).moves
    kept = StepMasks(num_speculative_tokens=3, vocab_size=VOCAB)
    for drafts in steps:  # of batches of 1 to 4 requests, of which the second has no grammar
        alone, sharing = (
            [GuardedMatcher(make(moves)) if row != 1 else None for row in range(len(drafts))]
            for make in (ToyMatcher, SharingMatcher)
        )
        fresh = StepMasks(num_speculative_tokens=3, vocab_size=VOCAB).make(alone, drafts)
        assert torch.equal(kept.make(alone, drafts), fresh)
        assert torch.equal(kept.make(sharing, drafts), fresh)


def test_matchers_that_share_are_asked_together_for_every_draft() -> None:
    moves = PAIRS.start(stop_token_ids=STOP).moves
    matchers = [GuardedMatcher(SharingMatcher(moves)) for _ in range(3)]
    SharingMatcher.calls.clear()
    masks = StepMasks(num_speculative_tokens=2, vocab_size=VOCAB)
    first = masks.make(matchers, [[10, 60], [10, 99], [5, 10]])
    assert SharingMatcher.calls == [[0, 3, 6], [1, 4], [2]]
    assert masks.make(matchers, [[]] * 3).data_ptr() == first.data_ptr()


def test_one_broken_matcher_of_those_that_share_fails_alone() -> None:
    moves = PAIRS.start(stop_token_ids=STOP).moves
    matchers = [GuardedMatcher(SharingMatcher(moves, is_broken=row == 1)) for row in range(3)]
    masks = StepMasks(num_speculative_tokens=1, vocab_size=VOCAB).make(matchers, [[10]] * 3)
    assert [one.error for one in matchers] == [None, "ValueError: broken matcher", None]
    assert torch.equal(masks[0], masks[2])
    assert (masks[0] != -1).any(dim=-1).all()


def test_apply_bitmask_odd_vocabulary_and_nan_survive() -> None:
    logits = torch.zeros(1, 1, 35)
    logits[0, 0, 3] = torch.nan
    bitmask = torch.tensor([[[1 << 2, 1 << 1]]], dtype=torch.int32)
    masked = apply_bitmask(logits, bitmask)[0, 0]
    assert (masked == 0).nonzero()[:, 0].tolist() == [2, 33]
    assert masked[3].isnan()


def test_mask_is_one_node_of_a_compiled_step_and_keeps_the_dtype() -> None:
    calls: list[object] = []

    def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        calls.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    logits = torch.zeros(2, 1, VOCAB, dtype=torch.bfloat16)
    bitmask = torch.full((2, 3, -(-VOCAB // 32)), -1, dtype=torch.int32)
    masked = torch.compile(apply_bitmask, backend=note, fullgraph=True)(logits, bitmask)
    assert calls == [torch.ops.mtp_research.mask_logits.default]
    assert masked.dtype == torch.bfloat16


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("verify", ["standard", "block", "typical"])
def test_greedy_mixed_batch_equals_baseline(
    target, heads, verify: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [_sampling(PAIRS), _sampling(None), _sampling(WORD), _sampling(PAIRS, min_tokens=6)]
    baseline = run(
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params
    )
    expected = texts_of(baseline)
    assert expected["2"][:3] == (40, 41, 42)
    assert baseline["2"].finish_reason == "stop"
    assert all(_follows(PAIRS, expected[name]) for name in ("0", "3"))
    assert not _follows(PAIRS, expected["1"])
    draft_rightly(monkeypatch, expected, chance=0.7)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(num_speculative_tokens=num_drafts, verify=verify)
    )
    assert texts_of(run(decoder, sampling=params)) == expected
    assert decoder.stats.acceptance_length > 1.2


def test_sampled_drafts_that_the_grammar_forbids_are_never_emitted(target, heads) -> None:
    params = [
        _sampling(grammar, temperature=1.5, seed=seed, max_new_tokens=12)
        for seed, grammar in enumerate((PAIRS, None, WORD, PAIRS))
    ]
    synthetic = VerifyOptions(synthetic_rates=(1.0, 1.0, 1.0))
    plain = VerifyOptions()
    for verify, options in (("standard", plain), ("block", plain), ("synthetic", synthetic)):
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(verify=verify, draft_sampling="sample", verify_options=options),
        )
        texts = texts_of(run(decoder, sampling=params))
        assert _follows(PAIRS, texts["0"])
        assert _follows(WORD, texts["2"])
        assert _follows(PAIRS, texts["3"])


def test_preempted_request_keeps_its_place_in_the_grammar(target, heads) -> None:
    params = [_sampling(PAIRS), _sampling(None), _sampling(WORD), _sampling(PAIRS)]
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params)
    )
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(num_speculative_tokens=2), engine=small_pool(8)
    )
    assert texts_of(run(decoder, sampling=params)) == expected
    assert decoder.stats.num_preemptions > 0


def test_matcher_after_every_step_stands_at_the_output(target, heads, monkeypatch) -> None:
    params = [_sampling(PAIRS)] * 4
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params)
    )
    draft_rightly(monkeypatch, expected, chance=0.7)
    decoder = SpecDecoder(target, heads)
    requests = [
        decoder.add_request(prompt, sampling=params[0], request_id=str(index))
        for index, prompt in enumerate(PROMPTS)
    ]
    while decoder.scheduler.has_work:
        decoder.step()
        for request in requests:
            assert isinstance(request.matcher.matcher, ToyMatcher)
            assert len(request.matcher.matcher.history) == 1 + len(request.output_token_ids)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_grammar_that_allows_nothing_ends_its_request_alone(target, heads, num_drafts) -> None:
    params = [_sampling(NOTHING), _sampling(None), _sampling(PAIRS), _sampling(None)]
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=num_drafts))
    records = run(decoder, sampling=params)
    assert records["0"].finish_reason == "non_finite"
    assert records["0"].output_token_ids == ()
    assert len(records["1"].output_token_ids) == 10


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_deferred_output_any_policy_equals_baseline_in_mixed_company(
    target, heads, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plain request outlives the grammars.
    params = [_sampling(PAIRS), _sampling(None, max_new_tokens=48), _sampling(WORD)]
    params.append(_sampling(PAIRS, min_tokens=6))
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params)
    )
    draft_rightly(monkeypatch, expected, chance=0.7)
    # Three slots: the last grammar starts beside a step in flight.
    engine = EngineConfig(deferred_output=True, max_num_requests=3, max_prefill_chunk=4)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=engine)
    were_late: list[bool] = []
    step = decoder.step

    def observed() -> None:
        step()
        were_late.append(decoder._ledger.in_flight is not None)

    monkeypatch.setattr(decoder, "step", observed)
    assert texts_of(run(decoder, sampling=params)) == expected
    assert decoder.stats.acceptance_length > 1.2
    assert all(were_late), "a step was not deferred"


def test_deferred_output_preempted_grammar_keeps_its_place(
    target, heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The victim is the only grammar: nobody else's tokens bring its drafts to the host in time.
    params = [_sampling(None)] * 3 + [_sampling(PAIRS, min_tokens=9)]
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params)
    )
    draft_rightly(monkeypatch, expected, chance=0.8)
    engine = small_pool(8, deferred_output=True)
    decoder = SpecDecoder(target, heads, engine=engine)
    preempted: list[tuple[str, int]] = []
    begin = decoder._ledger.begin

    def observed(schedule: Schedule) -> None:
        preempted.extend((r.request_id, len(r.output_token_ids)) for r in schedule.preempted)
        begin(schedule)

    monkeypatch.setattr(decoder._ledger, "begin", observed)
    assert texts_of(run(decoder, sampling=params)) == expected
    assert any(name == "3" and num_outputs > 0 for name, num_outputs in preempted)


def test_grammar_without_a_stop_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids must be at least one id"):
        SamplingParams(grammar=PAIRS)


@pytest.fixture(scope="module")
def compiler():
    pytest.importorskip("xgrammar")
    vocabulary = [bytes([token]) if token > 2 else b"" for token in range(VOCAB)]
    return XGrammarCompiler(vocabulary, stop_token_ids=STOP)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda c: c.regex("[a-f]{2}(0|1[0-9])+"), id="regex"),
        pytest.param(lambda c: c.ebnf('root ::= "<" [a-z]+ ">" | "-" root'), id="ebnf"),
        pytest.param(lambda c: c.json_schema('{"enum": ["north", "south"]}'), id="json"),
    ],
)
def test_xgrammar_greedy_equals_baseline(
    target, heads, compiler, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [_sampling(make(compiler), min_tokens=4), _sampling(None)] * 2
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=params)
    )
    draft_rightly(monkeypatch, expected, chance=0.8)
    decoder = SpecDecoder(target, heads)
    assert texts_of(run(decoder, sampling=params)) == expected
    assert decoder.stats.acceptance_length > 1.3


def test_xgrammar_masks_of_many_equal_those_of_one_at_a_time(compiler, monkeypatch) -> None:
    grammars = [compiler.regex("[a-f]{2}(0|1[0-9])+"), compiler.ebnf('root ::= "<" [a-z]+ ">"')]
    sampling = [_sampling(grammar) for grammar in grammars * 3]
    drafts = [[97, 98, 48], [60, 120, 62], [97, 48, 98], [60, 62, 1], [], [60, 120, -1]]
    together = [start_matcher(one, vocab_size=VOCAB) for one in sampling]
    alone = [start_matcher(one, vocab_size=VOCAB) for one in sampling]
    for one in alone:
        one.fill_many = None
    masks = [
        StepMasks(num_speculative_tokens=3, vocab_size=VOCAB).make(matchers, drafts)
        for matchers in (together, alone)
    ]
    assert torch.equal(*masks)
    fill_bitmask = mock.Mock()
    monkeypatch.setattr(GuardedMatcher, "fill_bitmask", fill_bitmask)
    StepMasks(num_speculative_tokens=3, vocab_size=VOCAB).make(together, drafts)
    fill_bitmask.assert_not_called()


def test_xgrammar_finished_outputs_match_their_expression(target, heads, compiler) -> None:
    grammar = compiler.regex("[a-f]{2}[01]{3}")
    params = [_sampling(grammar, temperature=1.0, seed=seed) for seed in range(4)]
    records = run(
        SpecDecoder(target, heads, spec=SpecSettings(draft_sampling="sample")), sampling=params
    )
    for record in records.values():
        assert record.finish_reason == "stop"
        text = bytes(record.output_token_ids[:-1]).decode()
        assert re.fullmatch("[a-f]{2}[01]{3}", text)


@pytest.mark.parametrize("vocab_size", [64, 127, 256])
def test_xgrammar_of_another_vocabulary_is_refused_with_both_sizes(target, vocab_size) -> None:
    pytest.importorskip("xgrammar")
    vocabulary = [bytes([token]) if token > 2 else b"" for token in range(vocab_size)]
    foreign = XGrammarCompiler(vocabulary, stop_token_ids=STOP).regex("[0-9]+")
    decoder = SpecDecoder(target, "null")
    with pytest.raises(ConfigError, match=f"the 128 logits of .*, got one for {vocab_size}"):
        decoder.add_request([5], sampling=_sampling(foreign))
    assert not decoder.has_work


def test_xgrammar_stop_token_outside_its_vocabulary_is_refused_alone(target, compiler) -> None:
    decoder = SpecDecoder(target, "null")
    with pytest.raises(ConfigError, match=r"sampling\.grammar must start and give a mask, got Run"):
        decoder.add_request([5], sampling=_sampling(compiler.regex("a"), stop_token_ids=(500,)))
    assert not decoder.has_work


def test_xgrammar_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'mtp-research\[grammar\]'"):
        XGrammarCompiler([b"a"], stop_token_ids=(0,))
