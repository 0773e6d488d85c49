"""Which calls of the loop the decode-only rate counts."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.evaluation.run import timed_decode
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.run.timed_decode import StepClock
from mtp_research.evaluation.stats.outcome import PassRecord
from tests import tiny
from tests.evaluation.generations import generation


@pytest.mark.parametrize("deferred", [False, True])
def test_decode_time_holds_no_step_with_prompt_rows(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    """On this clock a step with prompt rows takes 100 s, any other 1 s, and nothing else any."""
    engine = EngineConfig(
        max_num_requests=2, max_prefill_chunk=8, deferred_output=deferred, audit=False
    )
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    now, kinds = [0.0], []
    make_schedule = decoder.scheduler.schedule

    def timed():
        schedule = make_schedule()
        kinds.append(any(entry.is_prefill for entry in schedule.entries))
        now[0] += 100.0 if kinds[-1] else 1.0
        return schedule

    monkeypatch.setattr(decoder.scheduler, "schedule", timed)
    monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: now[0])
    kept: list[tuple[float, bool]] = []
    monkeypatch.setattr(StepClock, "end_step", lambda _, wall_s, keep: kept.append((wall_s, keep)))
    prompts = tuple(SimpleNamespace(question_id=str(i)) for i in range(5))
    encoded = EncodedPrompts(prompts, tuple([1 + i] * (6 + 4 * i) for i in range(5)), ())
    sampling = [SamplingParams(max_new_tokens=6 + i) for i in range(5)]
    clock = StepClock(target.device)
    counts = timed_decode.decode_prompts(decoder, encoded, sampling, salt="", clock=clock).times
    num_mixed, num_decoding = sum(kinds), len(kinds) - sum(kinds)
    assert num_mixed >= 5
    assert counts.wall_s == 100.0 * num_mixed + num_decoding
    assert 0 < counts.decode_wall_s <= num_decoding
    assert counts.decode_wall_s == sum(wall_s for wall_s, keep in kept if keep)
    assert counts.full_wall_s is not None
    assert counts.num_full_tokens is not None
    assert 0 < counts.full_wall_s < counts.decode_wall_s  # the last text ends alone
    assert counts.num_full_tokens == 2 * counts.full_wall_s  # K = 0: a token a place and second
    assert all(wall_s < 100.0 for wall_s, keep in kept if keep)
    if not deferred:
        assert counts.decode_wall_s == num_decoding


class Step(NamedTuple):
    num_prompt_rows: int
    num_entries: int


SCRIPT = [Step(6, 4), Step(0, 4), Step(0, 4), Step(2, 4), Step(0, 4), Step(0, 4), Step(0, 3),
          Step(0, 1)]  # fmt: skip


class Scripted:
    """A decoder whose step n emits 3^n tokens; call n of its loop takes 2^n s on its clock."""

    def __init__(self, *, places: int, deferred: bool, steps: list[Step] = SCRIPT) -> None:
        self.engine = EngineConfig(max_num_requests=places, deferred_output=deferred)
        self.target = SimpleNamespace(device=torch.device("cpu"))
        self.auditor: SimpleNamespace | None = None
        self.has_work = True
        self.stats = DecodeStats()
        self.now = 0.0
        self._steps = list(enumerate(steps))
        self._num_calls = 0
        self._in_flight: tuple[int, Step] | None = None

    def step(self) -> None:
        self.now += 2.0**self._num_calls
        self._num_calls += 1
        started = committed = self._steps.pop(0) if self._steps else None
        if started is not None:
            self.stats.num_launched_prompt_rows += started[1].num_prompt_rows
            self.stats.num_launched_entries += started[1].num_entries
        if self.engine.deferred_output:
            committed, self._in_flight = self._in_flight, started
        if committed is not None:
            self.stats.num_prompt_rows += committed[1].num_prompt_rows
            self.stats.num_entries += committed[1].num_entries
            self.stats.num_emitted_tokens += 3 ** committed[0]
        self.has_work = bool(self._steps or self._in_flight)

    def serve_peers(self) -> None:
        """There are none."""

    def decode(self, monkeypatch: pytest.MonkeyPatch) -> PassRecord:
        monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: self.now)
        return timed_decode.decode_prompts(self, EncodedPrompts((), (), ()), [], salt="").times


def powers(base: int, exponents: list[int]) -> float:
    return sum(float(base) ** n for n in exponents)


def test_call_is_full_if_its_step_took_every_place_without_prompt_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Scripted(places=4, deferred=False).decode(monkeypatch)
    assert counts.decode_wall_s == powers(2, [1, 2, 4, 5, 6, 7])
    assert counts.full_wall_s == powers(2, [1, 2, 4, 5])
    assert counts.num_full_tokens == powers(3, [1, 2, 4, 5])


def test_call_that_starts_a_step_and_commits_the_one_before_is_full_if_both_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Scripted(places=4, deferred=True).decode(monkeypatch)
    assert counts.decode_wall_s == powers(2, [2, 5, 6, 7, 8])
    assert counts.full_wall_s == powers(2, [2, 5])
    assert counts.num_full_tokens == powers(3, [1, 4])


@pytest.mark.parametrize("deferred", [False, True])
def test_fewer_prompts_than_places_are_never_a_full_batch(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    counts = Scripted(places=5, deferred=deferred).decode(monkeypatch)
    assert counts.decode_wall_s > 0
    assert (counts.full_wall_s, counts.num_full_tokens) == (None, None)


@pytest.mark.parametrize("deferred", [False, True])
def test_full_batch_of_one_is_every_decoding_call_but_the_edges(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    steps = [Step(3, 1), Step(0, 1), Step(0, 1), Step(0, 1)]
    counts = Scripted(places=1, deferred=deferred, steps=steps).decode(monkeypatch)
    last = 2.0**4 if deferred else 0.0  # it starts nothing
    assert counts.full_wall_s == counts.decode_wall_s - last


@pytest.mark.parametrize("is_captured", [False, True])
def test_warm_up_of_captured_steps_decodes_two_uneven_batches_of_the_longest_prompts(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    asked: list[list[int]] = []

    def decode(_, few: EncodedPrompts, sampling: list[SamplingParams], *, salt: str) -> object:
        lengths = [len(token_ids) for token_ids in few.token_ids]
        assert lengths == (list(range(12, 2, -1)) if is_captured else [1, 2, 3, 4])
        assert [int(one.question_id) for one in few.prompts] == [n - 1 for n in lengths]
        assert len(few.prompts) == len(sampling)
        asked.append([params.max_new_tokens for params in sampling])
        return SimpleNamespace(step_s=[1.0])

    monkeypatch.setattr(timed_decode, "decode_prompts", decode)
    decoder = SimpleNamespace(is_captured=is_captured, engine=EngineConfig(max_num_requests=5))
    prompts = tuple(SimpleNamespace(question_id=str(i)) for i in range(12))
    encoded = EncodedPrompts(prompts, tuple((7,) * (i + 1) for i in range(12)), ())
    sampling = [SamplingParams(max_new_tokens=64)] * 12
    assert timed_decode.warm_up(decoder, encoded, sampling, most=3) == 2
    assert len(asked[0]) == (10 if is_captured else 4)
    assert len(set(asked[0])) == (8 if is_captured else 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_work_of_the_auditor_is_on_no_clock_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    class Audited(Scripted):
        """Checks the slots of every step for 1000 s."""

        def step(self) -> None:
            super().step()
            self.now += 1000.0
            self.auditor.seconds += 1000.0

    loop, kept = Audited(places=4, deferred=False), []
    loop.auditor, loop.target.device = SimpleNamespace(seconds=7.0), torch.device(device)
    clock = SimpleNamespace(end_step=lambda wall_s, keep: kept.append(wall_s), parts=lambda: None)
    monkeypatch.setattr(timed_decode, "device_timer", lambda _: lambda: None)
    monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: loop.now)
    nothing = EncodedPrompts((), (), ())
    times = timed_decode.decode_prompts(loop, nothing, [], salt="", clock=clock).times
    plain = Scripted(places=4, deferred=False).decode(monkeypatch)
    if device == "cpu":
        assert times == plain
        assert kept == [2.0**number for number in range(len(SCRIPT))]
    else:  # there it waits for rows that the step computes
        assert times.wall_s == plain.wall_s + 1000.0 * len(SCRIPT)


def test_making_a_later_turn_is_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finishing(Scripted):
        """Ends a request in every step."""

        def step(self) -> None:
            super().step()
            self.stats.records.append(generation(f"r{self._num_calls}", []))

    loop = Finishing(places=4, deferred=False)
    seen = []

    def follow_up(record: RequestRecord) -> None:
        seen.append(record.request_id)
        loop.now += 1000.0

    monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: loop.now)
    nothing = EncodedPrompts((), (), ())
    times = timed_decode.decode_prompts(loop, nothing, [], salt="", follow_up=follow_up).times
    assert seen == [f"r{number}" for number in range(1, len(SCRIPT) + 1)]  # each once
    assert times.wall_s == powers(2, list(range(len(SCRIPT))))
    assert times == Scripted(places=4, deferred=False).decode(monkeypatch)
