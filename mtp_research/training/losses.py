"""Multi-depth loss through the frozen lm_head, in row chunks, gradient made in the forward pass.

    loss = sum_d w_d / num_labels_d * sum_t loss(logits of row (t, d)),  w_d ~ depth_decay^(d-1)

`num_labels_d` counts the labels of the whole optimizer step, over micro-batches and ranks, so the
step does not depend on how its tokens were split. lm_head is frozen: a chunk's logits give the
gradient of its rows at once and are then dropped, so memory is `[chunk, V]`, whatever S and k are.

    ce   -log q(y)                      gradient in the logits  q - onehot(y)
    kl   sum_v p(v) log(p(v) / q(v))    gradient in the logits  q - p,  p = target's at t + d

Letters: B batch rows, S row length, D hidden, V vocabulary, k depths, T rows with a label, C chunk.
Source: depth weights FastMTP (arXiv:2509.18362); chunking as in fused linear cross-entropy (Liger).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.errors import ConfigError
from mtp_research.training.unroll import DepthOutput, same_document, shift_left

CHUNK_ROWS = 1024  # at V = 151 552 a chunk of float32 logits takes 0.6 GB


class RowLoss(NamedTuple):
    """Loss of a chunk of rows and its gradient in the logits, `[C]` and `[C, V]`, both float32."""

    loss: Tensor
    logits_grad: Tensor


class DepthLoss(NamedTuple):
    """Loss of one micro-batch.

    Attributes:
        loss: scalar float32, already weighted and divided by the step's label counts.
        num_labels: `[k]` int64, rows of this micro-batch that have a label.
        num_correct: `[k]` int64, those whose argmax is the label.
    """

    loss: Tensor
    num_labels: Tensor
    num_correct: Tensor


@dataclass(frozen=True)
class LossSpec:
    """What is minimised.

    Attributes:
        loss: key of `LOSSES`.
        depth_decay: beta in (0, 1]; depth d weighs beta^(d-1), normalised over the depths.
        chunk_rows: rows of logits held at a time.
    """

    loss: str = "ce"
    depth_decay: float = 0.8
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        """Check the name of the loss."""
        if self.loss not in LOSSES:
            raise ConfigError(f"objective.loss must be one of {sorted(LOSSES)}, got {self.loss!r}.")


def multi_depth_loss(
    outputs: Sequence[DepthOutput],
    *,
    labels: Sequence[Tensor],
    num_step_labels: Tensor,
    lm_head: Tensor,
    spec: LossSpec,
    target_post_norm: Tensor | None = None,
) -> DepthLoss:
    """Weighted loss of all depths.

    Args:
        outputs: k depths of `unroll`.
        labels: k times `[B, S]` int64 of `depth_labels`.
        num_step_labels: `[k]` labels per depth in the whole optimizer step (this call included).
        lm_head: `[V, D]` frozen output embedding.
        spec: which loss and weights.
        target_post_norm: `[B, S, D]` target hidden states after the final norm; needed by `kl`.
    """
    weights = depth_weights(len(outputs), decay=spec.depth_decay)
    total = _wide(lm_head.new_zeros(()))
    num_labels, num_correct = [], []
    for depth, (output, label, weight) in enumerate(
        zip(outputs, labels, weights, strict=True), start=1
    ):
        rows = label >= 0
        teacher = None
        if target_post_norm is not None and spec.loss in NEEDS_TEACHER:
            teacher = _rows_ahead(target_post_norm, rows, offset=depth)
        loss_sum, correct = _ChunkedLoss.apply(
            output.post_norm[rows], label[rows], lm_head, teacher, spec.loss, spec.chunk_rows
        )
        total = total + loss_sum * weight / num_step_labels[depth - 1].clamp(min=1)
        num_labels.append(rows.sum())
        num_correct.append(correct)
    return DepthLoss(total, torch.stack(num_labels), torch.stack(num_correct))


def depth_labels(
    input_ids: Tensor, *, document_index: Tensor, loss_mask: Tensor, num_depths: int
) -> list[Tensor]:
    """Labels x_{t+d+1} of depths 1..k, each `[B, S]` int64, -1 where there is none.

    A row has a label when t and t + d + 1 lie in one document and the label is the target's own
    output (`loss_mask` at the label).
    """
    labels = []
    for depth in range(1, num_depths + 1):
        label = shift_left(input_ids, offset=depth + 1, fill=-1)
        is_own_output = shift_left(loss_mask.long(), offset=depth + 1, fill=0) > 0
        wanted = same_document(document_index, offset=depth + 1) & is_own_output
        labels.append(torch.where(wanted, label, -1))
    return labels


def depth_weights(num_depths: int, *, decay: float) -> list[float]:
    """Weights of depths 1..k: decay^(d-1), summing to 1."""
    raw = [decay**depth for depth in range(num_depths)]
    return [weight / sum(raw) for weight in raw]


def cross_entropy_rows(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> RowLoss:
    """Cross-entropy with the label, float32 logits `[C, V]` and labels `[C]`."""
    log_probs = torch.log_softmax(logits, dim=-1)
    loss = -log_probs.gather(1, labels[:, None])[:, 0]
    grad = log_probs.exp_()
    grad[torch.arange(len(labels), device=labels.device), labels] -= 1
    return RowLoss(loss, grad)


def kl_rows(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> RowLoss:
    """KL(target || draft) over the whole vocabulary, float32 logits `[C, V]` both."""
    if teacher_logits is None:
        raise ValueError("objective.loss=kl needs the target's hidden states (target_post_norm=)")
    log_probs = torch.log_softmax(logits, dim=-1)
    teacher_log_probs = torch.log_softmax(teacher_logits, dim=-1)
    teacher = teacher_log_probs.exp()
    loss = (teacher * (teacher_log_probs - log_probs)).sum(dim=-1)
    return RowLoss(loss, log_probs.exp_() - teacher)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor | None], RowLoss]] = {
    "ce": cross_entropy_rows,
    "kl": kl_rows,
}
NEEDS_TEACHER = ("kl",)


def argmax_tokens(post_norm: Tensor, *, lm_head: Tensor, chunk_rows: int = CHUNK_ROWS) -> Tensor:
    """Greedy draft `[...]` int64 of rows `[..., D]`, in row chunks."""
    rows = post_norm.flatten(0, -2)
    tokens = [(chunk @ lm_head.T).argmax(dim=-1) for chunk in rows.split(chunk_rows)]
    return torch.cat(tokens).view(post_norm.shape[:-1])


def _rows_ahead(hidden: Tensor, rows: Tensor, *, offset: int) -> Tensor:
    """Hidden states `[T, D]` at t + offset for each marked row t of `[B, S]`."""
    batch, column = rows.nonzero(as_tuple=True)
    return hidden[batch, column + offset]


class _ChunkedLoss(torch.autograd.Function):
    """Sum of row losses `[T, D]` -> scalar; keeps the `[T, D]` gradient instead of any logits."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        labels: Tensor,
        lm_head: Tensor,
        teacher: Tensor | None,
        loss: str,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Loss sum (float32) and number of rows whose argmax is the label (int64)."""
        total = _wide(rows.new_zeros(()))
        num_correct = labels.new_zeros(())
        grad = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = _wide(rows[part] @ lm_head.T)
            num_correct += (logits.argmax(dim=-1) == labels[part]).sum()
            teacher_logits = None if teacher is None else _wide(teacher[part] @ lm_head.T)
            row_loss = LOSSES[loss](logits, labels[part], teacher_logits)
            total += row_loss.loss.sum()
            if grad is not None:
                grad[part] = row_loss.logits_grad.to(lm_head.dtype) @ lm_head
        ctx.grad = grad
        ctx.mark_non_differentiable(num_correct)
        return total, num_correct

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradient made in the forward pass."""
        return (ctx.grad * grads[0].to(ctx.grad.dtype), None, None, None, None, None)


def _wide(logits: Tensor) -> Tensor:
    """At least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
