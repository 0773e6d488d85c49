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
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import attention_checks, checks
from mtp_research.kernels.attention_launch import MAX_SPLITS, launch_paged_attention
from mtp_research.kernels.new_rows import NewRows, rows_for_launch
from mtp_research.kernels.paged_attention_ref import paged_attention_ref
from mtp_research.kernels.paged_attention_triton import attention_kernel

if TYPE_CHECKING:
    from torch import Tensor


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
    attention_checks.check_attention_indices(
        block_table, seq_lens=seq_lens, query_start_loc=query_start_loc, device=query.device
    )
    attention_checks.check_heads(query, key_cache, sinks=sinks)
    attention_checks.check_optional_positions(
        query, seq_lens, positions=positions, kv_start=kv_start
    )
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
