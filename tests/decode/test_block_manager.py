"""Ownership of pages against a model that only counts, and the assertions that name the culprit."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import Request

NAMES = ("a", "b", "c")


def _request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams())


class BlockMachine(RuleBasedStateMachine):
    """Random reservations and releases; `wanted` is all that the blocks held must follow from."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 3, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size=block_size)
        self.requests = {name: _request(name) for name in NAMES}
        self.num_held = dict.fromkeys(NAMES, 0)

    @rule(name=st.sampled_from(NAMES), num_slots=st.integers(0, 80))
    def reserve(self, name: str, num_slots: int) -> None:
        request, before = self.requests[name], list(self.requests[name].block_ids)
        wanted = max(-(-num_slots // self.blocks.block_size), self.num_held[name])
        fits = wanted - self.num_held[name] <= self.blocks.num_blocks - sum(self.num_held.values())
        assert self.blocks.can_reserve(request, num_slots) == fits
        if fits:
            self.blocks.reserve(request, num_slots)
            self.num_held[name] = wanted
            assert request.block_ids[: len(before)] == before, "a held block moved"
        else:
            with pytest.raises(AssertionError, match=f"request {name} needs"):
                self.blocks.reserve(request, num_slots)
            assert request.block_ids == before, "a refused reservation took blocks"

    @rule(name=st.sampled_from(NAMES))
    def free(self, name: str) -> None:
        self.blocks.free(self.requests[name])
        self.num_held[name] = 0

    @rule(name=st.sampled_from(NAMES))
    def free_twice(self, name: str) -> None:
        request = self.requests[name]
        stale = list(request.block_ids)
        self.free(name)
        request.block_ids = stale
        if stale:
            with pytest.raises(AssertionError, match=rf"request {name} frees block .*double free"):
                self.blocks.free(request)
        request.block_ids = []

    @rule(thief=st.sampled_from(NAMES), victim=st.sampled_from(NAMES))
    def free_foreign(self, thief: str, victim: str) -> None:
        if thief == victim or not self.num_held[victim] or self.num_held[thief]:
            return
        request = self.requests[thief]
        request.block_ids = list(self.requests[victim].block_ids)
        message = f"request {thief} frees block {request.block_ids[0]}, which belongs to {victim}"
        with pytest.raises(AssertionError, match=message):
            self.blocks.free(request)
        request.block_ids = []

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity(list(self.requests.values()))
        held = {name: len(request.block_ids) for name, request in self.requests.items()}
        assert held == self.num_held
        assert self.blocks.num_free_blocks == self.blocks.num_blocks - sum(held.values())


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=30, stateful_step_count=25)


def test_num_blocks_for_boundaries_rounds_up() -> None:
    blocks = BlockManager(4, block_size=16)
    assert [blocks.num_blocks_for(slots) for slots in (0, 1, 16, 17, 64)] == [0, 1, 1, 2, 4]


def test_check_integrity_lost_block_is_found() -> None:
    blocks, request = BlockManager(3, block_size=16), _request("a")
    blocks.reserve(request, 32)
    request.block_ids.pop()
    with pytest.raises(AssertionError, match="1 held \\+ 1 free blocks are not the 3 of the pool"):
        blocks.check_integrity([request])


def test_check_integrity_block_held_twice_is_found() -> None:
    blocks, first, second = BlockManager(3, block_size=16), _request("a"), _request("b")
    blocks.reserve(first, 16)
    second.block_ids = list(first.block_ids)
    with pytest.raises(AssertionError, match="held twice"):
        blocks.check_integrity([first, second])


def test_check_integrity_wrong_owner_is_named() -> None:
    blocks, first, second = BlockManager(2, block_size=16), _request("a"), _request("b")
    blocks.reserve(first, 16)
    second.block_ids, first.block_ids = first.block_ids, []
    with pytest.raises(AssertionError, match="block 0 of b has a wrong owner"):
        blocks.check_integrity([first, second])
