"""Owner of the page ids: which blocks are free, which requests hold which, which can be shared.

A block is empty, held by one request or more, or idle: held by nobody, but its content is in the
prefix cache until the block is needed. Empty and idle blocks both count as free. A block that is
cached is never written again, so that holders of one block cannot disturb each other.

Sizes are in tokens unless a name says blocks.
Source: paged attention (Kwon et al., arXiv:2309.06180).
"""

from collections import Counter, deque
from collections.abc import Sequence

from mtp_research.decode.prefix_cache import PrefixCache
from mtp_research.decode.request import Request


class BlockManager:
    """Free list and per-block holders.

    Args:
        num_blocks: pages in the pool, >= 1.
        block_size: tokens a page.
        prefix_cache: keeps contents for sharing; None shares nothing.
    """

    def __init__(
        self, num_blocks: int, *, block_size: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
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
        """Put the blocks whose content has become final into the prefix cache.

        Args:
            request: the holder.
            num_rows: leading rows of its text that finished steps have computed.
        """
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
        """Let go of every block; nothing changes when one of them is not the request's own.

        Args:
            request: the holder.
            forget: take the contents out of the prefix cache too, because they are not sound.
        """
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
        """Nobody holds the block any more: keep its content while there is room."""
        del self._holders[block_id]
        if self.prefix_cache is not None and self.prefix_cache.holds(block_id):
            self.prefix_cache.rest(block_id)
        else:
            self._empty.append(block_id)
