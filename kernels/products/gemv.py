"""Products of up to four rows with a weight, without the matrix instruction.

Where it sits: `few_rows_product` calls it where `few_rows_choice` names a `GemvConfig`.
Maths: out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n], multiplied and accumulated in float32.
Layout: a program holds a slab of the weight in registers, BLOCK_N rows by BLOCK_K columns, and
walks K in such slabs. A tile that goes through shared memory to the matrix instruction is short of
bandwidth at so few rows; here every load of a slab is on its way at once, and on Hopper the first
slab is asked for before the kernel in front has ended, whose `x` is only needed later.
A gated product has the rows of `gate` and `up` in one weight `[2F, K]`; a program holds a slab of
each and stores silu(gate) * up.
The scale of a block of an FP8 weight is multiplied into `x`, that of a row into the sum.
Letters: T rows, N outputs, K depth, F gated outputs, B edge of a scale's block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.attention.splits import ceil_div
from mtp_research.kernels.products.scaled_weights import widened

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    triton = tl = None


@checks.kernel_jit
def scaled_row(row_at, scale_at, start, depth, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """BLOCK_K numbers of a row in float32, zeros past its end, times the scales of their columns.

    `scale_at` is where the scales of the program's weight rows begin.
    """
    k = start + tl.arange(0, BLOCK_K)
    row = tl.load(row_at + k, mask=k < depth, other=0.0).to(tl.float32)
    if SCALE_BLOCK > 0:
        NUM_BLOCKS: tl.constexpr = BLOCK_K // SCALE_BLOCK
        block = start // SCALE_BLOCK + tl.arange(0, NUM_BLOCKS)
        is_block = block * SCALE_BLOCK < depth
        scale = tl.load(scale_at + block, mask=is_block, other=0.0)
        row = tl.reshape(tl.reshape(row, [NUM_BLOCKS, SCALE_BLOCK]) * scale[:, None], [BLOCK_K])
    return row


@checks.kernel_jit
def gemv_kernel(
    x,  # [T, K], rows contiguous
    weight,  # [N, K], rows contiguous; [2F, K] if gated
    scale,  # float32 [ceil(N / B), ceil(K / B)], [N, 1] for SCALE_BLOCK 0, or None
    bias,  # [N] or None
    out,  # [T, N], contiguous; written
    num_outputs,  # N, or F if gated
    depth,
    stride_x,
    stride_weight,
    NUM_ROWS: tl.constexpr,  # T
    BLOCK_T: tl.constexpr,  # T or the power of two above it
    BLOCK_N: tl.constexpr,  # divides B
    BLOCK_K: tl.constexpr,  # a multiple of B
    NUM_STEPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # B, or 0
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
):
    """BLOCK_N outputs of every row."""
    tile = tl.program_id(0)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    row = tl.minimum(output, num_outputs - 1)  # a repeated row instead of a mask
    lane = tl.arange(0, BLOCK_T)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + row.to(tl.int64)[:, None] * stride_weight + k
    w = tl.load(weight_at, mask=k < depth, other=0.0)
    up_at = weight + (row.to(tl.int64) + num_outputs)[:, None] * stride_weight + k
    if IS_GATED:
        u = tl.load(up_at, mask=k < depth, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = acc
    scale_at = scale
    if SCALE_BLOCK > 0:
        scale_at += tile * BLOCK_N // SCALE_BLOCK * ((depth + SCALE_BLOCK - 1) // SCALE_BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()  # `x` is there, and nobody reads `out` any more
        tl.extra.cuda.gdc_launch_dependents()  # they wait for the end of this before they write
    for step in tl.static_range(NUM_STEPS):
        start = step * BLOCK_K
        if step > 0:
            w = tl.load(weight_at + start, mask=k < depth - start, other=0.0)
            if IS_GATED:
                u = tl.load(up_at + start, mask=k < depth - start, other=0.0)
        for t in tl.static_range(NUM_ROWS):
            a = scaled_row(x + t * stride_x, scale_at, start, depth, BLOCK_K, SCALE_BLOCK)
            part = tl.sum(widened(w, tl.float32) * a[None, :], 1)
            acc += tl.where(lane == t, part[:, None], 0.0)
            if IS_GATED:
                part = tl.sum(widened(u, tl.float32) * a[None, :], 1)
                up += tl.where(lane == t, part[:, None], 0.0)
    if scale is not None and SCALE_BLOCK == 0:
        acc *= tl.load(scale + row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    if IS_GATED:
        gate = acc.to(out.dtype.element_ty).to(tl.float32)  # rounded as a product of its own
        up = up.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    place = lane * num_outputs + output[:, None]
    is_place = (lane < NUM_ROWS) & is_output[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_place)


MAX_ROWS = 4


class GemvConfig(NamedTuple):
    """Compile-time shape of one program: powers of two."""

    block_n: int  # weight rows a program; of gate and of up as many each
    block_k: int  # columns of a slab
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
    """Writes `out` `[T, N]`; arguments as in `few_rows_product`, which has checked them."""
    with checks.launch_device(x):
        gemv_kernel[(ceil_div(out.shape[1], config.block_n),)](
            x,
            weight,
            scale,
            bias,
            out,
            out.shape[1],
            weight.shape[1],
            x.stride(0),
            weight.stride(0),
            **gemv_constants(
                len(x), weight.shape[1], config=config, is_gated=is_gated, scale_block=scale_block
            ),
            **checks.overlapping(x.device),
            num_warps=config.num_warps,
        )


def gemv_constants(
    num_rows: int, depth: int, *, config: GemvConfig, is_gated: bool = False, scale_block: int = 0
) -> dict[str, int | bool]:
    """Compile-time arguments of the kernel but `OVERLAPS`, by name."""
    block_k = max(config.block_k, scale_block)
    return {
        "NUM_ROWS": num_rows,
        "BLOCK_T": triton.next_power_of_2(num_rows),
        "BLOCK_N": min(config.block_n, scale_block or config.block_n),
        "BLOCK_K": block_k,
        "NUM_STEPS": ceil_div(depth, block_k),
        "IS_GATED": is_gated,
        "SCALE_BLOCK": scale_block,
    }
