"""Requests at the edge: no prompt, hardly any output, more drafts than there is room for."""

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import FinishReason, Request
from mtp_research.decode.schedule.scheduler import Scheduler
from mtp_research.decode.settings import SpecSettings
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


@pytest.fixture(scope="module")
def baseline(target):
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    return texts_of(run(decoder, sampling=SamplingParams(max_new_tokens=3)))


@pytest.mark.usefixtures("output_timing")
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize(("policy", "num_drafts"), [("training", 4), ("eagle", 17)])
def test_fewer_tokens_wanted_than_drafted_are_given_exactly(
    target, heads, baseline, policy: str, num_drafts: int, max_new_tokens: int
) -> None:
    engine = EngineConfig(
        block_size=4, max_num_requests=2, max_prefill_chunk=4, prefix_caching=True
    )
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=engine,
    )
    records = run(decoder, sampling=SamplingParams(max_new_tokens=max_new_tokens))
    assert texts_of(records) == {name: text[:max_new_tokens] for name, text in baseline.items()}
    assert {record.finish_reason for record in records.values()} == {"length"}


@pytest.mark.usefixtures("output_timing")
@pytest.mark.parametrize("room", [1, 2, 3])
def test_more_drafts_than_context_left_stay_inside_it(target, heads, baseline, room: int) -> None:
    engine = EngineConfig(max_model_len=len(PROMPTS[0]) + room, max_num_requests=2)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=9), engine=engine)
    record = run(decoder, PROMPTS[:1], sampling=SamplingParams(max_new_tokens=50))["0"]
    assert record.output_token_ids == baseline["0"][:room]


@pytest.mark.parametrize("call", ["add_request", "generate", "stream"])
def test_prompt_without_tokens_is_refused_and_leaves_nothing(target, call: str) -> None:
    decoder = SpecDecoder(target, "null")
    calls = {
        "add_request": lambda: decoder.add_request([]),
        "generate": lambda: list(decoder.generate([[5], []])),
        "stream": lambda: list(decoder.stream([])),
    }
    with pytest.raises(ConfigError, match="prompt must hold at least one token, got none"):
        calls[call]()
    assert not decoder.scheduler.has_work
    assert decoder.scheduler.blocks.num_free_blocks == decoder.scheduler.blocks.num_blocks


def test_request_that_can_never_fit_names_both_counts_at_arrival(target, heads) -> None:
    decoder = SpecDecoder(target, heads, engine=EngineConfig(num_blocks=2, max_model_len=200))
    with pytest.raises(ConfigError, match="can never fit: it needs 3 blocks, the pool has 2"):
        decoder.add_request([5] * 30, sampling=SamplingParams(max_new_tokens=10))
    fits = decoder.add_request([5] * 20, sampling=SamplingParams(max_new_tokens=7))
    while decoder.scheduler.has_work:
        decoder.step()
    assert len(fits.output_token_ids) == 7


def _running(scheduler: Scheduler, name: str) -> Request:
    return next(request for request in scheduler.running if request.request_id == name)


def test_block_given_back_twice_or_by_a_stranger_is_an_assertion_with_the_id(target) -> None:
    decoder = SpecDecoder(target, "null")
    for name in ("mine", "theirs"):
        decoder.add_request([5, 6, 7], request_id=name)
    decoder.step()
    mine, theirs = (_running(decoder.scheduler, name) for name in ("mine", "theirs"))
    own = mine.block_ids
    mine.block_ids = list(theirs.block_ids)
    message = f"request mine frees block {theirs.block_ids[0]}, which belongs to theirs"
    with pytest.raises(AssertionError, match=message):
        decoder.scheduler.blocks.free(mine)
    mine.block_ids = list(own)
    decoder.scheduler.finish(mine, FinishReason.ABORT)
    mine.block_ids = own
    with pytest.raises(AssertionError, match=r"request mine frees block .*nobody \(double free\)"):
        decoder.scheduler.blocks.free(mine)
