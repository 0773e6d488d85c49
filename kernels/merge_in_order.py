"""Parts of batch-invariant attention: splits merged in order, rows as requests of their own.

Where it sits: `attention_launch` and `latent_attention_launch` merge with it in their invariant
form, where split s holds keys `[s * 512, (s + 1) * 512)` whatever the batch: a row's partial
results follow from its position alone. The number of splits is what the longest table could hold,
so the merge must not depend on it either: it adds the splits up in rising order, and a split
without keys changes nothing. The reference lets every row run alone instead.
Letters: R requests, T packed rows, M blocks per table, H heads, Dv value head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor


class RowRequests(NamedTuple):
    """The index tensors of a batch of T requests of one row each; as in `paged_attention`."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    kv_start: Tensor | None


def rows_as_requests(
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    positions: Tensor | None,
    kv_start: Tensor | None,
) -> RowRequests:
    """The same attention with one row a request; padded rows are left out. Reads the host.

    Row i of a request that ends at seq_len sees the keys up to its own position, so that its
    request is that long: 3 rows ending at 10 become three requests of 8, 9 and 10 keys.
    """
    query_lens = query_start_loc.diff().long()
    requests = torch.arange(len(query_lens), device=query_lens.device)
    request = torch.repeat_interleave(requests, query_lens)
    starts = torch.arange(len(request) + 1, device=request.device)
    if positions is None:
        offset = starts[:-1] - query_start_loc[request]
        positions = seq_lens[request] - query_lens[request] + offset
    lens = torch.minimum(positions[: len(request)] + 1, seq_lens[request])
    start = None if kv_start is None else kv_start[request]
    return RowRequests(block_table[request], lens, starts, start)


@checks.kernel_jit
def merge_in_order_kernel(
    partial,  # [splits, T, H, Dv] float32
    lse,  # [splits, T, H] float32, base 2; -inf where a split saw no key
    query_start_loc,  # [R + 1] int32
    out,  # [T, H, Dv], written
    num_requests,
    num_splits,
    num_row_heads,  # T x H
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    """One output row of one head: the partial outputs weighted by their share of the softmax."""
    row_head = tl.program_id(0).to(tl.int64)
    is_row = row_head // NUM_HEADS < tl.load(query_start_loc + num_requests)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    highest = tl.full([], float("-inf"), tl.float32)
    at = row_head
    for _ in range(num_splits):
        highest = tl.maximum(highest, tl.load(lse + at, mask=is_row, other=float("-inf")))
        at += num_row_heads
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([PADDED_VALUE_DIM], tl.float32)
    at = row_head
    for _ in range(num_splits):
        part_lse = tl.load(lse + at, mask=is_row, other=float("-inf"))
        part = tl.load(partial + at * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        # Splits without keys left their partial output unwritten.
        part = tl.where(part_lse == float("-inf"), 0.0, part)
        share = tl.exp2(part_lse - base)
        total += share
        acc += part * share
        at += num_row_heads
    merged = acc / tl.where(total == 0.0, 1.0, total)
    target = out + row_head * VALUE_DIM + dims
    tl.store(target, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
