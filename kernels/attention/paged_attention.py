"""Ragged causal attention over paged keys and values, for prefill chunks and verify rows alike.

Where it sits: after store_kv has appended this step's rows, attention reads pages only. Row i of
request r sits at `pos = seq_lens[r] - q_len + i` and sees keys `[max(0, pos - window + 1), pos]`.
Maths: out = softmax(scale * q k^T) v; a sink adds one logit per head to the denominator only. The
kernel (paged_attention_triton) keeps a running maximum and sum in base 2 (online softmax) and
splits a long context over programs, whose partial outputs are merged by their log-sum-exp.
Layout: the H / Hkv query heads of a KV head and the rows of a request are packed into one M tile,
so each key is read once per tile however many drafts are verified.
Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims; in the
reference r requests of a group, Q rows of its longest, S keys, G heads a KV head.
Source: FlashAttention-2 (online softmax), Flash-Decoding (splits), vLLM (block table).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_launch import MAX_SPLITS, launch_paged_attention
from mtp_research.kernels.attention.attention_rows import (
    AttentionRows,
    PagedKV,
    Scoring,
    check_rows,
    rows_as_requests,
)
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.attention.store_kv import NewRows, rows_for_launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class RowGroup(NamedTuple):
    """Requests of similar q_len in the reference: their rows, and what these may read.

    It depends on the pass and the window alone, so that layers of one pass can share it.
    """

    at: Tensor  # [r, Q] int64, packed rows; 0 stands in where a request has fewer
    is_row: Tensor | None  # [r, Q]; None where none stands in
    pages: Tensor  # [r, blocks] int64, of the longest request; page 0 stands in likewise
    unreadable: Tensor  # [*] int64 in 0..r x S, key slots that may hold anything
    hidden: Tensor  # [r, 1, 1, Q, S] float32, 0 or -inf


def paged_attention_ref(
    query: Tensor,
    kv: PagedKV,
    rows: AttentionRows,
    scoring: Scoring,
    *,
    invariant: bool = False,
    groups: Sequence[RowGroup] | None = None,
) -> Tensor:
    """Plain PyTorch, float32 or wider inside, any device; the CPU path of the engine.

    Requests of similar q_len run together, so that a prefill chunk does not pad the verify rows
    beside it; with `invariant` every row runs alone, so that its bits do not depend on the batch.
    Reads lengths on the host. Arguments and result as in `paged_attention`; `groups` are those of
    `group_rows` for the same rows and window.
    """
    out = query.new_zeros(*query.shape[:2], kv.values.shape[3])
    if groups is None:
        groups = group_rows(
            rows,
            block_size=kv.keys.shape[1],
            sliding_window=scoring.sliding_window,
            invariant=invariant,
        )
    for group in groups:
        keys = _gather_pages(kv.keys, group)
        values = _gather_pages(kv.values, group)
        attended = _masked_attention(query[group.at], keys, values, group.hidden, scoring)
        attended = attended.to(out.dtype)
        if group.is_row is None:
            out[group.at] = attended
        else:
            out[group.at[group.is_row]] = attended[group.is_row]
    return out


def group_rows(
    rows: AttentionRows, *, block_size: int, sliding_window: int | None, invariant: bool = False
) -> list[RowGroup]:
    """What `paged_attention_ref` has to know of the rows of a pass; reads lengths on the host."""
    by_len = _group_by_query_len(rows.query_start_loc.tolist(), max_query_len=rows.max_query_len)
    if invariant:
        rows = rows_as_requests(rows)
        by_len = [[row] for row in range(len(rows.seq_lens))]
    return [_group(rows, requests, block_size, sliding_window) for requests in by_len]


def _group(
    rows: AttentionRows, requests: list[int], block_size: int, sliding_window: int | None
) -> RowGroup:
    index = torch.tensor(requests, device=rows.seq_lens.device)
    lens = rows.seq_lens[index, None].long()  # [r, 1]
    first_row = rows.query_start_loc[index, None].long()
    query_lens = rows.query_start_loc[index + 1, None] - first_row
    offsets = torch.arange(int(query_lens.max()), device=index.device)
    is_row = offsets < query_lens  # [r, Q]
    at = torch.where(is_row, first_row + offsets, 0)
    row_pos = lens - query_lens + offsets if rows.positions is None else rows.positions[at]

    num_blocks = max(1, ceil_div(int(lens.max()), block_size))
    key_pos = torch.arange(num_blocks * block_size, device=index.device)
    readable = key_pos < lens  # [r, S]
    if rows.kv_start is not None:
        readable &= key_pos >= rows.kv_start[index, None]
    allowed = readable[:, None] & (key_pos <= row_pos[..., None])  # [r, Q, S]
    if sliding_window is not None:
        allowed &= key_pos > row_pos[..., None] - sliding_window
    # Table entries past a request's own blocks may hold anything; page 0 stands in for them.
    owned = readable.unflatten(1, (num_blocks, block_size)).any(-1)
    return RowGroup(
        at=at,
        is_row=None if bool(is_row.all()) else is_row,
        pages=torch.where(owned, rows.block_table[index, :num_blocks], 0).long(),
        unreadable=(~readable).flatten().nonzero().squeeze(1),
        hidden=torch.where(allowed, 0.0, -math.inf)[:, None, None],
    )


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


def _gather_pages(cache: Tensor, group: RowGroup) -> Tensor:
    """Pages as `[r, Hkv, S, D]` in the compute dtype, zero where not readable (it may hold NaN)."""
    gathered = cache.index_select(0, group.pages.flatten()).flatten(0, 1)  # [r x S, Hkv, D]
    gathered.index_fill_(0, group.unreadable, 0.0)
    heads_first = gathered.unflatten(0, (len(group.pages), -1)).transpose(1, 2)
    return heads_first.to(torch.promote_types(cache.dtype, torch.float32))


def _masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scoring: Scoring
) -> Tensor:
    """Attention of `[r, Q, H, Dk]` rows over `[r, Hkv, S, D]` keys; a row without keys gives 0."""
    num_requests, num_queries, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.to(keys.dtype).mul(scoring.scale).unflatten(2, (num_kv_heads, -1))
    grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [r, Hkv, G x Q, Dk]
    scores = torch.matmul(grouped, keys.mT).unflatten(2, (-1, num_queries))
    scores += hidden  # [r, Hkv, G, Q, S]
    highest = scores.amax(-1, keepdim=True)
    sinks = scoring.sinks
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


def paged_attention(
    query: Tensor,
    kv: PagedKV,
    rows: AttentionRows,
    scoring: Scoring,
    *,
    backend: str = "auto",
    num_splits: int | None = None,
) -> Tensor:
    """Attention of packed ragged rows over paged keys and values.

    Opaque to torch.compile (custom op `mtp_research::paged_attention`). The Triton path never reads
    a device value on the host: its grid comes from shapes, `max_query_len` and `num_splits` alone.

    Args:
        query: `[T, H, Dk]` packed rows; T may exceed `query_start_loc[R]` (padding).
        kv: pages in the dtype of `query`; Hkv divides H.
        rows: where the rows sit and what they read.
        scoring: scale, window and sinks.
        backend: `auto`, `invariant`, `reference` or `triton`, see `checks.resolve_backend`.
        num_splits: programs a request's keys are spread over, 1..128; None chooses. Triton only.

    Returns:
        `[T, H, Dv]` in the dtype of `query`. Padded rows and rows without a visible key are zero.
    """
    *of_rows, positions, kv_start = rows
    return torch.ops.mtp_research.paged_attention(
        query, *kv, *of_rows, *scoring, positions, kv_start, backend, num_splits
    )


@torch.library.custom_op("mtp_research::paged_attention", mutates_args=())
def _paged_attention_op(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    positions: torch.Tensor | None,
    kv_start: torch.Tensor | None,
    backend: str,
    num_splits: int | None,
) -> torch.Tensor:
    rows = AttentionRows(block_table, seq_lens, query_start_loc, max_query_len, positions, kv_start)
    return attend_pages(
        query,
        PagedKV(key_cache, value_cache),
        rows,
        Scoring(scale, sliding_window, sinks),
        backend=backend,
        num_splits=num_splits,
    )


@_paged_attention_op.register_fake
def _paged_attention_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])


def attend_pages(
    query: Tensor,
    kv: PagedKV,
    rows: AttentionRows,
    scoring: Scoring,
    *,
    backend: str,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
    groups: dict[tuple[int, int | None], list[RowGroup]] | None = None,
) -> Tensor:
    """What the op does, for ops that store this step's rows as well, and for code that runs as is.

    Args and result as in `paged_attention`, and:
        groups: of the rows by block size and window, which the reference fills and reads; the
            layers of a pass share it.
        new_rows: rows to store in the pages first, in place; None if they are there. The Triton
            programs store few rows themselves. With angles, `query` is rotated as the new keys are.
    """
    checks.check_rank("query", query, letters="[T, H, Dk]")
    checks.check_paged_cache(*kv, rows=query)
    check_rows(rows, query)
    _check_heads(query, kv.keys, sinks=scoring.sinks)
    checks.check_optional_range("sliding_window", scoring.sliding_window, low=1, high=None)
    checks.check_optional_range("num_splits", num_splits, low=1, high=MAX_SPLITS)
    resolved = checks.resolve_backend(backend, tensor=query, kernel=attention_kernel)
    invariant = backend == checks.INVARIANT
    query, new_rows = rows_for_launch(
        query, new_rows, kv, backend=backend, resolved=resolved, max_query_len=rows.max_query_len
    )
    if query.shape[0] == 0 or rows.block_table.shape[0] == 0:
        return query.new_zeros(*query.shape[:2], kv.values.shape[3])
    if resolved == "reference":
        key = kv.keys.shape[1], scoring.sliding_window
        groups = {} if groups is None else groups
        if key not in groups:
            block_size, window = key
            groups[key] = group_rows(
                rows, block_size=block_size, sliding_window=window, invariant=invariant
            )
        return paged_attention_ref(query, kv, rows, scoring, groups=groups[key])
    checks.check_kernel_layout(
        query, key_cache=kv.keys, value_cache=kv.values, kernel=attention_kernel
    )
    return launch_paged_attention(
        query, kv, rows, scoring, num_splits=num_splits, new_rows=new_rows, invariant=invariant
    )


def _check_heads(query: Tensor, key_cache: Tensor, *, sinks: Tensor | None) -> None:
    """Refuses heads H of `query` that are no multiple of the cache's, and `sinks` not `[H]`."""
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query heads H must be a multiple of the cache's Hkv, got H={num_heads}, "
            f"Hkv={num_kv_heads}; repeat or slice heads before the call."
        )
    if sinks is not None:
        checks.check_shape("sinks", sinks, shape=(num_heads,), letters="[H]")
        checks.check_dtype("sinks", sinks, dtype=torch.float32)
        checks.check_device("sinks", sinks, device=query.device)
