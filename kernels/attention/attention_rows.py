"""The arguments that every attention over pages shares: its rows, its pages, its scores.

Where it sits: wrappers, references and launches of paged_attention and latent_attention take these
tuples. Registered ops keep flat tensors, which is what torch.library can describe.
Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks

if TYPE_CHECKING:
    from torch import Tensor


class PagedKV(NamedTuple):
    """The pages of one layer, written by store_kv."""

    keys: Tensor  # [num_blocks, block_size, Hkv, Dk]
    values: Tensor  # [num_blocks, block_size, Hkv, Dv]


class AttentionRows(NamedTuple):
    """The packed rows of a pass and the keys that each may read.

    Row i of request r sits at `seq_lens[r] - q_len + i`, unless `positions` says otherwise.
    """

    block_table: Tensor  # [R, M] int32; entries past a request's own blocks are never followed
    seq_lens: Tensor  # [R] int32, KV tokens including this pass's rows, <= M x block_size
    query_start_loc: Tensor  # [R + 1] int32, rows of request r are [loc[r], loc[r + 1])
    max_query_len: int  # upper bound of rows a request; Triton leaves rows beyond it unwritten
    positions: Tensor | None = None  # [T] int64; a row at -1 sees no key
    kv_start: Tensor | None = None  # [R] int32, keys of request r below it are hidden
    # Older than the nearest kernel in front that waits first (`checks.wait_in_front`), such as the
    # product of the layer: the attention need not wait to read them.
    are_settled: bool = False


class Scoring(NamedTuple):
    """How a layer weighs the keys that a row may read."""

    scale: float  # factor on the logits, > 0, usually Dk ** -0.5
    sliding_window: int | None = None  # keys a row sees including its own, >= 1
    sinks: Tensor | None = None  # [H] float32, one more softmax logit per head


def check_rows(rows: AttentionRows, query: Tensor) -> None:
    """Refuses index tensors whose shape, dtype or device does not fit `query` `[T, ...]`."""
    checks.check_rank("block_table", rows.block_table, letters="[R, M]")
    num_requests, num_blocks = rows.block_table.shape
    indices = (
        ("block_table", rows.block_table, (num_requests, num_blocks), "[R, M]", torch.int32),
        ("seq_lens", rows.seq_lens, (num_requests,), "[R]", torch.int32),
        ("query_start_loc", rows.query_start_loc, (num_requests + 1,), "[R + 1]", torch.int32),
        ("positions", rows.positions, (query.shape[0],), "[T]", torch.int64),
        ("kv_start", rows.kv_start, (num_requests,), "[R]", torch.int32),
    )
    for name, tensor, shape, letters, dtype in indices:
        if tensor is not None:
            checks.check_shape(name, tensor, shape=shape, letters=letters)
            checks.check_dtype(name, tensor, dtype=dtype)
            checks.check_device(name, tensor, device=query.device)


def rows_as_requests(rows: AttentionRows) -> AttentionRows:
    """The same attention with one row a request; padded rows are left out. Reads the host.

    Row i of a request that ends at seq_len sees the keys up to its own position, so that its
    request is that long: 3 rows ending at 10 become three requests of 8, 9 and 10 keys.
    """
    query_lens = rows.query_start_loc.diff().long()
    requests = torch.arange(len(query_lens), device=query_lens.device)
    request = torch.repeat_interleave(requests, query_lens)
    starts = torch.arange(len(request) + 1, device=request.device)
    positions = rows.positions
    if positions is None:
        offset = starts[:-1] - rows.query_start_loc[request]
        positions = rows.seq_lens[request] - query_lens[request] + offset
    lens = torch.minimum(positions[: len(request)] + 1, rows.seq_lens[request])
    kv_start = None if rows.kv_start is None else rows.kv_start[request]
    return AttentionRows(rows.block_table[request], lens, starts, 1, kv_start=kv_start)
