"""Cross-entropy of many rows through one frozen lm_head, in chunks, gradient made on the way.

    per chunk   logits = rows @ lm_head.T;  loss, hit and gradient in the logits' own memory
                grads  = gradient @ lm_head                                   4 D V FLOPs a row

    nll = log sum_v exp(s_v) - s_y          gradient in s, times `weight`: exp(s - lse) - onehot(y)

Rows of all depths are one list, so that no chunk is cut short by the end of a depth. Chunks fill
whole waves of the second product: it has few tiles, D / 256 for 128 rows, and a last wave with few
of them costs as much as a full one.

Between the products `cross_entropy_rows` runs one program a row: it reads the row, and reads it
again for the gradient, by then from the cache (rows in work take tens of megabytes). Holding the
row in registers instead left room for one program on a multiprocessor, and was slower. Arithmetic
is float32 whatever the logits' dtype is.

With `half_logits` the products run in float16 and logits and their gradient take two bytes instead
of four: for D below some thousands the product is as slow as what it writes. float16 and not
bfloat16, because a logit below 16 is then off by at most 2^-8 instead of 2^-5. Relative error of
the gradient at D = 768, V = 16384, label probabilities .5, .95 and .98: float32 logits and a
bfloat16 gradient 2.0e-3, 2.2e-3, 2.5e-3; float16 1.2e-3, 2.2e-3, 4.9e-3; bfloat16 logits 9e-3,
17e-3, 44e-3. Logits beyond 65,504 give a loss that is not finite.
Letters: R rows, C rows of a chunk, D hidden, V vocabulary; in `gather_rows` U rows read.
Source: gradient made in the forward pass as in Liger's fused linear cross-entropy; online softmax
(Milakov and Gimelshein, arXiv:1805.02867), here one a lane.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.losses.distill import (
    LOGITS_BYTES,
    _gradient_view,
    _project,
    _wide_weight,
    default_chunk_rows,
)
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    triton = tl = None

# The fastest of eight shapes on an H100 for 49,152 logits and more, 4 % behind for 16,384.
# Many warps: fewer rows at a time, of which more may still be in the L2 cache when read again.
BLOCK_V = 4096
NUM_WARPS = 16
ROWS_PER_PROGRAM, MAX_BLOCK_D, GATHER_WARPS = 4, 2048, 4  # of `gather_rows`


def cross_entropy_rows_ref(
    logits: Tensor,
    *,
    labels: Tensor,
    valid: Tensor,
    nll: Tensor,
    is_hit: Tensor,
    grad: Tensor | None = None,
    weight: float = 1.0,
) -> None:
    """Plain PyTorch, see `cross_entropy_rows`; any float dtype, any device."""
    wide = logits.to(nll.dtype)
    lse = torch.logsumexp(wide, dim=-1)
    nll.copy_(torch.where(valid, lse - wide.gather(1, labels[:, None])[:, 0], 0))
    is_hit.copy_(valid & (logits.argmax(dim=-1) == labels))
    if grad is not None:
        slope = weight * torch.exp(wide - lse[:, None])
        slope[torch.arange(len(labels), device=labels.device), labels] -= weight
        grad.copy_(slope.masked_fill_(~valid[:, None], 0))


@checks.kernel_jit
def _cross_entropy_kernel(
    logits,  # [C, V]
    grad,  # [C, V], written; may start at the same address as `logits`
    labels,  # [C] int64
    valid,  # [C] bool
    nll,  # [C] float32, written
    is_hit,  # [C] bool, written
    vocab_size,
    stride_logits,
    stride_grad,
    weight,
    WRITES_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride_logits
    target = grad + row * stride_grad
    lanes = tl.arange(0, BLOCK_V)
    if tl.load(valid + row) == 0:
        tl.store(nll + row, 0.0)
        tl.store(is_hit + row, False)
        if WRITES_GRAD:
            for start in range(0, vocab_size, BLOCK_V):
                columns = start + lanes
                zeros = tl.zeros((BLOCK_V,), grad.dtype.element_ty)
                tl.store(target + columns, zeros, mask=columns < vocab_size)
        return
    label = tl.load(labels + row).to(tl.int32)
    label_logit = tl.load(source + label).to(tl.float32)
    # A maximum and a sum a lane: threads meet once a row, and an element costs one power.
    lane_max = tl.full((BLOCK_V,), -3.0e38, tl.float32)  # finite: no -inf - (-inf)
    lane_sum = tl.zeros((BLOCK_V,), tl.float32)
    lane_start = tl.zeros((BLOCK_V,), tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        columns = start + lanes
        values = tl.load(
            source + columns,
            mask=columns < vocab_size,
            other=float("-inf"),
            eviction_policy="evict_last",
        )
        above = values.to(tl.float32) - lane_max
        power = tl.exp(-tl.abs(above))
        is_new = above > 0
        lane_sum = tl.where(is_new, lane_sum * power + 1.0, lane_sum + power)
        lane_start = tl.where(is_new, start, lane_start)
        lane_max = tl.where(is_new, values.to(tl.float32), lane_max)
    highest = tl.max(lane_max, axis=0)
    best = tl.min(tl.where(lane_max == highest, lane_start + lanes, vocab_size), axis=0)
    total = tl.sum(lane_sum * tl.exp(lane_max - highest), axis=0)
    tl.store(nll + row, highest + tl.log(total) - label_logit)
    tl.store(is_hit + row, best == label)
    if WRITES_GRAD:
        scale = weight / total
        num_tiles = tl.cdiv(vocab_size, BLOCK_V)
        for index in range(0, num_tiles):
            tile = index
            if logits.dtype == grad.dtype:
                tile = num_tiles - 1 - index  # what was read last is nearest
            columns = tile * BLOCK_V + lanes
            inside = columns < vocab_size
            values = tl.load(
                source + columns, mask=inside, other=float("-inf"), eviction_policy="evict_first"
            )
            slope = tl.exp(values.to(tl.float32) - highest) * scale
            slope = tl.where(columns == label, slope - weight, slope)
            # A narrower gradient overlaps logits that other threads of this tile still read, and
            # backwards it would those of tiles to come.
            tl.debug_barrier()
            tl.store(target + columns, slope.to(grad.dtype.element_ty), mask=inside)


def cross_entropy_rows(
    logits: Tensor,
    *,
    labels: Tensor,
    valid: Tensor,
    nll: Tensor,
    is_hit: Tensor,
    grad: Tensor | None = None,
    weight: float = 1.0,
    backend: str = "auto",
) -> None:
    """Loss and hit of each row, and its gradient, all written in place.

    Args:
        logits: `[C, V]`, contiguous in V.
        labels: `[C]` int64 in [0, V).
        valid: `[C]` bool; other rows give zeros, whatever they hold.
        nll: `[C]` float32 (or wider for the reference), written: -log q(label).
        is_hit: `[C]` bool, written: the first largest logit is the label's.
        grad: `[C, V]`, written: `weight` (q - onehot(label)); None for statistics alone. It may
            share the first bytes of each row with `logits`, if its elements are not wider.
        weight: of the loss in the gradient.
        backend: `auto`, `reference` or `triton`.
    """
    num_rows, vocab_size = logits.shape
    vectors = {"labels": labels, "valid": valid, "nll": nll, "is_hit": is_hit}
    for name, tensor in vectors.items():
        checks.check_shape(name, tensor, shape=(num_rows,), letters="[C]")
    if checks.resolve_backend(backend, tensor=logits, kernel=_cross_entropy_kernel) == "reference":
        cross_entropy_rows_ref(logits, **vectors, grad=grad, weight=weight)
        return
    _check_kernel_tensors(logits, vectors=vectors, grad=grad)
    if not num_rows:
        return
    written = logits if grad is None else grad
    with checks.launch_device(logits):
        _cross_entropy_kernel[(num_rows,)](
            logits,
            written,
            labels,
            valid,
            nll,
            is_hit,
            vocab_size,
            logits.stride(0),
            written.stride(0),
            weight,
            WRITES_GRAD=grad is not None,
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
        )


def _check_kernel_tensors(
    logits: Tensor, *, vectors: dict[str, Tensor], grad: Tensor | None
) -> None:
    checks.check_kernel_dtype("logits", logits, kernel=_cross_entropy_kernel)
    checks.check_last_dim_contiguous("logits", logits)
    wanted = (torch.int64, torch.bool, torch.float32, torch.bool)
    for (name, tensor), dtype in zip(vectors.items(), wanted, strict=True):
        checks.check_dtype(name, tensor, dtype=dtype)
        checks.check_device(name, tensor, device=logits.device)
        checks.check_last_dim_contiguous(name, tensor)
    if grad is not None:
        checks.check_kernel_dtype("grad", grad, kernel=_cross_entropy_kernel)
        checks.check_last_dim_contiguous("grad", grad)
        checks.check_shape("grad", grad, shape=tuple(logits.shape), letters="[C, V]")
        if grad.dtype.itemsize > logits.dtype.itemsize:
            raise ValueError(
                f"grad must not be wider than the logits' {logits.dtype}, got {grad.dtype}; "
                "give both the same dtype."
            )


_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of the library's product on one multiprocessor


class CrossEntropyResult(NamedTuple):
    """Statistics and gradients of every row."""

    nll: Tensor  # [R] -log q(label), float32 or wider; 0 where not valid
    is_hit: Tensor  # [R] bool, the argmax is the label
    grads: Tensor | None  # [R, D] of `weight` times the sum of losses, dtype of the products


@torch.no_grad()
def cross_entropy(
    rows: Tensor,
    *,
    labels: Tensor,
    valid: Tensor,
    lm_head: Tensor,
    weight: float | None = None,
    half_logits: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> CrossEntropyResult:
    """Loss of each row, and its gradient in the row.

    Args:
        rows: `[R, D]` hidden states after the last norm.
        labels: `[R]` int64 in [0, V).
        valid: `[R]` bool; other rows count nothing and have gradient 0.
        lm_head: `[V, D]` frozen output embedding.
        weight: of the loss in the gradient; None for statistics alone.
        half_logits: products, logits and gradients in float16; for rows of half precision on a GPU
            (and any float16 row). It costs a copy of `lm_head` unless that is float16.
        chunk_rows: C; None: what `wave_rows` says.
        backend: of the row kernel: `auto`, `reference` or `triton`.
    """
    checks.check_rank("rows", rows, letters="[R, D]")
    is_narrow = half_logits and (rows.is_cuda or rows.dtype == torch.float16)
    if is_narrow:
        lm_head = lm_head.to(torch.float16)
    wide = torch.promote_types(lm_head.dtype, torch.float32)
    itemsize = lm_head.dtype.itemsize if is_narrow else wide.itemsize
    chunk = chunk_rows or wave_rows(lm_head, bytes_per_logit=itemsize)
    nll, is_hit = rows.new_empty(len(rows), dtype=wide), torch.empty_like(valid)
    grads = None if weight is None else torch.empty_like(rows, dtype=lm_head.dtype)
    projection = lm_head if is_narrow else _wide_weight(lm_head)
    for start in range(0, len(rows), chunk):
        part = slice(start, min(start + chunk, len(rows)))
        chunk_of_rows = rows[part].to(lm_head.dtype)
        if is_narrow:
            logits = chunk_of_rows @ projection.T
        else:
            logits = _project(chunk_of_rows, weight=projection)
        grad = None if grads is None else _gradient_view(logits, dtype=lm_head.dtype)
        cross_entropy_rows(
            logits,
            labels=labels[part],
            valid=valid[part],
            nll=nll[part],
            is_hit=is_hit[part],
            grad=grad,
            weight=1.0 if weight is None else weight,
            backend=backend,
        )
        if grads is not None and grad is not None:
            torch.mm(grad, lm_head, out=grads[part])
        del logits, grad  # before the next chunk's are made
    return CrossEntropyResult(nll, is_hit, grads)


def wave_rows(lm_head: Tensor, *, bytes_per_logit: int) -> int:
    """Rows of a chunk: whole waves of tiles of the product with `[V, D]`, in `LOGITS_BYTES`.

    Example: D = 768 has 3 tiles for 128 rows, so 132 multiprocessors take 44 of them at a time,
    5,632 rows.
    """
    if not lm_head.is_cuda:
        return default_chunk_rows(lm_head)
    vocab_size, hidden_size = lm_head.shape
    tiles = -(-hidden_size // _TILE_COLUMNS)
    num_processors = checks.num_multiprocessors(lm_head.device)
    wave = max(1, num_processors // tiles) * _TILE_ROWS
    fitting = LOGITS_BYTES // (bytes_per_logit * vocab_size)
    if fitting >= wave:
        return fitting // wave * wave
    return max(_TILE_ROWS, fitting // _TILE_ROWS * _TILE_ROWS)


def gather_rows_ref(
    values: Tensor, *, index: Tensor, out: Tensor, scale: Tensor | None = None
) -> None:
    """Plain PyTorch, see `gather_rows`; any float dtype, any device."""
    if not len(values):
        out.zero_()
        return
    found = values.index_select(0, index.clamp(min=0))
    if scale is not None:
        found = found * scale[:, None]
    out.copy_(found.masked_fill_(index[:, None] < 0, 0))


@checks.kernel_jit
def _gather_kernel(
    values,  # [U, D]
    index,  # [R] int64
    scale,  # [R] float32; not read without HAS_SCALE
    out,  # [R, D], written
    num_rows,
    hidden_size,
    stride_values,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = rows < num_rows
    source = tl.load(index + rows, mask=exists, other=-1)
    inside = columns < hidden_size
    mask = (source >= 0)[:, None] & inside[None, :]
    found = tl.load(values + source[:, None] * stride_values + columns[None, :], mask=mask, other=0)
    if HAS_SCALE:
        factor = tl.load(scale + rows, mask=exists & (source >= 0), other=0.0)
        found = found.to(tl.float32) * factor[:, None]
    target = out + rows[:, None] * hidden_size + columns[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


def gather_rows(
    values: Tensor,
    *,
    index: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the picked rows, scaled and cast: `out[r] = scale[r] values[index[r]]`.

    The multi-depth loss picks the drafts' rows that have a label, and brings their gradients back
    to the anchors. An anchor has at most one row at a depth, so nothing is added by atomics.

    Args:
        values: `[U, D]`, contiguous in D.
        index: `[R]` int64 below U; negative ones give zeros, whatever `values` and `scale` hold.
        out: `[R, D]`, contiguous, any float dtype, written.
        scale: `[R]` float32, or the dtype of `values` for the reference; None for 1.
        backend: `auto`, `reference` or `triton`.
    """
    checks.check_rank("values", values, letters="[U, D]")
    checks.check_rank("index", index, letters="[R]")
    shape = (len(index), values.shape[1])
    checks.check_shape("out", out, shape=shape, letters="[R, D]")
    if scale is not None:
        checks.check_shape("scale", scale, shape=shape[:1], letters="[R]")
    if checks.resolve_backend(backend, tensor=values, kernel=_gather_kernel) == "reference":
        gather_rows_ref(values, index=index, out=out, scale=scale)
        return
    _check_gathered(values, index=index, out=out, scale=scale)
    if not out.numel():
        return
    block = min(MAX_BLOCK_D, triton.next_power_of_2(shape[1]))
    grid = (triton.cdiv(shape[0], ROWS_PER_PROGRAM), triton.cdiv(shape[1], block))
    with checks.launch_device(values):
        _gather_kernel[grid](
            values,
            index,
            index if scale is None else scale,
            out,
            *shape,
            values.stride(0),
            HAS_SCALE=scale is not None,
            ROWS=ROWS_PER_PROGRAM,
            BLOCK_D=block,
            num_warps=GATHER_WARPS,
        )


def _check_gathered(values: Tensor, *, index: Tensor, out: Tensor, scale: Tensor | None) -> None:
    checks.check_dtype("index", index, dtype=torch.int64)
    for name, tensor in (("values", values), ("out", out)):
        checks.check_kernel_dtype(name, tensor, kernel=_gather_kernel)
    for name, tensor in {"values": values, "index": index, "out": out, "scale": scale}.items():
        if tensor is not None:
            checks.check_device(name, tensor, device=values.device)
            checks.check_last_dim_contiguous(name, tensor)
    if scale is not None:
        checks.check_dtype("scale", scale, dtype=torch.float32)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}.")
