"""Streams, one at a time and many at once: the batch's tokens, and nothing left behind."""

import asyncio
import gc
import threading

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.streaming import AsyncDecoder
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of

TEN = SamplingParams(max_new_tokens=10)
LONG = SamplingParams(max_new_tokens=100)
ENGINE = EngineConfig(max_num_requests=4, max_prefill_chunk=4, prefix_caching=True)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def baseline(target):
    return texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=ENGINE))
    )


@pytest.fixture
def decoder(target):
    return SpecDecoder(target, "oracle", spec=SpecSettings(num_speculative_tokens=2), engine=ENGINE)


def assert_clean(decoder: SpecDecoder) -> None:
    decoder.scheduler.check_integrity()
    assert not decoder.scheduler.has_work
    blocks = decoder.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks


async def collect(stream) -> list:
    return [event async for event in stream]


def tokens_of(events: list) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


@pytest.mark.usefixtures("output_timing")
def test_stream_yields_the_tokens_of_each_step(decoder, baseline) -> None:
    other = decoder.add_request(PROMPTS[2], sampling=TEN)
    events = list(decoder.stream(PROMPTS[0], sampling=TEN, request_id="mine"))
    assert tokens_of(events) == baseline["0"]
    assert {event.request_id for event in events} == {"mine"}
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    # The prompt gives one token, a round with both drafts accepted three, the last what is left.
    assert [len(event.token_ids) for event in events] == [1, 3, 3, 3]
    while decoder.scheduler.has_work:
        decoder.step()
    assert other.output_token_ids == baseline["2"]
    assert_clean(decoder)


@pytest.mark.usefixtures("output_timing")
def test_streams_take_a_limit_as_a_batch_does(decoder) -> None:
    events = list(decoder.stream(PROMPTS[0], max_new_tokens=4))
    (batch,) = decoder.generate(PROMPTS[:1], max_new_tokens=4)
    assert [token for event in events for token in event.token_ids] == [*batch.token_ids]

    async def read() -> list[int]:
        async with AsyncDecoder(decoder) as serving:
            found = [event async for event in serving.generate(PROMPTS[0], max_new_tokens=4)]
            with pytest.raises(ConfigError, match="sampling or max_new_tokens, got both"):
                await anext(serving.generate(PROMPTS[0], sampling=TEN, max_new_tokens=4))
        return [token for event in found for token in event.token_ids]

    assert asyncio.run(read()) == [*batch.token_ids]
    with pytest.raises(ConfigError, match="sampling or max_new_tokens, got both"):
        next(decoder.stream(PROMPTS[0], sampling=TEN, max_new_tokens=4))


def test_stream_left_early_is_aborted(decoder) -> None:
    stream = decoder.stream(PROMPTS[0], sampling=LONG)
    next(stream)
    stream.close()
    assert_clean(decoder)
    assert [record.finish_reason for record in decoder.stats.records] == ["abort"]
    unused = decoder.stream(PROMPTS[0])
    assert not decoder.scheduler.has_work  # queued when somebody listens
    unused.close()


def test_stream_of_no_tokens_has_one_last_event(decoder) -> None:
    (event,) = decoder.stream([5], sampling=SamplingParams(max_new_tokens=0))
    assert (event.token_ids, event.finish_reason) == ((), "length")


def test_stream_carries_logprobs_of_its_tokens(decoder, baseline) -> None:
    sampling = SamplingParams(max_new_tokens=10, logprobs=2)
    events = list(decoder.stream(PROMPTS[0], sampling=sampling))
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)
    best = [entry.top[0][0] for event in events for entry in event.logprobs]
    assert tuple(best) == baseline["0"]


@pytest.mark.usefixtures("output_timing")
def test_async_streams_interleave_and_equal_the_batch(decoder, baseline) -> None:
    order: list[str] = []

    async def read(service: AsyncDecoder, index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for event in service.generate(PROMPTS[index], sampling=TEN, request_id=str(index)):
            order.append(event.request_id)
            tokens += event.token_ids
        return tuple(tokens)

    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            texts = await asyncio.gather(*(read(service, index) for index in range(4)))
        assert {str(index): text for index, text in enumerate(texts)} == baseline

    asyncio.run(main())
    assert order.index("1") < len(order) - 1 - order[::-1].index("0")
    assert len({order.index(name) for name in "0123"} | {len(order)}) == 5
    assert order != sorted(order)  # one after the other it is not
    assert_clean(decoder)


@pytest.mark.usefixtures("output_timing")
@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_async_cancelled_reader_frees_its_blocks_and_disturbs_nobody(
    decoder, baseline, num_events: int
) -> None:
    async def main() -> None:
        service = AsyncDecoder(decoder)
        seen = asyncio.Semaphore(0)

        async def read_long() -> None:
            async for _ in service.generate(PROMPTS[2], sampling=LONG):
                seen.release()

        task = asyncio.create_task(read_long())
        others = [
            asyncio.create_task(collect(service.generate(prompt, sampling=TEN)))
            for prompt in PROMPTS[:2]
        ]
        for _ in range(num_events):
            await seen.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        texts = [tokens_of(events) for events in await asyncio.gather(*others)]
        assert texts == [baseline["0"], baseline["1"]]
        await service.close()

    asyncio.run(main())
    assert_clean(decoder)


def test_async_iterator_dropped_without_closing_is_aborted(decoder) -> None:
    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            async for _ in service.generate(PROMPTS[0], sampling=LONG):
                break
            gc.collect()
            while decoder.scheduler.has_work:
                await asyncio.sleep(0.001)
            assert [record.finish_reason for record in decoder.stats.records] == ["abort"]

    asyncio.run(main())
    assert_clean(decoder)


def test_async_bad_request_fails_alone(decoder, baseline) -> None:
    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            good = asyncio.create_task(collect(service.generate(PROMPTS[0], sampling=TEN)))
            for bad in ([], [128], list(range(100)) * 3, ["text"]):
                with pytest.raises(ConfigError):
                    await collect(service.generate(bad))
            assert tokens_of(await good) == baseline["0"]

    asyncio.run(main())
    assert_clean(decoder)


@pytest.mark.parametrize("error", [RuntimeError("odd"), asyncio.CancelledError()])
def test_async_admission_that_raises_leaves_no_reader_waiting(
    decoder, baseline, monkeypatch, error: BaseException
) -> None:
    add_request = decoder.add_request

    def failing(prompt, **arguments):
        if list(prompt) == PROMPTS[1]:
            raise error
        return add_request(prompt, **arguments)

    monkeypatch.setattr(decoder, "add_request", failing)

    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            readers = [collect(service.generate(prompt, sampling=TEN)) for prompt in PROMPTS[:3]]
            ends = asyncio.gather(*readers, return_exceptions=True)
            first, second, third = await asyncio.wait_for(ends, timeout=30)
            assert type(second) is type(error)
            if isinstance(error, Exception):  # else the loop is being torn down
                assert [tokens_of(first), tokens_of(third)] == [baseline["0"], baseline["2"]]

    asyncio.run(main())
    assert_clean(decoder)


def test_async_step_that_raises_reaches_every_reader(decoder, monkeypatch) -> None:
    step, num_steps = decoder.step, 0

    def failing_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise MemoryError("no room")
        step()

    monkeypatch.setattr(decoder, "step", failing_step)

    async def main() -> None:
        service = AsyncDecoder(decoder)
        readers = [collect(service.generate(prompt, sampling=LONG)) for prompt in PROMPTS[:2]]
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [MemoryError, MemoryError]
        with pytest.raises(EnvironmentFault, match="step failed before: no room"):
            await collect(service.generate(PROMPTS[0]))
        await service.close()

    asyncio.run(main())
    assert_clean(decoder)


def test_async_idle_decoder_runs_nothing_and_wakes_up_again(decoder, baseline) -> None:
    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            for _ in range(2):
                assert (
                    tokens_of(await collect(service.generate(PROMPTS[0], sampling=TEN)))
                    == (baseline["0"])
                )
                await asyncio.sleep(0.02)
                num_steps = decoder.stats.num_steps
                assert asyncio.all_tasks() == {asyncio.current_task()}
                await asyncio.sleep(0.02)
                assert decoder.stats.num_steps == num_steps

    asyncio.run(main())


def test_async_slow_reader_gets_merged_events_and_stops_nobody(decoder, baseline) -> None:
    async def main() -> None:
        async with AsyncDecoder(decoder) as service:
            stream = service.generate(PROMPTS[0], sampling=TEN)
            first = await anext(stream)
            await collect(service.generate(PROMPTS[2], sampling=LONG))  # meanwhile it finishes
            rest = await collect(stream)
            assert len(rest) == 1
            assert first.token_ids + rest[0].token_ids == baseline["0"]
            assert rest[0].finish_reason == "length"

    asyncio.run(main())


def test_async_arrivals_beyond_the_limit_wait_in_order(decoder) -> None:
    most_live, order = 0, []

    async def read(service: AsyncDecoder, index: int) -> None:
        nonlocal most_live
        async for _ in service.generate(PROMPTS[index % 4], sampling=TEN):
            most_live = max(most_live, len(decoder.scheduler.requests()))
        order.append(index)

    async def main() -> None:
        async with AsyncDecoder(decoder, max_num_live=1) as service:
            tasks = [asyncio.create_task(read(service, index)) for index in range(5)]
            await asyncio.sleep(0)
            tasks[2].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert order == [0, 1, 3, 4]
    assert most_live == 1
    assert_clean(decoder)


def test_async_close_ends_running_readers_with_an_abort(decoder) -> None:
    async def main() -> None:
        service = AsyncDecoder(decoder)
        reader = asyncio.create_task(collect(service.generate(PROMPTS[0], sampling=LONG)))
        while not decoder.stats.num_steps:
            await asyncio.sleep(0.001)
        await service.close()
        assert (await reader)[-1].finish_reason == "abort"
        with pytest.raises(EnvironmentFault, match="closed"):
            await anext(service.generate(PROMPTS[0]))
        assert not [t for t in threading.enumerate() if t.name.startswith("decode-step")]

    asyncio.run(main())
    assert_clean(decoder)


def test_async_decoder_that_is_in_use_or_without_places_is_refused(decoder) -> None:
    with pytest.raises(ConfigError, match="max_num_live must be >= 1 or None, got 0"):
        AsyncDecoder(decoder, max_num_live=0)
    request = decoder.add_request([5])
    with pytest.raises(ConfigError, match="without requests"):
        AsyncDecoder(decoder)
    decoder.abort(request)
