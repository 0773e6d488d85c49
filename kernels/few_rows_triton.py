"""The Triton program of `few_rows_product`; layout and letters there.

Letters: T rows, N outputs, K depth, S splits of K, F gated outputs.
"""

from __future__ import annotations

from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None


@checks.kernel_jit
def few_rows_kernel(
    x,  # [T, K], rows contiguous
    weight,  # [N, K], rows contiguous
    weight_tiles,  # its descriptor, or None
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
    if OVERLAPS:
        line = begin * BLOCK_K + tl.arange(0, NUM_EARLY_LINES)[None, :] * LINE
        _ask_for(weight_rows + tl.minimum(line, depth - 1))
        tl.extra.cuda.gdc_wait()  # `x` is there, and nobody reads `out` any more
    for step in range(begin, end):
        inside = k < (BLOCK_K if EVEN_DEPTH else depth - step * BLOCK_K)
        if weight_tiles is None:
            w = tl.load(weight_at, mask=inside, other=0.0)
            weight_at += BLOCK_K
        else:
            w = weight_tiles.load([tile * BLOCK_N, step * BLOCK_K])
        a = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        x_at += BLOCK_K
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()  # whoever comes next may overwrite `x`
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
        acc = _silu_product(acc, out.dtype.element_ty, BLOCK_T, BLOCK_N)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_place)


@checks.kernel_jit
def _sum_parts(at, num_splits, stride_split, is_place):
    """Parts of a tile, added up in the order of K; `.cg` reads past this multiprocessor's cache."""
    acc = tl.load(at, mask=is_place, other=0.0, cache_modifier=".cg")
    for _ in range(1, num_splits):
        at += stride_split
        acc += tl.load(at, mask=is_place, other=0.0, cache_modifier=".cg")
    return acc


@checks.kernel_jit
def _silu_product(acc, dtype: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up `[BLOCK_N / 2, BLOCK_T]` of a tile, both rounded as a product of its own."""
    halves = tl.permute(tl.reshape(acc.to(dtype), [2, BLOCK_N // 2, BLOCK_T]), (1, 2, 0))
    gate, up = tl.split(halves)
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@checks.kernel_jit
def _ask_for(lines):
    """Have the cache lines at some addresses brought into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
