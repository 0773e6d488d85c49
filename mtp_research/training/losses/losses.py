"""Multi-depth loss through the frozen lm_head, in row chunks, gradient made in the forward pass.

    unroll -> labels -> their positions -> `row_losses`: statistics and gradients -> `combine_terms`

lm_head is frozen: a chunk's logits give the gradient of its rows at once and are then dropped, so
memory is two chunks of `[C, V]`, whatever S and k are, and `[k, U, D]` of gradients.
`num_step_labels` counts the labels of the whole optimizer step, over micro-batches and ranks, so
the step does not depend on how its tokens were split. Terms and weights are defined in
`loss_terms`, the terms of a row in `kernels.distill_rows`; `hidden` is the smooth-L1 distance of
the draft's hidden state from the target's at t + d, both after their norms, averaged over D.

Letters: B batch rows, S row length, N = B S anchors, D hidden, V vocabulary, k depths, U positions
with a label. Source: chunking as in fused linear cross-entropy (Liger); `hidden` EAGLE
(arXiv:2401.15077).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels.losses.cross_entropy import gather_rows
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.training.losses.loss_terms import LossSpec, combine_terms
from mtp_research.training.losses.row_losses import (
    LabelPositions,
    cross_entropy_losses,
    distilled_losses,
    label_positions,
)
from mtp_research.training.packed_rows import Batch, BatchHidden
from mtp_research.training.unroll import DepthOutput, RowInputs, same_document, shift_left, unroll


@dataclass(frozen=True)
class UnrollSpec:
    """How heads are run over a batch: depths, unroll (see `unroll.UNROLLS`) and module order."""

    num_depths: int
    kind: str
    schedule: ModuleSchedule = "cycle"


class DepthLoss(NamedTuple):
    """Loss of one micro-batch."""

    loss: Tensor  # scalar, float32 or wider, weighted and divided by the step's label counts
    num_labels: Tensor  # `[k]` int64, anchors of this micro-batch that have a label
    num_correct: Tensor  # `[k]` int64, those whose argmax is the label
    # `[k]` sum over those of the chance that a sampled draft is accepted; 0 when the loss does not
    # look at the target
    sum_acceptance: Tensor


class HeadObjective(nn.Module):
    """Loss of a micro-batch as one module, which is what data parallelism wraps.

    `run` gives the outputs of all depths for the parts of `RowInputs`; graphs may take its place.
    """

    def __init__(self, heads: MTPHeads, *, unroll_spec: UnrollSpec, loss_spec: LossSpec) -> None:
        super().__init__()
        self.heads = heads
        self.unroll_spec = unroll_spec
        self.loss_spec = loss_spec
        self.run: Callable[..., list[DepthOutput]] = functools.partial(
            run_rows, heads, spec=unroll_spec
        )

    def forward(
        self, batch: Batch, hidden: BatchHidden, labels: list[Tensor], num_step_labels: Tensor
    ) -> DepthLoss:
        """Unroll the heads; see `multi_depth_loss`."""
        return multi_depth_loss(
            self.run(*row_inputs(batch, hidden)),
            labels=labels,
            num_step_labels=num_step_labels,
            lm_head=self.heads.target.lm_head_weight,
            spec=self.loss_spec,
            target_post_norm=hidden.post_norm,
            num_positions=batch.num_labels,
        )


def run_heads(
    heads: MTPHeads, batch: Batch, *, hidden: BatchHidden, spec: UnrollSpec
) -> list[DepthOutput]:
    """`unroll` of a batch."""
    return run_rows(heads, *row_inputs(batch, hidden), spec=spec)


def row_inputs(batch: Batch, hidden: BatchHidden) -> tuple[Tensor, ...]:
    """Parts of `RowInputs`."""
    rows = (batch.position_ids, batch.document_index, batch.cu_seqlens)
    return (batch.input_ids, hidden.source, *rows)


def run_rows(heads: MTPHeads, *inputs: Tensor, spec: UnrollSpec) -> list[DepthOutput]:
    """`unroll` of the parts of `RowInputs`, as a spec says."""
    rows = RowInputs(*inputs)
    return unroll(heads, rows, num_depths=spec.num_depths, kind=spec.kind, schedule=spec.schedule)


def multi_depth_loss(
    outputs: Sequence[DepthOutput],
    *,
    labels: Sequence[Tensor],
    num_step_labels: Tensor,
    lm_head: Tensor,
    spec: LossSpec,
    target_post_norm: Tensor | None = None,
    num_positions: int | None = None,
) -> DepthLoss:
    """Weighted loss of all depths.

    Args:
        outputs: k depths of `unroll`.
        labels: k times `[B, S]` int64 of `depth_labels`.
        num_step_labels: `[k + 1]` of `label_counts`, summed over the optimizer step.
        lm_head: `[V, D]` frozen output embedding.
        spec: terms and weights.
        target_post_norm: `[B, S, D]` target hidden states after the final norm; every term but `ce`
            needs them.
        num_positions: labels at depth 1, if the host knows it; see `label_positions`.

    Raises:
        ValueError: a term needs the target's hidden states and there are none.
    """
    positions = label_positions(labels, num_positions=num_positions)
    teacher = None
    if spec.needs_teacher:
        if target_post_norm is None:
            raise ValueError(
                f"objective.loss={spec.loss} needs the target's hidden states (target_post_norm=)"
            )
        teacher = target_post_norm.flatten(0, 1)[positions.position]
    loss, weights, num_correct, sum_acceptance = _DistillLoss.apply(
        positions, teacher, lm_head, num_step_labels, spec, *(out.post_norm for out in outputs)
    )
    if spec.terms["hidden"]:
        assert teacher is not None, "hidden is a term that needs the target"
        drafts = [
            positions.gather(out.post_norm, depth=d) for d, out in enumerate(outputs, start=1)
        ]
        distance = _hidden_distance(drafts, teacher, positions=positions, weights=weights)
        loss = loss + spec.terms["hidden"] * distance
    return DepthLoss(loss, positions.labelled.sum(dim=1), num_correct, sum_acceptance)


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


def batch_labels(batch: Batch, *, num_depths: int) -> list[Tensor]:
    """`depth_labels` of a batch."""
    return depth_labels(
        batch.input_ids,
        document_index=batch.document_index,
        loss_mask=batch.loss_mask,
        num_depths=num_depths,
    )


def label_counts(labels: Sequence[Tensor]) -> Tensor:
    """`[k + 1]` int64: labels of each depth, then anchors that have one at every depth."""
    labelled = torch.stack(list(labels)) >= 0
    return torch.cat([labelled.sum(dim=(1, 2)), labelled.all(dim=0).sum()[None]])


class _DistillLoss(torch.autograd.Function):
    """All depths' outputs `[B, S, D]` -> scalar; keeps row gradients instead of any logits."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        positions: LabelPositions,
        teacher: Tensor | None,
        lm_head: Tensor,
        num_step_labels: Tensor,
        spec: LossSpec,
        *outputs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, row weights `[k, N]`, correct labels `[k]` and summed acceptance `[k]`."""
        wants_grad, scale = any(ctx.needs_input_grad), 1.0
        if spec.fused_rows and not spec.needs_teacher:
            losses = cross_entropy_losses(
                positions, outputs, lm_head=lm_head, spec=spec, wants_grad=wants_grad
            )
            scale = spec.terms["ce"]
        else:
            losses = distilled_losses(
                positions,
                outputs,
                teacher=teacher,
                lm_head=lm_head,
                spec=spec,
                wants_grad=wants_grad,
            )
        stats = losses.stats
        combined = combine_terms(
            stats, labelled=positions.labelled, num_step_labels=num_step_labels, spec=spec
        )
        factors = [scale * factor for factor in combined.factors]
        ctx.parts = list(zip(losses.grads, factors, strict=False))  # none without grads
        ctx.inverse, ctx.shape, ctx.dtype = positions.inverse, outputs[0].shape, outputs[0].dtype
        acceptance = torch.where(positions.labelled, 1 - stats.tv, 0).sum(dim=1)
        if teacher is None:
            acceptance = torch.zeros_like(acceptance)
        found = (combined.weights, stats.is_hit.sum(dim=1), acceptance)
        ctx.mark_non_differentiable(*found)
        return combined.loss, *found

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Bring the gradients made in the forward pass to their anchors, scaled."""
        num_depths = len(ctx.needs_input_grad) - 5
        found: list[Tensor | None] = [None] * num_depths
        for group, factors in ctx.parts:
            for depth, grad in enumerate(group):
                total = grad.new_empty(len(ctx.inverse[depth]), grad.shape[1], dtype=ctx.dtype)
                scale = factors[depth] * grads[0].to(factors.dtype)
                gather_rows(grad, index=ctx.inverse[depth], out=total, scale=scale)
                total, before = total.view(ctx.shape), found[depth]
                found[depth] = total if before is None else before + total
        return (None,) * 5 + tuple(found)


def _hidden_distance(
    drafts: Sequence[Tensor], teacher: Tensor, *, positions: LabelPositions, weights: Tensor
) -> Tensor:
    """Weighted smooth-L1 distance of the drafts' hidden states from the target's, scalar."""
    scales, total = positions.to_positions(weights), weights.new_zeros(())
    wide = teacher.to(weights.dtype)
    for depth, draft in enumerate(drafts):
        known = torch.where(positions.valid[depth, :, None], draft.to(wide.dtype), wide)
        distance = functional.smooth_l1_loss(known, wide, reduction="none").mean(dim=-1)
        total = total + (distance * scales[depth]).sum()
    return total
