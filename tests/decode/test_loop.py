"""The whole loop: lossless for every policy, exact at both ends, faults stay where they arise."""

import copy
from collections import Counter

import pytest
import torch

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.drafter import NullDrafter
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import FinishReason
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.verify.verify_rules import RULES
from mtp_research.policy.audit import Verdict
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny
from tests.decode.chi_square import chi_square_p_value
from tests.decode.loops import PROMPTS, draft_rightly, poison, run, small_pool, texts_of

# Every scenario runs with deferred output on and off.
pytestmark = pytest.mark.usefixtures("output_timing")

SMALL = EngineConfig(max_num_requests=3, max_prefill_chunk=4)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


@pytest.fixture(scope="module")
def baseline(target):
    return texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=SMALL))
    )


def test_baseline_equals_full_recompute_and_transformers(target, baseline) -> None:
    assert baseline["2"] == tuple(oracle.greedy_text(target, PROMPTS[2], 10))
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")
    prompt = torch.tensor([PROMPTS[0]])
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False
    )
    assert tuple(text[0, len(PROMPTS[0]) :].tolist()) == baseline["0"]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_greedy_text_equals_baseline_for_every_policy(
    target, heads, baseline, policy: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, baseline, chance=0.6)
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=SMALL,
    )
    records = run(decoder)
    assert texts_of(records) == baseline
    rounds = [count for record in records.values() for count in record.num_accepted_per_round]
    assert len(set(rounds)) > 1  # drafts were accepted, and rejected
    auditor = decoder.auditor
    if POLICIES[policy].clean:
        faults = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
        assert not any(total[verdict] for total in auditor.totals for verdict in faults)
        assert auditor.num_dirty_rounds == 0


@pytest.mark.parametrize("policy", ["eagle", "training"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo_v2"])
def test_greedy_text_of_families_equals_baseline(
    family: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.tiny_target(family)
    outputs = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=SMALL))
    )
    draft_rightly(monkeypatch, outputs, chance=0.6)
    decoder = SpecDecoder(
        target, tiny.tiny_heads(target), spec=SpecSettings(policy=policy), engine=SMALL
    )
    assert texts_of(run(decoder)) == outputs
    assert decoder.stats.acceptance_length > 1.2


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ("training_norefresh", Verdict.WRONG),
        ("target_roll", Verdict.WRONG),
        ("eagle_norefresh", Verdict.HOLE),
        ("window", Verdict.HOLE),
    ],
)
def test_audit_of_unclean_policy_counts_its_fault(
    target, heads, baseline, policy: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, baseline, chance=0.7)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy=policy, num_speculative_tokens=3), engine=SMALL
    )
    records = run(decoder)
    rejected = [
        drafted - accepted
        for record in records.values()
        for accepted, drafted in zip(
            record.num_accepted_per_round, record.num_drafted_per_round, strict=True
        )
    ]
    assert max(rejected) >= 2
    assert min(rejected) == 0
    assert sum(total[verdict] for total in decoder.auditor.totals) > 0
    assert decoder.auditor.num_dirty_rounds > 0


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_null_head_has_length_one_and_baseline_text(target, baseline, num_drafts: int) -> None:
    decoder = SpecDecoder(
        target, "null", spec=SpecSettings(num_speculative_tokens=num_drafts), engine=SMALL
    )
    assert texts_of(run(decoder)) == baseline
    assert decoder.stats.acceptance_length == 1.0


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_oracle_head_has_length_k_plus_one_and_baseline_text(
    target, baseline, num_drafts: int
) -> None:
    decoder = SpecDecoder(
        target, "oracle", spec=SpecSettings(num_speculative_tokens=num_drafts), engine=SMALL
    )
    assert texts_of(run(decoder)) == baseline
    assert decoder.stats.acceptance_length == num_drafts + 1


@pytest.mark.parametrize("heads_name", ["null", "oracle"])
def test_drafts_outside_the_vocabulary_are_rejected(
    target, baseline, heads_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = torch.tensor([[128, -7, 10**9]])

    def draft(_, step, *, cache, slot_state) -> torch.Tensor:
        drafts = bad.expand(len(step.inputs.slots), -1)
        column = torch.arange(3)
        slot_state.write_text(
            step.inputs.slots,
            positions=step.state.num_known_tokens[:, None] + column,
            token_ids=drafts,
            keep=step.state.drafting[:, None].expand_as(drafts),
        )
        return drafts

    monkeypatch.setattr(NullDrafter, "draft", draft)
    for verify in ("greedy", "standard"):
        decoder = SpecDecoder(target, "null", spec=SpecSettings(verify=verify), engine=SMALL)
        assert texts_of(run(decoder)) == baseline
        assert decoder.stats.acceptance_length == 1.0
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6)
    records = run(
        SpecDecoder(target, "null", spec=SpecSettings(verify="block"), engine=SMALL),
        sampling=sampling,
    )
    assert all(0 <= token < 128 for text in texts_of(records).values() for token in text)


@pytest.mark.parametrize("heads_name", ["null", "oracle"])
@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 5])
def test_stop_token_inside_accepted_drafts_ends_the_text_there(
    target, baseline, heads_name: str, index: int
) -> None:
    stop = baseline["0"][index]
    expected = baseline["0"][: baseline["0"].index(stop) + 1]
    decoder = SpecDecoder(
        target, heads_name, spec=SpecSettings(num_speculative_tokens=3), engine=SMALL
    )
    sampling = SamplingParams(max_new_tokens=10, stop_token_ids=(stop,))
    record = run(decoder, PROMPTS[:1], sampling=sampling)["0"]
    assert record.output_token_ids == expected
    assert record.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_few_tokens_wanted_are_given_exactly(
    target, baseline, max_new_tokens: int, num_drafts: int
) -> None:
    decoder = SpecDecoder(
        target, "oracle", spec=SpecSettings(num_speculative_tokens=num_drafts), engine=SMALL
    )
    records = run(decoder, sampling=SamplingParams(max_new_tokens=max_new_tokens))
    assert texts_of(records) == {name: text[:max_new_tokens] for name, text in baseline.items()}
    assert {record.finish_reason for record in records.values()} == {"length"}


@pytest.mark.parametrize("heads_name", ["mtp", "oracle"])
@pytest.mark.parametrize("room", [1, 2, 4, 7])
def test_context_limit_ends_the_text_and_is_never_exceeded(
    target, heads, baseline, heads_name: str, room: int, output_timing: bool
) -> None:
    limit = len(PROMPTS[2]) + room
    engine = EngineConfig(max_num_requests=2, max_model_len=limit, block_size=4)
    decoder = SpecDecoder(
        target,
        heads if heads_name == "mtp" else "oracle",
        spec=SpecSettings(policy="eagle"),
        engine=engine,
    )
    positions = []
    forward = target.model.base_model.forward

    def spy(*args, **kwargs):
        positions.append(int(kwargs["position_ids"].max()))
        return forward(*args, **kwargs)

    target.model.base_model.forward = spy
    try:
        record = run(decoder, [PROMPTS[2]], sampling=SamplingParams(max_new_tokens=99))["0"]
    finally:
        target.model.base_model.forward = forward
    assert record.output_token_ids == baseline["2"][:room]
    assert record.finish_reason == FinishReason.LENGTH
    if heads_name == "mtp":  # the oracle's own passes look further ahead; nothing is kept of them
        # Deferred steps have K+1 rows whatever is left; what lies beyond is computed and dropped.
        assert max(positions) < limit + (3 if output_timing else 0)


@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_preempted_requests_repeat_the_unpressured_run(
    target, heads, baseline, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, baseline, chance=0.5)
    records = [
        run(SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=small_pool(blocks)))
        for blocks in (64, 8)
    ]
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=small_pool(8))
    run(decoder)
    assert decoder.stats.num_preemptions > 0
    assert decoder.auditor.num_dirty_rounds == 0
    for name, record in records[0].items():
        other = records[1][name]
        assert other.output_token_ids == record.output_token_ids == baseline[name]
        assert other.num_accepted_per_round == record.num_accepted_per_round
        assert other.num_target_forwards == record.num_target_forwards


# The rules run on the device, where it is the same when the host learns of it: one timing each.
@pytest.mark.parametrize(
    ("output_timing", "verify", "draft_sampling"),
    [
        (False, "standard", "greedy"),
        (True, "standard", "sample"),
        (False, "block", "sample"),
        (True, "typical", "greedy"),
    ],
    indirect=["output_timing"],
)
def test_sampled_text_depends_on_seed_and_prompt_alone(
    target, heads, verify: str, draft_sampling: str
) -> None:
    params = [
        SamplingParams(temperature=1.0, top_k=6, seed=seed, max_new_tokens=4)
        for seed in (1, 2, 2**40, -5)
    ]

    def decoded(engine: EngineConfig, order: tuple[int, ...] = (0, 1, 2, 3)):
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(verify=verify, draft_sampling=draft_sampling),
            engine=engine,
        )
        prompts, chosen = [PROMPTS[i] for i in order], [params[i] for i in order]
        records = run(decoder, prompts, sampling=chosen)
        outputs = {i: records[str(row)].output_token_ids for row, i in enumerate(order)}
        return outputs, decoder.stats.num_preemptions

    expected, _ = decoded(EngineConfig())
    assert decoded(EngineConfig())[0] == expected
    assert decoded(EngineConfig(max_num_requests=1))[0] == expected
    assert (
        decoded(EngineConfig(max_num_requests=2, max_prefill_chunk=2), (3, 1, 0, 2))[0] == expected
    )
    assert decoded(EngineConfig(), (2,))[0][2] == expected[2]
    pressed, num_preemptions = decoded(small_pool(7))
    assert num_preemptions > 0
    assert pressed == expected
    other = [SamplingParams(temperature=1.0, top_k=6, seed=99, max_new_tokens=4)] * 4
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(verify=verify, draft_sampling=draft_sampling)
    )
    assert texts_of(run(decoder, sampling=other)) != {str(i): expected[i] for i in expected}


def _exact_texts(target, prompt: list[int], *, top_k: int, num_tokens: int) -> dict:
    """Probability of every continuation at temperature 1, from full recomputes."""
    texts = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for text, chance in texts.items():
            logits = oracle.target_logits(target, [*prompt, *text])[-1]
            best = logits.topk(top_k)
            for token, share in zip(best.indices, torch.softmax(best.values, dim=-1), strict=True):
                longer[(*text, int(token))] = chance * float(share)
        texts = longer
    return texts


@pytest.mark.parametrize(
    ("output_timing", "verify", "draft_sampling"),
    [(True, "standard", "greedy"), (False, "standard", "sample"), (True, "block", "sample")],
    indirect=["output_timing"],
)
def test_sampled_text_is_distributed_as_the_target(
    target, heads, verify: str, draft_sampling: str
) -> None:
    num_requests, prompt = 900, [5, 9]
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(num_speculative_tokens=2, verify=verify, draft_sampling=draft_sampling),
        engine=EngineConfig(
            max_num_requests=300, max_num_batched_tokens=2000, max_model_len=16, audit=False
        ),
    )
    params = [
        SamplingParams(temperature=1.0, top_k=3, seed=seed, max_new_tokens=3)
        for seed in range(num_requests)
    ]
    counts = Counter(texts_of(run(decoder, [prompt] * num_requests, sampling=params)).values())
    exact = _exact_texts(target, prompt, top_k=3, num_tokens=3)
    assert set(counts) <= set(exact)
    observed = torch.tensor([counts[text] for text in exact])
    expected = torch.tensor(list(exact.values())) * num_requests
    assert chi_square_p_value(observed, expected) > 1e-3


@pytest.mark.parametrize("heads_name", ["mtp", "oracle", "null"])
def test_non_finite_target_logits_end_only_that_request(baseline, heads_name: str) -> None:
    target = tiny.tiny_target("qwen3")
    seen = {token for text in baseline.values() for token in text}
    seen |= {token for prompt in PROMPTS for token in prompt}
    bad = min(set(range(128)) - seen)
    heads = tiny.tiny_heads(target) if heads_name == "mtp" else heads_name
    poison(target.embed_tokens.weight, bad)
    for where in (0, 3, 8):
        prompt = [*PROMPTS[2][:where], bad, *PROMPTS[2][where:]]
        records = run(SpecDecoder(target, heads, engine=SMALL), [*PROMPTS, prompt])
        assert records["4"].finish_reason == FinishReason.NON_FINITE
        assert records["4"].output_token_ids == ()
        assert {name: records[name].output_token_ids for name in baseline} == baseline


def test_token_that_breaks_the_target_ends_the_request_at_it(baseline) -> None:
    target = tiny.tiny_target("qwen3")
    text = baseline["2"]
    bad = text[4]
    assert bad not in (*text[:4], *PROMPTS[2])
    poison(target.embed_tokens.weight, bad)
    for heads in ("oracle", "null", tiny.tiny_heads(target)):
        record = run(SpecDecoder(target, heads), [PROMPTS[2]])["0"]
        assert record.finish_reason == FinishReason.NON_FINITE
        assert record.output_token_ids == text[:5]


def test_non_finite_draft_logits_are_rejected_drafts(target, baseline) -> None:
    heads = tiny.tiny_heads(target)
    poison(heads.mtp_modules[1].eh_proj.weight, 0)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy="training"), engine=SMALL)
    assert texts_of(run(decoder)) == baseline
    assert max(max(r.num_accepted_per_round, default=0) for r in decoder.stats.records) <= 1


def test_generate_again_yields_only_new_records(target, baseline) -> None:
    decoder = SpecDecoder(target, "oracle", engine=SMALL)
    for _ in range(2):
        records = list(decoder.generate(PROMPTS, max_new_tokens=10))
        assert {r.request_id: r.output_token_ids for r in records} == baseline
        assert len(records) == len(PROMPTS)
    assert len(decoder.stats.records) == 2 * len(PROMPTS)


def test_generate_leaves_other_requests_to_their_owner(target, baseline) -> None:
    decoder = SpecDecoder(target, "oracle", engine=SMALL)
    mine = decoder.add_request(PROMPTS[2], sampling=SamplingParams(max_new_tokens=10))
    records = list(decoder.generate(PROMPTS[:2], max_new_tokens=10))
    assert sorted(record.request_id for record in records) == ["0", "1"]
    while decoder.scheduler.has_work:
        decoder.step()
    assert mine.output_token_ids == baseline["2"]


def test_generate_closed_early_or_given_a_bad_prompt_leaves_nothing_behind(target) -> None:
    decoder = SpecDecoder(target, "oracle", engine=SMALL)
    stream = decoder.generate(PROMPTS, max_new_tokens=10)
    next(stream)
    stream.close()
    assert not decoder.scheduler.has_work
    with pytest.raises(ConfigError, match=r"must be in \[0, 128\)"):
        list(decoder.generate([[5], [128]]))
    assert not decoder.scheduler.has_work
    assert len(list(decoder.generate(PROMPTS, max_new_tokens=2))) == len(PROMPTS)
    assert decoder.scheduler.blocks.num_free_blocks == decoder.scheduler.blocks.num_blocks


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_keeps_the_text_so_far_and_disturbs_nobody(
    target, heads, baseline, num_steps: int
) -> None:
    decoder = SpecDecoder(target, heads, engine=SMALL)
    requests = [
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=10), request_id=str(i))
        for i, prompt in enumerate(PROMPTS)
    ]
    for _ in range(num_steps):
        decoder.step()
    decoder.abort(requests[0])
    decoder.abort(requests[0])  # twice is once
    decoder.scheduler.check_integrity()
    while decoder.scheduler.has_work:
        decoder.step()
    texts = {record.request_id: record.output_token_ids for record in decoder.stats.records}
    assert len(decoder.stats.records) == len(PROMPTS)
    assert texts["0"] == baseline["0"][: len(texts["0"])]
    assert {name: texts[name] for name in "123"} == {name: baseline[name] for name in "123"}


def test_synthetic_rule_accepts_at_its_rates(target) -> None:
    options = VerifyOptions(synthetic_rates=(1.0, 1.0, 0.0))
    decoder = SpecDecoder(
        target, "oracle", spec=SpecSettings(verify="synthetic", verify_options=options)
    )
    run(decoder)
    assert decoder.stats.acceptance_length == 3.0


def test_relaxed_rule_holds_between_thinking_tokens_of_the_text(target, heads, baseline) -> None:
    # Everything is accepted while thinking, which begins in the prompt of one request only.
    options = VerifyOptions(
        relaxed_top_n=128, relaxed_delta=1.0, relaxed_thinking_token_ids=(31, 127)
    )
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(verify="relaxed", verify_options=options), engine=SMALL
    )
    records = run(decoder)
    assert 127 not in {token for text in baseline.values() for token in text}
    assert records["0"].num_accepted_per_round[0] == 3
    assert {name: records[name].output_token_ids for name in "123"} == {
        name: baseline[name] for name in "123"
    }


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.samples])
def test_temperature_for_a_rule_without_sampling_is_refused(target, rule: str) -> None:
    decoder = SpecDecoder(target, "null", spec=SpecSettings(verify=rule))
    with pytest.raises(ConfigError, match=f"temperature must be 0 for verify='{rule}'"):
        decoder.add_request([1], sampling=SamplingParams(temperature=0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "eagel"}, "policy must be one of"),
        ({"heads": "assets/heads"}, "pass load_heads"),
        ({"verify": "exact"}, "verify must be one of"),
        ({"draft_sampling": "top"}, "draft_sampling must be one of"),
        ({"module_schedule": "random"}, "module_schedule must be one of"),
        ({"policy": ["eagle"]}, r"policy must be one of .* got \['eagle'\]"),
        ({"policy": None}, "policy must be one of"),
        ({"verify": len}, "verify must be one of"),
        ({"num_speculative_tokens": -1}, "must be an integer in 0..64, got -1"),
        ({"num_speculative_tokens": 65}, "must be an integer in 0..64, got 65"),
        ({"num_speculative_tokens": 3.0}, "must be an integer in 0..64, got 3.0"),
        ({"num_speculative_tokens": "3"}, "must be an integer in 0..64, got '3'"),
        ({"heads": None}, "num_speculative_tokens=3 needs heads"),
        ({"verify": "synthetic"}, "must hold spec.k=3 rates"),
    ],
)
def test_decoder_bad_argument_names_the_key(target, arguments: dict, message: str) -> None:
    arguments = dict(arguments)
    heads = arguments.pop("heads", "null")
    with pytest.raises(ConfigError, match=message):
        SpecDecoder(target, heads, spec=SpecSettings(**arguments))
