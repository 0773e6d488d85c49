"""Deferred output changes nothing: random histories, pools, lengths, aborts and orders."""

import random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import ConfidenceLength, DraftLength, FixedLength
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.policy.fields import POLICIES
from tests import tiny
from tests.decode.hashed_loop import VOCAB, HashedLoop
from tests.decode.loops import poison

STOP = 3


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return {count: tiny.tiny_heads(target, num_mtp_modules=count) for count in (1, 2, 3)}


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_modules=st.integers(1, 3),
    num_drafts=st.integers(1, 5),
    chunk=st.integers(1, 9),
    num_blocks=st.sampled_from([None, 16, 20]),
    sharing=st.booleans(),
    length=st.sampled_from([FixedLength(), ConfidenceLength(0.04)]),
    break_chance=st.sampled_from([0.0, 0.2]),
    max_model_len=st.sampled_from([24, 200]),
    aborted=st.sampled_from([None, 0, 2, 4]),
    order=st.permutations(range(5)),
    seed=st.integers(0, 2**20),
)
def test_deferred_any_scenario_equals_output_at_once(
    target,
    heads,
    policy: str,
    num_modules: int,
    num_drafts: int,
    chunk: int,
    num_blocks: int | None,
    sharing: bool,
    length: DraftLength,
    break_chance: float,
    max_model_len: int,
    aborted: int | None,
    order: list[int],
    seed: int,
) -> None:
    outcomes, audits = [], []
    for deferred in (False, True):
        engine = EngineConfig(
            block_size=4,
            max_num_requests=3,
            max_prefill_chunk=chunk,
            # A recompute mends what an unclean policy left, and gives a broken round new drafts.
            num_blocks=num_blocks if POLICIES[policy].clean and not break_chance else None,
            max_model_len=max_model_len,
            prefix_caching=sharing and POLICIES[policy].clean,
            deferred_output=deferred,
        )
        decoder = SpecDecoder(
            target,
            heads[num_modules],
            spec=SpecSettings(
                policy=policy, num_speculative_tokens=num_drafts, draft_length=length
            ),
            engine=engine,
        )
        loop, rng = HashedLoop(decoder, break_chance=break_chance), random.Random(seed)
        trunk = [rng.randrange(VOCAB) for _ in range(9)]
        prompts = [
            trunk[: rng.randint(1, 9)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
            for _ in range(5)
        ]
        limits = [rng.randint(1, 16) for _ in prompts]
        requests = {
            index: decoder.add_request(
                prompts[index],
                sampling=SamplingParams(max_new_tokens=limits[index], stop_token_ids=(STOP,)),
                request_id=str(index),
            )
            for index in (order if deferred else range(5))
        }
        outcome = loop.decode(
            list(requests.values()), aborted=requests.get(aborted), num_steps=seed % 7
        )
        outcomes.append(outcome)
        auditor = decoder.auditor
        audits.append((auditor.totals, auditor.num_slots, auditor.num_requests))
        if POLICIES[policy].clean:
            assert auditor.num_dirty_rounds == 0
        event("preempted" if decoder.stats.num_preemptions else "undisturbed")
    if aborted is not None:  # how far it came depends on the steps
        texts = sorted((outcome.pop(str(aborted))[1] for outcome in outcomes), key=len)
        assert texts[1][: len(texts[0])] == texts[0]
    else:
        assert audits[0] == audits[1]
    assert outcomes[0] == outcomes[1]


def _audited(target, heads, **changes: object) -> SpecDecoder:
    settings = {"block_size": 4, "max_prefill_chunk": 5, "deferred_output": True} | changes
    return SpecDecoder(target, heads[3], engine=EngineConfig(**settings))


def _assert_clean(decoder: SpecDecoder) -> None:
    assert decoder.auditor.num_dirty_rounds == 0
    assert not any(total[v] for total in decoder.auditor.totals for v in ("WRONG", "MIXED", "HOLE"))


def test_request_id_used_again_is_not_audited_by_its_former_owners_rows(target, heads) -> None:
    # Each text ends at a stop token while a step is in flight. Its commit must leave the log of
    # the next request "0" alone, which starts with cached blocks by then.
    decoder = _audited(target, heads, prefix_caching=True)
    prompt = list(range(1, 14))
    (free,) = decoder.generate([prompt], max_new_tokens=12)
    stop = free.output_token_ids[5]
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=(stop,))
    for _ in range(3):
        (record,) = decoder.generate([prompt], sampling=sampling)
        assert record.finish_reason == "stop"
    assert decoder.stats.num_cached_tokens > 0
    assert decoder.auditor.num_requests == 4
    _assert_clean(decoder)


@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_audit_of_an_aborted_request_counts_no_row_that_is_still_in_flight(
    target, heads, num_steps: int, deferred: bool
) -> None:
    decoder = _audited(target, heads, prefix_caching=True, deferred_output=deferred)
    for _ in range(2):  # the second time with cached blocks
        request = decoder.add_request(list(range(1, 14)), request_id="x")
        for _ in range(num_steps):
            decoder.step()
        decoder.abort(request)
    list(decoder.generate([[5, 6]], max_new_tokens=2))
    _assert_clean(decoder)
    assert not decoder.auditor._logs
    assert not decoder.auditor._left_out


@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
def test_audit_of_a_broken_prompt_counts_no_row_of_the_broken_step(deferred: bool) -> None:
    target = tiny.tiny_target("qwen3")
    poison(target.embed_tokens.weight, 100)
    decoder = _audited(target, {3: tiny.tiny_heads(target)}, deferred_output=deferred)
    (record,) = decoder.generate([[*range(1, 9), 100, *range(1, 9)]])
    assert record.finish_reason == "non_finite"
    _assert_clean(decoder)


def test_rehearsed_step_has_pages_for_its_rows(target, heads) -> None:
    spec = SpecSettings(
        3, verify="synthetic", verify_options=VerifyOptions(synthetic_rates=[1.0, 1.0, 1.0])
    )
    engine = EngineConfig(block_size=4, max_num_requests=1, deferred_output=True, audit=False)
    for num_steps in range(1, 9):  # some of which end with a page that is full
        decoder = SpecDecoder(target, heads[1], spec=spec, engine=engine)
        sampling = SamplingParams(max_new_tokens=64, seed=5)
        request = decoder.add_request([5, 9, 7], sampling=sampling)
        for _ in range(num_steps):
            decoder.step()
        decoder.rehearse()
        num_tokens = int(decoder.slot_state.num_tokens[request.slot])
        assert num_tokens + 3 <= 4 * len(request.block_ids), f"{num_steps} steps"
