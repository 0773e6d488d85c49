"""Checks of the index tensors that every attention over pages takes.

Where it sits: called by the wrappers of paged_attention and latent_attention beside `checks`.
Letters: R requests, T packed rows, M blocks per table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks

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
