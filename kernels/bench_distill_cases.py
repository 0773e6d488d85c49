"""Inputs and contenders of `bench_distill`: the distillation here, Liger's, and eager PyTorch.

Each contender gives the loss of every depth (a mean over rows) and its gradient in the rows of that
depth, scaled as the sum over rows.
Letters: T rows, k depths, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from mtp_research.kernels.losses.distill import distill
from mtp_research.kernels.losses.distill_rows import Mixture, distill_rows_ref
from torch import Tensor
from torch.nn import functional

MIXTURES = {"ce": Mixture(ce=1.0), "kl": Mixture(kl=1.0), "lk": Mixture(lk=1.0)}
ETA = 3.0
_LOGIT_STD = 4.0
_NUM_REFERENCE_ROWS = 128
_NUM_CALIBRATION_ROWS = 64


class Inputs(NamedTuple):
    """What every contender reads.

    Attributes:
        rows: k times `[T, D]`.
        teacher: `[T, D]`.
        lm_head: `[V, D]`.
        labels: `[T]` int64.
        alpha: mean acceptance of a sampled draft, measured.
    """

    rows: list[Tensor]
    teacher: Tensor
    lm_head: Tensor
    labels: Tensor
    alpha: float

    def depths(self, num_depths: int) -> Inputs:
        """The first depths only."""
        return self._replace(rows=self.rows[:num_depths])


class Outcome(NamedTuple):
    """Mean loss of each depth `[k]` and the gradients of its sum, `[T, D]` each."""

    losses: Tensor
    grads: list[Tensor]

    @property
    def num_rows(self) -> int:
        """Rows that have a gradient."""
        return len(self.grads[0])


def make_inputs(
    *, rows: int, hidden: int, vocab: int, num_depths: int, alpha: float, seed: int
) -> Inputs:
    """Random rows in bfloat16 on a GPU, float32 on a CPU; drafts near the teacher's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    lm_head = (draw(vocab, hidden) * (_LOGIT_STD / hidden**0.5)).to(dtype)
    teacher = draw(rows, hidden)
    sample, noise = teacher[:_NUM_CALIBRATION_ROWS].to(dtype), draw(rows, hidden)
    probe = (teacher + 0.01 * noise).to(dtype)[:_NUM_CALIBRATION_ROWS]
    size = 0.01 * (1 - alpha) / _total_variation(probe, sample, lm_head)
    drafts = [(teacher + size * draw(rows, hidden)).to(dtype) for _ in range(num_depths)]
    measured = 1 - _total_variation(drafts[0][:_NUM_CALIBRATION_ROWS], sample, lm_head)
    labels = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    return Inputs(drafts, teacher.to(dtype), lm_head, labels, measured)


def reference(inputs: Inputs, *, loss: str) -> Outcome:
    """In float64, chunk by chunk: losses over all rows, gradients of the first chunk."""
    head, losses, grads = inputs.lm_head.double(), [], []
    for rows in inputs.rows:
        total = head.new_zeros(())
        for start in range(0, len(rows), _NUM_REFERENCE_ROWS):
            part = slice(start, start + _NUM_REFERENCE_ROWS)
            logits, teacher_logits = (x[part].double() @ head.T for x in (rows, inputs.teacher))
            value, grad = _reference_rows(logits, teacher_logits, inputs.labels[part], loss=loss)
            total += value
            if start == 0:
                grads.append(grad @ head)
        losses.append(total / len(rows))
    return Outcome(torch.stack(losses), grads)


def _reference_rows(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, loss: str
) -> tuple[Tensor, Tensor]:
    """Sum of the losses and the gradient in the logits `[C, V]`."""
    lse, grad = logits.logsumexp(-1), torch.empty_like(logits)
    divergence = distill_rows_ref(
        logits,
        lse=lse,
        labels=labels,
        valid=torch.ones_like(labels, dtype=torch.bool),
        mixture=MIXTURES[loss],
        eta=ETA,
        grad=grad,
        teacher_logits=teacher_logits,
        teacher_lse=teacher_logits.logsumexp(-1),
    )
    nll = lse - logits.gather(1, labels[:, None])[:, 0]
    return _row_loss(loss, nll=nll, kl=divergence.kl, tv=divergence.tv).sum(), grad


def run_distill(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """The distillation of this package; the statistics come with it."""
    shape = (len(inputs.rows), len(inputs.labels))
    result = distill(
        inputs.rows,
        labels=inputs.labels,
        valid=torch.ones(shape, dtype=torch.bool, device=inputs.labels.device),
        lm_head=inputs.lm_head,
        teacher=None if loss == "ce" else inputs.teacher,
        mixtures=[MIXTURES[loss]],
        eta=ETA,
        chunk_rows=chunk_rows or None,
    )
    rows = _row_loss(loss, nll=result.nll, kl=result.kl, tv=result.tv)
    return Outcome(rows.mean(dim=1), result.grads[0])


def run_liger(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """One fused linear call per depth: JSD with beta 0 is KL(teacher || draft)."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    if loss == "lk":
        raise NotImplementedError("Liger has no lk")
    count, head, losses, grads = len(inputs.labels), inputs.lm_head, [], []
    for rows in inputs.rows:
        leaf = rows.detach().requires_grad_()
        if loss == "ce":
            value = LigerFusedLinearCrossEntropyFunction.apply(leaf, head, inputs.labels)
            value = value[0] if isinstance(value, tuple) else value
        else:
            value = LigerFusedLinearJSDFunction.apply(leaf, head, inputs.teacher, head, None, 0.0)
        value.backward()
        losses.append(value.detach())
        assert leaf.grad is not None, "backward gives the leaf a gradient"
        grads.append(leaf.grad)
    return Outcome(torch.stack(losses), [grad.mul_(count) for grad in grads])


def run_liger_kl(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """Liger's KL to given probabilities: `[T, V]` of them, made once for all depths."""
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

    if loss != "kl":
        raise NotImplementedError("a Kullback-Leibler divergence only")
    probabilities = inputs.teacher.new_empty(len(inputs.teacher), len(inputs.lm_head))
    for part in torch.arange(len(inputs.teacher)).split(512):
        logits = torch.mm(inputs.teacher[part], inputs.lm_head.T, out_dtype=torch.float32)
        probabilities[part] = logits.softmax(-1).to(probabilities.dtype)
    losses, grads = [], []
    for rows in inputs.rows:
        leaf = rows.detach().requires_grad_()
        value = LigerFusedLinearKLDivFunction.apply(leaf, inputs.lm_head, probabilities, None)
        value.backward()
        losses.append(value.detach())
        assert leaf.grad is not None, "backward gives the leaf a gradient"
        grads.append(leaf.grad.mul_(len(leaf)))
    return Outcome(torch.stack(losses), grads)


def run_eager(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """Float32 logits of all rows by autograd, one depth after the other."""
    losses, grads = [], []
    for rows in inputs.rows:
        leaf = rows.detach().requires_grad_()
        log_draft = (leaf @ inputs.lm_head.T).float().log_softmax(-1)
        if loss == "ce":
            value = functional.nll_loss(log_draft, inputs.labels, reduction="none")
        else:
            log_teacher = (inputs.teacher @ inputs.lm_head.T).float().log_softmax(-1)
            kl = functional.kl_div(log_draft, log_teacher, log_target=True, reduction="none")
            value = kl.sum(-1)
            if loss == "lk":
                tv = (log_teacher.exp() - log_draft.exp()).abs().sum(-1) / 2
                value = _row_loss(loss, nll=value, kl=value, tv=tv)
        value.sum().backward()
        losses.append(value.mean().detach())
        assert leaf.grad is not None, "backward gives the leaf a gradient"
        grads.append(leaf.grad)
    return Outcome(torch.stack(losses), grads)


Contender = Callable[..., Outcome]
CONTENDERS: dict[str, Contender] = {
    "distill": run_distill,
    "liger": run_liger,
    "liger_kl": run_liger_kl,
    "eager": run_eager,
}


def num_flops(inputs: Inputs, *, loss: str) -> int:
    """Of the products that must run: the teacher once, each depth there and back."""
    num_products = 2 * len(inputs.rows) + (loss != "ce")
    return num_products * 2 * inputs.teacher.numel() * len(inputs.lm_head)


def _row_loss(loss: str, *, nll: Tensor, kl: Tensor, tv: Tensor) -> Tensor:
    if loss == "lk":
        towards_kl = torch.exp(-ETA * (1 - tv)).detach()
        return towards_kl * kl + (1 - towards_kl) * tv
    return {"ce": nll, "kl": kl}[loss]


def _total_variation(rows: Tensor, teacher: Tensor, lm_head: Tensor) -> float:
    draft, target = ((x.float() @ lm_head.float().T).softmax(-1) for x in (rows, teacher))
    return float((draft - target).abs().sum(-1).mean() / 2)
