"""Cross-entropy of rows of logits in one launch: loss, hit, and the gradient over the logits.

    nll = log sum_v exp(s_v) - s_y          gradient in s, times `weight`: exp(s - lse) - onehot(y)

Where it sits: between the two products of `cross_entropy`, which runs it on each chunk of logits.
One program a row: it reads the row, and reads it again for the gradient, by then from the cache
(rows in work take tens of megabytes). Holding the row in registers instead left room for one
program on a multiprocessor, and was slower. Arithmetic is float32 whatever the logits' dtype is.
Letters: C rows of a chunk, V vocabulary.
Source: online softmax (Milakov and Gimelshein, arXiv:1805.02867), here one a lane.
"""

from __future__ import annotations

import torch
from mtp_research.kernels import checks
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

BLOCK_V = 2048
NUM_WARPS = 8  # eight logits a thread, six programs a multiprocessor


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
        values = tl.load(source + columns, mask=columns < vocab_size, other=float("-inf"))
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
        for start in range(0, vocab_size, BLOCK_V):
            columns = start + lanes
            inside = columns < vocab_size
            values = tl.load(source + columns, mask=inside, other=float("-inf"))
            slope = tl.exp(values.to(tl.float32) - highest) * scale
            slope = tl.where(columns == label, slope - weight, slope)
            # A narrower gradient overlaps logits that other threads of this tile still read.
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

    Raises:
        ValueError: shapes or dtypes disagree, or the backend cannot run the tensors.
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
