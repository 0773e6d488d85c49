"""How a long context is spread over programs, and how their partial results become one.

Where it sits: parts of `attention_kernel` and `latent_attention_kernel`, and the launch that may
follow them. A program works on one split of the keys of its tile of rows, and leaves a partial
output and its log-sum-exp. Who makes one of them, and how many splits there are:

- few requests: all get the same number, and a second launch merges (`merge_splits`);
- requests that fill a good part of the device (`shared_program`, `shared_span`): each gets its
  share of the programs by the length of its text, one to four. The program of a request that ends
  last merges its parts; one split writes the result, so that texts of equal length cost no parts.
  Beside prompts it is the requests of one tile that share, those that decode;
- the batch-invariant form: split s holds keys `[s * n, (s + 1) * n)` whatever the batch, and the
  number of splits is what the longest table could hold: the second launch adds them up in rising
  order, so that one without keys changes no bit.

Why not always the program that ends last: of many splits it is slower. 20.9 instead of 8.6 us for
one request of 1,024 keys (32 / 8 heads, 4 rows), 109.5 instead of 87.8 us for 8 of 8,192 (96 / 8
heads), one H200.
Letters: R requests, T packed rows, H heads, Dv value head dim.
Source: Flash-Decoding (splits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.checks import wait_in_front

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None


@checks.kernel_jit
def visible_positions(
    request,
    row,  # [BLOCK_M], index into [T]
    is_row,  # [BLOCK_M] bool
    tile_row,  # first packed row of the tile
    seq_len,
    query_len,
    positions,  # [T] int64 or None
    kv_start,  # [R] int32 or None
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Position of each row of a tile, their bounds, and the lowest key that a row sees."""
    if positions is None:
        shift = seq_len - query_len
        row_pos = shift + (tile_row + tl.arange(0, BLOCK_M)) // GROUP
        first_pos = shift + tile_row // GROUP
        last_pos = tl.minimum(shift + (tile_row + BLOCK_M - 1) // GROUP, seq_len - 1)
    else:
        row_pos = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
        first_pos = tl.min(tl.where(is_row, row_pos, seq_len), 0)
        last_pos = tl.max(row_pos, 0)
    lowest_key = tl.maximum(first_pos - WINDOW + 1, 0) if WINDOW > 0 else 0
    if kv_start is not None:
        lowest_key = tl.maximum(lowest_key, tl.load(kv_start + request))
    return row_pos, first_pos, last_pos, lowest_key


@checks.kernel_jit
def split_span(begin, end, split, num_splits, SPLIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part `[begin, end)` of a tile's keys that belongs to a split."""
    if SPLIT_KEYS > 0:
        begin = tl.maximum(begin, split * SPLIT_KEYS)
        end = tl.minimum((split + 1) * SPLIT_KEYS, end)
    else:
        tiles_per_split = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits)
        begin += split * tiles_per_split * BLOCK_N
        end = tl.minimum(begin + tiles_per_split * BLOCK_N, end)
    return begin, end


@checks.kernel_jit
def shared_program(
    program,
    num_first,  # programs of splits 0: R, or tiles of ragged requests
    seq_lens,  # [R] int32
    query_start_loc,  # [R + 1] int32
    num_requests,
    num_at_once,  # programs that run at the same time, of one KV head
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,  # 0 = all requests share, else those of one tile
    NUM_LANES: tl.constexpr,  # a power of two >= R
    MOST: tl.constexpr,  # splits at most
):
    """Request and split of the program with this number, and key tiles of those that share.

    First come all splits 0, whose place does not depend on lengths (where requests are ragged,
    `tile_of_program` says whose they are), then all further splits. A program behind these has no
    work, and R for a request.
    """
    lanes = tl.arange(0, NUM_LANES)
    is_request = lanes < num_requests
    lens = tl.load(seq_lens + lanes, mask=is_request, other=0)
    if RAGGED > 0:
        first = tl.load(query_start_loc + lanes, mask=is_request, other=0)
        behind = tl.load(query_start_loc + lanes + 1, mask=is_request, other=0)
        lens = tl.where((first < behind) & ((behind - first) * GROUP <= BLOCK_M), lens, 0)
    tiles = _share_tiles(lens, WINDOW, BLOCK_N)
    all_tiles = tl.maximum(tl.sum(tiles, 0), 1)
    request, split = program, tl.zeros([], tl.int32)
    if program >= num_first:
        further = tl.where(is_request, _share(tiles, all_tiles, num_at_once, MOST) - 1, 0)
        place = program - num_first
        request = tl.sum(((tl.cumsum(further, 0) <= place) & is_request).to(tl.int32), 0)
        split = 1 + place - tl.sum(tl.where(lanes < request, further, 0), 0)
    return request, split, all_tiles


@checks.kernel_jit
def _share_tiles(seq_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key tiles by which requests share programs."""
    return tl.cdiv(tl.minimum(seq_len, WINDOW) if WINDOW > 0 else seq_len, BLOCK_N)


@checks.kernel_jit
def _share(num_tiles, all_tiles, num_at_once, MOST: tl.constexpr):
    """num_tiles * num_at_once / all_tiles, rounded, 1 to MOST; of a request, or of each of some.

    By comparisons, as a division takes a hundred cycles before the first key is asked for.
    """
    share = 1
    for count in tl.static_range(2, MOST + 1):
        share += (2 * num_tiles * num_at_once >= (2 * count - 1) * all_tiles).to(tl.int32)
    return share


@checks.kernel_jit
def shared_span(
    begin,
    end,
    split,
    seq_len,
    all_tiles,
    num_at_once,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST: tl.constexpr,
):
    """As `split_span`, and the number of the request's splits that hold keys."""
    share = _share(_share_tiles(seq_len, WINDOW, BLOCK_N), all_tiles, num_at_once, MOST)
    num_tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_N), 0)  # all keys may lie below `kv_start`
    tiles_per_split = num_tiles
    for count in tl.static_range(2, MOST + 1):
        tiles_per_split = tl.where(share == count, tl.cdiv(num_tiles, count), tiles_per_split)
    num_splits = 1  # 5 tiles in 4 splits are 2, 2 and 1
    for count in tl.static_range(1, MOST):
        num_splits += (num_tiles > count * tiles_per_split).to(tl.int32)
    begin += split * tiles_per_split * BLOCK_N
    return begin, tl.minimum(begin + tiles_per_split * BLOCK_N, end), num_splits


@checks.kernel_jit
def merge_parts(
    partial,  # pointers [N, Dv] to the partial outputs of split 0
    lse,  # pointers [N] to its log-sum-exps, base 2
    num_splits,
    stride_split,  # T x H
    is_row,  # [N] bool
    inside,  # [N, Dv] bool
    VALUE_DIM: tl.constexpr,
    MOST: tl.constexpr,  # splits at most
):
    """Rows of the last program of a tile: all partial outputs, in the order of the keys.

    `.cg` reads past this multiprocessor's cache.
    """
    stride_split = stride_split.to(tl.int64)
    highest = tl.full([is_row.shape[0]], float("-inf"), tl.float32)
    for split in tl.static_range(MOST):
        mask = is_row & (split < num_splits)
        at = lse + split * stride_split
        part_lse = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, part_lse)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([is_row.shape[0]], tl.float32)
    acc = tl.zeros(inside.shape, tl.float32)
    # Of a larger tile the parts have no room in registers at the same time.
    if is_row.shape[0] <= 16:
        for split in tl.static_range(MOST):
            total, acc = _add_part(
                total,
                acc,
                split,
                partial,
                lse,
                base,
                num_splits,
                stride_split,
                is_row,
                inside,
                VALUE_DIM,
            )
    else:
        for split in tl.range(MOST):
            total, acc = _add_part(
                total,
                acc,
                split,
                partial,
                lse,
                base,
                num_splits,
                stride_split,
                is_row,
                inside,
                VALUE_DIM,
            )
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@checks.kernel_jit
def _add_part(
    total,  # [N], weights of the splits before
    acc,  # [N, Dv], their partial outputs times these
    split,
    partial,
    lse,
    base,  # [N], highest log-sum-exp of a row
    num_splits,
    stride_split,
    is_row,
    inside,
    VALUE_DIM: tl.constexpr,
):
    """`total` and `acc` with one split more."""
    mask = is_row & (split < num_splits)
    at = lse + split * stride_split
    share = tl.exp2(tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg") - base)
    part = tl.load(
        partial + split * stride_split * VALUE_DIM,
        mask=inside & (split < num_splits),
        other=0.0,
        cache_modifier=".cg",
    )
    return total + share, acc + part * share[:, None]


@checks.kernel_jit_once("num_requests", "num_splits", "num_row_heads")
def merge_splits_kernel(
    partial,  # [splits, T, H, Dv] float32
    lse,  # [splits, T, H] float32, base 2; -inf where a split saw no key
    query_start_loc,  # [R + 1] int32
    out,  # [T, H, Dv], written
    num_requests,
    num_splits,
    num_row_heads,  # T x H
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,  # 0 = one after the other, in rising order
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """One output row of one head: the partial outputs weighted by their share of the softmax."""
    row_head = tl.program_id(0).to(tl.int64)
    is_row = row_head // NUM_HEADS < tl.load(query_start_loc + num_requests)
    wait_in_front(OVERLAPS)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    if PADDED_SPLITS == 0:
        highest = tl.full([], float("-inf"), tl.float32)
        at = row_head
        for _ in range(num_splits):
            highest = tl.maximum(highest, tl.load(lse + at, mask=is_row, other=float("-inf")))
            at += num_row_heads
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.full([], 0.0, tl.float32)
        acc = tl.zeros([PADDED_VALUE_DIM], tl.float32)
        at = row_head
        for _ in range(num_splits):
            part_lse = tl.load(lse + at, mask=is_row, other=float("-inf"))
            part = tl.load(partial + at * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
            # Splits without keys left their partial output unwritten.
            part = tl.where(part_lse == float("-inf"), 0.0, part)
            share = tl.exp2(part_lse - base)
            total += share
            acc += part * share
            at += num_row_heads
    else:
        splits = tl.arange(0, PADDED_SPLITS)
        at = splits.to(tl.int64) * num_row_heads + row_head
        part_lse = tl.load(lse + at, mask=(splits < num_splits) & is_row, other=float("-inf"))
        # Splits without keys left their partial output unwritten.
        parts = tl.load(
            partial + at[:, None] * VALUE_DIM + dims,
            mask=(part_lse > float("-inf"))[:, None] & (dims < VALUE_DIM),
            other=0.0,
        )
        highest = tl.max(part_lse, 0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shares = tl.exp2(part_lse - base)
        total = tl.sum(shares, 0)
        acc = tl.sum(parts * shares[:, None], 0)
    merged = acc / tl.where(total == 0.0, 1.0, total)
    target = out + row_head * VALUE_DIM + dims
    tl.store(target, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


class SplitOutputs(NamedTuple):
    """Where the programs of a split context write; None for one split, which writes the output."""

    partial: Tensor | None  # [splits, T, H, Dv] float32
    lse: Tensor | None  # [splits, T, H] float32


def split_outputs(out: Tensor, num_splits: int, *, always_split: bool) -> SplitOutputs:
    """Storage of partial outputs and log-sum-exps for `out` `[T, H, Dv]`."""
    if num_splits == 1 and not always_split:
        return SplitOutputs(None, None)
    partial = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
    return SplitOutputs(partial, out.new_empty(partial.shape[:3], dtype=torch.float32))


def merge_splits(
    split: SplitOutputs,
    *,
    query_start_loc: Tensor,
    out: Tensor,
    num_warps: int,
    in_order: bool,
) -> None:
    """Launch the merge of `split` into `out` `[T, H, Dv]`; nothing where there is one split.

    `in_order` adds splits one by one, so that more of them, without keys, change no bit.
    """
    partial, lse = split
    if partial is None or lse is None:
        return
    num_rows, num_heads, value_dim = out.shape
    merge_splits_kernel[(num_rows * num_heads,)](
        partial,
        lse,
        query_start_loc,
        out,
        len(query_start_loc) - 1,
        len(partial),
        num_rows * num_heads,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=padded_head_dim(value_dim),
        PADDED_SPLITS=0 if in_order else next_power_of_two(len(partial)),
        num_warps=num_warps,
        **checks.overlapping(out.device),
    )


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is >= `value` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The tile width that holds `head_dim`: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, next_power_of_two(head_dim))


def ceil_div(numerator: int, denominator: int) -> int:
    """Division rounded up, for counts."""
    return -(-numerator // denominator)
