"""A step that raises gives no wrong text, and two decoders of two threads share one target."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.streaming import AsyncDecoder
from mtp_research.models.rewrites.invariant import InvariantProducts
from mtp_research.runtime.errors import ConfigError, DecoderClosed, EnvironmentFault
from tests import tiny
from tests.decode.loops import PROMPTS

SAMPLING = SamplingParams(max_new_tokens=6)
PLACES = ("schedule", "target", "draft", "commit", "wait", "apply")
# Of place, call and timing each pair.
FAULTS = [
    (place, call, (call == 4) == (index % 2 == 0))
    for index, place in enumerate(PLACES)
    for call in (1, 4)
]


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


def _decoder(target, heads, *, deferred: bool = False, policy: str = "training") -> SpecDecoder:
    engine = EngineConfig(
        max_num_requests=3,
        block_size=4,
        num_blocks=60,
        max_prefill_chunk=4,
        prefix_caching=True,
        deferred_output=deferred,
    )
    spec = SpecSettings(num_speculative_tokens=2, policy=policy)
    return SpecDecoder(target, heads, spec=spec, engine=engine)


def _texts(decoder: SpecDecoder) -> dict[str, tuple[int, ...]]:
    records = decoder.generate(PROMPTS, sampling=SAMPLING)
    return {record.request_id: record.output_token_ids for record in records}


@pytest.fixture(scope="module")
def expected(target, heads):
    return _texts(_decoder(target, heads))


def _break(decoder: SpecDecoder, place: str, *, call: int, error: BaseException) -> None:
    """Raise once, when `place` has been called for the n-th time and has done its work.

    `wait` is the place where a result comes to the host, before any of it is applied.
    """
    num_calls = 0

    def broken(function):
        def wrapped(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls == call and place == "wait":
                raise error
            result = function(*args, **kwargs)
            if num_calls == call:
                raise error
            return result

        return wrapped

    if place in ("commit", "wait", "apply"):
        name = place.replace("wait", "apply")
        setattr(decoder._ledger, name, broken(getattr(decoder._ledger, name)))
    elif place == "schedule":
        decoder.scheduler.schedule = broken(decoder.scheduler.schedule)
    else:
        decoder.observe(lambda parts: parts._replace(**{place: broken(getattr(parts, place))}))


def _drain(decoder: SpecDecoder) -> None:
    while decoder.has_work:
        decoder.step()


@pytest.mark.parametrize(("place", "call", "deferred"), FAULTS)
def test_step_that_raised_closes_the_decoder_until_nobody_is_left(
    target, heads, expected, place: str, call: int, deferred: bool
) -> None:
    decoder = _decoder(target, heads, deferred=deferred)
    _break(decoder, place, call=call, error=MemoryError("no room"))
    requests = [
        decoder.add_request(prompt, sampling=SAMPLING, request_id=str(index))
        for index, prompt in enumerate(PROMPTS)
    ]
    with pytest.raises(MemoryError, match="no room"):
        _drain(decoder)
    message = r"decoder closed after an error in step\(\) \(MemoryError: no room\): build a new one"
    for _ in range(2):
        with pytest.raises(DecoderClosed, match=message):
            decoder.step()
        with pytest.raises(DecoderClosed, match=message):
            decoder.add_request([5])
    for request in requests:
        if request.finish_reason == "length":
            assert request.output_token_ids == expected[request.request_id]
        decoder.abort(request)
    assert _texts(decoder) == expected
    assert decoder.auditor.num_dirty_rounds == 0
    assert _texts(decoder) == expected


@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
def test_generate_after_an_interrupted_generate_is_right(
    target, heads, expected, deferred: bool
) -> None:
    decoder = _decoder(target, heads, deferred=deferred)
    for place, call in (("draft", 4), ("apply", 3)):
        _break(decoder, place, call=call, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            _texts(decoder)
        assert _texts(decoder) == expected


def _say_it_has_graphs(decoder: SpecDecoder) -> None:
    number = decoder.num_speculative_tokens
    decoder._devices[number] = decoder._devices[number]._replace(graphs=object())


def test_decoder_that_lost_a_block_or_a_slot_or_has_graphs_stays_closed(target, heads) -> None:
    for lose in (
        lambda decoder: decoder.scheduler.blocks._empty.popleft(),
        lambda decoder: decoder.scheduler._free_slots.remove(2),
        _say_it_has_graphs,
    ):
        decoder = _decoder(target, heads)
        _break(decoder, "target", call=2, error=MemoryError("no room"))
        with pytest.raises(MemoryError):
            _texts(decoder)
        lose(decoder)
        with pytest.raises(DecoderClosed, match="build a new one\\."):
            _texts(decoder)


def test_async_decoder_after_a_failed_step_refuses_at_once(target, heads) -> None:
    decoder = _decoder(target, heads, deferred=True)
    _break(decoder, "target", call=3, error=MemoryError("no room"))

    async def read(service: AsyncDecoder, prompt: list[int]) -> None:
        async for _ in service.generate(prompt, sampling=SAMPLING):
            pass

    async def main() -> list[object]:
        service = AsyncDecoder(decoder)
        readers = asyncio.gather(*(read(service, p) for p in PROMPTS), return_exceptions=True)
        outcomes = await asyncio.wait_for(readers, timeout=60)
        with pytest.raises(DecoderClosed, match="a decode step failed before: no room"):
            await asyncio.wait_for(read(service, PROMPTS[0]), timeout=60)
        await service.close()
        return outcomes

    assert {type(outcome) for outcome in asyncio.run(main())} == {MemoryError}
    assert issubclass(DecoderClosed, EnvironmentFault)


def test_compiled_pass_hands_out_its_hidden_states_in_any_thread(target) -> None:
    def norm(hidden: torch.Tensor) -> torch.Tensor:
        target.model.base_model.norm(hidden)
        return target._seen().pop("pre_norm")

    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    hidden = torch.randn(1, 2, target.config.hidden_size, dtype=target.dtype)
    vars(target.captured)["pre_norm"] = hidden + 1  # another decoder's, which runs uncompiled
    with ThreadPoolExecutor(1) as thread:
        found = [compiled(hidden), thread.submit(compiled, hidden).result()]
    assert all(torch.equal(one, hidden) for one in found)
    assert torch.equal(vars(target.captured).pop("pre_norm"), hidden + 1)


def test_two_decoders_of_two_threads_share_a_target(target, heads, expected) -> None:
    start, policies = Barrier(2), ("training", "eagle")

    def decode(policy: str) -> list[dict[str, tuple[int, ...]]]:
        decoder = _decoder(target, heads, policy=policy)
        start.wait(timeout=60)
        return [_texts(decoder) for _ in range(3)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(decode, policies))
    finally:
        sys.setswitchinterval(before)
    assert outcomes == [[expected] * 3] * 2


def test_deterministic_steps_of_two_threads_on_shared_experts_are_refused() -> None:
    model = tiny.tiny_target("qwen3_moe").model
    before = model.config._experts_implementation
    with InvariantProducts([model]), pytest.raises(ConfigError, match="one thread at a time"):
        InvariantProducts([model]).__enter__()
    assert model.config._experts_implementation == before
