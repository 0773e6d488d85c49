"""What a call of the loop counts as, where the host commits a step one call late."""

import itertools

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode import ledger
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import FixedLength
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from tests import tiny

PROMPT = [1, 2, 3, 4, 5, 6]


class Alternating(FixedLength):
    """Drafts 2 tokens in four steps, then none in four, and so on."""

    def __init__(self) -> None:
        self._step = itertools.count()

    def limits(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return (num_speculative_tokens, 0)

    def num_drafts(self, *, batch_size: int, recent: object) -> int:
        return 0 if next(self._step) // 4 % 2 else 2


def make_decoder(*, deferred: bool, num_drafts: int) -> SpecDecoder:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    engine = EngineConfig(
        max_num_requests=2, max_prefill_chunk=4, deferred_output=deferred, audit=False
    )
    if num_drafts == 0:
        return SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    return SpecDecoder(
        target,
        tiny.tiny_heads(target, num_mtp_modules=1),
        spec=SpecSettings(
            policy="eagle", num_speculative_tokens=num_drafts, draft_length=Alternating()
        ),
        engine=engine,
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_prompt_rows_are_launched_before_they_are_committed(deferred: bool) -> None:
    decoder = make_decoder(deferred=deferred, num_drafts=0)
    decoder.add_request(PROMPT, sampling=SamplingParams(max_new_tokens=3))
    seen = []
    while decoder.scheduler.has_work:
        decoder.step()
        seen.append((decoder.stats.num_launched_prompt_rows, decoder.stats.num_prompt_rows))
    committed = [rows for _, rows in seen]
    assert [rows for rows, _ in seen][:3] == [4, 6, 6]
    assert committed[:3] == ([0, 4, 6] if deferred else [4, 6, 6])
    assert seen[-1] == (6, 6)


@pytest.mark.parametrize("deferred", [False, True])
def test_entries_are_the_requests_of_every_step(deferred: bool) -> None:
    decoder = make_decoder(deferred=deferred, num_drafts=0)
    for length in (2, 4):
        decoder.add_request(PROMPT[:3], sampling=SamplingParams(max_new_tokens=length))
    seen = [(0, 0)]
    while decoder.scheduler.has_work:
        decoder.step()
        seen.append((decoder.stats.num_launched_entries, decoder.stats.num_entries))
    launched, committed = (
        [after - before for before, after in itertools.pairwise(counts)]
        for counts in zip(*seen, strict=True)
    )
    sizes = [2, 2, 1, 1]
    assert launched == ([*sizes, 0] if deferred else sizes)
    assert committed == ([0, *sizes] if deferred else sizes)


@pytest.mark.parametrize("deferred", [False, True])
def test_seconds_of_a_draft_length_are_those_of_calls_that_saw_no_other_work(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    """A step with n drafts takes 1 + n seconds on this clock, one with prompt rows 100."""
    decoder = make_decoder(deferred=deferred, num_drafts=2)
    now = [0.0]
    commit = decoder._ledger.commit

    def timed(schedule, result, *, draft_limit: int):
        if schedule.entries:
            now[0] += 100.0 if schedule.num_prompt_rows else 1.0 + draft_limit
        commit(schedule, result, draft_limit=draft_limit)

    monkeypatch.setattr(decoder._ledger, "commit", timed)
    monkeypatch.setattr(ledger.time, "perf_counter", lambda: now[0])
    for arrival in range(6):
        decoder.add_request(PROMPT, sampling=SamplingParams(max_new_tokens=9 + arrival))
    while decoder.scheduler.has_work:
        decoder.step()
    seconds = {n: set(times.numbers) for n, times in decoder.recent.step_seconds.items()}
    assert seconds == {0: {1.0}, 2: {3.0}}
