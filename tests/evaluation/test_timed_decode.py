"""Which calls of the loop the decode-only rate counts."""

from types import SimpleNamespace

import pytest
import torch

from mtp_research.config import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.evaluation import timed_decode
from mtp_research.evaluation.prompts import EncodedPrompts
from mtp_research.evaluation.step_clock import StepClock
from tests import tiny


@pytest.mark.parametrize("deferred", [False, True])
def test_decode_time_holds_no_step_with_prompt_rows(
    monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    """On this clock a step with prompt rows takes 100 s, any other 1 s, and nothing else any."""
    engine = EngineConfig(
        max_num_requests=2, max_prefill_chunk=8, deferred_output=deferred, audit=False
    )
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    decoder = SpecDecoder(target, num_speculative_tokens=0, engine=engine)
    now, kinds = [0.0], []
    launch = decoder._launch

    def timed(schedule):
        kinds.append(any(entry.is_prefill for entry in schedule.entries))
        now[0] += 100.0 if kinds[-1] else 1.0
        return launch(schedule)

    monkeypatch.setattr(decoder, "_launch", timed)
    monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: now[0])
    kept: list[tuple[float, bool]] = []
    monkeypatch.setattr(StepClock, "end_step", lambda _, wall_s, keep: kept.append((wall_s, keep)))
    prompts = tuple(SimpleNamespace(question_id=str(i)) for i in range(5))
    encoded = EncodedPrompts(prompts, tuple([1 + i] * (6 + 4 * i) for i in range(5)), ())
    sampling = [SamplingParams(max_new_tokens=6 + i) for i in range(5)]
    clock = StepClock(target.device)
    counts = timed_decode.decode_prompts(decoder, encoded, sampling, salt="", clock=clock)
    num_mixed, num_decoding = sum(kinds), len(kinds) - sum(kinds)
    assert num_mixed >= 5
    assert counts.wall_s == 100.0 * num_mixed + num_decoding
    assert 0 < counts.decode_wall_s <= num_decoding
    assert counts.decode_wall_s == sum(wall_s for wall_s, keep in kept if keep)
    assert all(wall_s < 100.0 for wall_s, keep in kept if keep)
    if not deferred:
        assert counts.decode_wall_s == num_decoding


@pytest.mark.parametrize("is_captured", [False, True])
def test_warm_up_of_captured_steps_decodes_two_uneven_batches(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    asked: list[list[int]] = []

    def decode(_, few: EncodedPrompts, sampling: list[SamplingParams], *, salt: str) -> object:
        assert len(few.prompts) == len(sampling)
        asked.append([params.max_new_tokens for params in sampling])
        return SimpleNamespace(step_s=[1.0])

    monkeypatch.setattr(timed_decode, "decode_prompts", decode)
    decoder = SimpleNamespace(
        graphs=object() if is_captured else None, engine=EngineConfig(max_num_requests=5)
    )
    prompts = tuple(SimpleNamespace(question_id=str(i)) for i in range(12))
    encoded = EncodedPrompts(prompts, ([7],) * 12, ())
    sampling = [SamplingParams(max_new_tokens=64)] * 12
    assert timed_decode.warm_up(decoder, encoded, sampling, most=3) == 2
    assert len(asked[0]) == (10 if is_captured else 4)
    assert len(set(asked[0])) == (8 if is_captured else 1)
