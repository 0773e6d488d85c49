"""Block tables of captured steps: kept on the device by slot, only what changed is uploaded.

In a large batch some request gains a block in almost every step, so that a step would upload the
tables of all. Here it uploads the few new entries; the device puts the rows of a batch together.

Letters: R requests, M blocks per table.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mtp_research.decode.request import Request
from mtp_research.decode.transfer import to_device


class BlockTables:
    """Block tables of all slots; what a request does not own is the spare block.

    Args:
        num_slots: slots of requests; one more row, behind them, belongs to padding requests.
        num_table_blocks: M, blocks that the longest request can own.
        spare_block: block of padding.
        device: where the tables live.

    Attributes:
        width: M.
    """

    def __init__(
        self, num_slots: int, *, num_table_blocks: int, spare_block: int, device: torch.device
    ) -> None:
        self.width, self._spare_block = num_table_blocks, spare_block
        self._tables = torch.full(
            (num_slots + 1, num_table_blocks), spare_block, dtype=torch.int32, device=device
        )
        # Per slot, the list that was uploaded and how much of it. A list only grows while a request
        # runs, and `BlockManager.free` replaces it: the same list means the same tenant.
        self._uploaded: list[tuple[list[int], int]] = [([], 0)] * num_slots

    def update(self, requests: Iterable[Request]) -> bool:
        """Upload what is new in the tables of running requests; whether there was anything."""
        cells: list[int] = []
        blocks: list[int] = []
        uploaded, width = self._uploaded, self.width
        for request in requests:
            slot, table = request.slot, request.block_ids
            assert slot is not None, f"{request.request_id} has no slot"
            last, known = uploaded[slot]
            is_tenant = last is table
            assert known <= len(table) or not is_tenant, f"{request.request_id} lost blocks"
            assert len(table) <= width, f"{request.request_id} has more than {width} blocks"
            if not is_tenant:  # a new tenant: nothing of the former one's may stay
                cells += range(slot * width, (slot + 1) * width)
                blocks += table
                blocks += [self._spare_block] * (width - len(table))
            elif known != len(table):
                cells += range(slot * width + known, slot * width + len(table))
                blocks += table[known:]
            else:
                continue
            uploaded[slot] = table, len(table)
        if not cells:
            return False
        where, values = to_device(
            [cells, blocks], dtype=torch.int64, device=self._tables.device
        ).unbind()
        self._tables.view(-1)[where] = values.int()
        return True

    def read(self, slots: Tensor, *, out: Tensor) -> None:
        """Put the tables of `slots` `[R]` int64 into `out` `[R, M]` int32."""
        torch.index_select(self._tables, 0, slots, out=out)
