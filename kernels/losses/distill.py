"""Distillation of several draft depths through one frozen lm_head, in chunks of rows.

A row is a position u of the text. The teacher's distribution there, for the next token, is what
every depth d is compared with at its anchor t = u - d, and the label x_{u+1} is the same too. So a
chunk of positions needs ONE teacher product, whatever the number of depths:

    per chunk   teacher_logits = teacher @ lm_head.T
      per depth logits = rows_d @ lm_head.T;  statistics;  gradient in the logits' own memory
                grad_d = gradient @ lm_head                       (2 + 4k) D V FLOPs a position

Anchoring the chunks at u instead of t keeps them disjoint: no row is projected twice. Logits are
dropped with their chunk, so memory is two chunks of `[C, V]`, whatever U and k are. The gradient is
that of the plain sum of each row's loss; the caller scales rows, which commutes with the product.
A chunk's logits are read twice: `summarise_rows`, one program a row with a running maximum, gives
log-sum-exp, label logit and argmax, and `distill_rows` needs the first.

Half-precision products accumulate and end in float32: divergences of bfloat16 logits have gradient
errors of several per cent.
Letters: U positions, C positions of a chunk, k depths, D hidden, V vocabulary.
Source: chunked loss with the gradient made in the forward pass as in Liger's fused linear losses;
online softmax (Milakov and Gimelshein, arXiv:1805.02867); the shared teacher is our derivation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.losses.distill_rows import Divergence, Mixture, distill_rows
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

BLOCK_V = 2048
NUM_WARPS = 8


class RowSummary(NamedTuple):
    """What one look at a chunk of logits gives, each `[C]`."""

    lse: Tensor  # log-sum-exp, dtype of the logits
    label_logit: Tensor  # dtype of the logits
    argmax: Tensor  # int64


def summarise_rows_ref(logits: Tensor, *, labels: Tensor) -> RowSummary:
    """Plain PyTorch, see `summarise_rows`; any float dtype, any device."""
    return RowSummary(
        lse=torch.logsumexp(logits, dim=-1),
        label_logit=logits.gather(1, labels[:, None])[:, 0],
        argmax=logits.argmax(dim=-1),
    )


@checks.kernel_jit
def _summarise_kernel(
    logits,  # [C, V] float32
    labels,  # [C] int64
    lse,  # [C] float32, written
    label_logit,  # [C] float32, written
    argmax,  # [C] int64, written
    vocab_size,
    stride_logits,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride_logits
    # Finite, so that a tile of -inf does not make -inf - (-inf).
    highest = tl.full((), -3.0e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int64)
    for start in range(0, vocab_size, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        inside = columns < vocab_size
        values = tl.load(base + columns, mask=inside, other=float("-inf"))
        tile_max, tile_best = tl.max(values, axis=0, return_indices=True)
        best = tl.where(tile_max > highest, start + tile_best, best)
        new_highest = tl.maximum(highest, tile_max)
        total = total * tl.exp(highest - new_highest)
        total += tl.sum(tl.exp(values - new_highest), axis=0)
        highest = new_highest
    tl.store(lse + row, highest + tl.log(total))
    tl.store(label_logit + row, tl.load(base + tl.load(labels + row)))
    tl.store(argmax + row, best)


def summarise_rows(logits: Tensor, *, labels: Tensor, backend: str = "auto") -> RowSummary:
    """Log-sum-exp, label logit and argmax of each row.

    Args:
        logits: `[C, V]`, contiguous in V; float32 for the kernel.
        labels: `[C]` int64 in [0, V).
        backend: `auto`, `reference` or `triton`.
    """
    if checks.resolve_backend(backend, tensor=logits, kernel=_summarise_kernel) == "reference":
        return summarise_rows_ref(logits, labels=labels)
    checks.check_dtype("logits", logits, dtype=torch.float32)
    checks.check_last_dim_contiguous("logits", logits)
    checks.check_shape("labels", labels, shape=(len(logits),), letters="[C]")
    num_rows, vocab_size = logits.shape
    empty = (logits.new_empty(num_rows), logits.new_empty(num_rows), torch.empty_like(labels))
    summary, sizes = RowSummary(*empty), (vocab_size, logits.stride(0))
    with checks.launch_device(logits):
        _summarise_kernel[(num_rows,)](
            logits, labels, *summary, *sizes, BLOCK_V=BLOCK_V, num_warps=NUM_WARPS
        )
    return summary


LOGITS_BYTES = 640 * 10**6  # draft and teacher logits of a chunk; 512 rows at V = 151 552
_CPU_CHUNK_ROWS = 1024


class DistillResult(NamedTuple):
    """Statistics of every row and gradients of every depth."""

    nll: Tensor  # [k, U] -log q(label), float32 or wider
    kl: Tensor  # [k, U] KL(teacher || draft); 0 without a teacher
    tv: Tensor  # [k, U] total variation; 1 - tv is the chance that a sampled draft is accepted
    is_hit: Tensor  # [k, U] bool, the argmax is the label
    grads: list[list[Tensor]]  # for each mixture k gradients [U, D]; empty when not asked for


@torch.no_grad()
def distill(
    rows: Sequence[Tensor],
    *,
    labels: Tensor,
    valid: Tensor,
    lm_head: Tensor,
    teacher: Tensor | None = None,
    mixtures: Sequence[Mixture] = (),
    eta: float = 3.0,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> DistillResult:
    """Statistics of k depths over U positions, and a gradient in the rows for each mixture.

    Args:
        rows: k times `[U, D]` draft hidden states after the module's norm; row u of depth d belongs
            to anchor u - d.
        labels: `[U]` int64 token after each position, in [0, V).
        valid: `[k, U]` bool; other rows count nothing and have gradient 0.
        lm_head: `[V, D]` frozen output embedding.
        teacher: `[U, D]` the target's hidden states after its final norm; None when no mixture
            needs them.
        mixtures: weights of the terms; each costs one product more per depth and chunk.
        eta: sharpness of lk.
        chunk_rows: C; None: what fits in `LOGITS_BYTES`.
        backend: of the row kernels: `auto`, `reference` or `triton`.
    """
    num_depths, num_rows = valid.shape
    chunk = chunk_rows or default_chunk_rows(lm_head)
    wide = torch.promote_types(lm_head.dtype, torch.float32)
    nll, kl, tv = (labels.new_zeros(valid.shape, dtype=wide) for _ in range(3))
    is_hit = torch.zeros_like(valid)
    grads = [[torch.empty_like(row) for row in rows] for _ in mixtures]
    weight = _wide_weight(lm_head)
    for start in range(0, num_rows, chunk):
        part = slice(start, min(start + chunk, num_rows))
        teacher_logits = teacher_lse = None
        if teacher is not None:
            teacher_logits = _project(teacher[part], weight=weight)
            teacher_lse = summarise_rows(teacher_logits, labels=labels[part], backend=backend).lse
        for depth in range(num_depths):
            logits = _project(rows[depth][part], weight=weight)
            summary = summarise_rows(logits, labels=labels[part], backend=backend)
            is_valid = valid[depth, part]
            nll[depth, part] = torch.where(is_valid, summary.lse - summary.label_logit, 0)
            is_hit[depth, part] = is_valid & (summary.argmax == labels[part])
            distill_chunk = functools.partial(
                distill_rows,
                logits,
                lse=summary.lse,
                labels=labels[part],
                valid=is_valid,
                eta=eta,
                teacher_logits=teacher_logits,
                teacher_lse=teacher_lse,
                backend=backend,
            )
            outputs = [group[depth][part] for group in grads]
            divergence = _write_gradients(
                distill_chunk, logits, mixtures=mixtures, lm_head=lm_head, outputs=outputs
            )
            kl[depth, part], tv[depth, part] = divergence
            del logits, distill_chunk  # before the next depth's are made
    return DistillResult(nll, kl, tv, is_hit, grads)


def default_chunk_rows(lm_head: Tensor) -> int:
    """Rows of a chunk: a multiple of 128 whose two float32 logits fit in `LOGITS_BYTES`."""
    if not lm_head.is_cuda:
        return _CPU_CHUNK_ROWS
    return max(128, LOGITS_BYTES // (8 * len(lm_head)) // 128 * 128)


def _write_gradients(
    distill_chunk: Callable[..., Divergence],
    logits: Tensor,
    *,
    mixtures: Sequence[Mixture],
    lm_head: Tensor,
    outputs: list[Tensor],
) -> Divergence:
    """Divergences `[C]`; the gradient in the rows goes to `outputs`, `[C, D]` for each mixture.

    The last mixture's gradient in the logits overwrites them.
    """
    if not mixtures:
        return distill_chunk(mixture=Mixture(), grad=None)
    in_place = _gradient_view(logits, dtype=lm_head.dtype)
    for mixture, output in zip(mixtures[:-1], outputs[:-1], strict=True):
        grad = torch.empty(logits.shape, dtype=lm_head.dtype, device=logits.device)
        distill_chunk(mixture=mixture, grad=grad)
        torch.mm(grad, lm_head, out=output)
    divergence = distill_chunk(mixture=mixtures[-1], grad=in_place)
    torch.mm(in_place, lm_head, out=outputs[-1])
    return divergence


def _gradient_view(logits: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`[C, V]` of `dtype` over the first bytes of each row of `logits`, for a gradient in place."""
    return logits.view(dtype)[:, : logits.shape[1]]


def _wide_weight(lm_head: Tensor) -> Tensor:
    """What `_project` multiplies with: a CPU has no half-precision product that ends in float32."""
    if lm_head.is_cuda:
        return lm_head
    return lm_head.to(torch.promote_types(lm_head.dtype, torch.float32))


def _project(rows: Tensor, *, weight: Tensor) -> Tensor:
    """Logits `[C, V]`, float32 or wider."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    return rows.to(weight.dtype) @ weight.T
