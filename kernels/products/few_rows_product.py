"""Products of a few rows with a weight that is read once, near the bandwidth of the memory.

Where it sits: `models/rewrites/products.py` calls it in compiled decode steps, for the projections
that `few_rows_choice` names. Such a product is as slow as its weight is long. A library's leaves a
tenth to a third of the bandwidth unused there, in part because it splits K over programs and adds
the parts up in a second kernel.
Maths: out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n], accumulated in float32.
Layout: one program per BLOCK_N rows of the weight, the first operand of the matrix instruction, so
that the padded dimension of the other one is 8, 16, ... 128. Tiles are small enough to give every
multiprocessor about as many programs, and pipelined deeply enough to keep tens of kilobytes on
their way. Where a weight has too few rows for that, several programs share a tile's K; the last one
to arrive adds their parts up in the order of K, so that the result does not depend on who that is.
On Hopper a launch overlaps the end of the kernel in front of it (programmatic dependent launch): a
program asks for the beginning of its weight rows, into L2, where a copy cannot go stale, before it
waits for `x`.
A gated product has the rows of `gate` and `up` in one weight `[2F, K]`; a program multiplies half a
tile of each and stores silu(gate) * up.
An FP8 weight is converted to the dtype of `x` in registers, which is exact, and what a step adds is
multiplied by the scales of its block (`scaled_weights`); with a scale per row the sum is.
Letters: T rows, N outputs, K depth, S splits of K, F gated outputs, B edge of a scale's block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.checks import LINE_BYTES, ask_for
from mtp_research.kernels.products.gemv import GemvConfig, launch_gemv, silu_product
from mtp_research.kernels.products.scaled_weights import (
    FP8,
    add_product,
    check_scale,
    dequantise,
    fitting_depth,
    scaled_by_row,
    scales_at,
    widened,
)
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = TensorDescriptor = None


@checks.kernel_jit_once("num_rows", "num_splits")
def few_rows_kernel(
    x,  # [T, K], rows contiguous
    weight,  # [N, K], rows contiguous
    weight_tiles,  # its descriptor, or None
    scale,  # float32 [ceil(N / B), ceil(K / B)], [N, 1] for SCALE_BLOCK 0, or None
    bias,  # [N] or None
    out,  # [T, N], contiguous; written
    parts,  # [S, T, N] float32, or None for one split; written
    arrived,  # [tiles] int32 zeros, or None for one split; zeros again at the end
    num_rows,
    num_outputs,
    depth,
    stride_x,
    stride_weight,
    num_splits,
    EVEN_DEPTH: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,  # starts before the kernel in front of it has ended
    NUM_EARLY_LINES: tl.constexpr,  # cache lines of a weight row asked for before that, power of 2
    LINE: tl.constexpr,  # elements a cache line
    IS_GATED: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # B, a multiple of BLOCK_K, or 0
):
    """One tile of outputs over all of K, or over one split of it."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    TILE_OUTPUTS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    # Rows past the last one repeat it: cheaper than a mask, and they are not stored.
    weight_row = tl.minimum(tile * TILE_OUTPUTS + lane % TILE_OUTPUTS, num_outputs - 1)
    weight_row += lane // TILE_OUTPUTS * num_outputs  # rows of `up` lie behind those of `gate`
    output = tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    row = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)[None, :]
    num_steps = tl.cdiv(depth, BLOCK_K)
    begin = split * num_steps // num_splits
    end = (split + 1) * num_steps // num_splits
    weight_rows = weight + weight_row.to(tl.int64)[:, None] * stride_weight
    weight_at = weight_rows + begin * BLOCK_K + k
    x_at = x + row.to(tl.int64)[:, None] * stride_x + begin * BLOCK_K + k
    is_row = row < num_rows
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    scale_at = scales_at(scale, weight_row[:, None], depth, SCALE_BLOCK)
    if OVERLAPS:
        line = begin * BLOCK_K + tl.arange(0, NUM_EARLY_LINES)[None, :] * LINE
        ask_for(weight_rows + tl.minimum(line, depth - 1))
        tl.extra.cuda.gdc_wait()  # `x` is there, and nobody reads `out` any more
    for step in range(begin, end):
        inside = k < (BLOCK_K if EVEN_DEPTH else depth - step * BLOCK_K)
        if weight_tiles is None:
            w = tl.load(weight_at, mask=inside, other=0.0)
            weight_at += BLOCK_K
        else:
            w = weight_tiles.load([tile * BLOCK_N, step * BLOCK_K])
        a = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0)
        w = widened(w, a.dtype)
        acc = add_product(acc, w, tl.trans(a), scale_at, step * BLOCK_K, SCALE_BLOCK)
        x_at += BLOCK_K
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()  # whoever comes next may overwrite `x`
    acc = scaled_by_row(acc, scale_at, SCALE_BLOCK)
    place = row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    is_place = is_row[None, :] & (output < num_outputs)[:, None]
    if parts is not None:
        at = parts + place
        tl.store(at + split.to(tl.int64) * (num_rows * num_outputs), acc, mask=is_place)
        tl.debug_barrier()  # every thread's part is written before the program counts as arrived
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrived + tile, 0)
        acc = _sum_parts(at, num_splits, num_rows * num_outputs, is_place)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        acc = silu_product(acc, out.dtype.element_ty, BLOCK_T, BLOCK_N)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_place)


@checks.kernel_jit
def _sum_parts(at, num_splits, stride_split, is_place):
    """Parts of a tile, added up in the order of K; `.cg` reads past this multiprocessor's cache."""
    acc = tl.load(at, mask=is_place, other=0.0, cache_modifier=".cg")
    for _ in range(1, num_splits):
        at += stride_split
        acc += tl.load(at, mask=is_place, other=0.0, cache_modifier=".cg")
    return acc


MAX_ROWS = 128
_NUM_SMS = 132  # of the H100 and the H200
NUM_EARLY_LINES = 8  # of each weight row: a kilobyte, tens of them a multiprocessor


class FewRowsConfig(NamedTuple):
    """Compile-time shape of one program, and how many of them there should be.

    Programs share the K of a tile until there are about `programs_per_sm`; 0: they never do.
    """

    block_n: int  # rows of the weight a program, a power of two of 16 or more
    block_k: int  # elements of K a step of its loop, a power of two of 16 or more
    num_warps: int
    num_stages: int  # steps of the loop whose loads are under way together, and one more
    programs_per_sm: int = 0
    uses_descriptor: bool = False  # the tensor memory accelerator copies tiles of the weight


def few_rows_product_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    is_gated: bool = False,
    scale: Tensor | None = None,
    scale_block: int = 0,
) -> Tensor:
    """Plain PyTorch. Arguments and result as in `few_rows_product`."""
    out = x.float() @ dequantise(weight, scale, block=scale_block, dtype=torch.float32).T
    out = (out if bias is None else out + bias.float()).to(x.dtype)
    if not is_gated:
        return out
    gate, up = out.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: FewRowsConfig | GemvConfig,
    is_gated: bool = False,
    scale: Tensor | None = None,
    scale_block: int = 0,
    backend: str = "auto",
) -> Tensor:
    """`x @ weight.T + bias` for at most 128 rows, in one kernel; the same bits at every call.

    Args:
        x: `[T, K]`, 0 <= T <= 128, rows contiguous.
        weight: `[N, K]`, rows contiguous, dtype of `x`, or FP8 if there are scales. Not written by
            kernels shortly in front, whose end one row does not wait for: see
            `checks.wait_in_front`.
        bias: `[N]`, dtype of `x`; None for none.
        config: shape of the programs, from `few_rows_choice` or a benchmark; steps are made no
            deeper than a scale's block. A `GemvConfig` is for one row.
        is_gated: `weight` holds `gate` and `up`, F rows each; without bias, scales, splits or
            descriptor.
        scale: float32 scales of an FP8 weight, `[ceil(N / B), ceil(K / B)]`, or `[N, 1]` for B = 0.
        scale_block: B, edge of a scale's block.
        backend: `auto`, `reference` or `triton`.

    Returns:
        `[T, N]`, contiguous, in the dtype of `x`; silu(gate) * up `[T, F]` if gated.
    """
    _check(x, weight, bias, dtype=x.dtype if scale is None else FP8)
    if scale is not None:
        check_scale("weight", weight, scale, block=scale_block)
    if is_gated:
        _check_gated(weight, bias, scale, config)
    if isinstance(config, GemvConfig) and len(x) > 1:
        raise ValueError(f"x must have one row for {config}, got {len(x)}; use a FewRowsConfig.")
    if checks.resolve_backend(backend, tensor=x, kernel=few_rows_kernel) == "reference":
        scales = {"scale": scale, "scale_block": scale_block}
        return few_rows_product_ref(x, weight, bias, is_gated=is_gated, **scales)
    checks.check_kernel_dtype("x", x, kernel=few_rows_kernel)
    for name, tensor in (("x", x), ("weight", weight)):
        checks.check_last_dim_contiguous(name, tensor)
    scale = None if scale is None else scale.contiguous()
    out = x.new_empty(len(x), len(weight) // 2 if is_gated else len(weight))
    if out.numel() == 0:
        return out
    if isinstance(config, GemvConfig):
        scales = {"scale": scale, "scale_block": scale_block}
        launch_gemv(x, weight, bias, out=out, config=config, is_gated=is_gated, **scales)
        return out
    config = config._replace(block_k=fitting_depth(config.block_k, scale_block))
    num_tiles = -(-len(weight) // config.block_n)
    num_splits = choose_num_splits(num_tiles, weight.shape[1], config=config)
    is_split = num_splits > 1
    with checks.launch_device(x):
        few_rows_kernel[(num_tiles, num_splits)](
            x,
            weight,
            _tiles(weight, config) if config.uses_descriptor else None,
            scale,
            bias,
            out,
            x.new_empty(num_splits, *out.shape, dtype=torch.float32) if is_split else None,
            checks.arrivals(x.device) if is_split else None,
            len(x),
            out.shape[1],
            weight.shape[1],
            x.stride(0),
            weight.stride(0),
            num_splits,
            **few_rows_constants(
                len(x),
                weight.shape[1],
                dtype=weight.dtype,
                config=config,
                is_gated=is_gated,
                scale_block=scale_block,
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **checks.overlapping(x.device),
        )
    return out


def choose_num_splits(num_tiles: int, depth: int, *, config: FewRowsConfig) -> int:
    """Programs that share the K of a tile: as many as bring `programs_per_sm`, at least one."""
    num_programs = config.programs_per_sm * _NUM_SMS
    num_steps = -(-depth // config.block_k)
    most = 1 if num_tiles > checks.MAX_SHARED_TILES else num_steps
    return max(1, min(num_programs // num_tiles, most))


def few_rows_constants(
    num_rows: int,
    depth: int,
    *,
    dtype: torch.dtype,
    config: FewRowsConfig,
    is_gated: bool,
    scale_block: int = 0,
) -> dict[str, int | bool]:
    """Compile-time arguments of the kernel but `OVERLAPS`, by name; `dtype` is the weight's."""
    return {
        "EVEN_DEPTH": depth % config.block_k == 0,
        "BLOCK_T": max(8, 1 << (num_rows - 1).bit_length()),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "LINE": LINE_BYTES // dtype.itemsize,
        "IS_GATED": is_gated,
        "SCALE_BLOCK": scale_block,
        "NUM_EARLY_LINES": NUM_EARLY_LINES,
    }


def _tiles(weight: Tensor, config: FewRowsConfig) -> TensorDescriptor:
    """Descriptor of the weight's tiles, which must start at multiples of 16 bytes."""
    stride_bytes = weight.stride(0) * weight.element_size()
    if stride_bytes % 16 or weight.data_ptr() % 16:
        raise ValueError(
            "weight rows must start at multiples of 16 bytes for a config with uses_descriptor, "
            f"got a stride of {stride_bytes} bytes; use another config or a copy of the weight."
        )
    return TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> None:
    checks.check_rank("x", x, letters="[T, K]")
    checks.check_rank("weight", weight, letters="[N, K]")
    checks.check_shape("weight", weight, shape=(weight.shape[0], x.shape[1]), letters="[N, K]")
    if len(x) > MAX_ROWS:
        raise ValueError(
            f"x must have at most {MAX_ROWS} rows, got {len(x)}; use torch.nn.functional.linear."
        )
    checks.check_dtype("weight", weight, dtype=dtype)
    checks.check_device("weight", weight, device=x.device)
    if bias is not None:
        checks.check_shape("bias", bias, shape=(len(weight),), letters="[N]")
        checks.check_dtype("bias", bias, dtype=x.dtype)
        checks.check_device("bias", bias, device=x.device)


def _check_gated(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, config: FewRowsConfig | GemvConfig
) -> None:
    has_more = bias is not None or scale is not None
    is_plain = isinstance(config, GemvConfig) or not (
        config.programs_per_sm or config.uses_descriptor
    )
    if len(weight) % 2 or has_more or not is_plain:
        raise ValueError(
            "a gated product needs an even number of weight rows, no bias, no scales, and a config "
            f"without splits and descriptor, got {len(weight)} rows, bias or scales {has_more} and "
            f"{config}; use is_gated=False."
        )
