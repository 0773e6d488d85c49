"""Losses and acceptance statistics of draft logits, and their gradient, row by row.

    lse = log sum_v exp(s_v)            q = exp(s - lse)            p = exp(t - teacher_lse)
    nll = lse - s_y        kl = sum_v p (log p - log q)             tv = sum_v |p - q| / 2

    term    gradient in the draft logits s
    ce      q - onehot(y)
    kl      q - p
    tv      q (g - <q, g>),  g = sign(q - p) / 2
    lk      lambda * (kl row) + (1 - lambda) * (tv row),  lambda = exp(-eta (1 - tv)), held constant

Where it sits: `distill` calls it on each chunk of logits, after `summarise_rows`. One program a
row, looping over vocabulary tiles: it reads draft and teacher rows, sums kl and tv in float32 and
writes the gradient, which may lie in the memory of the draft logits. tv and lk need <q, g> before
they write, and read the rows once more.
Letters: C rows of a chunk, V vocabulary.
Source: lk from LK losses (arXiv:2602.23881); acceptance 1 - tv Leviathan et al. (arXiv:2211.17192).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mtp_research.kernels import checks
from torch import Tensor

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    tl = None

BLOCK_V = 2048
NUM_WARPS = 8


class Mixture(NamedTuple):
    """Weights of the terms of a row's loss."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0


class Divergence(NamedTuple):
    """Kullback-Leibler divergence from draft to teacher and total variation, each `[C]`."""

    kl: Tensor
    tv: Tensor


def distill_rows_ref(
    logits: Tensor,
    *,
    lse: Tensor,
    labels: Tensor,
    valid: Tensor,
    mixture: Mixture,
    eta: float,
    grad: Tensor | None,
    teacher_logits: Tensor | None = None,
    teacher_lse: Tensor | None = None,
) -> Divergence:
    """Plain PyTorch, see `distill_rows`; any float dtype, any device."""
    draft = torch.exp(logits - lse[:, None])
    kl = tv = torch.zeros_like(lse)
    total = mixture.ce * draft
    if teacher_logits is not None:
        assert teacher_lse is not None, "teacher logits come with their log-sum-exp"
        log_teacher = teacher_logits - teacher_lse[:, None]
        teacher = torch.exp(log_teacher)
        log_ratio = log_teacher - (logits - lse[:, None])
        kl = torch.where(teacher > 0, teacher * log_ratio, 0).sum(dim=-1)
        half_sign = torch.sign(draft - teacher) / 2
        tv = (draft - teacher).abs().sum(dim=-1) / 2
        kl_weight, tv_weight = _weights(mixture, tv=tv, eta=eta)
        mean = (draft * half_sign).sum(dim=-1, keepdim=True)
        total = (
            total
            + kl_weight[:, None] * (draft - teacher)
            + tv_weight[:, None] * draft * (half_sign - mean)
        )
    if grad is not None:
        total[torch.arange(len(labels), device=labels.device), labels] -= mixture.ce
        grad.copy_(total.masked_fill_(~valid[:, None], 0))
    return Divergence(torch.where(valid, kl, 0), torch.where(valid, tv, 0))


def _weights(mixture: Mixture, *, tv: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    towards_kl = torch.exp(-eta * (1 - tv))
    return mixture.kl + mixture.lk * towards_kl, mixture.tv + mixture.lk * (1 - towards_kl)


@checks.kernel_jit
def _distill_kernel(
    logits,  # [C, V] float32
    teacher_logits,  # [C, V] float32
    grad,  # [C, V], written; may start at the same address as `logits`
    lse,  # [C] float32
    teacher_lse,  # [C] float32
    labels,  # [C] int64
    valid,  # [C] bool
    kl,  # [C] float32, written
    tv,  # [C] float32, written
    vocab_size,
    stride_logits,
    stride_teacher,
    stride_grad,
    weight_ce,
    weight_kl,
    weight_tv,
    weight_lk,
    eta,
    HAS_TEACHER: tl.constexpr,
    HAS_TV: tl.constexpr,  # tv or lk is in the mixture
    WRITES_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride_logits
    teacher_source = teacher_logits + row * stride_teacher
    target = grad + row * stride_grad
    if tl.load(valid + row) == 0:
        tl.store(kl + row, 0.0)
        tl.store(tv + row, 0.0)
        if WRITES_GRAD:
            for start in range(0, vocab_size, BLOCK_V):
                columns = start + tl.arange(0, BLOCK_V)
                zeros = tl.zeros((BLOCK_V,), grad.dtype.element_ty)
                tl.store(target + columns, zeros, mask=columns < vocab_size)
        return
    row_lse = tl.load(lse + row)
    label = tl.load(labels + row)
    teacher_row_lse = tl.load(teacher_lse + row) if HAS_TEACHER else 0.0
    kl_sum = tl.zeros((BLOCK_V,), tl.float32)
    tv_sum = tl.zeros((BLOCK_V,), tl.float32)
    mean_sum = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        inside = columns < vocab_size
        log_draft = tl.load(source + columns, mask=inside, other=float("-inf")) - row_lse
        draft = tl.exp(log_draft)
        slope = weight_ce * tl.where(columns == label, draft - 1.0, draft)
        if HAS_TEACHER:
            log_teacher = tl.load(teacher_source + columns, mask=inside, other=float("-inf"))
            log_teacher -= teacher_row_lse
            teacher = tl.exp(log_teacher)
            kl_sum += tl.where(teacher > 0, teacher * (log_teacher - log_draft), 0.0)
            tv_sum += tl.abs(draft - teacher)
            mean_sum += tl.where(draft > teacher, draft, tl.where(draft < teacher, -draft, 0.0))
            slope += weight_kl * (draft - teacher)
        if WRITES_GRAD and not HAS_TV:
            # A narrower gradient overlaps logits that other threads of this tile still read.
            tl.debug_barrier()
            tl.store(target + columns, slope.to(grad.dtype.element_ty), mask=inside)
    row_tv = tl.sum(tv_sum, axis=0) / 2
    tl.store(kl + row, tl.sum(kl_sum, axis=0))
    tl.store(tv + row, row_tv)
    if WRITES_GRAD and HAS_TV:
        towards_kl = tl.exp(-eta * (1.0 - row_tv))
        row_kl = weight_kl + weight_lk * towards_kl
        row_weight = (weight_tv + weight_lk * (1.0 - towards_kl)) / 2
        mean = tl.sum(mean_sum, axis=0)
        for start in range(0, vocab_size, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            inside = columns < vocab_size
            draft = tl.exp(tl.load(source + columns, mask=inside, other=float("-inf")) - row_lse)
            teacher = tl.load(teacher_source + columns, mask=inside, other=float("-inf"))
            teacher = tl.exp(teacher - teacher_row_lse)
            sign = tl.where(draft > teacher, 1.0, tl.where(draft < teacher, -1.0, 0.0))
            slope = weight_ce * tl.where(columns == label, draft - 1.0, draft)
            slope += row_kl * (draft - teacher) + row_weight * draft * (sign - mean)
            tl.debug_barrier()
            tl.store(target + columns, slope.to(grad.dtype.element_ty), mask=inside)


def distill_rows(
    logits: Tensor,
    *,
    lse: Tensor,
    labels: Tensor,
    valid: Tensor,
    mixture: Mixture,
    eta: float,
    grad: Tensor | None,
    teacher_logits: Tensor | None = None,
    teacher_lse: Tensor | None = None,
    backend: str = "auto",
) -> Divergence:
    """Divergences of each row from its teacher row; the gradient goes to `grad`.

    Args:
        logits: `[C, V]` draft logits; float32 for the kernel.
        lse: `[C]` of `summarise_rows`.
        labels: `[C]` int64 in [0, V).
        valid: `[C]` bool; other rows give zeros, whatever they hold.
        mixture: weights of the terms.
        eta: sharpness of lk.
        grad: `[C, V]`, written in place; None for statistics alone. It may share the first bytes of
            each row with `logits`, if its elements are not wider.
        teacher_logits: `[C, V]`; None leaves kl and tv at 0, and only ce may be asked for.
        teacher_lse: `[C]`.
        backend: `auto`, `reference` or `triton`.
    """
    if teacher_logits is None and any(mixture[1:]):
        raise ValueError(f"kl, tv and lk need teacher_logits, got none for {mixture}")
    arguments = {"lse": lse, "labels": labels, "valid": valid, "mixture": mixture, "eta": eta}
    arguments |= {"grad": grad, "teacher_logits": teacher_logits, "teacher_lse": teacher_lse}
    if checks.resolve_backend(backend, tensor=logits, kernel=_distill_kernel) == "reference":
        return distill_rows_ref(logits, **arguments)
    return _launch_distill(logits, **arguments)


def _launch_distill(
    logits: Tensor,
    *,
    lse: Tensor,
    labels: Tensor,
    valid: Tensor,
    mixture: Mixture,
    eta: float,
    grad: Tensor | None,
    teacher_logits: Tensor | None,
    teacher_lse: Tensor | None,
) -> Divergence:
    checks.check_dtype("logits", logits, dtype=torch.float32)
    for name, tensor in {"logits": logits, "teacher": teacher_logits, "grad": grad}.items():
        if tensor is not None:
            checks.check_last_dim_contiguous(name, tensor)
            checks.check_shape(name, tensor, shape=tuple(logits.shape), letters="[C, V]")
    result = Divergence(torch.empty_like(lse), torch.empty_like(lse))
    teacher = logits if teacher_logits is None else teacher_logits
    written = logits if grad is None else grad
    with checks.launch_device(logits):
        _distill_kernel[(len(logits),)](
            logits,
            teacher,
            written,
            lse,
            lse if teacher_lse is None else teacher_lse,
            labels,
            valid,
            *result,
            logits.shape[1],
            logits.stride(0),
            teacher.stride(0),
            written.stride(0),
            *mixture,
            eta,
            HAS_TEACHER=teacher_logits is not None,
            HAS_TV=bool(mixture.tv or mixture.lk),
            WRITES_GRAD=grad is not None,
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
        )
    return result
