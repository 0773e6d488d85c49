"""Sort the pairs of a token and an expert by expert, padded to whole tiles, on the device.

Where it sits: `expert_mlp` gives each tile of pairs to one program of its products. The layout is
that of `invariant_matmul.tile_pairs`, which is the reference; here it takes one launch up to
`MAX_ONE_LAUNCH_PAIRS` pairs and three above, where the sort would otherwise cost as much as the
products. Nothing is read by the host, so that a CUDA graph can replay it.
Layout: tiles of an expert follow each other, experts rise, pairs of an expert rise, and what is
left of an expert's last tile is -1. The number of tiles is bounded from shapes; spare tiles name no
expert.
Letters: T tokens, P pairs of a token and an expert, E experts, C chunks of pairs.
Source: sorting and padding as in fused MoE kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.products.invariant_matmul import PairTiles, tile_pairs

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor

MAX_ONE_LAUNCH_PAIRS = 4096
MAX_EXPERTS = 1023  # the histogram's bins, one of them for padding, are a power of two
_CHUNK = 2048
_LEAST_PAIRS = 512  # every thread holds pairs of its own: histograms count what threads repeat
_CHUNKS_A_STEP = 16
_TILES_A_STEP = 128


def route_pairs_ref(experts: Tensor, *, num_experts: int, block_m: int) -> PairTiles:
    """Plain PyTorch. Arguments and result as in `route_pairs`."""
    pair_index, tile_expert = tile_pairs(experts, num_groups=num_experts, block_m=block_m)
    most = most_tiles(len(experts), num_experts=num_experts, block_m=block_m)
    return PairTiles(pair_index[: most * block_m], tile_expert[:most])


@checks.kernel_jit
def route_kernel(
    experts,  # [P] int64 or int32
    pair_index,  # [tiles x BLOCK_M] int32, written
    tile_expert,  # [tiles] int32, written
    num_pairs,
    num_experts,
    num_tiles,
    BLOCK_M: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,  # more than E
    PADDED_TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """All of the sort for one expert; every program counts all pairs for itself."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PADDED_PAIRS)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chosen = tl.load(experts + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
    counts = tl.histogram(chosen, PADDED_EXPERTS)
    any_expert = tl.arange(0, PADDED_EXPERTS)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(any_expert < expert, tiles, 0))
    end_tile = first_tile + tl.sum(tl.where(any_expert == expert, tiles, 0))
    is_mine = chosen == expert
    rank = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    tl.store(pair_index + first_tile * BLOCK_M + rank, pair, mask=is_mine)
    end = first_tile * BLOCK_M + tl.sum(is_mine.to(tl.int32))
    padding = end + tl.arange(0, BLOCK_M)
    tl.store(pair_index + padding, -1, mask=padding < end_tile * BLOCK_M)
    tile = first_tile + tl.arange(0, PADDED_TILES)
    tl.store(tile_expert + tile, expert, mask=tile < end_tile)
    is_spare = (tile >= end_tile) & (tile < num_tiles) & (expert == num_experts - 1)
    tl.store(tile_expert + tile, -1, mask=is_spare)


@checks.kernel_jit
def count_kernel(
    experts,  # [P] int64 or int32
    counts,  # [C, PADDED_EXPERTS] int32, written
    num_pairs,
    num_experts,
    PADDED_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Pairs of every expert in one chunk."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
    target = counts + chunk * PADDED_EXPERTS + tl.arange(0, PADDED_EXPERTS)
    tl.store(target, tl.histogram(chosen, PADDED_EXPERTS))


@checks.kernel_jit
def offset_kernel(
    counts,  # [C, PADDED_EXPERTS] int32
    offsets,  # [C, PADDED_EXPERTS] int32, written: where an expert's pairs of a chunk start
    tile_expert,  # [tiles] int32, written
    num_chunks,
    num_experts,
    num_tiles,
    BLOCK_M: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHUNKS_A_STEP: tl.constexpr,
    TILES_A_STEP: tl.constexpr,
):
    """One program: first tile of every expert, start of every chunk, expert of every tile."""
    expert = tl.arange(0, PADDED_EXPERTS)
    rows = tl.arange(0, CHUNKS_A_STEP)
    is_expert = expert < num_experts
    total = tl.zeros([PADDED_EXPERTS], tl.int32)
    for first in range(0, num_chunks, CHUNKS_A_STEP):
        at = (first + rows)[:, None] * PADDED_EXPERTS + expert[None, :]
        mask = (first + rows < num_chunks)[:, None] & is_expert[None, :]
        total += tl.sum(tl.load(counts + at, mask=mask, other=0), 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    end_tile = tl.cumsum(tiles, 0)
    start = (end_tile - tiles) * BLOCK_M
    for first in range(0, num_chunks, CHUNKS_A_STEP):
        at = (first + rows)[:, None] * PADDED_EXPERTS + expert[None, :]
        mask = (first + rows < num_chunks)[:, None] & is_expert[None, :]
        held = tl.load(counts + at, mask=mask, other=0)
        tl.store(offsets + at, start[None, :] + tl.cumsum(held, 0) - held, mask=mask)
        start += tl.sum(held, 0)
    last_tile = tl.sum(tiles)
    for first in range(0, num_tiles, TILES_A_STEP):
        tile = first + tl.arange(0, TILES_A_STEP)
        is_past = (end_tile[None, :] <= tile[:, None]) & is_expert[None, :]
        owner = tl.sum(is_past.to(tl.int32), 1)
        owner = tl.where(tile < last_tile, owner, -1)
        tl.store(tile_expert + tile, owner, mask=tile < num_tiles)


@checks.kernel_jit
def place_kernel(
    experts,  # [P] int64 or int32
    offsets,  # [C, PADDED_EXPERTS] int32
    pair_index,  # [tiles x BLOCK_M] int32, written
    num_pairs,
    num_experts,
    num_chunks,
    BLOCK_M: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Places the pairs of one expert in one chunk; the last chunk's program pads the last tile."""
    chunk, expert = tl.program_id(0), tl.program_id(1)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
    is_mine = chosen == expert
    start = tl.load(offsets + chunk * PADDED_EXPERTS + expert)
    rank = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    tl.store(pair_index + start + rank, pair, mask=is_mine)
    if chunk == num_chunks - 1:
        end = start + tl.sum(is_mine.to(tl.int32))
        padding = end + tl.arange(0, BLOCK_M)
        is_left = padding < (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        tl.store(pair_index + padding, -1, mask=is_left)


def route_pairs(
    experts: Tensor, *, num_experts: int, block_m: int, backend: str = "auto"
) -> PairTiles:
    """Sort pairs by expert and pad every expert to whole tiles, without reading the device.

    For example experts [1, 0, 1] in tiles of 2 give pairs [1, -1, 0, 2] of experts [0, 1].

    Args:
        experts: `[P]` int64 or int32 in [0, E), contiguous.
        num_experts: E, at most 1023 on Triton.
        block_m: pairs a tile, a power of two.
        backend: `auto`, `reference` or `triton`.

    Returns:
        Tiles as `most_tiles` counts them. Pairs of spare tiles are undefined.
    """
    checks.check_rank("experts", experts, letters="[P]")
    if experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"experts must have dtype torch.int32 or int64, got {experts.dtype}.")
    if checks.resolve_backend(backend, tensor=experts, kernel=route_kernel) == "reference":
        return route_pairs_ref(experts.long(), num_experts=num_experts, block_m=block_m)
    if num_experts > MAX_EXPERTS:
        raise ValueError(
            f"num_experts must be <= {MAX_EXPERTS} for backend 'triton', got {num_experts}; "
            "use backend='reference'."
        )
    most = most_tiles(len(experts), num_experts=num_experts, block_m=block_m)
    tiles = PairTiles(
        torch.empty(most * block_m, dtype=torch.int32, device=experts.device),
        torch.empty(most, dtype=torch.int32, device=experts.device),
    )
    if most:
        with checks.launch_device(experts):
            _launch(experts.contiguous(), tiles, num_experts=num_experts, block_m=block_m)
    return tiles


def most_tiles(num_pairs: int, *, num_experts: int, block_m: int) -> int:
    """Tiles that P pairs fill at most: each expert that has any starts one, the rest fill them."""
    starts = min(num_pairs, num_experts)
    return starts + (num_pairs - starts) // block_m


def padded_experts(num_experts: int) -> int:
    """Bins of the histogram: a power of two with one bin that no expert has."""
    return 1 << num_experts.bit_length()


def _launch(experts: Tensor, tiles: PairTiles, *, num_experts: int, block_m: int) -> None:
    num_pairs, num_tiles = len(experts), len(tiles.tile_group)
    sizes = {"BLOCK_M": block_m, "PADDED_EXPERTS": padded_experts(num_experts)}
    if num_pairs <= MAX_ONE_LAUNCH_PAIRS:
        route_kernel[(num_experts,)](
            experts,
            *tiles,
            num_pairs,
            num_experts,
            num_tiles,
            **sizes,
            PADDED_PAIRS=max(_LEAST_PAIRS, 1 << (num_pairs - 1).bit_length()),
            PADDED_TILES=1 << (num_tiles - 1).bit_length(),
            **checks.overlapping(experts.device),
            num_warps=4,
        )
        return
    num_chunks = ceil_div(num_pairs, _CHUNK)
    counts, offsets = experts.new_empty(
        (2, num_chunks, sizes["PADDED_EXPERTS"]), dtype=torch.int32
    ).unbind()
    count_kernel[(num_chunks,)](
        experts,
        counts,
        num_pairs,
        num_experts,
        PADDED_EXPERTS=sizes["PADDED_EXPERTS"],
        CHUNK=_CHUNK,
        num_warps=4,
    )
    offset_kernel[(1,)](
        counts,
        offsets,
        tiles.tile_group,
        num_chunks,
        num_experts,
        num_tiles,
        **sizes,
        CHUNKS_A_STEP=_CHUNKS_A_STEP,
        TILES_A_STEP=_TILES_A_STEP,
        num_warps=8,
    )
    place_kernel[(num_chunks, num_experts)](
        experts,
        offsets,
        tiles.pair_index,
        num_pairs,
        num_experts,
        num_chunks,
        **sizes,
        CHUNK=_CHUNK,
        num_warps=4,
    )
