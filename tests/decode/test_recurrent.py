"""The loop on recurrent targets: same text as without drafts, whatever was accepted or undone."""

import copy
import random

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import FinishReason
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.slot_state import KVCache
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.recurrent import RecurrentStates, with_states
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny_recurrent
from tests.decode.loops import PROMPTS, draft_rightly, poison, run, small_pool, texts_of
from tests.decode.test_exactness import DictatedLoop
from tests.decode.test_no_sync import NoSync

SMALL = EngineConfig(max_num_requests=3, max_prefill_chunk=4)  # four prompts: a slot is used twice
FAMILIES = sorted(tiny_recurrent.RECIPES)
RECIPES_RECOMPUTED = ("qwen3_next", "nemotron_h")
with_output_at_once_or_late = pytest.mark.usefixtures("output_timing")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest):
    return tiny_recurrent.tiny_target(request.param)


@pytest.fixture(scope="module")
def baseline(target):
    return texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=SMALL))
    )


@pytest.fixture(scope="module")
def one_target():
    return tiny_recurrent.tiny_target("qwen3_next")


@pytest.fixture(scope="module")
def one_baseline(one_target):
    return texts_of(
        run(SpecDecoder(one_target, spec=SpecSettings(num_speculative_tokens=0), engine=SMALL))
    )


def test_baseline_equals_full_recompute_and_transformers(target, baseline) -> None:
    assert baseline["2"] == tuple(oracle.greedy_text(target, PROMPTS[2], 10))
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")
    for name in ("0", "1"):
        prompt = torch.tensor([PROMPTS[int(name)]])
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False
        )
        generated = text[0, prompt.shape[1] :].tolist()
        assert tuple(generated) == baseline[name][: len(generated)]


@with_output_at_once_or_late
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_greedy_text_equals_baseline(
    target, baseline, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, baseline, chance=0.6)
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    records = run(SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=SMALL))
    assert texts_of(records) == baseline
    rounds = {count for record in records.values() for count in record.num_accepted_per_round}
    assert len(rounds) > 2  # drafts were accepted, and rejected at several places


@with_output_at_once_or_late
def test_starting_from_the_last_row_instead_is_noticed(
    target, baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, baseline, chance=0.6)
    select = RecurrentStates.select

    def keep_every_row(states, slots, *, num_rows, num_kept) -> None:
        select(states, slots, num_rows=num_rows, num_kept=num_rows)

    monkeypatch.setattr(RecurrentStates, "select", keep_every_row)
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    assert texts_of(run(SpecDecoder(target, heads, engine=SMALL))) != baseline


@with_output_at_once_or_late
@pytest.mark.parametrize(  # what a chunk cuts is not what the host knows late: one timing each
    ("output_timing", "chunk"),
    [(False, 1), (True, 2), (False, 3), (True, 7), (False, 256)],
    indirect=["output_timing"],
)
def test_text_does_not_depend_on_the_chunk(
    one_target, one_baseline, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, one_baseline, chance=0.6)
    heads = tiny_recurrent.tiny_heads(one_target)
    engine = EngineConfig(max_num_requests=3, max_prefill_chunk=chunk)
    assert texts_of(run(SpecDecoder(one_target, heads, engine=engine))) == one_baseline


@with_output_at_once_or_late
def test_preempted_requests_resume_with_the_same_text(
    one_target, one_baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, one_baseline, chance=0.6)
    heads = tiny_recurrent.tiny_heads(one_target)
    decoder = SpecDecoder(one_target, heads, engine=small_pool(11))
    assert texts_of(run(decoder)) == one_baseline
    assert decoder.stats.num_preemptions > 0


@with_output_at_once_or_late
def test_what_slots_held_before_changes_nothing(
    one_target, one_baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_rightly(monkeypatch, one_baseline, chance=0.6)
    decoder = SpecDecoder(one_target, tiny_recurrent.tiny_heads(one_target), engine=SMALL)
    for state in decoder.cache.recurrent.layers.values():
        for part in state:
            part.fill_(torch.nan)
    assert texts_of(run(decoder)) == one_baseline


@pytest.mark.parametrize("policy", ["eagle", "training"])
@pytest.mark.parametrize(
    ("recipe", "chunk"), [(RECIPES_RECOMPUTED[0], 256), *((name, 3) for name in RECIPES_RECOMPUTED)]
)
def test_drafts_equal_full_recompute_for_any_history(recipe: str, policy: str, chunk: int) -> None:
    target = tiny_recurrent.tiny_target(recipe)
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    engine = EngineConfig(max_num_requests=3, max_prefill_chunk=chunk)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=engine)
    loop = DictatedLoop(decoder, seed=chunk, break_chance=0.2)  # some steps are undone
    rng = random.Random(chunk)
    for length in (1, 2, 9, 5):
        prompt = [rng.randrange(128) for _ in range(length)]
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=8))
    while decoder.scheduler.has_work:
        assert loop.step_and_compare(policy) < 1e-10
    loop.close()


@settings(max_examples=8)
@given(
    policy=st.sampled_from(["training", "eagle"]),
    num_drafts=st.integers(1, 5),
    chunk=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 16), min_size=2, max_size=4),
    seed=st.integers(0, 2**20),
    num_blocks=st.integers(10, 13),
)
def test_drafts_equal_full_recompute_under_preemption(
    one_target,
    policy: str,
    num_drafts: int,
    chunk: int,
    lengths: list[int],
    seed: int,
    num_blocks: int,
) -> None:
    heads = tiny_recurrent.tiny_heads(one_target, num_mtp_modules=1)
    engine = small_pool(num_blocks, max_prefill_chunk=chunk)
    decoder = SpecDecoder(
        one_target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=engine,
    )
    loop = DictatedLoop(decoder, seed=seed, break_chance=0.1)
    rng = random.Random(seed)
    for length in lengths:
        prompt = [rng.randrange(128) for _ in range(length)]
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=6))
    while decoder.scheduler.has_work:
        assert loop.step_and_compare(policy) < 1e-10
    loop.close()
    event("preempted" if decoder.stats.num_preemptions else "undisturbed")


@with_output_at_once_or_late
@pytest.mark.parametrize("heads_name", ["mtp", "null", "oracle"])
def test_token_that_breaks_the_target_ends_the_request_at_it(one_baseline, heads_name: str) -> None:
    target = tiny_recurrent.tiny_target("qwen3_next")
    text = one_baseline["2"]
    bad = next(token for token in text[3:] if token not in PROMPTS[2])
    where = text.index(bad)
    poison(target.embed_tokens.weight, bad)
    heads = tiny_recurrent.tiny_heads(target) if heads_name == "mtp" else heads_name
    record = run(SpecDecoder(target, heads), [PROMPTS[2]])["0"]
    assert record.finish_reason == FinishReason.NON_FINITE
    assert record.output_token_ids == text[: where + 1]


@with_output_at_once_or_late
@pytest.mark.parametrize(("heads_name", "length"), [("null", 1), ("oracle", 4)])
def test_extreme_drafters_give_the_baseline_text(
    one_target, one_baseline, heads_name: str, length: int
) -> None:
    decoder = SpecDecoder(one_target, heads_name, engine=SMALL)
    assert texts_of(run(decoder)) == one_baseline
    assert decoder.stats.acceptance_length == length


def test_shared_prefixes_are_refused(one_target) -> None:
    with pytest.raises(ConfigError, match=r"engine\.prefix_caching"):
        SpecDecoder(
            one_target,
            spec=SpecSettings(num_speculative_tokens=0),
            engine=EngineConfig(prefix_caching=True),
        )


def test_states_of_a_decode_step_do_not_wait_for_the_device(one_target) -> None:
    states = RecurrentStates(one_target.mixers, num_slots=4, num_speculative_tokens=3)
    slots, position = torch.tensor([2, 0, 3]), torch.full((3,), 9)
    num_rows, num_kept = torch.full((3,), 4), torch.arange(3)
    pages = PagedContext(
        pool=KVCache([], num_blocks=1, block_size=4, dtype=torch.float64, device=slots.device),
        slot_mapping=slots,
        block_table=slots[:, None],
        seq_lens=position,
        query_start_loc=slots,
        max_query_len=4,
    )
    rows = torch.randn(1, 12, 64, dtype=torch.float64)
    with NoSync():
        context = with_states(
            pages, states=states, slots=slots, first_position=position, num_rows=(4, 4, 4)
        )
        for mixer in one_target.mixers.values():
            mixer(rows, cache_params=context, attention_context=context)
        states.select(slots, num_rows=num_rows, num_kept=num_kept)
