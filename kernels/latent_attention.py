"""Ragged causal attention over paged latents: multi-head latent attention in its absorbed form.

Where it sits: as paged_attention, after store_kv has appended this step's rows. A page keeps one
latent c (its first L entries) and one rotary key p (the last P) per token, shared by all heads.
Maths: with the key and value projections of head h absorbed into query and output,

    score = scale * (q_latent[h] . c + q_rope[h] . p),  out[h] = softmax(score) c

so that a step reads L + P numbers a token instead of keys and values of every head; the caller
multiplies `out[h]` by head h's value projection.
Letters: R requests, T packed rows, M blocks per table, H heads, L latent, P rotary key size.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; FlashMLA (one tile is key and value).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import attention_checks, checks
from mtp_research.kernels.latent_attention_launch import (
    MAX_LATENT_SPLITS,
    launch_latent_attention,
)
from mtp_research.kernels.latent_attention_triton import latent_attention_kernel
from mtp_research.kernels.new_rows import NewRows, rows_for_launch
from mtp_research.kernels.paged_attention_ref import paged_attention_ref

if TYPE_CHECKING:
    from torch import Tensor


def latent_attention_ref(
    query_latent: Tensor,
    *,
    query_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Plain PyTorch, float32 or wider inside, any device: attention with one KV head of L + P.

    Arguments and result as in `latent_attention`.
    """
    keys = latent_cache[:, :, None]  # one KV head
    return paged_attention_ref(
        torch.cat((query_latent, query_rope), dim=-1),
        key_cache=keys,
        value_cache=keys[..., : query_latent.shape[2]],
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        positions=positions,
        kv_start=kv_start,
        invariant=invariant,
    )


def latent_attention(
    query_latent: Tensor,
    *,
    query_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
    backend: str = "auto",
    num_splits: int | None = None,
) -> Tensor:
    """Attention of packed ragged rows over paged latents.

    Opaque to torch.compile (custom op `mtp_research::latent_attention`). The Triton path never
    reads a device value on the host.

    Args:
        query_latent: `[T, H, L]` packed rows, already multiplied by the key projections; any
            strides but the last. T may exceed `query_start_loc[R]` (padding).
        query_rope: `[T, H, P]`, rotated; any strides but the last.
        latent_cache: `[num_blocks, block_size, L + P]`, dtype of the queries.
        block_table: `[R, M]` int32; entries past a request's own blocks are never followed.
        seq_lens: `[R]` int32, KV length in tokens including this step's rows.
        query_start_loc: `[R + 1]` int32, rows of request r are `[loc[r], loc[r + 1])`.
        max_query_len: upper bound of rows a request; rows beyond it stay unwritten on Triton.
        scale: factor on the logits, > 0; of the expanded heads, not of L + P.
        positions: `[T]` int64 position of each row; None derives it from `seq_lens`.
        kv_start: `[R]` int32, keys of request r below it are hidden; None for 0.
        backend: `auto`, `invariant`, `reference` or `triton`, see `checks.resolve_backend`.
        num_splits: programs a request's keys are spread over, 1..32; None chooses. Triton only.

    Returns:
        `[T, H, L]` in the dtype of the queries. Padded rows and rows without a key are zero.

    Raises:
        ValueError: shapes, dtypes, devices or ranges disagree, or the backend cannot run them.
    """
    return torch.ops.mtp_research.latent_attention(
        query_latent,
        query_rope,
        latent_cache,
        block_table,
        seq_lens,
        query_start_loc,
        max_query_len,
        scale,
        positions,
        kv_start,
        backend,
        num_splits,
    )


@torch.library.custom_op("mtp_research::latent_attention", mutates_args=())
def _latent_attention_op(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    positions: torch.Tensor | None,
    kv_start: torch.Tensor | None,
    backend: str,
    num_splits: int | None,
) -> torch.Tensor:
    return attend_latents(
        query_latent,
        query_rope=query_rope,
        latent_cache=latent_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        positions=positions,
        kv_start=kv_start,
        backend=backend,
        num_splits=num_splits,
    )


@_latent_attention_op.register_fake
def _latent_attention_fake(query_latent: Tensor, *_: object) -> Tensor:
    return query_latent.new_empty(query_latent.shape)


def attend_latents(
    query_latent: Tensor,
    *,
    query_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    backend: str,
    positions: Tensor | None = None,
    kv_start: Tensor | None = None,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
) -> Tensor:
    """What the op does, for ops that store this step's rows as well.

    Args and result as in `latent_attention`, and:
        new_rows: latents `[T, 1, L]` and rotary keys `[T, 1, P]` to store in the pages first, in
            place; None if they are there. The Triton programs store few rows themselves.
    """
    _check_rows(query_latent, query_rope, latent_cache)
    attention_checks.check_attention_indices(
        block_table, seq_lens=seq_lens, query_start_loc=query_start_loc, device=query_latent.device
    )
    checks.check_optional_range("num_splits", num_splits, low=1, high=MAX_LATENT_SPLITS)
    attention_checks.check_optional_positions(
        query_latent, seq_lens, positions=positions, kv_start=kv_start
    )
    resolved = checks.resolve_backend(backend, tensor=query_latent, kernel=latent_attention_kernel)
    latent_dim = query_latent.shape[2]
    assert new_rows is None or new_rows.cos is None, "the rotary part of latents comes rotated"
    query_latent, new_rows = rows_for_launch(
        query_latent,
        new_rows,
        key_cache=latent_cache[:, :, None, :latent_dim],
        value_cache=latent_cache[:, :, None, latent_dim:],
        backend=backend,
        resolved=resolved,
        max_query_len=max_query_len,
    )
    if query_latent.shape[0] == 0 or block_table.shape[0] == 0:
        return query_latent.new_zeros(query_latent.shape)
    invariant = backend == checks.INVARIANT
    attend = functools.partial(latent_attention_ref, invariant=invariant)
    if resolved == "triton":
        _check_kernel_layout(query_latent, query_rope, latent_cache)
        attend = functools.partial(
            launch_latent_attention,
            num_splits=num_splits,
            new_rows=new_rows,
            invariant=invariant,
        )
    return attend(
        query_latent,
        query_rope=query_rope,
        latent_cache=latent_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        positions=positions,
        kv_start=kv_start,
    )


def _check_rows(query_latent: Tensor, query_rope: Tensor, latent_cache: Tensor) -> None:
    checks.check_rank("query_latent", query_latent, letters="[T, H, L]")
    checks.check_rank("query_rope", query_rope, letters="[T, H, P]")
    checks.check_rank("latent_cache", latent_cache, letters="[num_blocks, block_size, L + P]")
    num_rows, num_heads, latent_dim = query_latent.shape
    rope_dim = query_rope.shape[2]
    checks.check_shape(
        "query_rope", query_rope, shape=(num_rows, num_heads, rope_dim), letters="[T, H, P]"
    )
    checks.check_shape(
        "latent_cache",
        latent_cache,
        shape=(*latent_cache.shape[:2], latent_dim + rope_dim),
        letters="[num_blocks, block_size, L + P]",
    )
    for name, tensor in (("query_rope", query_rope), ("latent_cache", latent_cache)):
        checks.check_dtype(name, tensor, dtype=query_latent.dtype)
        checks.check_device(name, tensor, device=query_latent.device)


def _check_kernel_layout(query_latent: Tensor, query_rope: Tensor, latent_cache: Tensor) -> None:
    checks.check_kernel_dtype("latent_cache", latent_cache, kernel=latent_attention_kernel)
    checks.check_head_dim("L", query_latent.shape[2], high=checks.MAX_LATENT_DIM)
    checks.check_head_dim("P", query_rope.shape[2])
    checks.check_block_size(latent_cache.shape[1])
    tensors = {
        "query_latent": query_latent,
        "query_rope": query_rope,
        "latent_cache": latent_cache,
    }
    for name, tensor in tensors.items():
        checks.check_last_dim_contiguous(name, tensor)
