"""Which block holds which text: content keys, lookup, and the order in which idle blocks go.

A key stands for everything that decides a block's KV: the key of the block before it, its own
tokens, and the F tokens that *follow* it, because a module row at slot q depends on tokens up to
`q + K` (F = K with MTP modules, 0 without). Two texts that part within these F tokens therefore
have different keys. Matching block tokens alone and dropping the last matched block, as is usual
with F = 1, is not exact: of three texts `A B x`, `A B y` and `A B y z`, the last would find the
`B` of the first and take rows that saw `x`.

Weights, policy and K decide KV too, but a decoder has one of each and its own cache. The block
manager decides who holds a block; this file only knows contents. Sizes are in tokens
unless a name says blocks.
Source: hash-chained blocks as in vLLM's automatic prefix caching; the rule for F is ours.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 32


class BlockWatcher(Protocol):
    """Told when a block's content gets a key, and when a request takes cached blocks over."""

    def keep_block(self, block_id: int, *, request_id: str, first_slot: int, size: int) -> None:
        """Slots `[first_slot, first_slot + size)` of the request became cached as `block_id`."""
        ...

    def take_blocks(self, request_id: str, block_ids: Sequence[int], *, size: int) -> None:
        """The request starts with these cached blocks of `size` slots each."""
        ...


@dataclass
class CacheStats:
    """Counters since the cache was built.

    Attributes:
        num_queried_tokens: tokens of all texts looked up at admission.
        num_cached_tokens: those whose KV was found.
        num_evicted_blocks: cached blocks that were needed for something else.
    """

    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_evicted_blocks: int = 0


class PrefixCache:
    """Contents of cached blocks.

    Args:
        block_size: tokens a block.
        num_following_tokens: F, tokens after a block that its KV depends on.
        watcher: told about published and taken blocks.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_following_tokens: int,
        watcher: BlockWatcher | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_following_tokens = num_following_tokens
        self.watcher = watcher
        self.stats = CacheStats()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

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
        """Append keys in place until there are those of the first `num_blocks` blocks.

        Args:
            keys: keys of this text so far, from its start.
            token_ids: the text, at least up to the last of these blocks and the tokens after it.
            num_blocks: blocks wanted.
            salt: whatever else separates this text from equal ones, such as its owner.
        """
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
