"""Slow, dense references of the kernels: one request, row and head at a time, in float64.

They share nothing with the code under test: no padding, no masks, no batching; a key is either in
the slice or it is not.
"""

import torch
from torch import Tensor


def slow_store_kv(
    key: Tensor, value: Tensor, *, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies of both caches with every row written, one slot at a time."""
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    block_size = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[row]
            value_cache[slot // block_size, slot % block_size] = value[row]
    return key_cache, value_cache


def slow_paged_attention(
    query: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
) -> Tensor:
    """`[T, H, Dv]` float64: softmax over the visible keys of each row, nothing else."""
    num_rows, num_heads, _ = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    out = torch.zeros(num_rows, num_heads, value_dim, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        slots = [
            (int(block_table[request, pos // block_size]), pos % block_size)
            for pos in range(seq_len)
        ]
        query_len = starts[request + 1] - starts[request]
        for i in range(query_len):
            row = starts[request] + i
            pos = seq_len - query_len + i if positions is None else int(positions[row])
            low = 0 if sliding_window is None else max(0, pos - sliding_window + 1)
            low = low if kv_start is None else max(low, int(kv_start[request]))
            visible = slots[low : min(pos + 1, seq_len)]
            for head in range(num_heads if visible else 0):
                kv_head = head * num_kv_heads // num_heads
                keys = torch.stack([key_cache[b, s, kv_head] for b, s in visible]).double()
                values = torch.stack([value_cache[b, s, kv_head] for b, s in visible]).double()
                logits = keys @ query[row, head].double() * scale
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head].double().view(1)])
                weights = torch.softmax(logits, 0)[: len(visible)]
                out[row, head] = weights @ values
    return out
