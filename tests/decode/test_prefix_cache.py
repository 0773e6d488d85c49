"""Cached blocks against a symbolic memory: every slot that is taken over must fit the new text."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.blocks import BlockManager, PrefixCache
from mtp_research.decode.schedule.request import Request
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan

NAMES = ("a", "b", "c")
# Texts of zeros with at most one 1, so that most of them share a prefix, of any length.
TEXTS = st.tuples(st.integers(1, 14), st.integers(0, 20)).map(
    lambda shape: [int(index == shape[1]) for index in range(shape[0])]
)


def _request(name: str, tokens: list[int], *, salt: str = "") -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )


def _manager(num_blocks: int = 8, *, block_size: int = 4, following: int = 2) -> BlockManager:
    cache = PrefixCache(block_size=block_size, plan=DraftPlan(POLICIES["eagle"], following, 1))
    return BlockManager(num_blocks, block_size=block_size, prefix_cache=cache)


def _admit(blocks: BlockManager, request: Request) -> list[int]:
    """Start a request, return the blocks it found."""
    cached = blocks.find_cached(request)
    blocks.take_cached(request, cached)
    blocks.reserve(request, request.num_tokens)
    return cached


def _run(blocks: BlockManager, name: str, tokens: list[int], *, salt: str = "") -> list[int]:
    """A whole prompt: admitted, computed and freed; returns the blocks it found."""
    request = _request(name, tokens, salt=salt)
    cached = _admit(blocks, request)
    request.num_computed_tokens = request.num_tokens
    blocks.publish(request, num_rows=request.num_computed_tokens)
    blocks.free(request)
    blocks.check_integrity([])
    return cached


class SharingMachine(RuleBasedStateMachine):
    """Requests that come, run, share and go.

    `memory[block][offset]` is the text that the slot's KV was computed from: the tokens up to the
    slot and the F after it. `cached` is the naive cache: content -> block, least recently used
    first among those that nobody holds.
    """

    @initialize(
        num_blocks=st.integers(4, 14), block_size=st.integers(1, 4), following=st.integers(0, 5)
    )
    def start(self, num_blocks: int, block_size: int, following: int) -> None:
        self.blocks = _manager(num_blocks, block_size=block_size, following=following)
        self.memory = [[None] * block_size for _ in range(num_blocks)]
        self.cached: dict[tuple, int] = {}
        self.live: dict[str, Request] = {}
        self.order: list[int] = []

    @rule(name=st.sampled_from(NAMES), tokens=TEXTS, salt=st.sampled_from(["", "", "x"]))
    def admit(self, name: str, tokens: list[int], salt: str) -> None:
        self.free(name, forget=False)
        request = _request(name, tokens, salt=salt)
        found = self.blocks.find_cached(request)
        assert found == self.naive_match(request)
        num_slots = len(tokens)
        fits = self.blocks.can_reserve(request, num_slots, cached=found)
        needed = -(-num_slots // self.blocks.block_size) - len(found)
        unheld = self.blocks.num_blocks - len({*self.held(), *found})
        assert fits == (needed <= unheld)
        if not fits:
            return
        self.blocks.take_cached(request, found)
        assert request.num_computed_tokens < request.num_prefill_tokens
        self.order = [block for block in self.order if block not in found]
        self.live[name] = request
        self.grow(request, num_slots)
        for position in range(request.num_computed_tokens):
            assert self.slot(request, position) == self.wanted(request, position)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 12), token=st.integers(0, 1))
    def step(self, name: str, count: int, token: int) -> None:
        """Some prompt rows, or the newest token with accepted drafts; module rows are rerun."""
        request = self.live.get(name)
        if request is None:
            return
        self.publish(name)
        first = request.num_computed_tokens
        if request.is_prefilling:
            end = min(first + count, request.num_prefill_tokens)
            if end == request.num_tokens:
                request.token_ids.append(token)
        elif self.blocks.can_reserve(request, request.num_tokens + count):
            request.token_ids.extend([token] * count)
            end = request.num_tokens - 1
        else:
            return
        self.grow(request, end)
        following = self.blocks.prefix_cache.num_following_tokens
        for position in range(max(first - following, request.num_cached_tokens), end):
            block = request.block_ids[position // self.blocks.block_size]
            assert block not in self.cached.values(), "a cached block is written"
            text = self.wanted(request, position)
            self.memory[block][position % self.blocks.block_size] = text
        request.num_computed_tokens = end

    def publish(self, name: str) -> None:
        """Before every step and before the end, as the scheduler does."""
        request = self.live[name]
        size, following = self.blocks.block_size, self.blocks.prefix_cache.num_following_tokens
        for index, block in enumerate(request.block_ids):
            if (index + 1) * size + following <= request.num_computed_tokens:
                self.cached.setdefault(self.content(request, index), block)
        self.blocks.publish(request, num_rows=request.num_computed_tokens)

    @rule(name=st.sampled_from(NAMES), forget=st.sampled_from([False, False, True]))
    def free(self, name: str, forget: bool) -> None:
        if name not in self.live:
            return
        self.publish(name)
        request = self.live.pop(name)
        mine = list(reversed(request.block_ids))
        self.blocks.free(request, forget=forget)
        if forget:
            self.cached = {text: b for text, b in self.cached.items() if b not in mine}
        held = self.held()
        cached = set(self.cached.values())
        self.order += [block for block in mine if block not in held and block in cached]

    @rule(name=st.sampled_from(NAMES))
    def free_twice(self, name: str) -> None:
        request = self.live.get(name)
        if request is None or not request.block_ids:
            return
        stale = list(request.block_ids)
        self.free(name, forget=False)
        request.block_ids = stale
        with pytest.raises(AssertionError, match=f"request {name} frees block"):
            self.blocks.free(request)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity(list(self.live.values()))
        assert list(self.blocks.prefix_cache._idle) == self.order
        assert self.blocks.num_free_blocks == self.blocks.num_blocks - len(self.held())

    def held(self) -> set[int]:
        return {block for request in self.live.values() for block in request.block_ids}

    def grow(self, request: Request, num_slots: int) -> None:
        """Reserve; blocks beyond the empty ones are taken from the idle ones, oldest first."""
        before = self.blocks.prefix_cache.stats.num_evicted_blocks
        self.blocks.reserve(request, num_slots)
        num_evicted = self.blocks.prefix_cache.stats.num_evicted_blocks - before
        gone, self.order = self.order[:num_evicted], self.order[num_evicted:]
        assert set(gone) <= set(request.block_ids)
        self.cached = {text: b for text, b in self.cached.items() if b not in gone}

    def wanted(self, request: Request, position: int) -> tuple:
        following = self.blocks.prefix_cache.num_following_tokens
        return (request.cache_salt, *request.token_ids[: position + 1 + following])

    def slot(self, request: Request, position: int) -> tuple:
        size = self.blocks.block_size
        return self.memory[request.block_ids[position // size]][position % size]

    def content(self, request: Request, index: int) -> tuple:
        return self.wanted(request, (index + 1) * self.blocks.block_size - 1)

    def naive_match(self, request: Request) -> list[int]:
        size, following = self.blocks.block_size, self.blocks.prefix_cache.num_following_tokens
        found = []
        for index in range(len(request.token_ids)):
            end = (index + 1) * size
            if end + following > request.num_tokens or end >= request.num_prefill_tokens:
                break
            if self.content(request, index) not in self.cached:
                break
            found.append(self.cached[self.content(request, index)])
        return found


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=60, stateful_step_count=50)


def test_find_text_that_differs_right_behind_a_block_does_not_match_it() -> None:
    # Why keys reach beyond their block: matching A and B, and dropping the last match, would give
    # the third text the B that was computed in front of x.
    blocks = _manager(16)
    a, b, x, y, z = [1] * 4, [2] * 4, [3] * 4, [4] * 4, [5] * 4
    assert _run(blocks, "0", [*a, *b, *x, 9]) == []
    assert _run(blocks, "1", [*a, *b, *y, 9]) == [0]
    third = _run(blocks, "2", [*a, *b, *y, *z])
    assert len(third) == 2
    assert third[1] not in (1, 2)  # not the B of the first text, nor its x


@pytest.mark.parametrize(
    ("following", "num_tokens", "num_found"),
    [(0, 12, 2), (0, 13, 3), (2, 12, 2), (2, 13, 2), (2, 14, 3), (4, 12, 2), (6, 12, 1)],
)
def test_find_same_prompt_again_leaves_a_row_and_the_tokens_behind(
    following: int, num_tokens: int, num_found: int
) -> None:
    blocks, tokens = _manager(16, following=following), list(range(num_tokens))
    _run(blocks, "first", [*tokens, 99, 99, 99, 99, 99, 99])
    assert _run(blocks, "again", tokens) == list(range(num_found))


def test_find_other_salt_shares_nothing() -> None:
    blocks, tokens = _manager(), list(range(12))
    _run(blocks, "a", tokens, salt="one")
    assert _run(blocks, "b", tokens, salt="two") == []
    assert _run(blocks, "c", tokens, salt="one") == [0, 1]


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    blocks, tokens = _manager(8), list(range(12))
    _run(blocks, "writer", tokens)
    readers = [_request(name, tokens) for name in "ab"]
    for reader in readers:
        assert _admit(blocks, reader) == [0, 1]
    blocks.check_integrity(readers)
    assert blocks.num_free_blocks == 8 - 2 - 2  # two shared blocks, one more for each reader
    blocks.free(readers[0])
    assert blocks.num_free_blocks == 8 - 3
    blocks.check_integrity(readers[1:])
    blocks.free(readers[1])
    assert blocks.num_free_blocks == 8


def test_evict_takes_the_oldest_text_from_its_end() -> None:
    blocks = _manager(6, following=0)
    _run(blocks, "old", [1] * 8 + [0])  # blocks 0, 1 cached, 2 is empty again
    _run(blocks, "new", [2] * 8 + [0])
    _run(blocks, "old", [1] * 8 + [0])  # used again: now "new" is the oldest
    big = _request("big", [7] * 16)
    blocks.reserve(big, 12)
    assert len(blocks.find_cached(_request("x", [2] * 8 + [0]))) == 1
    assert len(blocks.find_cached(_request("x", [1] * 8 + [0]))) == 2
    blocks.reserve(big, 16)
    assert blocks.find_cached(_request("x", [2] * 8 + [0])) == []
    assert len(blocks.find_cached(_request("x", [1] * 8 + [0]))) == 2


def test_forget_unsound_blocks_are_found_by_nobody() -> None:
    blocks, tokens = _manager(), list(range(12))
    bad = _request("bad", tokens)
    _admit(blocks, bad)
    bad.num_computed_tokens = 12
    blocks.publish(bad, num_rows=12)
    assert blocks.find_cached(_request("b", tokens)) == [0, 1]
    blocks.free(bad, forget=True)
    assert blocks.find_cached(_request("b", tokens)) == []
    blocks.check_integrity([])


def test_check_integrity_block_under_a_wrong_key_is_found() -> None:
    blocks, request = _manager(following=0), _request("a", list(range(9)))
    _admit(blocks, request)
    request.num_computed_tokens = 8
    blocks.publish(request, num_rows=request.num_computed_tokens)
    blocks.check_integrity([request])
    request.block_ids[:2] = request.block_ids[1::-1]
    with pytest.raises(AssertionError, match="another text's key"):
        blocks.check_integrity([request])


def test_extend_keys_before_the_following_tokens_are_known_is_refused() -> None:
    cache = PrefixCache(block_size=4, plan=DraftPlan(POLICIES["eagle"], 3, 1))
    with pytest.raises(AssertionError, match="need the 3 tokens after them, the text has 6"):
        cache.extend_keys([], [1] * 6, num_blocks=1)
