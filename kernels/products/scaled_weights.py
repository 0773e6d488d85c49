"""FP8 weights with float32 scales: what they stand for, and which scales fit.

Where it sits: products and experts take such weights beside plain ones; a kernel multiplies a
block's product by its scale, so that nothing is rounded that the stored numbers had not rounded.
References, and products of many rows, multiply by the plain numbers that `dequantise` gives: on a
GPU in one pass over the weight, where single operations would read and write it three times.
Layouts: one scale per square block, `[ceil(O / B), ceil(C / B)]` (DeepSeek-V3's `weight_scale_inv`,
B = 128; the last block of a row or column may be cut off), or one per output row, `[O, 1]`, for
which B is 0. Stacks of matrices have the same behind their own dimensions.
Letters: O output rows, C columns, B edge of a block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

FP8 = torch.float8_e4m3fn
_LEAST_BLOCK = 16  # depth of a matrix instruction on 2-byte numbers
_TILE_ROWS, _TILE_COLUMNS = 16, 128  # of a program that writes plain numbers


@checks.kernel_jit
def widened(weight, dtype: tl.constexpr):
    """A weight in the dtype of the rows, which no FP8 number is rounded in.

    From FP8 to bfloat16 over float32: the direct conversion of float16 runs on a unit of 16 lanes a
    multiprocessor, which is slower than memory delivers the weights.
    """
    if weight.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return weight.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    return weight.to(dtype)


@checks.kernel_jit
def scales_at(scale, rows, depth, BLOCK: tl.constexpr):
    """Where the scales of some rows of a matrix begin, in the shape of `rows`; None without any."""
    if scale is None:
        at = None
    elif BLOCK > 0:
        at = scale + rows // BLOCK * ((depth + BLOCK - 1) // BLOCK)
    else:
        at = scale + rows
    return at


@checks.kernel_jit
def scales_of(scale, matrix, rows, num_rows, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """As `scales_at`, of one matrix of many, `[num_rows, DEPTH]` each."""
    if scale is not None:
        if BLOCK > 0:
            columns: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
            scale += matrix * ((num_rows + BLOCK - 1) // BLOCK) * columns
        else:
            scale += matrix * num_rows
    return scales_at(scale, rows, DEPTH, BLOCK)


@checks.kernel_jit
def add_product(acc, left, right, at, start, BLOCK: tl.constexpr):
    """Adds the product of a step that begins at column `start`, times the scales of its block."""
    if BLOCK > 0:
        return acc + tl.dot(left, right, input_precision="ieee") * tl.load(at + start // BLOCK)
    return tl.dot(left, right, acc, input_precision="ieee")


@checks.kernel_jit
def scaled_by_row(acc, at, BLOCK: tl.constexpr):
    """A whole sum times the scales of its rows, where there is one for each."""
    if at is not None and BLOCK == 0:
        acc *= tl.load(at)
    return acc


@checks.kernel_jit
def dequantise_kernel(
    weight,  # [matrices, O, C] FP8
    scale,  # float32 [matrices, ceil(O / B), ceil(C / B)], or [matrices, O, 1] for SCALE_BLOCK 0
    plain,  # [matrices, O, C], written
    num_rows,  # O
    DEPTH: tl.constexpr,  # C
    SCALE_BLOCK: tl.constexpr,  # B, a multiple of BLOCK_C, or 0
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of one matrix."""
    num_tiles: tl.constexpr = (DEPTH + BLOCK_C - 1) // BLOCK_C
    matrix, tile = tl.program_id(1), tl.program_id(0)
    row = tile // num_tiles * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    first = tile % num_tiles * BLOCK_C
    column = first + tl.arange(0, BLOCK_C)[None, :]
    is_row = row < num_rows
    at = (matrix.to(tl.int64) * num_rows + row) * DEPTH + column
    number = tl.load(weight + at, mask=is_row & (column < DEPTH), other=0.0)
    factor_at = scales_of(scale, matrix, row, num_rows, DEPTH, SCALE_BLOCK)
    if SCALE_BLOCK > 0:
        factor_at += first // SCALE_BLOCK
    factor = tl.load(factor_at, mask=is_row, other=0.0)
    found = number.to(tl.float16).to(tl.float32) * factor
    tl.store(plain + at, found.to(plain.dtype.element_ty), mask=is_row & (column < DEPTH))


def dequantise(
    weight: Tensor,
    scale: Tensor | None,
    *,
    block: int,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Plain numbers `[..., O, C]`, each rounded once to `dtype`; no scale, no change of numbers.

    Args:
        weight: `[..., O, C]`; in FP8 if there are scales.
        scale: float32, as the layouts of the module; None for a weight that is plain already.
        block: edge of a scale's block; 0 for a scale per row.
        dtype: of the result; None for that of `weight`.
        backend: `auto`, `reference` or `triton`; all give the same bits.
    """
    dtype = dtype or weight.dtype
    has_kernel = scale is not None and dtype in checks.KERNEL_DTYPES
    if not has_kernel or (
        checks.resolve_backend(backend, tensor=weight, kernel=dequantise_kernel) == "reference"
    ):
        return dequantise_ref(weight, scale, block=block, dtype=dtype)
    plain = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    *lead, rows, columns = weight.shape
    tile_columns = fitting_depth(_TILE_COLUMNS, block)
    num_tiles = ceil_div(rows, _TILE_ROWS) * ceil_div(columns, tile_columns)
    if plain.numel():
        with checks.launch_device(weight):
            dequantise_kernel[(num_tiles, math.prod(lead))](
                weight.contiguous(),
                scale.contiguous(),
                plain,
                rows,
                DEPTH=columns,
                SCALE_BLOCK=block,
                BLOCK_R=_TILE_ROWS,
                BLOCK_C=tile_columns,
                num_warps=4,
            )
    return plain


def dequantise_ref(
    weight: Tensor, scale: Tensor | None, *, block: int, dtype: torch.dtype
) -> Tensor:
    """Plain PyTorch. As `dequantise`."""
    plain = weight.to(dtype)
    if scale is None:
        return plain
    rows, columns = weight.shape[-2:]
    if not block:
        return plain.mul_(scale)
    by_row = scale.repeat_interleave(block, dim=-2)[..., :rows, :]  # [..., O, ceil(C / B)]
    num_whole = columns // block
    whole, rest = plain.tensor_split([num_whole * block], dim=-1)
    whole.unflatten(-1, (num_whole, block)).mul_(by_row[..., :num_whole, None])
    rest.mul_(by_row[..., num_whole:])
    return plain


def scale_shape(rows: int, columns: int, *, block: int) -> tuple[int, int]:
    """Shape of the scales of a matrix `[O, C]`."""
    return (-(-rows // block), -(-columns // block)) if block else (rows, 1)


def check_scale(
    name: str, weight: Tensor, scale: Tensor, *, block: int, num_parts: int = 1
) -> None:
    """Refuses (`ValueError`) scales that are not those of an FP8 weight `[..., O, C]`.

    The rows of `num_parts` matrices may follow each other in `weight`, and so may their scales.
    """
    if block and (block < _LEAST_BLOCK or block & (block - 1)):
        raise ValueError(
            f"{name}: the edge of a scale's block must be 0 or a power of two >= {_LEAST_BLOCK}, "
            f"got {block}; de-quantise the weight."
        )
    rows, columns = scale_shape(weight.shape[-2] // num_parts, weight.shape[-1], block=block)
    shape = (*weight.shape[:-2], num_parts * rows, columns)
    checks.check_dtype(name, weight, dtype=FP8)
    checks.check_shape(f"{name}_scale", scale, shape=shape, letters="[..., O / B, C / B]")
    checks.check_dtype(f"{name}_scale", scale, dtype=torch.float32)
    checks.check_device(f"{name}_scale", scale, device=weight.device)


def fitting_depth(block_k: int, block: int) -> int:
    """Depth of a kernel's step: one step reads one scale of a block, so it may not be deeper."""
    return min(block_k, block) if block else block_k
