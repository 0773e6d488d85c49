"""Passes that are left out for good: drafts of those that run, when others run again, and the rule.

Letters: K drafts per step, m passes of a step, n drafts of a step.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.build import shallow_passes
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import (
    DraftLength,
    ExpectedGainLength,
    FixedLength,
    LatestTimes,
    MixedSteps,
    RecentRounds,
    RoundCounts,
    StepKind,
    StepTimes,
    TextsToCome,
    tokens_a_round,
)
from mtp_research.decode.draft.drafter import VerifiedStep
from mtp_research.decode.graphs import decode_graphs, mixed_graphs
from mtp_research.decode.ledger import Launched
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Request, Schedule
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.step import DeviceParts
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.decode.test_loop_distribution import chain_target, copied_heads
from tests.decode.toy_grammar import PAIRS

K = 3
Drafts = dict[tuple[str, int], list[int]]  # by request and tokens known before them


@dataclass(frozen=True)
class Told(ExpectedGainLength):
    """Runs as many passes as it is told by the number of decode steps, and makes as many drafts."""

    told: tuple[tuple[int, int], ...] = ()  # (steps from here on, passes)

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        return recent.num_passes

    def num_passes(
        self, *, running: object, waiting: object, is_admitting: bool, recent: RecentRounds
    ) -> int:
        return next(m for steps, m in reversed(self.told) if recent.num_steps >= steps)


def build(
    target: Target, heads: MTPHeads, rule: DraftLength, policy: str, k: int = K, **changes: object
):
    """A decoder whose steps are captured, prompt rows or not, and the drafts that it makes."""
    engine = EngineConfig(
        max_num_requests=3,
        max_prefill_chunk=4,
        max_model_len=64,
        deferred_output=True,
        audit=False,
        cuda_graphs=True,
        capture_mixed=True,
        **changes,
    )
    spec = SpecSettings(policy=policy, num_speculative_tokens=k, draft_length=rule)
    decoder, made = SpecDecoder(target, heads, spec=spec, engine=engine), {}

    def watched(parts: DeviceParts) -> DeviceParts:
        def draft(step: VerifiedStep) -> Tensor:
            drafts = parts.draft(step)
            names = {request.slot: request.request_id for request in decoder.scheduler.running}
            rows = (step.inputs.slots, step.state.num_known_tokens, step.state.drafting, drafts)
            for slot, known, is_drafting, row in zip(*(one.tolist() for one in rows), strict=True):
                if is_drafting and slot in names and decoder.recent.num_passes > 0:
                    made[names[slot], known] = row[: decoder.recent.num_passes]
            return drafts

        return parts._replace(draft=draft)

    decoder.observe(watched)
    return decoder, made


def shared(some: Drafts, others: Drafts) -> int:
    """Drafts at the same place of the same text, which must agree as far as both go."""
    places = some.keys() & others.keys()
    for place in places:
        for one, other in zip(some[place], others[place], strict=False):
            assert one == other, place
    return sum(min(len(some[place]), len(others[place])) for place in places)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> tuple[Target, MTPHeads]:
    stand_in_for_graphs(monkeypatch)
    for module in (decode_graphs, mixed_graphs):  # nothing here asks how long a step takes
        monkeypatch.setattr(module, "seconds_of", lambda replays, device: 1.0)
    target = chain_target(128, sharpness=3)
    target.model.double()
    return target, copied_heads(target, blur=0.4).double()


@pytest.mark.parametrize("policy", ["training", "eagle"])
@pytest.mark.parametrize("told", [((4, 1),), ((2, 0),), ((3, 1), (9, 0))])
def test_steps_of_fewer_passes_draft_what_all_passes_would(
    models, policy: str, told: Sequence[tuple[int, int]]
) -> None:
    """Drafts follow from the text: the first m are those of K passes, and of K = m."""
    sampling = SamplingParams(max_new_tokens=24)
    decoder, made = build(*models, Told(told=((0, K), *told)), policy)
    decoder.warm_up(sampling)
    builds = decoder.num_builds
    texts = texts_of(run(decoder, sampling=sampling))
    least = min(m for _, m in told)
    assert decoder.recent.num_passes == least
    assert decoder.num_builds == builds
    assert {len(drafts) for drafts in made.values()} == {K, *(m for _, m in told)} - {0}
    others = [build(*models, FixedLength(), policy)]
    if least > 0:
        others.append(build(*models, FixedLength(), policy, k=least))
    for other, drafts in others:
        assert texts_of(run(other, sampling=sampling)) == texts
        assert shared(made, drafts) > 20


@dataclass(frozen=True)
class Falling(Told):
    """Never rises by itself."""

    def num_passes(self, *, recent: RecentRounds, **others: object) -> int:
        return min(recent.num_passes, super().num_passes(recent=recent, **others))


def test_all_passes_run_again_once_no_request_lacks_draft_kv(models) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    decoder, made = build(*models, Falling(told=((0, K), (3, 1))), "training")
    decoder.add_request(PROMPTS[0], sampling=sampling, request_id="0")
    while decoder.recent.num_passes == K:
        decoder.step()
    rule = Falling(told=((0, K),))  # nothing more is left out from now on
    decoder.spec = SpecSettings(num_speculative_tokens=K, draft_length=rule)
    decoder.add_request(PROMPTS[2], sampling=sampling, request_id="2")
    while decoder.has_work:
        decoder.step()
        assert decoder.recent.num_passes == 1
    made.clear()
    run(decoder, sampling=sampling)
    assert decoder.recent.num_passes == K
    plain, drafts = build(*models, FixedLength(), "training")
    run(plain, sampling=sampling)
    assert shared(made, drafts) > 40


@pytest.mark.parametrize("policy", ["training", "eagle"])
@pytest.mark.parametrize("least", [0, 1])
def test_passes_that_come_back_draft_for_the_requests_that_begin_then(
    models, policy: str, least: int
) -> None:
    sampling = SamplingParams(max_new_tokens=50)
    decoder, made = build(*models, Told(told=((0, K), (2, least), (6, K))), policy)
    decoder.warm_up(sampling)
    builds = decoder.num_builds
    old = decoder.add_request(PROMPTS[1], sampling=sampling, request_id="1")
    while decoder.recent.num_steps < 6:
        decoder.step()
    assert old.num_full_passes == decoder.recent.num_passes == least
    made.clear()
    num_rounds = rounds_that_reach(old, least)
    new = decoder.add_request(PROMPTS[2], sampling=sampling, request_id="2")
    counted = []
    decoder.recent.add_rounds = lambda count, **numbers: counted.append((count, numbers))
    while decoder.has_work:
        decoder.step()
    assert decoder.recent.num_passes == K
    assert (old.num_full_passes, new.num_full_passes) == (least, K)
    plain, drafts = build(*models, FixedLength(), policy)
    texts = texts_of(run(plain, PROMPTS[:3], sampling=sampling))
    assert {r.request_id: r.output_token_ids for r in (old, new)} == {
        name: texts[name] for name in "12"
    }
    of_new = {place: row for place, row in made.items() if place[0] == "2"}
    assert shared(of_new, drafts) > 20, "as if the passes had never been left out"
    assert any(row != drafts[place] for place, row in made.items() if place[0] == "1")
    assert decoder.num_builds == builds
    # The rounds of the old request count as far as its passes went, and no further.
    reached = 0
    for count, numbers in counted:
        within = numbers["num_drafted"] > least and numbers["num_accepted"] >= least
        reached += count if within else 0
    assert reached == rounds_that_reach(new, least)
    assert rounds_that_reach(old, least) > num_rounds


def rounds_that_reach(request: Request, position: int) -> int:
    """Rounds that made the draft at this position, from 0, and accepted all before it."""
    pairs = zip(request.num_drafted_per_round, request.num_accepted_per_round, strict=True)
    return sum(drafted > position and accepted >= position for drafted, accepted in pairs)


def test_steps_with_grammars_leave_passes_out_and_all_of_theirs_are_captured(models) -> None:
    sampling = SamplingParams(max_new_tokens=12, grammar=PAIRS, stop_token_ids=(1, 2))
    decoder, made = build(*models, Told(told=((0, K), (2, 1))), "training")
    decoder.warm_up(sampling)
    builds = decoder.num_builds
    run(decoder, PROMPTS[:1], sampling=sampling)
    assert decoder.num_builds == builds
    plain, drafts = build(*models, FixedLength(), "training")
    run(plain, PROMPTS[:1], sampling=sampling)
    assert {len(one) for one in made.values()} == {1, K}
    assert shared(made, drafts) > 4


def test_a_rule_of_more_drafts_than_passes_gets_those_of_the_passes(models) -> None:
    """As where somebody puts another rule in the place of the one that left them out."""
    decoder, _ = build(*models, Told(told=((0, K), (3, 1))), "training")
    decoder.add_request(PROMPTS[0], sampling=SamplingParams(max_new_tokens=20), request_id="0")
    while decoder.recent.num_passes == K:
        decoder.step()
    decoder.spec = SpecSettings(num_speculative_tokens=K)
    limits, commit = [], decoder._ledger.commit

    def noted(schedule, result, *, draft_limit: int) -> None:
        limits.append(draft_limit)
        commit(schedule, result, draft_limit=draft_limit)

    decoder._ledger.commit = noted
    for _ in range(4):
        decoder.step()
    assert limits == [1] * 4


def test_steps_that_run_as_they_come_leave_passes_out_too(models) -> None:
    decoder, made = build(*models, Told(told=((0, K), (2, 1))), "training")
    for graphs in decoder._all_graphs:
        graphs._mixed = None
    sampling = SamplingParams(max_new_tokens=16)
    run(decoder, sampling=sampling)
    plain, drafts = build(*models, FixedLength(), "training")
    run(plain, sampling=sampling)
    assert {len(one) for one in made.values()} == {1, K}
    assert shared(made, drafts) > 20


@pytest.mark.parametrize(
    ("policy", "modules", "expected"),
    [("training", 1, [2, 1, 0]), ("eagle", 1, [0]), ("eagle", 2, [1, 0]), ("eagle", 3, [2, 1, 0])],
)
def test_passes_that_make_no_draft_can_be_left_out(
    models, monkeypatch: pytest.MonkeyPatch, policy: str, modules: int, expected: list[int]
) -> None:
    target, _ = models
    heads = tiny.tiny_heads(target, num_mtp_modules=modules).double()
    decoder, _ = build(target, heads, ExpectedGainLength(), policy)
    step, spec, engine = decoder.device_step, decoder.spec, decoder.engine

    def numbers(rule: DraftLength = spec.draft_length, **changes: object) -> list[int]:
        changed = EngineConfig(**(vars(engine) | changes))
        settings = SpecSettings(policy=policy, draft_length=rule)
        return shallow_passes(step, spec=settings, engine=changed)

    assert numbers() == expected
    assert numbers(FixedLength()) == numbers(ExpectedGainLength(0.2)) == []
    assert numbers(cuda_graphs=False) == numbers(prefix_caching=True) == []
    for name in ("exchange", "parts"):
        with monkeypatch.context() as patch:
            patch.setattr(type(target), name, object())
            assert numbers() == []


ALL, ONE = StepKind(K, False), StepKind(1, False)


def priced(one: tuple[float, float] = (0.5, 0.5), **changes: object) -> RecentRounds:
    """Three passes cost 1 s, in batches of 4 and 8; one pass as is said."""
    recent = RecentRounds(DraftPlan(POLICIES["training"], K, 1), num_seen=16)
    recent.times.prices[ALL] = {size: dict.fromkeys(range(4), 1.0) for size in (4, 8)}
    recent.times.prices[ONE] = {4: {1: one[0]}, 8: {1: one[1]}}
    for counts in (recent.counts, recent.lasting_counts):  # 2.05 or 1.6 tokens
        counts.reached, counts.accepted = [1e9, 1e9, 1e9], [6e8, 5e8, 5e8]
    recent.output_tokens, recent.num_rounds = 800.0, 512
    for name, value in changes.items():
        setattr(recent, name, value)
    return recent


@dataclass
class Text:
    """What the rule reads of a request: half of 100 tokens behind a prompt of 300 are written."""

    num_written: int = 50
    num_prompt_tokens: int = 300
    most: int = 100
    num_accepted_per_round: Sequence[int] = ()
    num_drafted_per_round: Sequence[int] = ()
    num_full_passes: int = 1 << 30

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_written

    @property
    def max_tokens(self) -> int:
        return self.num_prompt_tokens + self.most


def passes(
    recent: RecentRounds, *, num_waiting: int = 4, num_admitted: int = 0, num_running: int = 8
) -> int:
    """What the rule says of eight requests, and of prompts of 300 tokens that wait or begin."""
    recent.add_admissions([200, 400] * (num_admitted // 2), is_queue=num_waiting > 0)
    recent.add_admissions([300] * (num_admitted % 2), is_queue=num_waiting > 0)
    return ExpectedGainLength().num_passes(
        running=[Text() for _ in range(num_running)],
        waiting=(Text(num_written=0) for _ in range(num_waiting)),
        is_admitting=num_admitted > 0,
        recent=recent,
    )


def test_passes_are_left_out_for_less_time_of_what_is_in_sight() -> None:
    recent = priced()
    assert passes(recent) == 1
    assert recent.num_passes == K, "the decoder's to change"
    assert passes(recent, num_waiting=0) == K, "nobody waits: the batch is about to shrink"
    for seconds, expected in ((0.78, 1), (0.79, K)):  # 1.6 / .78 is 2.051, .79 2.025
        assert passes(priced((seconds, seconds))) == expected
    # Until the last text has begun, in a batch of eight: .83 times as long. Then the eight end, in
    # steps of eight and, from half of the time on, of four: there 1.28 times as long.
    assert passes(priced((1.0, 0.65)), num_waiting=1) == K
    assert passes(priced((1.0, 0.65)), num_waiting=8) == 1


def test_six_percent_are_asked_for_where_nothing_drafts_any_more() -> None:
    for seconds, expected in ((0.29, 0), (0.3, 1)):  # 1 / .29 is 7.8 % above 1.6 / .5, .3 4.2 %
        recent = priced(num_passes=1)
        recent.times.prices[StepKind(0, False)] = {size: {0: seconds} for size in (4, 8)}
        assert passes(recent) == expected


def test_passes_are_looked_at_now_and_then_once_rounds_were_seen() -> None:
    assert passes(priced(is_due=False)) == K
    recent = priced()
    recent.num_rounds = 0
    for count, made, expected in ((511, K, K), (9, 0, K), (1, 1, 1)):
        recent.add_rounds(count, num_drafted=made, num_accepted=0)
        assert passes(recent) == expected, "they tell what drafts are worth"
    recent.add_text(is_stopped=False)
    assert passes(recent) == 1
    recent = priced((9.0, 9.0), num_passes=1)
    assert passes(recent) == 1, "those left out would pay, but others wait"
    assert ExpectedGainLength().num_drafts(batch_size=8, recent=recent) == 1


def test_passes_run_again_once_half_of_the_batch_began_without_a_queue() -> None:
    def said(recent: RecentRounds, *counts: int) -> list[int]:
        return [passes(recent, num_waiting=0, num_admitted=count) for count in counts]

    recent = priced((0.9, 0.9), num_passes=1, is_due=False)  # 1.6 / .9 a second where K makes 2.05
    assert said(recent, 1, 2, 0, 1, 0) == [1, 1, 1, K, 1], "where a request begins"
    assert passes(recent, num_admitted=4) == 1, "others wait"
    assert said(recent, 3, 1) == [1, K], "counted anew"
    assert recent.num_passes == 1, "the decoder's to change"
    for seconds, expected in ((0.79, 1), (0.80, K)):  # 2.05 is 1.2 % above 1.6 / .79, .80 2.5 %
        assert said(priced((seconds, seconds), num_passes=1), 4) == [expected]
    assert said(priced((0.9, 0.9), num_passes=1, num_rounds=511), 8) == [1]
    assert said(priced(), 4) == [K]
    recent = priced(num_passes=0)
    recent.times.prices[StepKind(0, False)] = {8: {0: 0.4}}
    assert said(recent, 4) == [1], "of more the best"


def test_drafts_and_passes_are_chosen_at_the_beginning_and_every_sixteenth_step() -> None:
    recent, rule = priced((9.0, 9.0)), ExpectedGainLength()
    looks, choices = [], []

    def noted(*_: object, **__: object) -> float:
        looks.append(recent.num_seen)
        return 1.0

    def costs(batch_size: int) -> dict[int, float]:
        choices.append(recent.num_seen)
        return {n: 1.0 + n * (recent.num_seen % 32 == 20) for n in range(4)}

    recent.rate, recent.costs = noted, costs
    for recent.num_seen in (*range(1004, 1396), *range(1400, 1420)):
        recent.begin_step(is_new_batch=recent.num_seen == 1012)
        assert passes(recent) == K
        recent.num_drafts = rule.num_drafts(batch_size=8, recent=recent)
        if recent.num_seen >= 1012:
            assert recent.num_drafts == (0 if choices[-1] % 32 == 20 else K)
    rounds = [*range(1012, 1396, 16), 1400, 1416]
    assert choices == [1004, *rounds], "a step that was not seen puts a choice off, by no more"
    assert list(dict.fromkeys(looks)) == [1004, *rounds[:8], *rounds[11::4]]
    recent.begin_step(is_new_batch=False)
    recent.begin_step(is_new_batch=True)
    assert recent.is_due
    recent.begin_step(is_new_batch=False)
    assert not recent.is_due, "the host is a step late: it knows no more than for the step before"
    recent.run_passes(1)
    assert rule.num_drafts(batch_size=8, recent=recent) == 1, "at once"
    recent.run_passes(K)
    assert recent.is_due
    assert recent.num_drafts == K
    recent.begin_step(is_new_batch=False)
    assert not recent.is_due
    recent.forget_texts()
    recent.begin_step(is_new_batch=False)
    assert recent.is_due


def test_passes_that_come_back_make_their_drafts_at_once(models) -> None:
    """Whenever they do: drafts are not chosen again in the step that is the sixteenth alone."""
    for num_first in range(8):
        decoder, _ = build(*models, ExpectedGainLength(), "training")
        sampling = SamplingParams(max_new_tokens=9)
        decoder.warm_up(sampling)
        run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=8 + num_first))
        recent = decoder.recent
        for kind in recent.times.prices:
            for row in recent.times.prices[kind].values():
                row.update(dict.fromkeys(row, 1.0))
        recent.run_passes(1)
        decoder.add_request(PROMPTS[0], sampling=sampling)
        decoder.step()
        assert (recent.num_passes, recent.num_drafts) == (K, K)


def test_a_decoder_that_was_not_warmed_up_leaves_no_passes_out(models) -> None:
    """Nothing is priced: texts that wait behind many that ended change nothing."""
    decoder, _ = build(*models, ExpectedGainLength(), "training")
    decoder.recent.add_rounds(600, num_drafted=K, num_accepted=0)
    run(decoder, PROMPTS * 8, sampling=SamplingParams(max_new_tokens=6))
    assert decoder.recent.num_rounds > 512
    assert decoder.recent.num_passes == K


def test_a_median_is_found_anew_for_every_fourth_number() -> None:
    times, found = LatestTimes(), []
    for number in (1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, *[5.0] * 16):
        times.add(number)
        found.append(times.median())
    assert found[:9] == [None, None, None, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert found[-1] == 5.0, "the latest sixteen"


def test_what_is_known_of_drafts_stays_while_their_passes_are_left_out() -> None:
    recent = priced(num_passes=1)
    both = recent.counts, recent.lasting_counts
    known = [counts.conditional_acceptance()[1:] for counts in both]
    for _ in range(20000):
        recent.add_rounds(8, num_drafted=1, num_accepted=1)
        recent.add_text(is_stopped=False)
        recent.end_step(num_drafts=1, seconds=None, batch_size=8)
    assert min(counts.conditional_acceptance()[0] for counts in both) > 0.9
    assert [counts.conditional_acceptance()[1:] for counts in both] == known


def test_passes_are_decided_by_the_long_memory_and_drafts_by_the_short_one() -> None:
    """A hundred steps and texts that no draft fits, after thousands that they do."""
    recent = priced((0.79, 0.79), half_life_steps=8.0)
    recent.forget_texts()
    recent.times.prices[ALL] = {8: {n: 1.0 + 0.1 * n for n in range(4)}}
    for accepted, steps in ((K, 4000), (0, 100)):
        for _ in range(steps):
            recent.add_rounds(8, num_drafted=K, num_accepted=accepted)
            recent.add_text(is_stopped=False)
            recent.end_step(num_drafts=K, seconds=None, batch_size=8)
    recent.output_tokens, recent.num_rounds, recent.num_seen = 800.0, 512, 16
    assert passes(recent) == K
    assert ExpectedGainLength().num_drafts(batch_size=8, recent=recent) == 0
    recent.lasting_counts = recent.counts
    assert passes(recent) == 1


def test_texts_end_as_often_as_they_did() -> None:
    """Eight requests run, one token a step each, and one in 12 steps stops, of two that end."""
    recent = RecentRounds(DraftPlan(POLICIES["training"], K, 1))
    for step in range(40000):
        recent.add_step(0, num_decoding=8, num_passes=K, num_tokens=8)
        if step % 6 == 0:
            recent.add_text(is_stopped=step % 12 == 0)
    texts = TextsToCome.like([Text(most=1 << 20)], recent)
    assert texts.mean_length(texts.most_tokens) == pytest.approx(96, rel=0.01)
    assert recent.num_stopped > 150, "however long they are, many ended of late"


@pytest.mark.parametrize("chance", [1e-8, 0.002, 0.03])
def test_lengths_and_rests_are_those_of_texts_that_end_anywhere(chance: float) -> None:
    """Summed up token by token: those that are left after each, and of these what is to come."""
    texts = TextsToCome(chance, 100.0)
    left = [math.exp(-chance * token) for token in np.arange(100_000) / 1000]
    length = sum(left) / 1000
    assert texts.mean_length(texts.most_tokens) == pytest.approx(length, rel=1e-3)
    rest = sum(token * share for token, share in enumerate(left)) / 1e6 / length
    assert texts.mean_rest() == pytest.approx(rest, rel=1e-3)
    running = [Text(num_written=90), Text(num_written=100)]
    assert texts.num_left(running) == pytest.approx(sum(left[:10_000]) / 1000, rel=1e-3)


@pytest.mark.parametrize("chance", [1e-8, 0.03, 0.3])
@pytest.mark.parametrize("speeds", [(2.0,), (1.2, 3.0), (1.0, 1.0, 1.0, 4.0)])
@pytest.mark.parametrize("usual", [1.0, 2.5])
def test_batches_end_as_in_a_thousand_trials(
    chance: float, speeds: Sequence[float], usual: float
) -> None:
    """Slow texts are left, more of them had begun before, and few take as long as a bucket."""
    recent = priced(num_passes=1)
    recent.times.prices[ONE] = {size: {1: 1.0 + 0.1 * size} for size in (1, 2, 4, 8)}
    for _ in range(8):
        recent.times.note(ONE, 1, size=8, batch_size=8, seconds=1.8 * usual)
    rounds = np.array([[1.0, speed, 0.0, 0.0] for speed in speeds])
    rng, seconds = random.Random(0), 0.0
    for _ in range(1000):
        kinds = [rng.choice(speeds) for _ in range(8)]
        ends = sorted(_rest(rng, chance) / speed for speed in kinds)
        for ended, (before, after) in enumerate(itertools.pairwise([0.0, *ends])):
            size = min(one for one in (1, 2, 4, 8) if one >= 8 - ended)
            seconds += (after - before) * (1.0 + 0.1 * size) * usual / 1000
    found = TextsToCome(chance, 100.0).drain_seconds(1, 8, rounds, recent)
    assert found == pytest.approx(seconds, rel=0.1)


def test_a_high_limit_changes_nothing_of_how_short_texts_end() -> None:
    recent, rounds = priced(), np.array([[1.0, 1.2, 1.4, 1.5], [1.0, 2.0, 2.6, 3.0]])
    first, *others = (
        TextsToCome(0.01, limit).drain_seconds(K, 8, rounds, recent) for limit in (1e3, 1e4, 1e6)
    )
    assert others == pytest.approx([first] * 2, rel=0.01)


def test_a_batch_that_ends_makes_the_drafts_that_are_best_in_half_of_it() -> None:
    """Three, which cost nothing in four requests; in eight they cost 2.2 for 2.05 tokens."""
    recent, rounds = priced(), np.array([[1.0, 1.6, 1.9, 2.05]])
    recent.times.prices[ALL] = {4: dict.fromkeys(range(4), 1.0), 8: {0: 1.0, 1: 9, 2: 9, 3: 2.2}}
    rest = TextsToCome(1e-8, 100.0)
    # For half of the rounds more than four are left, and at the end a ninth has none.
    expected = 100 / 2.05 * (2.2 / 2 + 1.0 / 2 - 1.0 / 9)
    assert rest.drain_seconds(K, 8, rounds, recent) == pytest.approx(expected, rel=0.02)
    recent.times.prices[ALL][4] = {0: 1.0, 1: 9.0, 2: 9.0, 3: 9.0}
    assert rest.drain_seconds(K, 8, rounds, recent) == pytest.approx(100 * 8 / 9, rel=0.01)


def _rest(rng: random.Random, chance: float) -> float:
    """Tokens that a text of at most 100 lacks at a time at random."""
    while True:  # a token of a text, longer texts have more of them
        length, token = min(rng.expovariate(chance), 100.0), rng.uniform(0.0, 100.0)
        if token < length:
            return length - token


def test_texts_are_known_by_their_rounds_and_four_of_all() -> None:
    recent = priced()
    made = [K] * 60
    running = [
        Text(),
        Text(num_accepted_per_round=[0] * 12 + [K] * 48, num_drafted_per_round=made),
        Text(num_accepted_per_round=[2] * 44, num_drafted_per_round=[K] * 44),
        Text(num_accepted_per_round=[1] * 12, num_drafted_per_round=[1] * 12),
    ]
    found = tokens_a_round(running, recent)
    alike = np.array([1.0, 1.6, 1.9, 2.05])  # .6, .3 and .15 more
    np.testing.assert_allclose(found[0], alike, rtol=1e-6)
    np.testing.assert_allclose(found[1], (48 * np.arange(1.0, 5.0) + 4 * alike) / 52, rtol=1e-6)
    twos = np.array([1.0, 2.0, 3.0, 3.0])
    np.testing.assert_allclose(found[2], (44 * twos + 4 * alike) / 48, rtol=1e-6)
    one = 1.0 + (12 + 4 * 0.6) / 16
    np.testing.assert_allclose(found[3], [1.0, one, one + 0.3, one + 0.45], rtol=1e-6)
    # Its other passes made drafts without the draft KV of its first rounds.
    lacking = Text(num_accepted_per_round=[1] * 6 + [K] * 6, num_drafted_per_round=[K] * 12)
    lacking.num_full_passes = 1
    np.testing.assert_allclose(tokens_a_round([lacking], recent)[0], found[3])
    many = [Text(num_accepted_per_round=[K], num_drafted_per_round=[K])] * 64
    many[::2] = [Text()] * 32
    np.testing.assert_allclose(tokens_a_round(many, recent), [alike] * 32)


def test_texts_that_run_tell_the_limits_of_others() -> None:
    recent = priced(num_stopped=8.0)
    assert TextsToCome.like([Text(most=40), Text(most=60)], recent) == TextsToCome(0.01, 50.0)


def test_slow_texts_at_the_end_ask_for_fewer_passes() -> None:
    """All texts together accept as many drafts, but half of them none, and these end last."""
    recent = priced((0.82, 0.82))  # 1.6 / .82 is 1.95 tokens a second, less than 2.05
    alike = [Text() for _ in range(8)]
    some = Text(num_accepted_per_round=[K] * 48, num_drafted_per_round=[K] * 48)
    none = Text(num_accepted_per_round=[0] * 48, num_drafted_per_round=[K] * 48)
    rule, waiting = ExpectedGainLength(), [Text(num_written=0)]
    for running, expected in ((alike, K), ([some, none] * 4, 1)):
        found = rule.num_passes(running=running, waiting=waiting, is_admitting=False, recent=recent)
        assert found == expected


def test_the_batch_is_all_that_runs(models) -> None:
    """Where a step holds prompts alone, as well."""
    sizes = []

    class Noted(ExpectedGainLength):
        def num_passes(
            self, *, running: Sequence[Request], recent: RecentRounds, **_: object
        ) -> int:
            sizes.append((len(running), len(decoder.scheduler.running)))
            return recent.num_passes

    decoder, _ = build(*models, Noted(), "training", mixed_batches=False)
    run(decoder, sampling=SamplingParams(max_new_tokens=8))
    assert all(size == num_running for size, num_running in sizes)
    assert (3, 3) in sizes


def test_passes_run_again_for_prompts_like_those_that_begin() -> None:
    """Three tokens of prompt for one of output: with them steps of more passes take too long."""
    recent = priced((0.9, 0.9), num_passes=1, max_rows=64)
    assert passes(recent, num_waiting=0, num_admitted=4) == K
    recent.times.prices[StepKind(K, True)] = {64: dict.fromkeys(range(4), 3.0)}
    recent.times.prices[StepKind(1, True)] = {64: {1: 1.0}}
    assert passes(recent, num_waiting=0, num_admitted=4) == 1


def test_all_steps_take_as_much_more_than_their_price_as_steps_do_now() -> None:
    """Else whatever was never tried would look better than what is."""
    recent = priced()
    for _ in range(6):
        recent.end_step(num_drafts=K, seconds=3.0, batch_size=8)
    for _ in range(8):
        recent.times.note(ONE, 1, size=8, batch_size=8, seconds=0.5)
    assert recent.times.usual(ALL) == pytest.approx(3.0)
    assert recent.rate(K, 8) == pytest.approx(8 * 2.05 / 3.0)
    assert recent.rate(1, 8) == pytest.approx(8 * 1.6 / 1.5)
    assert recent.costs(8) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0}, "n that looks good is tried"


def test_no_step_is_shorter_than_what_the_host_does_in_it() -> None:
    recent = priced()
    assert passes(recent) == 1
    for seconds in (9.0, 0.1, 0.85, 0.85):  # one call of 9 s counts as one
        assert passes(recent) == 1
        recent.add_call(seconds, has_prompts=False, batch_size=8)
    assert recent.times.costs(ONE, batch_size=8) == {1: pytest.approx(0.85)}
    assert recent.costs(8) == dict.fromkeys(range(4), 1.0)
    assert passes(recent) == K  # 1.6 / .85 tokens a second, less than 2.05
    for _ in range(5):
        recent.add_call(0.1, has_prompts=True, batch_size=8)
    assert passes(recent) == K, "that was beside prompts"
    for _ in range(5):
        recent.add_call(0.1, has_prompts=False, batch_size=8)
    assert passes(recent) == 1
    recent.times.host_seconds.clear()
    for _ in range(4):
        recent.add_call(0.85, has_prompts=True, batch_size=8)
    assert passes(recent) == K, "nothing is known of calls without prompts: these are no shorter"


def test_the_host_takes_longer_for_more_requests() -> None:
    """Beside its work for a call, which is as much as for 64 requests."""
    recent = priced(most_running=64.0)
    for batch_size in (31, 16):  # less than half of the most: the end of a batch
        for _ in range(8):
            recent.add_call(7.0, has_prompts=False, batch_size=batch_size)
    for _ in range(4):
        recent.add_call(0.6, has_prompts=False, batch_size=32)
    assert recent.times.costs(ONE, batch_size=128) == {1: pytest.approx(1.2)}
    assert recent.times.costs(ONE, batch_size=4) == {1: pytest.approx(0.5)}, "the price"


def test_the_host_is_timed_again_once_a_burst_is_over() -> None:
    """A server: 128 at a time once, then eight, and nobody waits."""
    recent = priced(most_running=128.0)
    for _ in range(1600):
        recent.num_seen += 1
        recent.begin_step(is_new_batch=False)
        passes(recent, num_waiting=0)
        recent.add_call(0.9, has_prompts=False, batch_size=8)
    assert recent.most_running < 16
    assert recent.times.costs(ONE, batch_size=8) == {1: pytest.approx(0.9)}


def test_the_host_beside_prompts_works_for_those_that_decode() -> None:
    """Half of the steps have prompts: of 64 requests seven decode and one reads, in .8 s."""
    recent = priced(max_rows=64)
    recent.times.prices[StepKind(1, True)] = {64: {1: 0.1}}
    for _ in range(4):
        recent.add_call(0.8, has_prompts=True, batch_size=8)
        recent.add_call(1.4, has_prompts=False, batch_size=64)
    recent.add_step(50, num_decoding=7, num_passes=1, num_tokens=7)
    found = recent.rate(1, 64, rows_a_token=50 / 71 / 1.6)  # 64 w / (50 + 57 w) is a half
    assert found == pytest.approx((64 + 7) * 1.6 / (1.4 + 0.8))


def test_steps_that_wait_for_the_host_say_nothing_of_their_price() -> None:
    """They took 1.5 s for the host's 1.4, whatever they drafted; others of 3 s take 3.2."""
    recent = priced()
    recent.times.prices[ALL][8][K] = 3.0
    for _ in range(6):
        recent.add_call(1.4, has_prompts=False, batch_size=8)
    recent.last_num_drafts = 1
    for _ in range(6):
        recent.end_step(num_drafts=1, seconds=1.5, batch_size=8)
    usual = recent.times.usual(ALL)
    assert usual == pytest.approx(1.5 / 1.4)
    priced_now = recent.times.priced(ALL, batch_size=8, usual=usual)
    assert priced_now[K] == pytest.approx(3.0 * usual)
    assert priced_now[1] == pytest.approx(1.4)


def test_prompts_cost_what_the_steps_cost_that_hold_them() -> None:
    """Eight requests, three tokens of prompt for one of output; steps of 16, 32 and 64 rows."""
    recent = priced(max_rows=64)
    prices = {16: {1: 1.0}, 32: {1: 1.5}, 64: {1: 2.0}}
    recent.times.prices[StepKind(1, True)] = prices
    tokens = 8 * 1.6

    def rate(rows_a_token: float) -> float:
        return recent.rate(1, 8, rows_a_token=rows_a_token)

    assert rate(0.0) == pytest.approx(tokens / 0.5)
    # 38.4 prompt rows a step beside 16 others: four steps in five are full of them.
    assert rate(3.0) == pytest.approx(tokens / (0.2 * 0.5 + 0.8 * 2.0))
    # 9.6 rows for each that decodes: 5.5 of them and their prompts fill all steps.
    fed = 64 / (2 + 9.6)
    prices[128] = {1: 2.0}
    assert rate(6.0) == pytest.approx(fed * 1.6 / 2.0)
    del prices[128]
    recent.max_rows = 96  # 80 rows beside 16 in 96 of 100 steps, where nothing was timed above 64
    assert rate(6.0) == pytest.approx(tokens / (0.96 * 2.0 * 96 / 64 + 0.04 * 0.5))
    recent.max_rows, recent.num_passes = 64, 1
    for size, seconds in ((17, 4.5), (65, 99.0)) * 4:  # the larger ones were not replayed
        recent.times.note(StepKind(1, True), 1, size=size, batch_size=8, seconds=seconds)
    assert rate(6.0) == pytest.approx(fed * 1.6 / 6.0), "they took three times as long"


def test_steps_of_any_size_cost_the_buckets_that_hold_them() -> None:
    """Sixteen rows that decode, and prompt rows of which any step may have more, summed up."""
    times, kind = StepTimes(), StepKind(1, True)
    prices = {16: 1.0, 32: 1.5, 64: 2.0}

    def price(num_rows: float) -> float:
        return prices[min((s for s in prices if s >= num_rows), default=64)] * max(num_rows / 64, 1)

    times.prices[kind] = {size: {1: price} for size, price in prices.items()}
    for mean in (1.0, 12.0, 50.0):
        rows = -mean * np.log((np.arange(10_000) + 0.5) / 10_000)
        paid = [price(16 + n) for n in rows]
        step = MixedSteps(1.0, 8.0, mean)
        found = times.priced_beside_prompts(kind, 1, step, most_rows=1000, usual=3.0)
        assert found == pytest.approx(3.0 * sum(paid) / 10_000, rel=1e-3)
        found = times.priced_beside_prompts(kind, 1, step, most_rows=None, usual=3.0)
        assert found == pytest.approx(3.0 * price(16 + mean)), "all are as large"
    many = MixedSteps(1.0, 400.0, 1.0)  # 800 rows decode
    found = times.priced_beside_prompts(kind, 1, many, most_rows=1000, usual=1.0)
    assert found == pytest.approx(2.0 * 801 / 64)
    step = MixedSteps(1.0, 8.0, 200.0)
    found = times.priced_beside_prompts(kind, 1, step, most_rows=64, usual=1.0)
    assert 1.5 < found < 2.0, "none is larger"


def test_full_steps_cost_their_bucket() -> None:
    """All have 40 rows, in a bucket of 64: no mean of smaller and larger ones."""
    recent = priced(max_rows=40)
    recent.times.prices[StepKind(1, True)] = {32: {1: 1.0}, 64: {1: 2.0}}
    recent.add_step(24, num_decoding=8, num_passes=1, num_tokens=8)
    assert recent.rate(1, 8, rows_a_token=24 / (8 * 1.6)) == pytest.approx(8 * 1.6 / 2.0)


def test_steps_with_prompts_are_like_the_latest() -> None:
    recent = priced(max_rows=64, half_life_steps=1.0)
    recent.times.prices[StepKind(1, True)] = {64: {1: 2.0}}
    recent.times.prices[StepKind(K, True)] = {64: dict.fromkeys(range(4), 4.0)}
    recent.add_step(
        24, num_decoding=9, num_passes=K, num_tokens=9
    )  # 60 rows, and eight decode at most
    assert recent.rate(1, 8, rows_a_token=2.0) == pytest.approx(8 * 1.6 / 2.0), "25.6 in every one"
    # 6.4 rows a step, 24 in each that has any
    shared = 6.4 / 24
    seconds = (1.0 - shared) * 0.5 + shared * 2.0
    assert recent.rate(1, 8, rows_a_token=0.5) == pytest.approx(8 * 1.6 / seconds)
    # Then one that was full: four decoded in 16 rows, beside 48 prompt rows. With one pass there
    # would be 56. It counts twice as much.
    recent.add_step(48, num_decoding=4, num_passes=K, num_tokens=4)
    recent.add_step(0, num_decoding=8, num_passes=K, num_tokens=8)
    for num_passes, tokens, full in ((1, 1.6, 56), (K, 2.05, 48)):
        num_away, num_rows = 4 * 2 / 3, 24 / 3 + full * 2 / 3
        share = 8 * tokens / (num_rows + tokens * num_away)
        made = tokens * (8 - share * num_away)
        price = {1: 2.0, K: 4.0}[num_passes]
        seconds = (1.0 - share) * {1: 0.5, K: 1.0}[num_passes] + share * price
        found = recent.rate(num_passes, 8, rows_a_token=1.0)
        assert found == pytest.approx(made / seconds), num_passes


def test_more_prompt_rows_never_bring_more_tokens() -> None:
    """Nor less at a stroke, where all steps have some."""
    recent = priced(max_rows=64)
    recent.times.prices[StepKind(1, True)] = {64: {1: 2.0}}
    recent.add_step(6, num_decoding=4, num_passes=1, num_tokens=4)
    rates = [recent.rate(1, 8, rows_a_token=0.01 * i) for i in range(600)]
    pairs = list(itertools.pairwise(rates))
    assert all(0.9 * left < right <= left + 1e-9 for left, right in pairs)
    assert rates[-1] == pytest.approx(4 * 1.6 / 2.0), "as many decode as did"


def test_rows_of_fewer_drafts_are_fewer_beside_prompts() -> None:
    """Three passes of which one draft pays: 16 decoding rows and 16 others, not 48 in all."""
    recent = priced(max_rows=192)
    recent.lasting_counts.accepted = [6e8, 0, 0]
    recent.times.prices[ALL] = {8: {n: 1.0 + 0.01 * n for n in range(4)}}
    recent.times.prices[StepKind(K, True)] = {
        64: dict.fromkeys(range(4), 1.0),
        192: dict.fromkeys(range(4), 5.0),
    }
    recent.add_step(16, num_decoding=8, num_passes=K, num_tokens=8)
    shared = 8 * 1.6 / 16
    beside = 1.0 + math.exp((16 - 64) / 16) * (5.0 - 1.0)  # few steps have more than 64 rows
    expected = 8 * 1.6 / ((1.0 - shared) * 1.01 + shared * beside)
    assert recent.rate(K, 8, rows_a_token=1.0) == pytest.approx(expected, rel=1e-6)


def test_a_batch_that_fills_up_counts_as_large_as_one_was() -> None:
    """One pass pays for eight requests, and not for the four that run yet."""
    recent = priced((9.0, 0.3))

    def said(num_running: int, num_waiting: int) -> int:
        return passes(recent, num_running=num_running, num_waiting=num_waiting)

    assert said(4, 200) == K, "eight were never seen"
    assert said(8, 200) == said(4, 200) == 1
    asked = []
    recent.rate = lambda m, size, rows_a_token=0.0: asked.append((m, size, rows_a_token)) or 9.0 - m
    said(4, 2)
    # No more than there are. Of the 400 tokens that are to come the six that drain write 300.
    assert asked == [(m, 6, pytest.approx(600 / 100, rel=1e-3)) for m in (K, 1)]
    del recent.rate
    assert [said(4, 200) for _ in range(20)][-1] == K, "others wait, and no more run"


def test_the_prompts_that_wait_are_in_sight() -> None:
    """Eight texts of 100 tokens and prompts of 300 begin while as much is written as they write."""
    asked = []
    recent = priced()
    recent.rate = lambda m, size, rows_a_token: asked.append((m, size, rows_a_token)) or 9.0 - m
    passes(recent, num_waiting=8)
    assert asked == [(m, 8, pytest.approx(2400 / 800, rel=1e-3)) for m in (K, 1)]
    for running, waiting, num_tokens in (
        (Text(num_written=0), Text(num_written=0), 800 + 400),
        (Text(num_written=99), Text(num_written=0), 400),  # before the drain: half at least
        (Text(), Text(num_written=0, most=20), 160),
        (Text(), Text(num_written=30, num_prompt_tokens=270), 560),  # it ran before
    ):
        asked.clear()
        ExpectedGainLength().num_passes(
            running=[running] * 8, waiting=[waiting] * 8, is_admitting=False, recent=recent
        )
        assert asked[0][2] == pytest.approx(2400 / num_tokens, rel=0.02)


def test_prompts_that_begin_come_with_texts_as_long_as_any() -> None:
    """Three rows of prompt a token where they have all 100 tokens, six where they have 50."""
    for num_stopped, expected in ((0.0, 3.0), (16.0 * 0.7968, 6.0)):
        asked = []
        recent = priced(num_passes=1, num_stopped=num_stopped)
        recent.rate = lambda m, size, rows_a_token: asked.append(rows_a_token) or 9.0  # noqa: B023
        passes(recent, num_waiting=0, num_admitted=4)
        assert asked == pytest.approx([expected] * 2, rel=0.01)


def test_recent_steps_and_texts_are_counted() -> None:
    recent = RecentRounds(
        DraftPlan(POLICIES["training"], K, 1), half_life_steps=1.0, half_life_texts=2.0
    )
    recent.add_rounds(3, num_drafted=3, num_accepted=1)
    for num_prompt_rows in (10, 0, 20):
        recent.add_text(is_stopped=num_prompt_rows < 20)
        recent.add_step(num_prompt_rows, num_decoding=4, num_passes=K, num_tokens=6)
    assert recent.num_seen == 3
    assert recent.mixed == {False: MixedSteps(1.5, 6.0, 25.0)}, "none of them was full"
    root = 2.0**-0.5
    assert recent.num_stopped == pytest.approx(root + root**2)
    assert recent.output_tokens == pytest.approx(6 * (1 + root + root**2))
    assert recent.lasting_counts.reached == pytest.approx([3 * root**3, 3 * root**3, 0])
    assert recent.counts.reached == [3, 3, 0], "no decode step has ended"
    recent.forget_texts()
    assert (recent.num_stopped, recent.output_tokens) == (0.0, 0.0)
    assert recent.counts == recent.lasting_counts == RoundCounts.none(K)


def test_a_decoder_counts_its_steps_and_texts(models) -> None:
    decoder, _ = build(*models, FixedLength(), "training", max_num_batched_tokens=12)
    steps: list[Schedule] = []
    schedule = decoder.scheduler.schedule

    def noted() -> Schedule:
        steps.append(schedule())
        return steps[-1]

    decoder.scheduler.schedule = noted
    decoder.recent.half_life_texts = math.inf
    prompts = [[8], [11, 12], list(range(2, 40)), *PROMPTS]
    run(decoder, prompts, sampling=SamplingParams(max_new_tokens=12))
    recent, expected = decoder.recent, {}
    assert recent.num_seen == decoder.stats.num_steps
    for entries in (step.entries for step in steps if step.num_prompt_rows):
        for kind in expected.values():
            kind.fade(0.5 ** (1 / recent.half_life_steps))
        num_prompt_rows = sum(e.num_scheduled_tokens for e in entries if e.is_prefill)
        kind = expected.setdefault(sum(e.num_scheduled_tokens for e in entries) == 12, MixedSteps())
        num_decoding = sum(not e.is_prefill for e in entries)
        kind.add(num_decoding=num_decoding, num_prompt_rows=num_prompt_rows)
    assert recent.mixed == expected
    assert expected.keys() == {False, True}
    assert all(kind.num_decoding for kind in expected.values())
    assert (recent.num_stopped, recent.output_tokens) == (0.0, 12 * len(prompts))
    recent.forget_texts()
    decoder.abort(decoder.add_request(PROMPTS[0]))
    assert recent.num_stopped == 0, "it wrote nothing"
    request = decoder.add_request(PROMPTS[0], sampling=SamplingParams(max_new_tokens=12))
    while request.num_tokens == len(PROMPTS[0]):
        decoder.step()
    decoder.abort(request)
    assert recent.num_stopped == 1
    assert recent.output_tokens == request.num_tokens - len(PROMPTS[0]) < 12
    ends = request.output_token_ids[:1]
    run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=12, stop_token_ids=ends))
    assert recent.num_stopped == 2
    recent.forget_texts()
    run(decoder, sampling=SamplingParams(max_new_tokens=0))
    assert recent.output_tokens == 0, "nothing was written"


def test_prompts_may_take_the_rows_of_drafts_that_are_not_made(models) -> None:
    decoder, _ = build(*models, Told(told=((0, K), (3, 1))), "training")
    decoder.warm_up(SamplingParams())
    prices = decoder.recent.times.prices
    assert sorted(prices) == list(itertools.product(range(K + 1), (False, True)))
    assert all(prices.values()), "steps with prompt rows are timed as well"
    for (m, _), rows in prices.items():
        assert all(set(row) == (set(range(K + 1)) if m == K else {m}) for row in rows.values())
    counts: set[tuple[int, int]] = set()  # passes, rows of a request that decodes
    schedule = decoder.scheduler.schedule

    def noted() -> Schedule:
        found = schedule()
        counts.update(
            (decoder.recent.num_passes, entry.num_scheduled_tokens)
            for entry in found.entries
            if not entry.is_prefill
        )
        return found

    decoder.scheduler.schedule = noted
    run(decoder, sampling=SamplingParams(max_new_tokens=16))
    assert counts == {(K, K + 1), (1, 2)}


def test_the_host_and_steps_are_timed_with_their_requests(models, monkeypatch) -> None:
    """Of the step that a call started, and of the one that it ended."""
    decoder, _ = build(*models, FixedLength(), "training", max_num_batched_tokens=12)
    decoder.warm_up(SamplingParams(max_new_tokens=12))
    seen: list[tuple[Launched | None, Launched | None]] = []
    calls: list[tuple[int, bool]] = []
    steps: list[tuple[int, int]] = []
    end_step = decoder._ledger._end_step

    def noted(committed: Launched | None, started: Launched | None, *, seconds: float) -> None:
        seen.append((committed, started))
        end_step(committed, started, seconds=seconds)

    def called(seconds: float, *, has_prompts: bool, batch_size: int) -> None:
        calls.append((batch_size, has_prompts))

    def timed(kind: StepKind, num_drafts: int, *, size: int, batch_size: int, seconds: float):
        if kind.has_prompts:
            steps.append((size, batch_size))

    monkeypatch.setattr(decoder._ledger, "_end_step", noted)
    monkeypatch.setattr(decoder.recent, "add_call", called)
    monkeypatch.setattr(decoder.recent.times, "note", timed)
    prompts = [list(range(2, 60)), *PROMPTS, *PROMPTS]
    run(decoder, prompts, sampling=SamplingParams(max_new_tokens=12))
    both = [(one, two) for one, two in seen if one is not None and two is not None]
    assert calls == [(len(two.entries), two.num_prompt_rows > 0) for _, two in both]
    assert any(len(one.entries) != len(two.entries) for one, two in both)
    assert steps == [
        (sum(entry.num_scheduled_tokens for entry in one.entries), len(one.entries))
        for one, two in both
        if one.num_prompt_rows and one.kind == two.kind
    ]
    assert steps


def test_times_of_steps_around_a_change_say_nothing(models) -> None:
    """The host is a step late: a call starts a step of one pass and ends one of three."""
    decoder, _ = build(*models, Told(told=((0, K), (3, 1))), "training")
    sampling = SamplingParams(max_new_tokens=20)
    decoder.warm_up(sampling)
    timed: list[tuple[int, bool]] = []
    end_step = decoder.recent.end_step

    def noted(*, num_drafts: int, seconds: float | None, batch_size: int) -> None:
        timed.append((num_drafts, seconds is not None))
        end_step(num_drafts=num_drafts, seconds=seconds, batch_size=batch_size)

    decoder.recent.end_step = noted
    run(decoder, PROMPTS[:1], sampling=sampling)
    change = next(index for index, (n, _) in enumerate(timed) if n == 1)
    assert not timed[change - 1][1]
    assert timed[change][1]
    assert set(decoder.recent.times.overruns) == {(ALL, K), (StepKind(K, True), K), (ONE, 1)}
