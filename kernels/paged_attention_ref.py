"""Paged attention in plain PyTorch: the reference of the kernel and the engine's path on a CPU.

Where it sits: `paged_attention` calls it for tensors that no kernel runs, and explains maths,
layout and letters.
Letters: R requests, T packed rows, r requests of a group, Q rows of its longest request, S keys,
H / Hkv heads, G heads a KV head, Dk / Dv head dims.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from mtp_research.kernels.merge_in_order import rows_as_requests
from mtp_research.kernels.splits import ceil_div

if TYPE_CHECKING:
    from torch import Tensor


def paged_attention_ref(
    query: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Plain PyTorch, float32 or wider inside, any device; the CPU path of the engine.

    Requests of similar q_len run together, so that a prefill chunk does not pad the verify rows
    beside it; with `invariant` every row runs alone, so that its bits do not depend on the batch.
    Reads lengths on the host. Arguments and result as in `paged_attention`.

    Raises:
        ValueError: a request has more rows than `max_query_len`.
    """
    block_size, value_dim = key_cache.shape[1], value_cache.shape[3]
    out = query.new_zeros(*query.shape[:2], value_dim)
    groups = _group_by_query_len(query_start_loc.tolist(), max_query_len=max_query_len)
    if invariant:
        block_table, seq_lens, query_start_loc, kv_start = rows_as_requests(
            block_table, seq_lens, query_start_loc, positions=positions, kv_start=kv_start
        )
        positions, groups = None, [[row] for row in range(len(seq_lens))]
    for requests in groups:
        index = torch.tensor(requests, device=query.device)
        lens = seq_lens[index, None].long()  # [r, 1]
        first_row = query_start_loc[index, None].long()
        query_lens = query_start_loc[index + 1, None] - first_row
        offsets = torch.arange(int(query_lens.max()), device=query.device)
        is_row = offsets < query_lens  # [r, Q]
        rows = torch.where(is_row, first_row + offsets, 0)
        row_pos = lens - query_lens + offsets if positions is None else positions[rows]

        num_blocks = max(1, ceil_div(int(lens.max()), block_size))
        key_pos = torch.arange(num_blocks * block_size, device=query.device)
        readable = key_pos < lens  # [r, S]
        if kv_start is not None:
            readable &= key_pos >= kv_start[index, None]
        allowed = readable[:, None] & (key_pos <= row_pos[..., None])  # [r, Q, S]
        if sliding_window is not None:
            allowed &= key_pos > row_pos[..., None] - sliding_window
        # Table entries past a request's own blocks may hold anything; page 0 stands in for them.
        owned = readable.unflatten(1, (num_blocks, block_size)).any(-1)
        pages = torch.where(owned, block_table[index, :num_blocks], 0).long()
        keys = _gather_pages(key_cache, pages, readable=readable)
        values = _gather_pages(value_cache, pages, readable=readable)
        attended = _masked_attention(query[rows], keys, values, allowed, scale, sinks)
        out[rows[is_row]] = attended[is_row].to(out.dtype)
    return out


def _group_by_query_len(query_starts: list[int], *, max_query_len: int) -> list[list[int]]:
    """Requests with rows, grouped so that the longest q_len is less than twice the shortest."""
    groups: dict[int, list[int]] = {}
    for request in range(len(query_starts) - 1):
        query_len = query_starts[request + 1] - query_starts[request]
        if query_len > max_query_len:
            raise ValueError(
                f"max_query_len must be >= the longest request's rows, got {max_query_len} for a "
                f"request of {query_len} rows; pass the maximum of diff(query_start_loc)."
            )
        if query_len > 0:
            groups.setdefault(query_len.bit_length(), []).append(request)
    return list(groups.values())


def _gather_pages(cache: Tensor, pages: Tensor, *, readable: Tensor) -> Tensor:
    """Pages as `[r, Hkv, S, D]` in the compute dtype, zero where not readable (it may hold NaN)."""
    gathered = cache.index_select(0, pages.flatten()).flatten(0, 1)  # [r x S, Hkv, D]
    gathered.index_fill_(0, (~readable).flatten().nonzero().squeeze(1), 0.0)
    heads_first = gathered.unflatten(0, readable.shape).transpose(1, 2)
    return heads_first.to(torch.promote_types(cache.dtype, torch.float32)).contiguous()


def _masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of `[r, Q, H, Dk]` rows over `[r, Hkv, S, D]` keys; a row without keys gives 0."""
    num_requests, num_queries, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.to(keys.dtype).mul(scale).unflatten(2, (num_kv_heads, -1))
    grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [r, Hkv, G x Q, Dk]
    scores = torch.matmul(grouped, keys.mT).unflatten(2, (-1, num_queries))
    hidden = torch.where(allowed, 0.0, -math.inf).to(scores.dtype)
    scores += hidden[:, None, None]  # [r, Hkv, G, Q, S]
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1)
        highest = torch.maximum(highest, sinks)
    # A row without keys has -inf here, and -inf - (-inf) would be NaN.
    highest = highest.clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks - highest).exp_()
    weights /= torch.where(total == 0, 1.0, total)
    attended = torch.matmul(weights.flatten(2, 3), values)
    attended = attended.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
    return attended.reshape(num_requests, num_queries, num_heads, values.shape[3])
