"""Products and sums whose rows do not depend on the rows beside them, for deterministic decoding.

Where it sits: `models/rewrites/invariant.py` calls these in place of PyTorch's. A library picks its
tiles, and the order in which it adds up the K terms of a row, by the number of rows M. Then a token
verified among drafts differs in its last bits from the same token decoded alone, and near-ties of
the argmax flip. Here tile shapes follow from the weight alone, and one program adds up all K terms
of its tile in rising order, so that a row's bits follow from the row and the weight. `row_sum`, for
the means inside norms and the weights of routers, walks each row in blocks of one size.
Maths: out[b, m, n] = sum_k x[b, m, k] * weight[b, n, k] + bias[n], accumulated in float32.
Layout: grid (M tiles, N tiles, batch); M tiles of one weight tile run beside each other, so that
they find it in L2. For experts the pairs of a row and a group are sorted by group and padded to
whole tiles, on the device, and the same program reads one group's weight for every M tile.
On Hopper half-precision matrices go through `few_rows_product`, as many rows at a time as it takes:
its matrix instruction has the weight's rows on one side, always as many of them, and adds up the
terms of each pair of a row and an output by itself. How many rows lie on the other side, and how
many loads are under way, changes no bit; where K is split follows from the weight.
Letters: B batch, M rows, K depth, N outputs, E groups, P pairs of a row and a group, D columns.
Source: batch invariance as in thinking-machines-lab/batch_invariant_ops; sorting and padding as in
fused MoE kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_launch import ceil_div
from mtp_research.kernels.products.few_rows_choice import runs_on
from mtp_research.kernels.products.few_rows_product import (
    MAX_ROWS,
    FewRowsConfig,
    few_rows_product,
)

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


_NUM_SMS = 132  # tiles must not depend on the card either; these are the H100's and the H200's
BLOCK_D = 1024  # of `row_sum`
NUM_WARPS = 4
_FEW_ROWS = FewRowsConfig(64, 128, 4, 4, 2, uses_descriptor=True)  # for any number of rows
_HALVES = (torch.bfloat16, torch.float16)
_VECTOR_BYTES = 16


class MatmulConfig(NamedTuple):
    """Compile-time shape of one program; a function of the weight's shape and dtype alone."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class PairTiles(NamedTuple):
    """Pairs sorted by group and padded to tiles."""

    pair_index: Tensor  # [tiles x block_m] int32, pair of each tile row, -1 for padding
    tile_group: Tensor  # [tiles] int32, group of each tile, -1 for spare tiles


def invariant_matmul_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain PyTorch, one row at a time: every product has the same shape. As `invariant_matmul`."""
    if x.dim() == 3:
        pairs = zip(x, weight.expand(len(x), *weight.shape[-2:]), strict=True)
        return stacked_rows(
            [invariant_matmul_ref(*pair, bias) for pair in pairs], like=x, of=weight
        )
    rows = [torch.nn.functional.linear(row.clone()[None], weight, bias)[0] for row in x]
    return stacked_rows(rows, like=x, of=weight)


def stacked_rows(parts: list[Tensor], *, like: Tensor, of: Tensor) -> Tensor:
    """Outputs of a reference as one tensor; empty for rows `like` `[..., K]` and weight `of`."""
    shape = (*like.shape[:-1], of.shape[-2])
    return torch.stack(parts) if parts else like.new_empty(shape)


@checks.kernel_jit
def invariant_matmul_kernel(
    x,  # [B, M, K], last dimension contiguous
    weight,  # [B, N, K], or [E, N, K] with groups
    bias,  # [N] or None
    out,  # [B, M, N], or [P, N] with groups; written
    pair_index,  # [tiles x BLOCK_M] int32 or None
    tile_group,  # [tiles] int32 or None
    num_rows,
    num_outputs,
    depth,
    stride_x_batch,
    stride_x_row,
    stride_weight_batch,
    stride_weight_output,
    stride_weight_depth,
    stride_out_batch,
    PAIRS_PER_ROW: tl.constexpr,  # 1 without groups
    EVEN_DEPTH: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of rows times one tile of outputs, over all of K."""
    tile = tl.program_id(0)
    batch = tl.program_id(2)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile_group is not None:
        batch = tl.load(tile_group + tile)
        if batch < 0:
            return
        row = tl.load(pair_index + row)
        is_row = row >= 0
        x_row = row // PAIRS_PER_ROW
    else:
        is_row = row < num_rows
        x_row = row
        x += batch.to(tl.int64) * stride_x_batch
        out += batch.to(tl.int64) * stride_out_batch
    weight += batch.to(tl.int64) * stride_weight_batch
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    k = tl.arange(0, BLOCK_K)[None, :]
    x_at = x + x_row.to(tl.int64)[:, None] * stride_x_row + k
    weight_at = weight + output.to(tl.int64)[:, None] * stride_weight_output
    weight_at += k * stride_weight_depth
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = k < (BLOCK_K if EVEN_DEPTH else depth - start)
        a = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0)
        w = tl.load(weight_at, mask=is_output[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K * stride_weight_depth
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def invariant_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """`x @ weight.mT + bias`, each row with the bits it would have alone.

    Args:
        x: `[M, K]`, or `[B, M, K]`; any strides.
        weight: `[N, K]`, or `[B, N, K]` (B may be 1); any strides, dtype of `x`.
        bias: `[N]`, dtype of `x`; None for none.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[M, N]` or `[B, M, N]`, contiguous, in the dtype of `x`.
    """
    check_operands(x, weight, bias)
    if checks.resolve_backend(backend, tensor=x, kernel=invariant_matmul_kernel) == "reference":
        return invariant_matmul_ref(x, weight, bias)
    if fits_few_rows(weight):
        return matmul_by_few_rows(x, weight, bias)
    batch = len(x) if x.dim() == 3 else 1
    out = x.new_empty(*x.shape[:-1], weight.shape[-2])
    launch_matmul(
        x.reshape(batch, *x.shape[-2:]),
        weight.expand(batch, *weight.shape[-2:]),
        bias,
        out=out,
        tiles=None,
        pairs_per_row=1,
    )
    return out


def fits_few_rows(weight: Tensor) -> bool:
    """Whether products with `weight` go through `matmul_by_few_rows`: it alone decides."""
    is_matrix = weight.dim() == 2 and weight.dtype in _HALVES and weight.stride(1) == 1
    starts = (weight.data_ptr(), weight.stride(0) * weight.element_size())
    return is_matrix and runs_on(weight.device) and not any(n % _VECTOR_BYTES for n in starts)


def matmul_by_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `invariant_matmul` of `x` `[M, K]`, by `few_rows_product`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = [few_rows_product(rows, weight, bias, config=_FEW_ROWS) for rows in x.split(MAX_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_matmul_config(num_outputs: int, *, element_bytes: int) -> MatmulConfig:
    """Tile shape by the weight alone, never by the number of rows.

    64 rows make one wgmma tile; outputs a tile are as many as leave a program for every SM.
    float32 multiplies without tensor cores, so that it stays exact.
    """
    if element_bytes == 4:
        return MatmulConfig(16, 32, 32, num_warps=4, num_stages=3)
    if num_outputs < 64 * _NUM_SMS:
        return MatmulConfig(64, 32, 128, num_warps=4, num_stages=4)
    if num_outputs < 128 * _NUM_SMS:
        return MatmulConfig(64, 64, 64, num_warps=4, num_stages=4)
    return MatmulConfig(64, 128, 64, num_warps=4, num_stages=4)


def launch_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    tiles: PairTiles | None,
    pairs_per_row: int,
) -> None:
    """Launch the program on `x` `[B, M, K]` and `weight` `[B or E, N, K]`; writes `out`."""
    if out.numel() == 0:
        return
    for name, tensor in (("x", x), ("weight", weight)):
        checks.check_kernel_dtype(name, tensor, kernel=invariant_matmul_kernel)
    num_outputs, depth = weight.shape[1:]
    config = choose_matmul_config(num_outputs, element_bytes=x.element_size())
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tiles = ceil_div(x.shape[1], config.block_m) if tiles is None else len(tiles.tile_group)
    batch = len(x) if tiles is None else 1
    with checks.launch_device(x):
        invariant_matmul_kernel[(num_tiles, ceil_div(num_outputs, config.block_n), batch)](
            x,
            weight,
            bias,
            out,
            None if tiles is None else tiles.pair_index,
            None if tiles is None else tiles.tile_group,
            x.shape[1],
            num_outputs,
            depth,
            *x.stride()[:2],
            *weight.stride(),
            x.shape[1] * num_outputs,
            **matmul_constants(depth, pairs_per_row=pairs_per_row, config=config),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def matmul_constants(
    depth: int, *, pairs_per_row: int, config: MatmulConfig
) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel, by parameter name."""
    return {
        "PAIRS_PER_ROW": pairs_per_row,
        "EVEN_DEPTH": depth % config.block_k == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse operands of a product whose shapes, dtypes or devices disagree."""
    letters = "[B, {}, K]" if x.dim() == 3 else "[{}, K]"
    checks.check_rank("x", x, letters=letters.format("M"))
    checks.check_rank("weight", weight, letters=letters.format("N"))
    batch = () if x.dim() == 2 else (len(weight) if len(weight) == 1 else len(x),)
    shape = (*batch, weight.shape[-2], x.shape[-1])
    checks.check_shape("weight", weight, shape=shape, letters=letters.format("N"))
    operands = {"weight": weight}
    if bias is not None:
        checks.check_shape("bias", bias, shape=(weight.shape[-2],), letters="[N]")
        operands["bias"] = bias
    for name, tensor in operands.items():
        checks.check_dtype(name, tensor, dtype=x.dtype)
        checks.check_device(name, tensor, device=x.device)


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
    """Sort pairs `[P]` by group and pad every group to whole tiles, without reading the device.

    For example groups [1, 0, 1] in tiles of 2 give pairs [1, -1, 0, 2] of groups [0, 1].
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


def row_sum_ref(x: Tensor) -> Tensor:
    """Plain PyTorch, one row at a time. Arguments and result as in `row_sum`."""
    return torch.stack([row.clone().sum() for row in x]) if len(x) else x.new_empty(0)


@checks.kernel_jit
def _row_sum_kernel(
    x,  # [M, D], rows contiguous
    out,  # [M], written
    num_columns,
    stride_row,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_columns, BLOCK_D):
        column = start + lanes
        at = x + row * stride_row + column
        acc += tl.load(at, mask=column < num_columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(acc, 0).to(out.dtype.element_ty))


def row_sum(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Sum `[M]` of every row of `x` `[M, D]`, any strides, with the bits it would have alone."""
    checks.check_rank("x", x, letters="[M, D]")
    if checks.resolve_backend(backend, tensor=x, kernel=_row_sum_kernel) == "reference":
        return row_sum_ref(x)
    checks.check_kernel_dtype("x", x, kernel=_row_sum_kernel)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(len(x))
    if len(x) > 0:
        with checks.launch_device(x):
            _row_sum_kernel[(len(x),)](
                x, out, x.shape[1], x.stride(0), BLOCK_D=BLOCK_D, num_warps=NUM_WARPS
            )
    return out
