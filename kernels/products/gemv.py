"""The product of one row with a weight, without the matrix instruction.

Where it sits: `few_rows_product` calls it where `few_rows_choice` names a `GemvConfig`.
Maths: out[n] = sum_k x[k] * weight[n, k] + bias[n], multiplied and accumulated in float32; `x` may
be normalised first and a residual added, as in `few_rows_product`; normalised numbers are not
rounded here.
Layout: a program holds a slab of the weight in registers, BLOCK_N rows by BLOCK_K columns, and
walks K in such slabs. What goes through shared memory to the matrix instruction arrives in steps;
here all loads of a slab are on their way at once. On Hopper the first slab is asked for before the
kernel in front has ended, and only then is `x` read. From two rows on the conversion of the numbers
to float32, and their products, take longer than the memory.
A gated product has the rows of `gate` and `up` in one weight `[2F, K]`; a program has half of its
rows of each and stores silu(gate) * up.
The scale of a block of an FP8 weight is multiplied into `x`, that of a row into the sum.
Letters: N outputs, K depth, F gated outputs, B edge of a scale's block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.products.scaled_weights import widened

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


@checks.kernel_jit
def dot_rows(
    weight,
    x,
    scale,
    start,
    depth,
    BLOCK_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    gain=None,
):
    """What columns `[start, start + BLOCK_K)` add to the sums of the rows of a slab.

    `x` is a row of `depth` numbers; `scale` is where the scales of the slab's rows begin, which lie
    in one block, or anything for SCALE_BLOCK 0. `gain`, of those columns, is multiplied into `x`.
    """
    k = start + tl.arange(0, BLOCK_K)
    a = tl.load(x + k, mask=k < depth, other=0.0).to(tl.float32)
    if gain is not None:
        a *= gain
    if SCALE_BLOCK > 0:
        NUM_BLOCKS: tl.constexpr = BLOCK_K // SCALE_BLOCK
        block = start // SCALE_BLOCK + tl.arange(0, NUM_BLOCKS)
        of_block = tl.load(scale + block, mask=block * SCALE_BLOCK < depth, other=0.0)
        a = tl.reshape(tl.reshape(a, [NUM_BLOCKS, SCALE_BLOCK]) * of_block[:, None], [BLOCK_K])
    return tl.sum(widened(weight, tl.float32) * a[None, :], 1)


@checks.kernel_jit
def load_columns(row, column, depth):
    """Numbers of a row of `depth` at some columns, as float32; 0 behind its end."""
    return tl.load(row + column, mask=column < depth, other=0.0).to(tl.float32)


@checks.kernel_jit
def inverse_rms(
    x,  # [BLOCK_T, 1] pointers to rows
    is_row,  # [BLOCK_T, 1] bool
    depth,
    eps,
    BLOCK_K: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    """1 / sqrt(mean of squares + eps) `[BLOCK_T]` of rows of `depth` numbers."""
    k = tl.arange(0, BLOCK_K)[None, :]
    squares = tl.zeros([x.shape[0], BLOCK_K], tl.float32)
    for step in tl.static_range(NUM_STEPS):
        inside = is_row & (k < depth - step * BLOCK_K)
        part = tl.load(x + step * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        squares += part * part
    return tl.rsqrt(tl.sum(squares, 1) / depth + eps)


@checks.kernel_jit
def silu_product(acc, dtype: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up `[BLOCK_N / 2, BLOCK_T]` of a tile, both rounded as a product of its own."""
    halves = tl.permute(tl.reshape(acc.to(dtype), [2, BLOCK_N // 2, BLOCK_T]), (1, 2, 0))
    gate, up = tl.split(halves)
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@checks.kernel_jit
def store_sum(product, out, residual, place, is_place):
    """Store a product, or its sum with a residual, at places of `out`; both are rounded."""
    dtype: tl.constexpr = out.dtype.element_ty
    if residual is not None:
        product = product.to(dtype).to(tl.float32)
        product += tl.load(residual + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(dtype), mask=is_place)


@checks.kernel_jit
def gemv_kernel(
    x,  # [K]
    weight,  # [N, K], rows contiguous; [2F, K] if gated
    scale,  # float32 [ceil(N / B), ceil(K / B)], [N, 1] for SCALE_BLOCK 0, or None
    bias,  # [N] or None
    norm_weight,  # [K], with which `x` is normalised first, or None
    residual,  # [N], added to the rounded product, or None
    out,  # [N], or [F] if gated; written
    num_outputs,  # N, or F if gated
    depth,
    eps,  # of the norm
    stride_weight,
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    NUM_STEPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """One tile of outputs."""
    TILE_OUTPUTS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    first = tl.program_id(0) * TILE_OUTPUTS
    lane = tl.arange(0, BLOCK_N)
    row = tl.minimum(first + lane % TILE_OUTPUTS, num_outputs - 1)  # instead of a mask
    row += lane // TILE_OUTPUTS * num_outputs  # rows of `up` lie behind those of `gate`
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + row.to(tl.int64)[:, None] * stride_weight + k
    w = tl.load(weight_at, mask=k < depth, other=0.0)
    acc = tl.zeros([BLOCK_N], tl.float32)
    scale_at = scale
    if SCALE_BLOCK > 0:
        scale_at += first // SCALE_BLOCK * ((depth + SCALE_BLOCK - 1) // SCALE_BLOCK)
    column = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    gain = None
    if norm_weight is not None:
        gain = load_columns(norm_weight, column, depth)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # `x` is there, and nobody reads `out` any more
        tl.extra.cuda.gdc_launch_dependents()  # they wait for the end of this before they write
    for step in tl.static_range(NUM_STEPS):
        start = step * BLOCK_K
        if step > 0:
            w = tl.load(weight_at + start, mask=k < depth - start, other=0.0)
        if norm_weight is not None:
            if step > 0:
                gain = load_columns(norm_weight, start + column, depth)
            part = load_columns(x, start + column, depth)
            squares += part * part
        acc += dot_rows(w, x, scale_at, start, depth, BLOCK_K, SCALE_BLOCK, gain)
    if norm_weight is not None:  # the factor of all columns comes last: nothing waits for it
        acc *= tl.rsqrt(tl.sum(squares) / depth + eps)
    if scale is not None and SCALE_BLOCK == 0:
        acc *= tl.load(scale + row)
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)
    if IS_GATED:
        acc = tl.reshape(
            silu_product(acc[:, None], out.dtype.element_ty, 1, BLOCK_N), [BLOCK_N // 2]
        )
    output = first + tl.arange(0, TILE_OUTPUTS)
    is_output = output < num_outputs
    store_sum(acc, out, residual, output, is_output)


class RowNorm(NamedTuple):
    """A norm that a product applies to its rows first: x / sqrt(mean x^2 + eps) * weight."""

    weight: Tensor  # [K], dtype of the rows
    eps: float


class GemvConfig(NamedTuple):
    """Compile-time shape of one program: powers of two."""

    block_n: int  # weight rows a program
    block_k: int  # most columns of a slab
    num_warps: int


def launch_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    config: GemvConfig,
    is_gated: bool,
    scale: Tensor | None,
    scale_block: int,
    norm: RowNorm | None = None,
    residual: Tensor | None = None,
) -> None:
    """Writes `out` `[1, N]` of `x` `[1, K]`; arguments as `few_rows_product` has checked them."""
    num_outputs, depth = out.shape[1], weight.shape[1]
    blocks = slab_of(depth, config=config, scale_block=scale_block)
    with checks.launch_device(x):
        gemv_kernel[(ceil_div(len(weight), blocks["BLOCK_N"]),)](
            x,
            weight,
            scale,
            bias,
            None if norm is None else norm.weight,
            residual,
            out,
            num_outputs,
            depth,
            0.0 if norm is None else norm.eps,
            weight.stride(0),
            **blocks,
            NUM_STEPS=ceil_div(depth, blocks["BLOCK_K"]),
            IS_GATED=is_gated,
            **checks.overlapping(x.device),
            num_warps=config.num_warps,
        )


def slab_of(depth: int, *, config: GemvConfig, scale_block: int) -> dict[str, int]:
    """Compile-time arguments that the sizes and the blocks of scales decide, by name.

    Half a slab of columns leaves fewer lanes without any where a whole one does not fit K.
    """
    block_k = config.block_k
    while block_k > max(scale_block, 128) and -depth % block_k > depth // 4:
        block_k //= 2
    return {
        "BLOCK_N": min(config.block_n, scale_block or config.block_n),
        "BLOCK_K": max(block_k, scale_block),
        "SCALE_BLOCK": scale_block,
    }
