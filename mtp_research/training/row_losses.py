"""Statistics and gradients of every row that has a label: the two ways through lm_head.

`ce` alone needs one visit of each row of logits; terms that look at the target need its logits
beside every depth's. Between `loss_rows` and `loss_terms` in the flow of `losses`.

Letters: B batch rows, S row length, D hidden, V vocabulary, k depths, U positions with a label.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.kernels.cross_entropy import cross_entropy
from mtp_research.kernels.distill import distill
from mtp_research.kernels.gather_rows import gather_rows
from mtp_research.training.loss_rows import LossRows
from mtp_research.training.loss_terms import AnchorStats, LossSpec


class RowLosses(NamedTuple):
    """What is known of each depth's rows.

    Attributes:
        stats: of every anchor.
        grads: `[U, D]` of each depth, for each of `LossSpec.mixtures`, before their factors; of
            `cross_entropy_rows_of` those of the plain cross-entropy.
    """

    stats: AnchorStats
    grads: list[list[Tensor]]


def cross_entropy_rows_of(
    rows: LossRows,
    outputs: Sequence[Tensor],
    *,
    lm_head: Tensor,
    spec: LossSpec,
    wants_grad: bool,
) -> RowLosses:
    """Rows of all depths as one list, each visited once.

    Args:
        rows: which rows have labels.
        outputs: k times `[B, S, D]`.
        lm_head: `[V, D]`.
        spec: without a term that needs the teacher.
        wants_grad: whether gradients are made.
    """
    num_depths, num_rows = rows.valid.shape
    is_half = spec.half_logits and lm_head.is_cuda and lm_head.dtype.itemsize == 2
    drafts = outputs[0].new_empty(
        num_depths,
        num_rows,
        outputs[0].shape[-1],
        dtype=torch.float16 if is_half else None,
    )
    for draft, output, index in zip(drafts, outputs, rows.index, strict=True):
        gather_rows(output.flatten(0, 1), index=index, out=draft)
    result = cross_entropy(
        drafts.flatten(0, 1),
        labels=rows.label.repeat(num_depths),
        valid=rows.valid.flatten(),
        lm_head=lm_head,
        weight=1.0 if wants_grad else None,  # a small one would underflow in float16
        half_logits=is_half,
        chunk_rows=spec.chunk_rows,
    )
    nll = rows.to_anchors(result.nll.view(num_depths, num_rows))
    hits = rows.to_anchors(result.is_hit.view(num_depths, num_rows))
    nothing = torch.zeros_like(nll)
    grads = [] if result.grads is None else [list(result.grads.view_as(drafts))]
    return RowLosses(AnchorStats(nll, nothing, nothing, hits), grads)


def distilled_rows_of(
    rows: LossRows,
    outputs: Sequence[Tensor],
    *,
    teacher: Tensor | None,
    lm_head: Tensor,
    spec: LossSpec,
    wants_grad: bool,
) -> RowLosses:
    """Rows of all depths at a position beside the teacher's.

    Args:
        rows: which rows have labels.
        outputs: k times `[B, S, D]`.
        teacher: `[U, D]`; None when no term needs it.
        lm_head: `[V, D]`.
        spec: the terms.
        wants_grad: whether gradients are made.
    """
    drafts = [rows.gather(output, depth=depth) for depth, output in enumerate(outputs, start=1)]
    result = distill(
        drafts,
        labels=rows.label,
        valid=rows.valid,
        lm_head=lm_head,
        teacher=teacher,
        mixtures=spec.mixtures() if wants_grad else (),
        eta=spec.lk_eta,
        chunk_rows=spec.chunk_rows,
    )
    stats = AnchorStats(
        *(rows.to_anchors(x) for x in (result.nll, result.kl, result.tv, result.is_hit))
    )
    return RowLosses(stats, result.grads)
