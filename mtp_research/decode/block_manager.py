"""Owner of the page ids: which blocks are free and which request holds which.

Sizes are in tokens unless a name says blocks.
Source: paged attention (Kwon et al., arXiv:2309.06180).
"""

from collections import deque

from mtp_research.decode.request import Request


class BlockManager:
    """Free list and per-request ownership.

    Args:
        num_blocks: pages in the pool, >= 1.
        block_size: tokens a page.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._owner: dict[int, str] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that hold positions `[0, num_slots)`."""
        return -(-num_slots // self.block_size)

    def can_reserve(self, request: Request, num_slots: int) -> bool:
        """Whether `reserve` would succeed."""
        return self.num_blocks_for(num_slots) - len(request.block_ids) <= self.num_free_blocks

    def reserve(self, request: Request, num_slots: int) -> None:
        """Append blocks until the request owns positions `[0, num_slots)`; it may own more."""
        missing = self.num_blocks_for(num_slots) - len(request.block_ids)
        assert missing <= self.num_free_blocks, (
            f"request {request.request_id} needs {missing} blocks, {self.num_free_blocks} are "
            "free: can_reserve was not asked"
        )
        for _ in range(missing):
            block_id = self._free.popleft()
            self._owner[block_id] = request.request_id
            request.block_ids.append(block_id)

    def free(self, request: Request) -> None:
        """Give back every block of the request; nothing changes when one of them is not its own."""
        for block_id in request.block_ids:
            owner = self._owner.get(block_id)
            assert owner == request.request_id, (
                f"request {request.request_id} frees block {block_id}, "
                f"which belongs to {owner or 'nobody (double free)'}"
            )
        for block_id in request.block_ids:
            del self._owner[block_id]
            self._free.append(block_id)
        request.block_ids.clear()

    def check_integrity(self, requests: list[Request]) -> None:
        """Assert that free and owned blocks are all there, once, and as the requests list them."""
        held = [block_id for request in requests for block_id in request.block_ids]
        assert len(held) == len(set(held)), f"a block is held twice: {sorted(held)}"
        assert sorted(held + list(self._free)) == list(range(self.num_blocks)), (
            f"{len(held)} held + {len(self._free)} free blocks are not the {self.num_blocks} "
            "of the pool"
        )
        for request in requests:
            for block_id in request.block_ids:
                assert self._owner.get(block_id) == request.request_id, (
                    f"block {block_id} of {request.request_id} has a wrong owner"
                )
