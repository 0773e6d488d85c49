"""What the device is told of a schedule: texts of admitted requests, then the rows of the step.

Between `Scheduler.schedule` and `DeviceStep.run`; nothing here waits for the device. Captured steps
with prompt rows copy the same facts into tensors of their own, see `mixed_graphs`.

Letters: R requests, M blocks per table, K drafts per step.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from mtp_research.decode.batch import StepInputs
from mtp_research.decode.kv_cache import HiddenRing
from mtp_research.decode.request import Request
from mtp_research.decode.schedule import Scheduled
from mtp_research.decode.transfer import to_device


def start_texts(admitted: Iterable[Request], *, ring: HiddenRing) -> None:
    """Write the texts of admitted requests into their slots of the ring."""
    for request in admitted:
        assert request.slot is not None, f"{request.request_id} was admitted without a slot"
        tokens = to_device(request.token_ids, dtype=torch.int64, device=ring.text.device)
        ring.start(request.slot, tokens, first_row=request.num_cached_tokens)


def build_inputs(
    scheduled: list[Scheduled], *, ring: HiddenRing, block_size: int, deferred: bool
) -> StepInputs:
    """Lay out the rows of a schedule; the ring already holds texts, lengths and drafts.

    Args:
        scheduled: one entry a request.
        ring: state of the request slots.
        block_size: tokens a page.
        deferred: the host is one step late: nothing here or in drafting may wait for the device.
    """
    device = ring.text.device
    requests = [entry.request for entry in scheduled]
    block_table = _block_table(requests, device=device)
    is_prefill = tuple(entry.is_prefill for entry in scheduled)
    if deferred and not any(is_prefill):
        slots = to_device([r.slot for r in requests], dtype=torch.int64, device=device)
        return StepInputs.decoding(slots, block_table, ring=ring, block_size=block_size)
    counts = [entry.num_scheduled_tokens for entry in scheduled]
    inputs = StepInputs.mixed(
        to_device([facts_of(entry) for entry in scheduled], dtype=torch.int64, device=device),
        block_table,
        ring=ring,
        total=sum(counts),
        longest=max(counts),
        block_size=block_size,
    )
    return replace(inputs, row_counts=tuple(counts), is_prefill=is_prefill if deferred else None)


def facts_of(entry: Scheduled) -> tuple[int, ...]:
    """What the device must be told of an entry: slot, first row, rows, and three flags."""
    return (
        cast(int, entry.request.slot),
        entry.first_position,
        entry.num_scheduled_tokens,
        entry.is_prefill,
        entry.samples,
        entry.resumes,
    )


def _block_table(requests: list[Request], *, device: torch.device) -> Tensor:
    """`[R, M]` int32 for the longest of these requests, padded with 0."""
    width = max(len(request.block_ids) for request in requests)
    tables = [request.block_ids + [0] * (width - len(request.block_ids)) for request in requests]
    return to_device(tables, dtype=torch.int32, device=device)
