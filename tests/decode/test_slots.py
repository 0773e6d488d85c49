"""Page slots the loop really writes: none but the request's own, none beyond the plan."""

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Schedule
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention import paged
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from tests import tiny
from tests.decode.loops import PROMPTS, draft_rightly, run, small_pool, texts_of


def _num_slots_needed(num_drafts: int, num_late_steps: int = 0) -> int:
    return DraftPlan(POLICIES["eagle"], num_drafts, 1).num_slots_needed(0, num_late_steps)


class SlotSpy:
    """Notes the highest position written, relative to the tokens known when its step began."""

    def __init__(self, decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder = decoder
        self.highest = -(10**9)
        self.num_tokens: dict[str, int] = {}
        self._store, self._schedule = paged.store_rows, decoder.scheduler.schedule
        monkeypatch.setattr(paged, "store_rows", self.store)
        monkeypatch.setattr(decoder.scheduler, "schedule", self.schedule)

    def schedule(self) -> Schedule:
        """Reservations are made: note what each request owns."""
        schedule = self._schedule()
        self.owned = {
            block_id: (entry.request, index)
            for entry in schedule.entries
            for index, block_id in enumerate(entry.request.block_ids)
        }
        self.num_tokens = {e.request.request_id: e.request.num_tokens for e in schedule.entries}
        return schedule

    def store(self, key, value, *, slot_mapping: torch.Tensor, **rest) -> None:
        size = self.decoder.engine.block_size
        slots = slot_mapping[slot_mapping >= 0].tolist()
        assert len(set(slots)) == len(slots), "two rows of a pass write one slot"
        for slot in slots:
            assert slot // size in self.owned, f"slot {slot} belongs to no scheduled request"
            request, index = self.owned[slot // size]
            position = index * size + slot % size
            self.highest = max(self.highest, position - self.num_tokens[request.request_id])
        self._store(key, value, slot_mapping=slot_mapping, **rest)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def outputs(target):
    """Greedy texts."""
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    return texts_of(run(decoder, sampling=SamplingParams(max_new_tokens=14)))


def _highest_slot(
    target,
    monkeypatch: pytest.MonkeyPatch,
    *,
    heads: object,
    policy: str = "eagle",
    num_drafts: int,
    outputs: dict[str, tuple[int, ...]],
    chance: float = 1.0,
    engine: EngineConfig | None = None,
) -> int:
    with monkeypatch.context() as patch:
        draft_rightly(patch, outputs, chance=chance)
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
            engine=engine or EngineConfig(block_size=4, max_prefill_chunk=5),
        )
        spy = SlotSpy(decoder, patch)
        assert texts_of(run(decoder, sampling=SamplingParams(max_new_tokens=14))) == outputs
    return spy.highest


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_highest_slot_is_the_documented_one(
    target, outputs, policy: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=min(num_drafts, 2))
    highest = _highest_slot(
        target, monkeypatch, heads=heads, policy=policy, num_drafts=num_drafts, outputs=outputs
    )
    # Relative to L: the target's verify rows end at L-1+K. After full acceptance the frontier is
    # L+K-1, and draft rows reach K-1 further.
    expected = num_drafts - 1
    if POLICIES[policy].draft_rows != "none":
        expected = 2 * num_drafts - 2 if num_drafts > 1 else 0
    assert highest == expected
    assert highest < _num_slots_needed(num_drafts)


@pytest.mark.parametrize("num_late_steps", [0, 1])
def test_reservation_is_no_larger_than_needed(
    target, outputs, num_late_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    engine = EngineConfig(block_size=4, deferred_output=num_late_steps == 1)
    highest = _highest_slot(
        target, monkeypatch, heads=heads, num_drafts=4, outputs=outputs, engine=engine
    )
    assert highest == _num_slots_needed(4, num_late_steps) - 1


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_oracle_writes_only_what_it_declares(
    target, outputs, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    highest = _highest_slot(
        target, monkeypatch, heads="oracle", num_drafts=num_drafts, outputs=outputs
    )
    assert highest == _num_slots_needed(num_drafts)  # its one extra slot


@pytest.mark.parametrize("policy", ["eagle", "training", "window"])
def test_slots_stay_the_requests_own_under_preemption_and_mixed_histories(
    target, outputs, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=3)
    for num_blocks in (9, 11):
        highest = _highest_slot(
            target,
            monkeypatch,
            heads=heads,
            policy=policy,
            num_drafts=3,
            outputs=outputs,
            chance=0.6,
            engine=small_pool(num_blocks, max_prefill_chunk=3),
        )
        assert highest < _num_slots_needed(3)


def test_slots_stay_inside_the_pages_at_the_context_limit(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    for limit in range(len(PROMPTS[2]) + 1, len(PROMPTS[2]) + 9, 2):
        engine = EngineConfig(block_size=4, max_num_requests=4, max_model_len=limit)
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(policy="eagle", num_speculative_tokens=5),
            engine=engine,
        )
        with monkeypatch.context() as patch:
            spy = SlotSpy(decoder, patch)
            run(decoder, sampling=SamplingParams(max_new_tokens=99))
        assert spy.highest < _num_slots_needed(5)
