"""Rows for the distillation tests, and their losses by plain autograd in float64."""

from typing import NamedTuple

import torch
from mtp_research.kernels.losses.distill_rows import Mixture
from torch import Tensor
from torch.nn import functional

MIXTURES = {
    "ce": Mixture(ce=1.0),
    "kl": Mixture(kl=1.0),
    "tv": Mixture(tv=1.0),
    "lk": Mixture(lk=1.0),
    "all": Mixture(ce=0.3, kl=0.7, tv=0.4, lk=1.1),
}
ETA = 3.0


class DistillCase(NamedTuple):
    """Hidden states, lm_head, labels and which rows count."""

    rows: list[Tensor]
    teacher: Tensor
    lm_head: Tensor
    labels: Tensor
    valid: Tensor


def distill_case(
    *,
    num_rows: int = 11,
    num_depths: int = 2,
    hidden: int = 16,
    vocab: int = 53,
    dtype: torch.dtype = torch.float64,
    noise: float = 0.5,
    seed: int = 0,
) -> DistillCase:
    """Draft rows near the teacher's, the first row of every depth but the first not valid."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    teacher = torch.randn(num_rows, hidden, **draw)
    rows = [teacher + noise * torch.randn(num_rows, hidden, **draw) for _ in range(num_depths)]
    labels = torch.randint(0, vocab, (num_rows,), generator=generator)
    valid = torch.ones(num_depths, num_rows, dtype=torch.bool)
    valid[1:, :1] = False
    lm_head = torch.randn(vocab, hidden, **draw)
    return DistillCase(
        [row.to(dtype) for row in rows], teacher.to(dtype), lm_head.to(dtype), labels, valid
    )


def plain_terms(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Each term of each row, `[C]`, as its definition reads; differentiable."""
    log_draft, log_teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    kl = (log_teacher.exp() * (log_teacher - log_draft)).sum(-1)
    tv = (log_teacher.exp() - log_draft.exp()).abs().sum(-1) / 2
    towards_kl = torch.exp(-ETA * (1 - tv)).detach()
    ce = functional.cross_entropy(logits, labels, reduction="none")
    return {"ce": ce, "kl": kl, "tv": tv, "lk": towards_kl * kl + (1 - towards_kl) * tv}


def plain_distill(case: DistillCase, mixture: Mixture) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Terms `[k, U]` and gradients k times `[U, D]` by autograd in float64, invalid rows at 0."""
    rows = [row.double().clone().requires_grad_() for row in case.rows]
    head, teacher = case.lm_head.double(), case.teacher.double()
    terms = [plain_terms(row @ head.T, teacher @ head.T, case.labels) for row in rows]
    stacked = {
        name: torch.where(case.valid, torch.stack([term[name] for term in terms]), 0)
        for name in mixture._fields
    }
    total = sum(weight * stacked[name].sum() for name, weight in mixture._asdict().items())
    return stacked, list(torch.autograd.grad(total, rows))
