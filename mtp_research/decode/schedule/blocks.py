"""Owner of the page ids: which blocks are free, which requests hold which, which can be shared.

A block is empty, held by one request or more, or idle: held by nobody, but its content is in the
prefix cache until the block is needed. Empty and idle blocks both count as free. A cached block is
never written again, so that its holders cannot disturb each other.

A content key stands for everything that decides a block's KV: the key of the block before it, its
own tokens, and the F tokens that *follow* it, because a module row at slot q depends on tokens up
to `q + K` (F = K with MTP modules, 0 without). Matching block tokens alone and dropping the last
matched block, as is usual with F = 1, is not exact: of three texts `A B x`, `A B y` and `A B y z`,
the last would find the `B` of the first and take rows that saw `x`.

Sizes are in tokens unless a name says blocks.
Source: paged attention (Kwon et al., arXiv:2309.06180); hash-chained blocks as in vLLM's automatic
prefix caching; the rule for F is ours.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_research.decode.schedule.request import Request
from mtp_research.policy.audit import Auditor
from mtp_research.policy.plan import DraftPlan

KEY_BYTES = 32


@dataclass
class CacheStats:
    """Counters since the cache was built."""

    num_queried_tokens: int = 0  # tokens of all texts looked up at admission
    num_cached_tokens: int = 0  # those whose KV was found
    num_evicted_blocks: int = 0  # cached blocks that were needed for something else


class PrefixCache:
    """Contents of cached blocks."""

    def __init__(
        self, *, block_size: int, plan: DraftPlan | None = None, watcher: Auditor | None = None
    ) -> None:
        self.block_size, self.plan, self.watcher = block_size, plan, watcher
        self.stats = CacheStats()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_following_tokens(self) -> int:
        """F, tokens after a block that its KV depends on."""
        return 0 if self.plan is None else self.plan.num_speculative_tokens

    @property
    def num_idle_blocks(self) -> int:
        """Cached blocks that no request holds."""
        return len(self._idle)

    def num_final_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks whose KV is final, and that no later step writes.

        A step that starts with c computed rows reruns module rows from `c - K` on.
        """
        return max(num_computed_tokens - self.num_following_tokens, 0) // self.block_size

    def extend_keys(
        self, keys: list[bytes], token_ids: Sequence[int], *, num_blocks: int, salt: str = ""
    ) -> None:
        """Append keys in place until there are those of the first `num_blocks` blocks."""
        size, reach = self.block_size, self.block_size + self.num_following_tokens
        assert num_blocks * size + self.num_following_tokens <= len(token_ids) or num_blocks == 0, (
            f"keys of {num_blocks} blocks need the {self.num_following_tokens} tokens after them, "
            f"the text has {len(token_ids)}"
        )
        for index in range(len(keys), num_blocks):
            tokens = array("q", token_ids[index * size : index * size + reach])
            parent = keys[-1] if keys else salt.encode()
            digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
            digest.update(tokens.tobytes())
            keys.append(digest.digest())

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached run of `keys`; changes nothing."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def publish(self, block_id: int, key: bytes) -> bool:
        """Make a held block findable; False when another block has this content already."""
        assert block_id not in self._key_of, f"block {block_id} is published twice"
        if key in self._block_of:
            return False
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        return True

    def forget(self, block_id: int) -> None:
        """Drop the content of a block, if it has one: nobody will find it any more."""
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]
            self._idle.pop(block_id, None)

    def holds(self, block_id: int) -> bool:
        """Whether the block has a content that can be found."""
        return block_id in self._key_of

    def is_idle(self, block_id: int) -> bool:
        """Whether the block is cached and no request holds it."""
        return block_id in self._idle

    def rest(self, block_id: int) -> None:
        """The last holder of a cached block let go of it: it is now the most recently used."""
        assert block_id in self._key_of, f"block {block_id} has no content to keep"
        self._idle[block_id] = None

    def wake(self, block_id: int) -> None:
        """A request takes an idle block."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Give up the least recently used idle block."""
        assert self._idle, "no cached block is idle"
        block_id = next(iter(self._idle))
        self.forget(block_id)
        self.stats.num_evicted_blocks += 1
        return block_id

    def check_integrity(self, *, held: set[int]) -> None:
        """Assert that keys and blocks pair up, and that the idle ones are those nobody holds."""
        assert {key: block for block, key in self._key_of.items()} == self._block_of, (
            "keys and blocks of the prefix cache do not pair up"
        )
        unheld = set(self._key_of) - held
        assert set(self._idle) == unheld, (
            f"idle blocks {sorted(self._idle)} are not the cached blocks without a holder "
            f"{sorted(unheld)}"
        )

    def check_keys(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Assert that blocks of one text, where they are cached, are cached under its keys."""
        for block_id, key in zip(block_ids, keys, strict=False):
            found = self._key_of.get(block_id, key)
            assert found == key, f"block {block_id} is cached under another text's key"


class BlockManager:
    """Free list and per-block holders."""

    def __init__(
        self, num_blocks: int, *, block_size: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self._empty: deque[int] = deque(range(num_blocks))
        self._holders: dict[int, set[str]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached or not."""
        idle = self.prefix_cache.num_idle_blocks if self.prefix_cache is not None else 0
        return len(self._empty) + idle

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that hold positions `[0, num_slots)`."""
        return -(-num_slots // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """Cached blocks that the text of a waiting request starts with; changes no block.

        At least one row is left to run: the last one before the request decodes.
        """
        cache = self.prefix_cache
        if cache is None:
            return []
        num_keyed = max(request.num_tokens - cache.num_following_tokens, 0) // self.block_size
        num_usable = min(num_keyed, (request.num_prefill_tokens - 1) // self.block_size)
        cache.extend_keys(
            request.block_keys, request.token_ids, num_blocks=num_usable, salt=request.cache_salt
        )
        return cache.find(request.block_keys[:num_usable])

    def can_reserve(self, request: Request, num_slots: int, *, cached: Sequence[int] = ()) -> bool:
        """Whether `reserve` would succeed, after `take_cached(cached)` if it is given."""
        missing = self.num_blocks_for(num_slots) - len(request.block_ids) - len(cached)
        num_woken = sum(block_id not in self._holders for block_id in cached)
        return missing <= self.num_free_blocks - num_woken

    def take_cached(self, request: Request, cached: Sequence[int]) -> None:
        """Start a request that holds nothing with the blocks that `find_cached` named."""
        cache = self.prefix_cache
        if cache is None:
            return
        assert not request.block_ids, f"request {request.request_id} holds blocks already"
        for block_id in cached:
            if cache.is_idle(block_id):
                cache.wake(block_id)
            self._holders.setdefault(block_id, set()).add(request.request_id)
        request.block_ids.extend(cached)
        request.num_published_blocks = len(cached)
        request.num_cached_tokens = len(cached) * self.block_size
        request.num_computed_tokens = request.num_cached_tokens
        cache.stats.num_queried_tokens += request.num_tokens
        cache.stats.num_cached_tokens += request.num_cached_tokens
        if cache.watcher is not None:
            cache.watcher.take_blocks(request.request_id, cached, size=self.block_size)

    def reserve(self, request: Request, num_slots: int) -> None:
        """Append blocks until the request owns positions `[0, num_slots)`; it may own more."""
        missing = self.num_blocks_for(num_slots) - len(request.block_ids)
        assert missing <= self.num_free_blocks, (
            f"request {request.request_id} needs {missing} blocks, {self.num_free_blocks} are "
            "free: can_reserve was not asked"
        )
        for _ in range(missing):
            block_id = self._take_free()
            self._holders[block_id] = {request.request_id}
            request.block_ids.append(block_id)

    def publish(self, request: Request, *, num_rows: int) -> None:
        """Put the blocks whose content has become final into the prefix cache."""
        cache = self.prefix_cache
        if cache is None:
            return
        num_final = cache.num_final_blocks(num_rows)
        cache.extend_keys(
            request.block_keys, request.token_ids, num_blocks=num_final, salt=request.cache_salt
        )
        for index in range(request.num_published_blocks, num_final):
            block_id = request.block_ids[index]
            if cache.publish(block_id, request.block_keys[index]) and cache.watcher is not None:
                cache.watcher.keep_block(
                    block_id,
                    request_id=request.request_id,
                    first_slot=index * self.block_size,
                    size=self.block_size,
                )
        request.num_published_blocks = max(num_final, request.num_published_blocks)

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Let go of every block; nothing changes when one of them is not the request's own."""
        name, cache = request.request_id, self.prefix_cache
        for block_id in request.block_ids:
            holders = self._holders.get(block_id, set())
            assert name in holders, (
                f"request {name} frees block {block_id}, "
                f"which belongs to {', '.join(sorted(holders)) or 'nobody (double free)'}"
            )
        # The end of a text is reused first: without it, the beginning is still worth something.
        for block_id in reversed(request.block_ids):
            if forget and cache is not None:
                cache.forget(block_id)
            self._holders[block_id].remove(name)
            if not self._holders[block_id]:
                self._let_go(block_id)
        request.block_ids = []  # not emptied: `BlockTables` tells tenants of a slot by their lists
        request.num_published_blocks = 0
        request.num_cached_tokens = 0

    def check_integrity(self, requests: list[Request]) -> None:
        """Assert that free and held blocks are all there, once, and as the requests list them."""
        cache = self.prefix_cache
        counts = Counter(block_id for request in requests for block_id in request.block_ids)
        num_idle = cache.num_idle_blocks if cache is not None else 0
        unheld = [block for block in range(self.num_blocks) if block not in counts]
        idle = [block for block in unheld if cache is not None and cache.is_idle(block)]
        found = sorted([*idle, *self._empty]) if len(idle) == num_idle else None
        assert found == unheld, (
            f"{len(counts)} held + {self.num_free_blocks} free blocks are not the "
            f"{self.num_blocks} of the pool"
        )
        shared = {block for block, count in counts.items() if count != len(self._holders[block])}
        assert not shared, f"a block is held twice, or not by all its holders: {sorted(shared)}"
        for request in requests:
            for block_id in request.block_ids:
                assert request.request_id in self._holders[block_id], (
                    f"block {block_id} of {request.request_id} has a wrong owner"
                )
        if cache is not None:
            cache.check_integrity(held=set(counts))
            for request in requests:
                num_published = request.num_published_blocks
                cache.check_keys(request.block_ids[:num_published], request.block_keys)

    def _take_free(self) -> int:
        if self._empty:
            return self._empty.popleft()
        assert self.prefix_cache is not None, "no block is free"
        return self.prefix_cache.evict()

    def _let_go(self, block_id: int) -> None:
        del self._holders[block_id]
        if self.prefix_cache is not None and self.prefix_cache.holds(block_id):
            self.prefix_cache.rest(block_id)
        else:
            self._empty.append(block_id)
