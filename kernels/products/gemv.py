"""The product of one row with a weight, without the matrix instruction.

Where it sits: `few_rows_product` calls it where `few_rows_choice` names a `GemvConfig`.
Maths: out[n] = sum_k x[k] * weight[n, k] + bias[n], multiplied and accumulated in float32.
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
from mtp_research.kernels.products.scaled_weights import scales_at, widened

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


@checks.kernel_jit
def dot_rows(weight, x, scale, start, depth, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """What columns `[start, start + BLOCK_K)` add to the sums of the rows of a slab.

    `x` is a row of `depth` numbers; `scale` is where the scales of the slab's rows begin, which lie
    in one block, or anything for SCALE_BLOCK 0.
    """
    k = start + tl.arange(0, BLOCK_K)
    a = tl.load(x + k, mask=k < depth, other=0.0).to(tl.float32)
    if SCALE_BLOCK > 0:
        NUM_BLOCKS: tl.constexpr = BLOCK_K // SCALE_BLOCK
        block = start // SCALE_BLOCK + tl.arange(0, NUM_BLOCKS)
        of_block = tl.load(scale + block, mask=block * SCALE_BLOCK < depth, other=0.0)
        a = tl.reshape(tl.reshape(a, [NUM_BLOCKS, SCALE_BLOCK]) * of_block[:, None], [BLOCK_K])
    return tl.sum(widened(weight, tl.float32) * a[None, :], 1)


@checks.kernel_jit
def silu_product(acc, dtype: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up `[BLOCK_N / 2, BLOCK_T]` of a tile, both rounded as a product of its own."""
    halves = tl.permute(tl.reshape(acc.to(dtype), [2, BLOCK_N // 2, BLOCK_T]), (1, 2, 0))
    gate, up = tl.split(halves)
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@checks.kernel_jit
def gemv_kernel(
    x,  # [K]
    weight,  # [N, K], rows contiguous; [2F, K] if gated
    scale,  # float32 [ceil(N / B), ceil(K / B)], [N, 1] for SCALE_BLOCK 0, or None
    bias,  # [N] or None
    out,  # [N], or [F] if gated; written
    num_outputs,  # N, or F if gated
    depth,
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
    scale_at = scales_at(scale, first, depth, SCALE_BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # `x` is there, and nobody reads `out` any more
        tl.extra.cuda.gdc_launch_dependents()  # they wait for the end of this before they write
    for step in tl.static_range(NUM_STEPS):
        start = step * BLOCK_K
        if step > 0:
            w = tl.load(weight_at + start, mask=k < depth - start, other=0.0)
        acc += dot_rows(w, x, scale_at, start, depth, BLOCK_K, SCALE_BLOCK)
    if scale is not None and SCALE_BLOCK == 0:
        acc *= tl.load(scale + row)
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)
    if IS_GATED:
        acc = tl.reshape(
            silu_product(acc[:, None], out.dtype.element_ty, 1, BLOCK_N), [BLOCK_N // 2]
        )
    output = first + tl.arange(0, TILE_OUTPUTS)
    tl.store(out + output, acc.to(out.dtype.element_ty), mask=output < num_outputs)


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
            out,
            num_outputs,
            depth,
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
