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


_WIDE = (torch.float32, torch.float64)  # dtypes that the reference computes in
_FEW_ROWS = 4  # of a request of the reference: what verifies three drafts


class RowGroup(NamedTuple):
    """Requests of similar q_len in the reference: their rows, and what these may read.

    It depends on the pass, the window and Hkv, so that layers of one pass can share it.
    """

    at: Tensor | None  # [r x Q] int64, packed rows, 0 where a request has fewer; None: all in order
    is_row: Tensor | None  # [r x Q]; None where none stands in
    slots: Tensor  # [r x Hkv x S] int64 of the cache as [slots x Hkv, D]
    hidden: Tensor  # [r, 1, 1, Q, S] float32, 0 or -inf
    blind: Tensor | None  # [r x Q], rows that see no key; None where all see one


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
    `group_rows` for the same rows, sizes and window.
    """
    if groups is None:
        groups = group_rows(query, kv, rows, scoring, invariant=invariant)
    if len(groups) == 1 and groups[0].at is None:
        return _attend_group(query, kv, groups[0], scoring).to(query.dtype)
    out = query.new_zeros(*query.shape[:2], kv.values.shape[3])
    for group in groups:
        attended = _attend_group(query, kv, group, scoring).to(out.dtype)
        if group.is_row is not None:
            attended = attended[group.is_row]
        out[group.at if group.is_row is None else group.at[group.is_row]] = attended
    return out


def group_rows(
    query: Tensor, kv: PagedKV, rows: AttentionRows, scoring: Scoring, *, invariant: bool = False
) -> list[RowGroup]:
    """What `paged_attention_ref` has to know of the rows of a pass; reads lengths on the host."""
    starts = rows.query_start_loc.tolist()
    by_len = _group_by_query_len(starts, max_query_len=rows.max_query_len)
    if invariant:
        rows = rows_as_requests(rows)
        by_len = [[row] for row in range(len(rows.seq_lens))]
        starts = list(range(len(by_len) + 1))
    lens = rows.seq_lens.tolist()
    groups = [
        _group(
            rows,
            [_Span(r, starts[r], starts[r + 1] - starts[r], lens[r]) for r in requests],
            block_size=kv.keys.shape[1],
            num_kv_heads=kv.keys.shape[2],
            sliding_window=scoring.sliding_window,
        )
        for requests in by_len
    ]
    num_requests, *_, num_queries, _ = groups[0].hidden.shape if groups else (0, 0, 0)
    if groups and groups[0].is_row is None and num_requests * num_queries == len(query):
        return [groups[0]._replace(at=None)]
    return groups


class _Span(NamedTuple):
    """A request on the host: its place, its rows and its KV tokens."""

    request: int
    first_row: int
    num_rows: int
    seq_len: int


def _group(
    rows: AttentionRows,
    spans: list[_Span],
    *,
    block_size: int,
    num_kv_heads: int,
    sliding_window: int | None,
) -> RowGroup:
    device = rows.seq_lens.device
    index, first_row, query_lens, lens = torch.tensor(spans, device=device)[..., None].unbind(1)
    longest = max(span.num_rows for span in spans)
    offsets = torch.arange(longest, device=device)
    at, row_pos, is_row = first_row + offsets, lens - query_lens + offsets, None  # [r, Q]
    if min(span.num_rows for span in spans) < longest:
        is_row = offsets < query_lens
        at = torch.where(is_row, at, 0)
    if rows.positions is not None:
        row_pos = rows.positions[at]

    num_blocks = max(1, ceil_div(max(span.seq_len for span in spans), block_size))
    key_pos = torch.arange(num_blocks * block_size, device=device)
    readable = key_pos < lens  # [r, S]
    allowed = key_pos <= row_pos[..., None]  # [r, Q, S]
    if sliding_window is not None:
        allowed &= key_pos > row_pos[..., None] - sliding_window
    pages = rows.block_table[index[:, 0], :num_blocks, None].long()
    slots = (pages * block_size + torch.arange(block_size, device=device)).flatten(1)  # [r, S]
    # Other slots may hold NaN, and table entries past a request's own blocks anything: the first
    # key that the request may read stands in for all of them, with weight 0.
    first, blind = slots[:, :1], None
    is_usual = rows.positions is None and rows.kv_start is None
    if not is_usual or any(span.seq_len < span.num_rows for span in spans):
        if rows.kv_start is not None:
            start = rows.kv_start[index].long()
            readable &= key_pos >= start
            first = slots.gather(1, start.clamp(0, len(key_pos) - 1))
        first = torch.where(readable.any(-1, keepdim=True), first, 0)
        allowed &= readable[:, None]
        blind = ~allowed.any(-1).flatten()
    slots = torch.where(readable, slots, first)
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    return RowGroup(
        at=at.flatten(),
        is_row=None if is_row is None else is_row.flatten(),
        slots=(slots[:, None] * num_kv_heads + heads).flatten(),
        hidden=torch.where(allowed, 0.0, -math.inf)[:, None, None],
        blind=blind,
    )


def _group_by_query_len(query_starts: list[int], *, max_query_len: int) -> list[list[int]]:
    """Requests with rows, grouped so that the longest q_len is less than twice the shortest.

    All of few rows are one group: another group costs more than padding them does.
    """
    groups: dict[int, list[int]] = {}
    for request in range(len(query_starts) - 1):
        query_len = query_starts[request + 1] - query_starts[request]
        if query_len > max_query_len:
            raise ValueError(
                f"max_query_len must be >= the longest request's rows, got {max_query_len} for a "
                f"request of {query_len} rows; pass the maximum of diff(query_start_loc)."
            )
        if query_len > 0:
            groups.setdefault(max(query_len, _FEW_ROWS).bit_length(), []).append(request)
    return list(groups.values())


def _attend_group(query: Tensor, kv: PagedKV, group: RowGroup, scoring: Scoring) -> Tensor:
    """Attention `[r x Q, H, Dv]` of a group's rows in the compute dtype; 0 of a row without keys.

    Whether a row has keys is known beforehand, so that a plain softmax does.
    """
    num_requests, _, _, num_queries, num_keys = group.hidden.shape
    num_kv_heads, (num_heads, key_dim) = kv.keys.shape[2], query.shape[1:]
    dtype = query.dtype if query.dtype in _WIDE else torch.float32
    query = query if group.at is None else query.index_select(0, group.at)
    query = query.to(dtype).mul(scoring.scale)
    grouped = query.view(num_requests, num_queries, num_kv_heads, -1, key_dim)
    grouped = grouped.permute(0, 2, 3, 1, 4)  # [r, Hkv, G, Q, Dk]
    sizes, num_tiles = grouped.shape[:4], num_requests * num_kv_heads
    # Heads first, as products want them: [r x Hkv, S, D].
    keys, values = (
        cache.flatten(0, 2).index_select(0, group.slots).view(num_tiles, num_keys, -1).to(dtype)
        for cache in kv
    )
    scores = torch.bmm(grouped.reshape(num_tiles, -1, key_dim), keys.mT)
    scores = scores.view(*sizes, num_keys)
    scores += group.hidden
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(dtype).view(num_kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*sizes, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    attended = torch.bmm(weights.reshape(num_tiles, -1, num_keys), values)
    attended = attended.view(*sizes, -1).permute(0, 3, 1, 2, 4)
    attended = attended.reshape(len(query), num_heads, -1).contiguous()
    if group.blind is not None:
        attended = attended.masked_fill(group.blind[:, None, None], 0.0)
    return attended


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
    *of_rows, positions, kv_start, _ = rows  # the op does not know what is in front of it
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
    groups: dict[tuple[object, ...], list[RowGroup]] | None = None,
) -> Tensor:
    """What the op does, for ops that store this step's rows as well, and for code that runs as is.

    Args and result as in `paged_attention`, and:
        groups: of the rows by sizes, dtypes and window, which the reference fills and reads; the
            layers of a pass share it, and are checked once.
        new_rows: rows to store in the pages first, in place; None if they are there. The Triton
            programs store few rows themselves. With angles, `query` is rotated as the new keys are.
    """
    # Layers that are alike were checked with the first of them.
    sizes = (query.shape, kv.keys.shape, kv.values.shape, scoring.sliding_window)
    layout = (*sizes, query.dtype, kv.keys.dtype, kv.values.dtype, scoring.sinks is None)
    if groups is not None and (known := groups.get(layout)) is not None:
        return paged_attention_ref(query, kv, rows, scoring, groups=known)
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
        known = group_rows(query, kv, rows, scoring, invariant=invariant)
        if groups is not None:
            groups[layout] = known
        return paged_attention_ref(query, kv, rows, scoring, groups=known)
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
