"""Products of rows with the weights of the groups they were sent to (experts), batch-invariant.

Where it sits: `models/invariant.py` calls it for the experts of deterministic decoding; the program
and why its rows do not depend on each other are in `invariant_matmul`.
Layout: the pairs of a row and a group are sorted by group and padded to whole tiles, and each tile
reads one group's weight. Everything is computed on the device, so that a CUDA graph can replay it.
Letters: M rows, K depth, N outputs, E groups, P pairs of a row and a group.
Source: sorting and padding as in fused MoE kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.invariant_matmul import (
    PairTiles,
    check_operands,
    choose_matmul_config,
    invariant_matmul_kernel,
    launch_matmul,
    stacked_rows,
)

if TYPE_CHECKING:
    from torch import Tensor


def invariant_grouped_matmul_ref(x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
    """Plain PyTorch, one pair at a time. Arguments and result as in `invariant_grouped_matmul`."""
    rows = x.repeat_interleave(len(groups) // max(len(x), 1), dim=0)
    outputs = [
        torch.nn.functional.linear(row.clone()[None], weight[group])[0]
        for row, group in zip(rows, groups.tolist(), strict=True)
    ]
    return stacked_rows(outputs, like=x, of=weight)


def invariant_grouped_matmul(
    x: Tensor, weight: Tensor, groups: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`weight[groups[p]] @ x[p // (P / M)]` for every pair p, with the bits it would have alone.

    Never synchronises with the device on Triton: the number of tiles is bounded from shapes.

    Args:
        x: `[M, K]`.
        weight: `[E, N, K]`, any strides, dtype of `x`.
        groups: `[P]` int64 in [0, E); P is a multiple of M, pairs of a row follow each other.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[P, N]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or the backend cannot run them.
    """
    check_operands(x[None], weight[:1], None)
    checks.check_rank("groups", groups, letters="[P]")
    checks.check_dtype("groups", groups, dtype=torch.int64)
    checks.check_device("groups", groups, device=x.device)
    if len(groups) % max(len(x), 1):
        raise ValueError(
            f"groups must hold as many pairs for every row, got {len(groups)} for {len(x)} rows."
        )
    if checks.resolve_backend(backend, tensor=x, kernel=invariant_matmul_kernel) == "reference":
        return invariant_grouped_matmul_ref(x, weight, groups)
    out = x.new_empty(len(groups), weight.shape[1])
    block_m = choose_matmul_config(weight.shape[1], element_bytes=x.element_size()).block_m
    tiles = tile_pairs(groups, num_groups=len(weight), block_m=block_m)
    pairs_per_row = len(groups) // max(len(x), 1)
    launch_matmul(x[None], weight, None, out=out, tiles=tiles, pairs_per_row=pairs_per_row)
    return out


def tile_pairs(groups: Tensor, *, num_groups: int, block_m: int) -> PairTiles:
    """Sort pairs by group and pad every group to whole tiles, without reading the device.

    For example groups [1, 0, 1] in tiles of 2 give pairs [1, -1, 0, 2] of groups [0, 1].

    Args:
        groups: `[P]` int64.
        num_groups: E.
        block_m: rows a tile.
    """
    num_pairs = len(groups)
    num_tiles = num_pairs // block_m + min(num_pairs, num_groups)
    sorted_groups, order = torch.sort(groups, stable=True)
    counts = torch.zeros(num_groups, dtype=torch.int64, device=groups.device)
    counts.scatter_add_(0, groups, torch.ones_like(groups))
    first_pair = torch.cumsum(counts, dim=0) - counts
    tile_end = torch.cumsum((counts + block_m - 1) // block_m, dim=0)
    first_tile = tile_end - (counts + block_m - 1) // block_m
    place = torch.arange(num_pairs, device=groups.device) - first_pair[sorted_groups]
    pair_index = torch.full(
        (num_tiles * block_m,), -1, dtype=torch.int32, device=groups.device
    ).scatter_(0, first_tile[sorted_groups] * block_m + place, order.int())
    tile = torch.arange(num_tiles, device=groups.device)
    group = torch.searchsorted(tile_end, tile, right=True)
    return PairTiles(pair_index, torch.where(group < num_groups, group, -1).int())
