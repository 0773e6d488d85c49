"""Fewer drafts in the real loop: same text, clean draft KV, right denominators, rows saved."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import drafter as draft
from mtp_research.decode.draft.draft_length import (
    NOT_DRAFTED,
    BatchTableLength,
    ConfidenceLength,
    DraftLength,
    ExpectedGainLength,
    RecentRounds,
    StepKind,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.verify.verify import (
    VerifyInputs,
    VerifyOutput,
    verify_block,
    verify_standard,
)
from mtp_research.policy.audit import Verdict
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny
from tests.decode.loops import PROMPTS, draft_rightly, run, texts_of
from tests.decode.markov import decode, text_p_value
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.decode.test_exactness import VOCAB, DictatedLoop

CLEAN = [("training", 3), ("training", 1), ("eagle", 1), ("eagle", 2), ("eagle", 3)]


@dataclass(frozen=True)
class RandomLength:
    """Any limit in any step and, with `stops`, any request stopped after any pass."""

    seed: int
    stops: bool

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """Reads the number of steps only, so that a run can be repeated."""
        rng = random.Random(f"{self.seed} {recent.num_steps} {sum(recent.counts.reached)}")
        return rng.randint(0, recent.plan.num_speculative_tokens)

    def limits(self, num_speculative_tokens: int) -> range:
        """Any."""
        return range(num_speculative_tokens + 1)

    def keeps(self, probability: torch.Tensor) -> torch.Tensor:
        """A coin per request, from the bits of its probability."""
        coin = (probability * 1e6).long() % 5 > 0
        return coin if self.stops else torch.ones_like(coin)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


def compare_made_drafts(loop: DictatedLoop, policy: str) -> tuple[float, int]:
    """One step; largest difference of the draft logits to the oracle's, and drafts compared."""
    loop.draft_logits.clear()
    schedule, order = loop.decoder.scheduler.schedule, []

    def spy():
        result = schedule()
        order.extend(entry.request for entry in result.entries)
        return result

    loop.decoder.scheduler.schedule = spy
    loop.decoder.step()
    loop.decoder.scheduler.schedule = schedule
    loop.decoder.scheduler.check_integrity()
    logits_of_step, worst, compared = list(loop.draft_logits), 0.0, 0
    for row, request in enumerate(order):
        made = len(request.draft_token_ids)
        if request.slot is None or made == 0:
            continue
        drafts, logits = oracle.DRAFTS[policy](
            loop.decoder.drafter.heads, request.token_ids, loop.decoder.num_speculative_tokens
        )
        assert request.draft_token_ids == drafts[:made]
        for recorded, expected in zip(logits_of_step, logits[:made], strict=False):
            worst = max(worst, float((recorded[row] - expected).abs().max()))
        compared += made
    return worst, compared


@pytest.mark.parametrize(
    ("chunk", "stops"), [(256, False), (3, True)], ids=["limits", "limits_and_stops"]
)
@pytest.mark.parametrize(("policy", "num_modules"), CLEAN)
def test_drafts_equal_full_recompute_whatever_was_left_out(
    target, policy: str, num_modules: int, chunk: int, stops: bool
) -> None:
    decoder = SpecDecoder(
        target,
        tiny.tiny_heads(target, num_mtp_modules=num_modules),
        spec=SpecSettings(
            policy=policy,
            num_speculative_tokens=4,
            draft_length=RandomLength(seed=chunk, stops=stops),
        ),
        engine=EngineConfig(max_num_requests=3, max_prefill_chunk=chunk),
    )
    loop, rng = DictatedLoop(decoder, seed=chunk), random.Random(chunk)
    for length in (1, 9, 5, 2):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=14))
    worst, compared = 0.0, 0
    while decoder.scheduler.has_work:
        difference, count = compare_made_drafts(loop, policy)
        worst, compared = max(worst, difference), compared + count
    loop.close()
    assert worst < 1e-10
    assert compared > 20
    assert decoder.auditor.num_dirty_rounds == 0
    faults = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
    assert not any(total[fault] for total in decoder.auditor.totals for fault in faults)
    drafted = [n for record in decoder.stats.records for n in record.num_drafted_per_round]
    assert len(set(drafted)) >= 3


def test_leaving_whole_passes_out_would_break_the_draft_kv(target, monkeypatch) -> None:
    """The base rows are needed: the reason why `training` saves no module rows."""
    pass_plan = DraftPlan.pass_plan

    def plan_nothing(*args, makes_draft: bool, **kwargs):
        plan = pass_plan(*args, makes_draft=makes_draft, **kwargs)
        return plan if makes_draft else plan._replace(writes=plan.writes & False)

    monkeypatch.setattr(DraftPlan, "pass_plan", plan_nothing)
    decoder = SpecDecoder(
        target,
        tiny.tiny_heads(target),
        spec=SpecSettings(policy="training", draft_length=BatchTableLength(((1, 1), (3, 3)))),
    )
    run(decoder, sampling=[SamplingParams(max_new_tokens=8 + 9 * i) for i in range(4)])
    assert sum(total[Verdict.HOLE] for total in decoder.auditor.totals) > 0


RULES: dict[str, DraftLength] = {
    "confidence": ConfidenceLength(0.05),
    "never": ConfidenceLength(1.0),
    "table": BatchTableLength(((1, 3), (2, 1), (4, 0))),
    "gain": ExpectedGainLength(0.2),
    "measured": ExpectedGainLength(),
}


def assert_text_is_the_baselines(target, policy: str, rule: str, *, num_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_tokens)
    baseline = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=sampling)
    )
    heads = tiny.tiny_heads(target)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy, draft_length=RULES[rule]))
    assert texts_of(run(decoder, sampling=sampling)) == baseline
    if POLICIES[policy].clean:
        assert decoder.auditor.num_dirty_rounds == 0
    if rule == "never":
        assert decoder.stats.acceptance.num_rounds == 0
        assert decoder.stats.target_forwards_per_token == 1.0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_greedy_text_is_the_baselines_under_every_policy(target, policy: str) -> None:
    assert_text_is_the_baselines(target, policy, "table", num_tokens=9)


@pytest.mark.parametrize(  # rules that count passed steps meet both timings, others one
    ("output_timing", "rule"),
    [
        *((False, rule) for rule in ("never", "gain", "measured")),
        *((True, rule) for rule in ("confidence", "table", "gain", "measured")),
    ],
    indirect=["output_timing"],
)
@pytest.mark.usefixtures("output_timing")
def test_greedy_text_is_the_baselines_under_every_rule(target, rule: str) -> None:
    num_tokens = 28 if rule == "measured" else 9
    assert_text_is_the_baselines(target, "training", rule, num_tokens=num_tokens)


@pytest.mark.parametrize(("policy", "num_modules"), [("training", 3), ("eagle", 1), ("eagle", 3)])
def test_shorter_rounds_verify_and_draft_fewer_rows(
    target, monkeypatch: pytest.MonkeyPatch, policy: str, num_modules: int
) -> None:
    """What each policy saves, as the module docstring of `draft_length` has it."""
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules)
    sampling = SamplingParams(max_new_tokens=24)
    module_rows: list[int] = []
    run_module = heads.run_module

    def counted(*args, token_ids: torch.Tensor, **kwargs):
        module_rows.append(token_ids.numel())
        return run_module(*args, token_ids=token_ids, **kwargs)

    monkeypatch.setattr(heads, "run_module", counted)
    found = {}
    for num_drafts in (3, 1):
        module_rows.clear()
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(policy=policy, draft_length=BatchTableLength(((1, num_drafts),))),
            engine=EngineConfig(deferred_output=False),
        )
        # Random modules are never right: every round emits one token, whatever the limit.
        monkeypatch.setattr(
            draft,
            "choose_drafts",
            lambda logits, *_, **__: torch.full_like(logits.argmax(dim=-1), -1),
        )
        run(decoder, PROMPTS[:1], sampling=sampling)
        rounds = decoder.stats.acceptance.num_rounds
        assert decoder.stats.num_target_rows == len(PROMPTS[0]) + rounds * (1 + num_drafts)
        found[num_drafts] = sum(module_rows) / rounds
    saves_rows = policy == "eagle"
    assert (found[1] < found[3]) == saves_rows
    if policy == "eagle" and num_modules == 1:  # passes 2 and 3 are gone
        assert found[3] - found[1] == pytest.approx(2, abs=0.1)


def test_records_count_the_drafts_that_were_made(target, monkeypatch) -> None:
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    sampling = SamplingParams(max_new_tokens=20)
    outputs = texts_of(run(decoder, sampling=sampling))
    draft_rightly(monkeypatch, outputs, chance=0.7)
    decoder = SpecDecoder(
        target,
        tiny.tiny_heads(target),
        spec=SpecSettings(draft_length=RandomLength(seed=1, stops=True)),
    )
    decoder.recent.half_life_steps = math.inf  # then its counters are plain ones
    records = run(decoder, sampling=sampling)
    assert texts_of(records) == outputs
    pairs = [
        pair
        for record in records.values()
        for pair in zip(record.num_accepted_per_round, record.num_drafted_per_round, strict=True)
    ]
    assert all(0 <= accepted <= drafted for accepted, drafted in pairs)
    assert {drafted for _, drafted in pairs} == {1, 2, 3}
    counts = decoder.stats.acceptance
    assert counts.num_rounds == len(pairs)
    assert sum(counts.num_drafted) == sum(drafted for _, drafted in pairs)
    assert decoder.stats.tokens_per_s > 0
    for position in range(3):
        hits = sum(accepted > position for accepted, _ in pairs)
        assert decoder.recent.counts.accepted[position] == hits > 0
        reached = sum(accepted >= position < drafted for accepted, drafted in pairs)
        assert decoder.recent.counts.reached[position] == reached


def test_non_finite_draft_logits_count_as_made_and_rejected(target) -> None:
    heads = tiny.tiny_heads(target)
    logits = heads.own_logits
    heads.own_logits = lambda post_norm, **_: logits(post_norm) * torch.nan
    decoder = SpecDecoder(target, heads, spec=SpecSettings(draft_length=ConfidenceLength(0.9)))
    run(decoder)
    heads.own_logits = logits
    assert decoder.stats.acceptance_rate == 0.0
    assert decoder.stats.draft_rate_per_position[-1] > 0.8


@pytest.mark.parametrize("heads", ["null", "oracle"])
def test_length_rule_without_passes_is_refused(target, heads: str) -> None:
    with pytest.raises(ConfigError, match=r"draft_length must be FixedLength for heads="):
        SpecDecoder(target, heads, spec=SpecSettings(draft_length=ConfidenceLength(0.3)))


def _stopping(rule, judge):
    """`rule` after the drafts from the first one that `judge(probs, drafts)` drops are cut off."""

    def verify(inputs: VerifyInputs) -> VerifyOutput:
        made = judge(inputs.draft_probs, inputs.draft_token_ids).long().cumprod(dim=-1).bool()
        cut = torch.where(made, inputs.draft_token_ids, NOT_DRAFTED)
        return rule(inputs._replace(draft_token_ids=cut))

    return verify


def _by_distribution(probs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return ConfidenceLength(0.45).keeps(probs.amax(dim=-1))


def _by_own_draw(probs: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    return ConfidenceLength(0.45).keeps(probs.gather(-1, drafts[..., None])[..., 0])


@pytest.mark.parametrize("rule", [verify_standard, verify_block])
@pytest.mark.parametrize("seed", [0, 1])
def test_confidence_leaves_sampled_text_distributed_as_the_targets(rule, seed: int) -> None:
    sampling = SamplingParams(temperature=1.0)
    verify = _stopping(rule, _by_distribution)
    decoded = decode(verify, seed=seed, sampling=sampling, sample_drafts=True)
    assert text_p_value(decoded) > 1e-4


def test_judging_the_drawn_token_instead_would_bias_the_text() -> None:
    sampling = SamplingParams(temperature=1.0)
    p_values = [
        text_p_value(
            decode(
                _stopping(verify_standard, _by_own_draw),
                seed=seed,
                sampling=sampling,
                sample_drafts=True,
            )
        )
        for seed in (0, 1)
    ]
    assert min(p_values) < 1e-6


@pytest.mark.parametrize("makes_draft", [True, False])
def test_rows_of_a_pass_without_a_draft(makes_draft: bool) -> None:
    """The row plan itself: base rows stay, rows above the frontier go."""
    from mtp_research.policy.plan import StepState

    frontier = torch.tensor([20])
    state = StepState(
        first_fresh=frontier - 1,
        frontier=frontier,
        num_known_tokens=frontier + 2,
        oldest_hidden=torch.zeros_like(frontier),
        drafting=torch.ones(1, dtype=torch.bool),
        prefilling=torch.zeros(1, dtype=torch.bool),
    )
    for (name, modules), static in itertools.product(CLEAN, (False, True)):
        plan = DraftPlan(POLICIES[name], 3, modules).pass_plan(
            state, 1, static=static, makes_draft=makes_draft
        )
        above = plan.position[plan.position > 20].tolist()
        assert above == ([21] if makes_draft and name == "eagle" else [])
        assert (20 in plan.position.tolist()) == (name == "training" or modules > 1)
    assert DraftPlan(POLICIES["eagle"], 3, 1).num_rows_per_step == 6


def _by_graphs(target, heads, policy: str, rule: DraftLength, **changes: object) -> SpecDecoder:
    settings = {"max_num_requests": 3, "max_prefill_chunk": 4, "max_model_len": 64}
    settings |= {"deferred_output": True, "audit": False, **changes}
    spec = SpecSettings(policy=policy, num_speculative_tokens=3, draft_length=rule)
    return SpecDecoder(target, heads, spec=spec, engine=EngineConfig(**settings))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_captured_steps_of_every_number_decode_what_the_plain_loop_decodes(
    target, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Same texts and same drafts, whatever numbers follow one another."""
    stand_in_for_graphs(monkeypatch)
    heads, rule = tiny.tiny_heads(target), RandomLength(seed=5, stops=False)
    sampling = [
        SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
        for count, temperature in ((14, 0.0), (6, 0.0), (10, 0.8), (12, 0.0))
    ]
    plain = _by_graphs(target, heads, policy, rule)
    captured = _by_graphs(target, heads, policy, rule, cuda_graphs=True, capture_mixed=True)
    found = [run(decoder, PROMPTS, sampling=sampling) for decoder in (plain, captured)]
    assert texts_of(found[0]) == texts_of(found[1])
    for name, record in found[0].items():
        other = found[1][name]
        assert record.num_accepted_per_round == other.num_accepted_per_round
        assert record.num_drafted_per_round == other.num_drafted_per_round
    assert plain.stats.num_target_rows == captured.stats.num_target_rows
    assert {key[1] for key in captured.graphs._graphs} == {0, 1, 2, 3}


def test_a_late_host_verifies_as_many_rows_as_the_limit_says(target) -> None:
    heads = tiny.tiny_heads(target)
    rows = {}
    for number in (3, 1):
        decoder = _by_graphs(target, heads, "eagle", BatchTableLength(((1, number),)))
        records = run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=20))
        prompt_rows, record = decoder.stats.num_prompt_rows, next(iter(records.values()))
        rows[number] = (decoder.stats.num_target_rows - prompt_rows) / record.num_target_forwards
        assert max(record.num_drafted_per_round) == number
    assert rows == {3: 4, 1: 2}


def test_captured_steps_are_timed_and_their_times_decide(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_graphs(monkeypatch)
    heads, rule = tiny.tiny_heads(target), ExpectedGainLength()
    decoder = _by_graphs(target, heads, "training", rule, cuda_graphs=True)
    decoder.warm_up(SamplingParams())
    prices, kind = decoder.recent.times.prices, StepKind(3, has_prompts=False)
    assert sorted(prices[kind]) == [2, 3]
    assert all(set(row) == {0, 1, 2, 3} for row in prices[kind].values())
    num_graphs = decoder.graphs.num_graphs
    for price, usual in ((1.0, 0), (0.0, 3)):  # seconds of one more draft: never, always
        prices[kind] = {size: {n: 1 + n * price for n in range(4)} for size in (2, 3)}
        decoder.recent.times.last_noted.clear()  # steps of before have other prices
        decoder.recent.is_due = True
        assert rule.num_drafts(batch_size=1, recent=decoder.recent) == usual
        run(decoder, PROMPTS, sampling=SamplingParams(max_new_tokens=9))
        assert decoder.recent.num_drafts == decoder.recent.last_num_drafts == usual
    assert decoder.graphs.num_graphs == num_graphs


def test_number_that_looks_better_by_its_price_is_tried_and_then_counts_as_it_was_timed() -> None:
    recent = RecentRounds(DraftPlan(POLICIES["eagle"], 1, 1))
    prices = {4: {0: 1.0, 1: 1.9}, 8: {0: 1.0, 1: 1.5}}
    recent.times.prices[StepKind(1, has_prompts=False)] = prices
    assert recent.costs(3) == {0: 1.0, 1: 1.9}
    assert recent.costs(5) == recent.costs(99) == {0: 1.0, 1: 1.5}
    rule = ExpectedGainLength()
    assert rule.num_drafts(batch_size=3, recent=recent) == 0  # 1 or 1.8 / 1.9 tokens a second
    for _ in range(5):
        recent.end_step(num_drafts=0, seconds=2.0, batch_size=3)  # long texts
    assert recent.costs(3) == {0: 2.0, 1: 1.9}
    assert rule.num_drafts(batch_size=3, recent=recent) == 1  # 1 / 2 or 1.8 / 1.9
    for _ in range(5):
        recent.end_step(num_drafts=1, seconds=5.7, batch_size=3)  # they cost it more
    assert recent.costs(3) == {0: 2.0, 1: 5.7}
    assert rule.num_drafts(batch_size=3, recent=recent) == 0
    for _ in range(2050):  # of which the first says nothing
        recent.end_step(num_drafts=0, seconds=2.0, batch_size=3)
    assert recent.costs(3) == {0: 2.0, 1: 1.9}, "tried again: texts may be others by now"


@pytest.mark.parametrize("options", [{"synthetic_rates": [1.0, 1.0, 0.0]}, {"synthetic_length": 3}])
def test_a_shorter_step_takes_the_first_rates_of_k(target, options: dict) -> None:
    """Rates 1, 1, 0: whoever verifies one draft accepts it, and none where none is verified."""
    spec = SpecSettings(
        verify="synthetic",
        verify_options=VerifyOptions(**options),
        draft_length=BatchTableLength(((1, 1), (2, 0))),
    )
    decoder = SpecDecoder(
        target, tiny.tiny_heads(target), spec=spec, engine=EngineConfig(deferred_output=True)
    )
    one = run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=12))
    (record,) = one.values()
    assert set(record.num_accepted_per_round[1:-1]) == {1}
    run(decoder, PROMPTS[:2], sampling=SamplingParams(max_new_tokens=12))


@dataclass
class InTurn:
    """3 drafts, then 1, and so on."""

    keeps = None
    num_steps: int = 0

    def limits(self, _: int) -> list[int]:
        """Both."""
        return [3, 1]

    def num_drafts(self, **_: object) -> int:
        """The next of the two."""
        self.num_steps += 1
        return 3 if self.num_steps % 2 else 1


def test_drafts_that_were_made_and_not_verified_are_in_no_rate(target) -> None:
    """Of three drafts a step of one verifies the first; one of three finds a single draft made."""
    decoder = _by_graphs(target, tiny.tiny_heads(target), "training", InTurn())
    (record,) = run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=20)).values()
    assert set(record.num_drafted_per_round) == {1}
    assert len(record.num_drafted_per_round) > 8
