"""Products whose rows do not depend on the rows beside them, for deterministic decoding.

Where it sits: `models/invariant.py` calls these in place of PyTorch's products. A library picks its
tiles, and the order in which it adds up the K terms of a row, by the number of rows M. Then a token
verified among drafts differs in its last bits from the same token decoded alone, and near-ties of
the argmax flip. Here tile shapes follow from the weight alone, and one program adds up all K terms
of its tile in rising order, so that a row's bits follow from the row and the weight.
Maths: out[b, m, n] = sum_k x[b, m, k] * weight[b, n, k] + bias[n], accumulated in float32.
Layout: grid (M tiles, N tiles, batch); M tiles of one weight tile run beside each other, so that
they find it in L2. `invariant_grouped` runs the same program with a weight for every M tile.
Letters: B batch, M rows, K depth, N outputs, E groups, P pairs of a row and a group.
Source: batch invariance as in thinking-machines-lab/batch_invariant_ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention_launch import ceil_div

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor

_NUM_SMS = 132  # tiles must not depend on the card either; these are the H100's and the H200's


class MatmulConfig(NamedTuple):
    """Compile-time shape of one program; a function of the weight's shape and dtype alone."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class PairTiles(NamedTuple):
    """Pairs sorted by group and padded to tiles.

    Attributes:
        pair_index: `[tiles x block_m]` int32, pair of each tile row, -1 for padding.
        tile_group: `[tiles]` int32, group of each tile, -1 for spare tiles.
    """

    pair_index: Tensor
    tile_group: Tensor


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

    Raises:
        ValueError: shapes, dtypes or devices disagree, or the backend cannot run them.
    """
    check_operands(x, weight, bias)
    if checks.resolve_backend(backend, tensor=x, kernel=invariant_matmul_kernel) == "reference":
        return invariant_matmul_ref(x, weight, bias)
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


def choose_matmul_config(num_outputs: int, *, element_bytes: int) -> MatmulConfig:
    """Tile shape by the weight alone, never by the number of rows.

    64 rows make one wgmma tile; outputs a tile are as many as leave a program for every SM.
    float32 multiplies without tensor cores, so that it stays exact.

    Args:
        num_outputs: N.
        element_bytes: bytes of an element, 2 or 4.
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
    """Refuse operands of a product whose shapes, dtypes or devices disagree.

    Raises:
        ValueError: names the tensor and what was expected of it.
    """
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
