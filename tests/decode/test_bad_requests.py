"""A bad request hurts nobody: each kind's fate, and the texts of the good ones beside it."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Request, Status
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.streaming import AsyncDecoder
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.decode.bad_requests import FAILS, KINDS, REFUSED, RUNS, STOPS, Kind, sampling_of
from tests.decode.loops import PROMPTS
from tests.decode.toy_grammar import PAIRS

NUM_BESIDE = 60  # bad requests beside one set of good ones
GOOD = (
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(max_new_tokens=18, repetition_penalty=1.3, logprobs=1),
)
GRAMMATICAL = SamplingParams(max_new_tokens=16, grammar=PAIRS, stop_token_ids=STOPS, min_tokens=12)
TIMINGS = pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])


@pytest.fixture(scope="module")
def models():
    target = tiny.tiny_target("qwen3")
    return target, tiny.tiny_heads(target, num_mtp_modules=2)


def _decoder(models, *, deferred: bool) -> SpecDecoder:
    engine = EngineConfig(
        max_num_requests=8,
        max_model_len=64,
        block_size=4,
        prefix_caching=True,
        deferred_output=deferred,
    )
    return SpecDecoder(*models, spec=SpecSettings(num_speculative_tokens=2), engine=engine)


def _good(*, deferred: bool) -> tuple[SamplingParams, ...]:
    return GOOD if deferred else (*GOOD, GRAMMATICAL)


def _add_good(decoder: SpecDecoder) -> list[Request]:
    good = _good(deferred=decoder.engine.deferred_output)
    return [
        decoder.add_request(prompt, sampling=sampling, request_id=f"good-{index}")
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, good, strict=False))
    ]


@pytest.fixture(scope="module")
def texts(models) -> dict[bool, list[tuple[int, ...]]]:
    """Good texts without bad requests, by `deferred`."""
    found = {}
    for deferred in (False, True):
        decoder = _decoder(models, deferred=deferred)
        good = _add_good(decoder)
        while decoder.has_work:
            decoder.step()
        found[deferred] = [request.output_token_ids for request in good]
    return found


def _outcome(decoder: SpecDecoder, kind: Kind) -> Request | None:
    """The queued request; None where it was refused."""
    try:
        sampling = sampling_of(kind)
        return decoder.add_request(kind.prompt, sampling=sampling, **kind.arguments)
    except ConfigError:
        return None


def _check_fate(kind: Kind, request: Request | None, *, deferred: bool) -> None:
    if kind.fate == REFUSED or request is None:
        assert request is None, f"{kind.name} was queued"
        assert kind.fate == REFUSED or (kind.fate == FAILS and deferred), f"{kind.name}: refused"
        return
    assert request.status is Status.FINISHED
    assert (request.finish_reason == "error") == (kind.fate == FAILS), kind.name
    assert (request.error is not None) == (kind.fate == FAILS)


@TIMINGS
def test_every_kind_meets_its_fate_and_good_texts_stay(models, texts, deferred: bool) -> None:
    assert len([kind for kind in KINDS if kind.fate != RUNS]) > 200
    decoder = _decoder(models, deferred=deferred)
    for first in range(0, len(KINDS), NUM_BESIDE):
        good = _add_good(decoder)
        bad = []
        for number, kind in enumerate(KINDS[first : first + NUM_BESIDE]):
            bad.append((kind, _outcome(decoder, kind)))
            if number % 6 == 5:
                decoder.step()
        while decoder.has_work:
            decoder.step()
        decoder.check_integrity()
        assert [request.output_token_ids for request in good] == texts[deferred]
        for kind, request in bad:
            _check_fate(kind, request, deferred=deferred)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from(KINDS) | st.sampled_from(KINDS[-60:])),
        max_size=8,
    ),
    aborted=st.sets(st.integers(0, 7), max_size=2),
    deferred=st.booleans(),
)
def test_bad_requests_at_any_step_change_no_good_text(
    models, texts, arrivals: list[tuple[int, Kind]], aborted: set[int], deferred: bool
) -> None:
    decoder = _decoder(models, deferred=deferred)
    good = _add_good(decoder)
    bad: list[Request | None] = []
    for step in range(9):
        bad += [_outcome(decoder, kind) for when, kind in arrivals if when == step]
        decoder.step()
        for index in aborted:
            if index < len(bad) and (request := bad[index]) is not None:
                decoder.abort(request)
    while decoder.has_work:
        decoder.step()
    assert [request.output_token_ids for request in good] == texts[deferred]
    decoder.check_integrity()


@TIMINGS
def test_async_every_reader_beside_bad_ones_gets_its_end(models, texts, deferred: bool) -> None:
    async def read(service: AsyncDecoder, kind: Kind) -> str:
        sampling, arguments = sampling_of(kind), dict(kind.arguments)
        arguments.pop("cache_salt", None)
        async for event in service.generate(kind.prompt, sampling=sampling, **arguments):
            reason = event.finish_reason
        assert (event.error is not None) == (reason == "error")
        return reason

    async def read_good(service: AsyncDecoder, index: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        sampling = _good(deferred=deferred)[index]
        stream = service.generate(PROMPTS[index], sampling=sampling, request_id=f"good-{index}")
        async for event in stream:
            tokens += event.token_ids
        return tokens

    async def main() -> None:
        async with AsyncDecoder(_decoder(models, deferred=deferred)) as service:
            kinds = [kind for kind in KINDS if "cache_salt" not in kind.arguments]
            good = [asyncio.create_task(read_good(service, i)) for i in range(len(texts[deferred]))]
            await asyncio.sleep(0)
            bad = [asyncio.create_task(read(service, kind)) for kind in kinds]
            _, waiting = await asyncio.wait([*good, *bad], timeout=60)
            assert not waiting
            assert [task.result() for task in good] == texts[deferred]
            for kind, task in zip(kinds, bad, strict=True):
                fault = task.exception()
                assert fault is None or isinstance(fault, ConfigError), kind.name
                assert (fault is None) or kind.fate != RUNS, kind.name

    asyncio.run(main())


def test_numbers_of_numpy_and_torch_are_taken_as_plain_ones() -> None:
    sampling = SamplingParams(
        temperature=np.float32(0.5),
        top_k=torch.tensor(5),
        stop_token_ids=np.array([1, 2]),
        logit_bias=[(np.int8(3), 1)],
        allowed_token_ids=[3, torch.tensor(4)],
    )
    plain = SamplingParams(
        temperature=0.5,
        top_k=5,
        stop_token_ids=(1, 2),
        logit_bias=((3, 1.0),),
        allowed_token_ids=(3, 4),
    )
    assert sampling == plain
    assert type(sampling.top_k) is int
    assert type(sampling.temperature) is float


def test_mapping_of_biases_is_kept_as_pairs() -> None:
    mapped = SamplingParams(logit_bias={5: 2, np.int64(3): -1.0})
    assert mapped.logit_bias == ((5, 2.0), (3, -1.0))
    assert mapped == SamplingParams(logit_bias=((5, 2.0), (3, -1.0)))
    assert dataclasses.replace(mapped, seed=1).logit_bias == mapped.logit_bias
    with pytest.raises(ConfigError, match=r"token id of sampling\.logit_bias must be an integer"):
        SamplingParams(logit_bias={"5": 2.0})


def test_request_without_a_seed_gets_one_of_its_own_that_repeats_it(models) -> None:
    decoder = _decoder(models, deferred=False)
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=None)
    first, second = (decoder.add_request([5], sampling=sampling) for _ in range(2))
    again = decoder.add_request([5], sampling=first.sampling)
    while decoder.has_work:
        decoder.step()
    assert first.output_token_ids == again.output_token_ids != second.output_token_ids
    assert sampling.seed is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 2.5}, r"sampling\.top_k must be an integer in 0\.\.1048576, got 2\.5 of type"),
        ({"temperature": math.nan}, r"sampling\.temperature must be a number in 0\.0\.\.1e\+300"),
        ({"stop_token_ids": "ab"}, r"sampling\.stop_token_ids must be a sequence of token ids"),
        ({"logit_bias": ((5,),)}, r"sampling\.logit_bias must be \(token id, finite amount\)"),
        ({"bad_words": ((1.5,),)}, r"token id of each of sampling\.bad_words must be an integer"),
    ],
)
def test_ill_typed_field_is_named_with_what_it_takes(fields, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SamplingParams(**fields)
