"""Ragged causal attention over paged keys and values, for prefill chunks and verify rows alike.

Where it sits: after store_kv has appended this step's rows, attention reads pages only. Row i of
request r sits at `pos = seq_lens[r] - q_len + i` and sees keys `[max(0, pos - window + 1), pos]`.
Maths: out = softmax(scale * q k^T) v; a sink adds one logit per head to the denominator only. The
kernel keeps a running maximum and sum in base 2 (online softmax) and splits a long context over
programs, whose partial outputs are merged by their log-sum-exp.
Layout: the H / Hkv query heads of a KV head and the rows of a request are packed into one M tile,
so each key is read once per tile however many drafts are verified.
Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims.
Source: FlashAttention-2 (online softmax), Flash-Decoding (splits), vLLM (block table).

Checks of the index tensors that every attention over pages takes.

Where it sits: called by the wrappers of paged_attention and latent_attention beside `checks`.
Letters: R requests, T packed rows, M blocks per table.

Paged attention in plain PyTorch: the reference of the kernel and the engine's path on a CPU.

Where it sits: `paged_attention` calls it for tensors that no kernel runs, and explains maths,
layout and letters.
Letters: R requests, T packed rows, r requests of a group, Q rows of its longest request, S keys,
H / Hkv heads, G heads a KV head, Dk / Dv head dims.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_launch import MAX_SPLITS, launch_paged_attention
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.attention.splits import ceil_div, rows_as_requests
from mtp_research.kernels.attention.store_kv import NewRows, rows_for_launch

if TYPE_CHECKING:
    from torch import Tensor


def check_attention_indices(
    block_table: Tensor, *, seq_lens: Tensor, query_start_loc: Tensor, device: torch.device
) -> None:
    """Refuses index tensors of a ragged batch whose shape, dtype or device is wrong.

    Args:
        block_table: `[R, M]` int32.
        seq_lens: `[R]` int32.
        query_start_loc: `[R + 1]` int32.
        device: of the call's first argument.

    Raises:
        ValueError: names the tensor and what was expected of it.
    """
    checks.check_rank("block_table", block_table, letters="[R, M]")
    num_requests, num_blocks = block_table.shape
    indices = (
        ("block_table", block_table, (num_requests, num_blocks), "[R, M]"),
        ("seq_lens", seq_lens, (num_requests,), "[R]"),
        ("query_start_loc", query_start_loc, (num_requests + 1,), "[R + 1]"),
    )
    for name, tensor, shape, letters in indices:
        checks.check_shape(name, tensor, shape=shape, letters=letters)
        checks.check_dtype(name, tensor, dtype=torch.int32)
        checks.check_device(name, tensor, device=device)


def check_heads(query: Tensor, key_cache: Tensor, *, sinks: Tensor | None) -> None:
    """Refuses query heads that are no multiple of the cache's, and `sinks` that are not `[H]`.

    Args:
        query: `[T, H, Dk]`.
        key_cache: `[num_blocks, block_size, Hkv, Dk]`.
        sinks: float32, or None.

    Raises:
        ValueError: names what was expected.
    """
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


def check_optional_positions(
    rows: Tensor, seq_lens: Tensor, *, positions: Tensor | None, kv_start: Tensor | None
) -> None:
    """Refuses `positions` that are not `[T]` int64 or `kv_start` that is not `[R]` int32.

    Args:
        rows: the call's first argument, T rows.
        seq_lens: `[R]`.
        positions: position of each row, or None.
        kv_start: first visible key of each request, or None.

    Raises:
        ValueError: names the tensor and what was expected of it.
    """
    optional = (
        ("positions", positions, (rows.shape[0],), "[T]", torch.int64),
        ("kv_start", kv_start, tuple(seq_lens.shape), "[R]", torch.int32),
    )
    for name, tensor, shape, letters, dtype in optional:
        if tensor is not None:
            checks.check_shape(name, tensor, shape=shape, letters=letters)
            checks.check_dtype(name, tensor, dtype=dtype)
            checks.check_device(name, tensor, device=rows.device)


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


def paged_attention(
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
    backend: str = "auto",
    num_splits: int | None = None,
) -> Tensor:
    """Attention of packed ragged rows over paged keys and values.

    Opaque to torch.compile (custom op `mtp_research::paged_attention`). The Triton path never reads
    a device value on the host: its grid comes from shapes, `max_query_len` and `num_splits` alone.

    Args:
        query: `[T, H, Dk]` packed rows; T may exceed `query_start_loc[R]` (padding).
        key_cache: `[num_blocks, block_size, Hkv, Dk]`, dtype of `query`; Hkv divides H.
        value_cache: `[num_blocks, block_size, Hkv, Dv]`.
        block_table: `[R, M]` int32; entries past a request's own blocks are never followed.
        seq_lens: `[R]` int32, KV length in tokens including this step's rows, <= M x block_size.
        query_start_loc: `[R + 1]` int32, rows of request r are `[loc[r], loc[r + 1])`.
        max_query_len: upper bound of rows a request; rows beyond it stay unwritten on Triton.
        scale: factor on the logits, > 0, usually `Dk ** -0.5`.
        sliding_window: keys a row sees including its own, >= 1; None for all.
        sinks: `[H]` float32, one more softmax logit per head; None for none.
        positions: `[T]` int64 position of each row; a row at -1 sees no key. None derives it from
            `seq_lens` as the module docstring says.
        kv_start: `[R]` int32, keys of request r below it are hidden; None for 0.
        backend: `auto`, `invariant`, `reference` or `triton`, see `checks.resolve_backend`.
        num_splits: programs a request's keys are spread over, 1..64; None chooses. Triton only.

    Returns:
        `[T, H, Dv]` in the dtype of `query`. Padded rows and rows without a visible key are zero.

    Raises:
        ValueError: shapes, dtypes, devices or ranges disagree, or the backend cannot run them.
    """
    return torch.ops.mtp_research.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        scale,
        sliding_window,
        sinks,
        positions,
        kv_start,
        backend,
        num_splits,
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
    return attend_pages(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        positions=positions,
        kv_start=kv_start,
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
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    backend: str,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
) -> Tensor:
    """What the op does, for ops that store this step's rows as well.

    Args and result as in `paged_attention`, and:
        new_rows: rows to store in the pages first, in place; None if they are there. The Triton
            programs store few rows themselves. With angles, `query` is rotated as the new keys are.
    """
    checks.check_rank("query", query, letters="[T, H, Dk]")
    checks.check_paged_cache(key_cache, value_cache, rows=query)
    check_attention_indices(
        block_table, seq_lens=seq_lens, query_start_loc=query_start_loc, device=query.device
    )
    check_heads(query, key_cache, sinks=sinks)
    check_optional_positions(query, seq_lens, positions=positions, kv_start=kv_start)
    checks.check_optional_range("sliding_window", sliding_window, low=1, high=None)
    checks.check_optional_range("num_splits", num_splits, low=1, high=MAX_SPLITS)
    resolved = checks.resolve_backend(backend, tensor=query, kernel=attention_kernel)
    invariant = backend == checks.INVARIANT
    query, new_rows = rows_for_launch(
        query,
        new_rows,
        key_cache=key_cache,
        value_cache=value_cache,
        backend=backend,
        resolved=resolved,
        max_query_len=max_query_len,
    )
    if query.shape[0] == 0 or block_table.shape[0] == 0:
        return query.new_zeros(*query.shape[:2], value_cache.shape[3])
    attend = functools.partial(paged_attention_ref, invariant=invariant)
    if resolved == "triton":
        checks.check_kernel_layout(
            query, key_cache=key_cache, value_cache=value_cache, kernel=attention_kernel
        )
        attend = functools.partial(
            launch_paged_attention,
            num_splits=num_splits,
            new_rows=new_rows,
            invariant=invariant,
        )
    return attend(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        sinks=sinks,
        positions=positions,
        kv_start=kv_start,
    )
