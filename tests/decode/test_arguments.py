"""What `SpecDecoder` takes: names or objects, ranges as for eval.py; what generate() assumes."""

import dataclasses
import functools

import pytest

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import ConfidenceLength, FixedLength
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings, rule_name
from mtp_research.decode.verify.verify import VerifyInputs, VerifyOutput, verify_greedy
from mtp_research.decode.verify.verify_rules import RULES, Rule
from mtp_research.models.target import Target
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ArgumentTypeError, ConfigError
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_num_requests", 0, "engine.max_num_requests must be an integer in 1.."),
        ("max_num_batched_tokens", -1, "set engine.max_num_batched_tokens=1."),
        ("max_model_len", 1, "set engine.max_model_len=null."),
        ("num_blocks", 0, "engine.num_blocks must be an integer"),
        ("block_size", 0, "set engine.block_size=1."),
        ("backend", "cuda", "engine.backend must be auto | reference | triton, got cuda"),
        ("audit_every", 0, "set engine.audit_every=1."),
    ],
)
def test_engine_settings_are_checked_as_on_the_command_line(
    target, field: str, value: object, expected: str
) -> None:
    engine = dataclasses.replace(EngineConfig(), **{field: value})
    with pytest.raises(ConfigError) as fault:
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    assert expected in str(fault.value)


def test_policy_object_equals_its_name_and_a_new_one_is_taken(target) -> None:
    heads = tiny.tiny_heads(target)
    by_name = run(SpecDecoder(target, heads, spec=SpecSettings(policy="eagle")))
    by_object = run(SpecDecoder(target, heads, spec=SpecSettings(policy=POLICIES["eagle"])))
    counts = [
        {name: record.num_accepted_per_round for name, record in records.items()}
        for records in (by_name, by_object)
    ]
    assert counts[0] == counts[1]
    new = dataclasses.replace(POLICIES["target_roll"], name="anchored_roll", rows="anchored")
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=new))
    assert texts_of(run(decoder)) == texts_of(by_name)
    assert decoder.auditor.num_dirty_rounds == 0


def test_rule_object_is_applied_and_named_in_faults(target) -> None:
    seen = []

    def verify_mine(inputs: VerifyInputs) -> VerifyOutput:
        seen.append(inputs.options.relaxed_top_n)
        return verify_greedy(inputs)

    rule = Rule(verify_mine, lossless=False, samples=False)
    options = VerifyOptions(relaxed_top_n=7)  # its own affair what it reads
    decoder = SpecDecoder(
        target, tiny.tiny_heads(target), spec=SpecSettings(verify=rule, verify_options=options)
    )
    run(decoder)
    assert set(seen) == {7}
    nameless = rule._replace(function=functools.partial(verify_mine))
    spec = SpecSettings(verify=nameless, verify_options=options)
    assert rule_name(spec.rule).startswith("functools.partial(")
    assert rule_name(rule) == "verify_mine"
    with pytest.raises(ConfigError, match=r"must be 0 for verify='verify_mine', got 0\.5"):
        decoder.add_request([5], sampling=SamplingParams(temperature=0.5))


def test_built_in_rule_given_as_an_object_is_checked_like_its_name() -> None:
    options = VerifyOptions(relaxed_top_n=7)
    for verify in ("greedy", RULES["greedy"]):
        with pytest.raises(ConfigError, match="relaxed_top_n must be left alone"):
            SpecSettings(verify=verify, verify_options=options)
    plain = SpecSettings(num_speculative_tokens=0, verify="greedy", verify_options=options)
    assert plain.rule == RULES["standard"]


def test_generate_ends_at_the_targets_own_stop_tokens(target, monkeypatch) -> None:
    free = SamplingParams(max_new_tokens=30)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    texts = {r.request_id: r.output_token_ids for r in decoder.generate(PROMPTS, sampling=free)}
    stop = texts["0"][4]
    monkeypatch.setattr(Target, "stop_token_ids", property(lambda _: (stop,)))
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    records = list(decoder.generate(PROMPTS, max_new_tokens=30))
    for record in records:
        text = texts[record.request_id]
        end = text.index(stop) + 1 if stop in text else 30
        assert record.output_token_ids == text[:end]
    assert {record.finish_reason for record in records} >= {"stop"}


def test_name_of_something_else_than_a_rule_or_policy_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(RULES, "mine", RULES["greedy"].function)
    with pytest.raises(ConfigError, match="verify='mine' must be the name of a Rule, got that of"):
        SpecSettings(verify="mine")
    monkeypatch.setitem(POLICIES, "mine", "eagle")
    with pytest.raises(ConfigError, match="policy='mine' must be the name of a HiddenPolicy, got"):
        SpecSettings(policy="mine")


@dataclasses.dataclass(frozen=True)
class TwoOrLess(FixedLength):
    """Says that it makes at most two drafts; what it answers is told."""

    answer: object

    def limits(self, num_speculative_tokens: int) -> range:
        return range(min(3, num_speculative_tokens + 1))

    def num_drafts(self, **_: object) -> object:
        return self.answer


def test_length_rule_of_ones_own_is_held_to_its_limits(target) -> None:
    heads = tiny.tiny_heads(target)
    for answer in (3, 1.5, None, -1):
        decoder = SpecDecoder(target, heads, spec=SpecSettings(draft_length=TwoOrLess(answer)))
        with pytest.raises(ConfigError, match=rf"TwoOrLess.* \[0, 1, 2\], got {answer}; let both"):
            run(decoder)
    records = run(SpecDecoder(target, heads, spec=SpecSettings(draft_length=TwoOrLess(2))))
    assert {max(record.num_drafted_per_round) for record in records.values()} == {2}


class NoKeeps:
    limits = num_drafts = None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda _: SpecSettings(draft_length="confidence"),
            "draft_length must be a rule .* of type",
        ),
        (lambda _: SpecSettings(draft_length=ConfidenceLength), "of type type; pass one"),
        (lambda _: SpecSettings(draft_length=NoKeeps()), "with keeps, limits and num_drafts"),
        (
            lambda _: SpecSettings(verify_options={"x": 1}),
            "must be of type VerifyOptions, got .* dict",
        ),
        (lambda target: SpecDecoder(target, spec={}), r"pass SpecSettings\(\.\.\.\)"),
        (lambda target: SpecDecoder(target, engine={}), "engine must be of type EngineConfig"),
        (
            lambda target: SpecDecoder(target, target),
            r"heads must be of type MTPHeads, .*; pass load_heads\(\.\.\.\)\.",
        ),
        (
            lambda target: SpecDecoder("folder"),
            r"got one of type str; pass load_target\(\.\.\.\)\.",
        ),
    ],
)
def test_argument_of_another_type_is_one_line(target, call, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        call(target)


def test_list_of_sampling_parameters_names_the_call_that_takes_one_each(target) -> None:
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    with pytest.raises(ConfigError, match=r"call add_request\(prompt, sampling=\.\.\.\) and step"):
        list(decoder.generate([[1], [2]], sampling=[SamplingParams(), SamplingParams()]))


def test_generate_leaves_out_the_requests_of_others(target) -> None:
    one_by_one = EngineConfig(max_num_requests=1)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=one_by_one)
    ours = decoder.generate(PROMPTS[:2], sampling=SamplingParams(max_new_tokens=2))
    found = [next(ours).request_id]
    # Our first request has ended, so that its id is free while the second one is still out.
    theirs = list(decoder.generate(PROMPTS[2:3], max_new_tokens=5))
    assert [record.num_prompt_tokens for record in theirs] == [len(PROMPTS[2])]
    found += [record.request_id for record in ours]
    assert found == ["0", "1"]


def test_generate_ends_where_its_caller_drops_the_records(target) -> None:
    one_by_one = EngineConfig(max_num_requests=1)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=one_by_one)
    for record in decoder.generate(PROMPTS, max_new_tokens=1):
        assert record.token_ids
        decoder.stats.records.clear()  # one that came meanwhile is lost with them
        assert decoder.stats.num_steps < 10
    assert not decoder.has_work


def test_generate_refuses_two_limits(target) -> None:
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    with pytest.raises(ConfigError, match="expected sampling or max_new_tokens, got both"):
        next(decoder.generate(PROMPTS, sampling=SamplingParams(), max_new_tokens=3))
    assert not decoder.scheduler.has_work


def test_sampled_audit_watches_some_requests_and_counts_them_exactly(target) -> None:
    heads, prompts = tiny.tiny_heads(target), [[3 + i, 9] for i in range(12)]
    full = SpecDecoder(target, heads, spec=SpecSettings(policy="training_norefresh"))
    run(full, prompts)
    engine = EngineConfig(audit_every=3)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy="training_norefresh"), engine=engine
    )
    run(decoder, prompts)
    watched = [str(i) for i in range(12) if decoder.auditor.watches(str(i))]
    assert 1 <= len(watched) < 12
    assert decoder.auditor.num_requests == len(watched)
    # The same requests alone, all watched, must give the same counts.
    alone = SpecDecoder(target, heads, spec=SpecSettings(policy="training_norefresh"))
    for name in watched:
        alone.add_request(
            prompts[int(name)], sampling=SamplingParams(max_new_tokens=10), request_id=name
        )
    while alone.scheduler.has_work:
        alone.step()
    assert decoder.stats.audit == alone.stats.audit
    assert decoder.stats.audit["slots"] < full.stats.audit["slots"]
