"""Ragged causal attention over paged latents: multi-head latent attention in its absorbed form.

Where it sits: as paged_attention, after store_kv has appended this step's rows. A page keeps one
latent c (its first L entries) and one rotary key p (the last P) per token, shared by all heads.
Maths: with the key and value projections of head h absorbed into query and output,

    score = scale * (q_latent[h] . c + q_rope[h] . p),  out[h] = softmax(score) c

so that a step reads L + P numbers a token instead of keys and values of every head; the caller
multiplies `out[h]` by head h's value projection.
The programs are those of Gluon where `fits_gluon` allows it (Hopper, 512 + 64 entries) and those of
Triton elsewhere; their launch is computed from static shapes, as in `attention_launch`.
Letters: R requests, T packed rows, M blocks per table, H heads, L latent, P rotary key size.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; FlashMLA (one tile is key and value).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_launch import INVARIANT_SPLIT_KEYS, choose_num_splits
from mtp_research.kernels.attention.attention_rows import (
    AttentionRows,
    PagedKV,
    Scoring,
    check_rows,
)
from mtp_research.kernels.attention.paged_attention import paged_attention_ref
from mtp_research.kernels.attention.splits import (
    ceil_div,
    merge_splits,
    next_power_of_two,
    padded_head_dim,
    split_outputs,
)
from mtp_research.kernels.attention.store_kv import MAX_STORED_ROWS, NewRows, rows_for_launch
from mtp_research.kernels.latent.latent_attention_triton import latent_attention_kernel
from mtp_research.kernels.latent.latent_gluon import latent_attention_gluon_kernel
from mtp_research.kernels.latent.latent_gluon_parts import GLUON_DIMS, gluon

if TYPE_CHECKING:
    from torch import Tensor

# The merge holds all partial rows of a head at a time; 32 x 512 float32 still fits the registers.
MAX_LATENT_SPLITS = 32


class LatentConfig(NamedTuple):
    """Compile-time shape of one program."""

    block_m: int  # packed query rows: rows of the step x heads
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int
    gluon: bool = False  # the program of latent_attention_gluon

    @property
    def programs_per_sm(self) -> int:
        """Programs that an SM runs at a time; the Gluon program takes most of its shared memory."""
        return 1 if self.gluon else 2


def latent_attention_ref(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
    invariant: bool = False,
) -> Tensor:
    """Plain PyTorch, float32 or wider inside, any device: attention with one KV head of L + P.

    Arguments and result as in `latent_attention`.
    """
    keys = latent_cache[:, :, None]  # one KV head
    return paged_attention_ref(
        torch.cat((query_latent, query_rope), dim=-1),
        PagedKV(keys, keys[..., : query_latent.shape[2]]),
        rows,
        Scoring(scale),
        invariant=invariant,
    )


def latent_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
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
        rows: where the rows sit and what they read.
        scale: factor on the logits, > 0; of the expanded heads, not of L + P.
        backend: `auto`, `invariant`, `reference` or `triton`, see `checks.resolve_backend`.
        num_splits: programs a request's keys are spread over, 1..32; None chooses. Triton only.

    Returns:
        `[T, H, L]` in the dtype of the queries. Padded rows and rows without a key are zero.
    """
    *of_rows, positions, kv_start, _ = rows  # the op does not know what is in front of it
    queries = (query_latent, query_rope)
    return torch.ops.mtp_research.latent_attention(
        *queries, latent_cache, *of_rows, scale, positions, kv_start, backend, num_splits
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
    rows = AttentionRows(block_table, seq_lens, query_start_loc, max_query_len, positions, kv_start)
    return attend_latents(
        query_latent,
        query_rope,
        latent_cache,
        rows,
        scale=scale,
        backend=backend,
        num_splits=num_splits,
    )


@_latent_attention_op.register_fake
def _latent_attention_fake(query_latent: Tensor, *_: object) -> Tensor:
    return query_latent.new_empty(query_latent.shape)


def attend_latents(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
    backend: str,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
) -> Tensor:
    """What the op does, for ops that store this step's rows as well.

    Args and result as in `latent_attention`, and:
        new_rows: latents `[T, 1, L]` and rotary keys `[T, 1, P]` to store in the pages first, in
            place; None if they are there. The Triton programs store few rows themselves.
    """
    _check_queries(query_latent, query_rope, latent_cache)
    check_rows(rows, query_latent)
    checks.check_optional_range("num_splits", num_splits, low=1, high=MAX_LATENT_SPLITS)
    resolved = checks.resolve_backend(backend, tensor=query_latent, kernel=latent_attention_kernel)
    latent_dim = query_latent.shape[2]
    assert new_rows is None or new_rows.cos is None, "the rotary part of latents comes rotated"
    pages = latent_cache[:, :, None]
    query_latent, new_rows = rows_for_launch(
        query_latent,
        new_rows,
        PagedKV(pages[..., :latent_dim], pages[..., latent_dim:]),
        backend=backend,
        resolved=resolved,
        max_query_len=rows.max_query_len,
    )
    if query_latent.shape[0] == 0 or rows.block_table.shape[0] == 0:
        return query_latent.new_zeros(query_latent.shape)
    invariant = backend == checks.INVARIANT
    operands = (query_latent, query_rope, latent_cache)
    if resolved == "reference":
        return latent_attention_ref(*operands, rows, scale=scale, invariant=invariant)
    _check_kernel_layout(*operands)
    return launch_latent_attention(
        operands, rows, scale=scale, num_splits=num_splits, new_rows=new_rows, invariant=invariant
    )


def launch_latent_attention(
    operands: tuple[Tensor, Tensor, Tensor],
    rows: AttentionRows,
    *,
    scale: float,
    num_splits: int | None = None,
    new_rows: NewRows | None = None,
    config: LatentConfig | None = None,
    invariant: bool = False,
) -> Tensor:
    """Launches the programs, then the merge if there is more than one split.

    Arguments and result as in `latent_attention`, checked there; `operands` are queries and pages.
    `config` overrides the tile sizes that `choose_latent_config` picks (for measurements);
    `new_rows`, a latent `[T, 1, L]` and a rotary key `[T, 1, P]`, and `invariant` as in
    `attention_launch`.
    """
    query_latent, query_rope, latent_cache = operands
    num_rows, num_heads, latent_dim = query_latent.shape
    num_requests, num_table_blocks = rows.block_table.shape
    num_blocks, block_size = latent_cache.shape[:2]
    out = query_latent.new_empty(num_rows, num_heads, latent_dim)
    if config is None:
        config = choose_latent_config(
            1 if invariant else rows.max_query_len * num_heads,
            element_bytes=query_latent.element_size(),
            num_requests=num_requests,
            hopper=not invariant and fits_gluon(operands, new_rows=new_rows),
        )
    num_tiles = max(1, ceil_div(rows.max_query_len * num_heads, config.block_m))
    max_keys = num_table_blocks * block_size
    if invariant:
        num_splits = ceil_div(max_keys, INVARIANT_SPLIT_KEYS)
    elif num_splits is None:
        # Padding of ragged requests leaves tiles without rows; T bounds the tiles that have some.
        num_splits = choose_num_splits(
            min(num_rows * num_heads // config.block_m + num_requests, num_requests * num_tiles),
            max_key_tiles=ceil_div(max_keys, config.block_n),
            num_slots=checks.num_multiprocessors(query_latent.device) * config.programs_per_sm,
            has_prompts=rows.max_query_len > MAX_STORED_ROWS,
        )
        num_splits = min(num_splits, MAX_LATENT_SPLITS)
    split = split_outputs(out, num_splits, always_split=invariant)
    constants = latent_constants(
        num_heads,
        latent_dim=latent_dim,
        rope_dim=query_rope.shape[2],
        block_size=block_size,
        split=split.partial is not None,
        split_keys=INVARIANT_SPLIT_KEYS if invariant else 0,
        config=config,
        num_stored_rows=0 if new_rows is None else rows.max_query_len,
    )
    with checks.launch_device(query_latent):
        kernel = latent_attention_gluon_kernel if config.gluon else latent_attention_kernel
        kernel[(num_tiles, num_splits, num_requests)](
            *operands,
            rows.block_table,
            rows.seq_lens,
            rows.query_start_loc,
            rows.positions,
            rows.kv_start,
            *(new_rows[:3] if new_rows is not None else (None,) * 3),
            out if split.partial is None else split.partial,
            split.lse,
            num_blocks * block_size,
            num_rows,
            max_keys,
            scale / math.log(2),
            *query_latent.stride()[:2],
            *query_rope.stride()[:2],
            *latent_cache.stride()[:2],
            rows.block_table.stride(0),
            0 if new_rows is None else new_rows.key.stride(0),
            0 if new_rows is None else new_rows.value.stride(0),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **checks.overlapping_rows(query_latent.device, are_settled=rows.are_settled),
        )
        merge_splits(
            split,
            query_start_loc=rows.query_start_loc,
            out=out,
            num_warps=merge_warps(num_splits),
            in_order=invariant,
        )
    return out


def latent_constants(
    num_heads: int,
    *,
    latent_dim: int,
    rope_dim: int,
    block_size: int,
    split: bool,
    config: LatentConfig,
    split_keys: int = 0,
    num_stored_rows: int = 0,
) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel, by parameter name."""
    constants: dict[str, int | bool] = {
        "NUM_HEADS": num_heads,
        "BLOCK_SIZE": block_size,
        "SPLIT": split,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STORED_ROWS": next_power_of_two(num_stored_rows),
    }
    if config.gluon:
        return constants | {"KEYS_FIRST": config.block_m < 64}  # the least rows of a product
    return constants | {
        "LATENT_DIM": latent_dim,
        "ROPE_DIM": rope_dim,
        "PADDED_LATENT_DIM": padded_head_dim(latent_dim),
        "PADDED_ROPE_DIM": padded_head_dim(rope_dim),
        "SPLIT_KEYS": split_keys,
    }


def merge_warps(num_splits: int) -> int:
    """Warps of a program that merges one row of partial outputs."""
    return 4 if num_splits <= 8 else 8


def choose_latent_config(
    num_packed_rows: int, *, element_bytes: int, num_requests: int = 32, hopper: bool = False
) -> LatentConfig:
    """Picks the program, tile sizes, warps and pipeline depth.

    `num_packed_rows` share a request's latents: max_query_len x H. Small tiles spread one request's
    rows over more multiprocessors. `hopper`: `fits_gluon` allows the Gluon program.
    """
    # 4 requests of 80 rows: 11.7 us in tiles of 16 rows, 15.1 in tiles of 64; 8: 16.1 and 16.5.
    if hopper and num_packed_rows <= (128 if num_requests <= 4 else 16):
        return LatentConfig(16, 64, num_warps=4, num_stages=2, gluon=True)
    if hopper and num_packed_rows <= 32:  # 8 warps: 90.4 us for 16 heads and 2 rows, 4: 86.1
        return LatentConfig(32, 64, num_warps=4, num_stages=2, gluon=True)
    if hopper:
        return LatentConfig(64, 64, num_warps=8, num_stages=2, gluon=True)
    if element_bytes == 4:  # no tensor cores, so that it stays exact
        return LatentConfig(16, 16, num_warps=8, num_stages=2)
    if num_packed_rows <= 16:
        return LatentConfig(16, 32, num_warps=4, num_stages=3)
    if num_packed_rows <= 32:
        return LatentConfig(32, 32, num_warps=8, num_stages=3)
    return LatentConfig(64, 32, num_warps=8, num_stages=3)


def fits_gluon(operands: tuple[Tensor, Tensor, Tensor], *, new_rows: NewRows | None) -> bool:
    """True if the Gluon program can run: Hopper, 16-bit rows of 512 + 64, aligned to 16 bytes.

    Copies take 16 bytes at a time; Triton knows so of strides that are multiples of 16.
    """
    query_latent, query_rope, _ = operands
    tensors = [(tensor, 2) for tensor in operands]
    if new_rows is not None:
        tensors += [(new_rows.key, 1), (new_rows.value, 1)]
    dims = (query_latent.shape[2], query_rope.shape[2])
    if not query_latent.is_cuda or dims != GLUON_DIMS or query_latent.element_size() != 2:
        return False
    if gluon is None or torch.cuda.get_device_capability(query_latent.device)[0] != 9:
        return False
    return all(
        tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:num])
        for tensor, num in tensors
    )


def _check_queries(query_latent: Tensor, query_rope: Tensor, latent_cache: Tensor) -> None:
    checks.check_rank("query_latent", query_latent, letters="[T, H, L]")
    checks.check_rank("query_rope", query_rope, letters="[T, H, P]")
    of_cache = "[num_blocks, block_size, L + P]"
    checks.check_rank("latent_cache", latent_cache, letters=of_cache)
    rope_dim = query_rope.shape[2]
    shape = (*query_latent.shape[:2], rope_dim)
    checks.check_shape("query_rope", query_rope, shape=shape, letters="[T, H, P]")
    shape = (*latent_cache.shape[:2], query_latent.shape[2] + rope_dim)
    checks.check_shape("latent_cache", latent_cache, shape=shape, letters=of_cache)
    for name, tensor in (("query_rope", query_rope), ("latent_cache", latent_cache)):
        checks.check_dtype(name, tensor, dtype=query_latent.dtype)
        checks.check_device(name, tensor, device=query_latent.device)


def _check_kernel_layout(query_latent: Tensor, query_rope: Tensor, latent_cache: Tensor) -> None:
    checks.check_kernel_dtype("latent_cache", latent_cache, kernel=latent_attention_kernel)
    checks.check_head_dim("L", query_latent.shape[2], high=checks.MAX_LATENT_DIM)
    checks.check_head_dim("P", query_rope.shape[2])
    checks.check_block_size(latent_cache.shape[1])
    tensors = {"query_latent": query_latent, "query_rope": query_rope, "latent_cache": latent_cache}
    for name, tensor in tensors.items():
        checks.check_last_dim_contiguous(name, tensor)
