"""Statistics and gradients of every position that has a label: the two ways through lm_head.

`ce` alone needs one visit of each row of logits; terms that look at the target need its logits
beside every depth's.

Anchor t and depth d meet at position u = t + d: the draft there is compared with the target's
distribution at u, and its label is x_{u+1}, whatever d is. The products with lm_head run over the
positions that some depth needs; depth weights and acceptance lengths are functions of an anchor.

    anchors    [k, N], N = B * S, column t
    positions  [k, U], only those u with a label at some depth; row d belongs to t = u - d

Letters: B batch rows, S row length, D hidden, V vocabulary, k depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.kernels.losses.cross_entropy import cross_entropy, gather_rows
from mtp_research.kernels.losses.distill import distill
from mtp_research.training.losses.loss_terms import AnchorStats, LossSpec


class LabelPositions(NamedTuple):
    """Index tensors between the two layouts."""

    labelled: Tensor  # `[k, N]` bool, depth d of anchor t has a label
    position: Tensor  # `[U]` int64, rising, into the flattened batch
    label: Tensor  # `[U]` int64
    valid: Tensor  # `[k, U]` bool, the depth has a label at that position
    anchor: Tensor  # `[k, U]` int64, t = u - d; N where not valid

    @property
    def index(self) -> Tensor:
        """`[k, U]` int64, the anchor of each position, -1 where not valid."""
        return torch.where(self.valid, self.anchor, -1)

    @property
    def inverse(self) -> Tensor:
        """`[k, N]` int64, the position row of each anchor, -1 where it has no label."""
        num_depths, num_anchors = self.labelled.shape
        found = self.anchor.new_full((num_depths, num_anchors + 1), -1)
        index = torch.arange(len(self.position), device=found.device)
        found.scatter_(1, self.anchor, index.expand_as(self.anchor))
        return found[:, :-1].contiguous()

    def to_anchors(self, values: Tensor) -> Tensor:
        """`[k, U]` -> `[k, N]`, 0 where there is no label."""
        num_depths, num_anchors = self.labelled.shape
        found = values.new_zeros(num_depths, num_anchors + 1)
        return found.scatter_(1, self.anchor, values)[:, :-1]

    def to_positions(self, values: Tensor) -> Tensor:
        """`[k, N]` -> `[k, U]`, 0 where not valid."""
        padded = torch.nn.functional.pad(values, (0, 1))
        return padded.gather(1, self.anchor)

    def gather(self, values: Tensor, *, depth: int) -> Tensor:
        """Rows `[U, D]` of `[B, S, D]` at the anchors of a depth; arbitrary where not valid."""
        last = self.labelled.shape[1] - 1
        return values.flatten(0, 1).index_select(0, self.anchor[depth - 1].clamp(max=last))


def label_positions(
    labels: Sequence[Tensor], *, num_positions: int | None = None
) -> LabelPositions:
    """Positions of `depth_labels`, k times `[B, S]` int64.

    `num_positions` is U, if the host knows it: the device is not waited for then. It is the number
    of labels at depth 1, since a position that a deeper one needs has an anchor there too.
    """
    by_anchor = torch.stack(list(labels))  # [k, B, S]
    num_depths, num_rows, length = by_anchor.shape
    by_position = torch.full_like(by_anchor, -1)
    for depth in range(1, min(num_depths, length - 1) + 1):
        by_position[depth - 1, :, depth:] = by_anchor[depth - 1, :, : length - depth]
    by_position = by_position.flatten(1)
    label = by_position.amax(dim=0)
    if num_positions is None:
        position = (label >= 0).nonzero()[:, 0]
    else:
        position = torch.nonzero_static(label >= 0, size=num_positions)[:, 0]
    valid = by_position[:, position] >= 0
    depths = torch.arange(1, num_depths + 1, device=position.device)[:, None]
    return LabelPositions(
        labelled=by_anchor.flatten(1) >= 0,
        position=position,
        label=label[position],
        valid=valid,
        anchor=torch.where(valid, position - depths, num_rows * length),
    )


class RowLosses(NamedTuple):
    """What is known of each depth."""

    stats: AnchorStats  # of every anchor
    # `[U, D]` of each depth, for each of `LossSpec.mixtures`, before their factors; of
    # `cross_entropy_losses` those of the plain cross-entropy
    grads: list[list[Tensor]]


def cross_entropy_losses(
    positions: LabelPositions,
    outputs: Sequence[Tensor],
    *,
    lm_head: Tensor,
    spec: LossSpec,
    wants_grad: bool,
) -> RowLosses:
    """Positions of all depths as one list, each visited once; for a `spec` that needs no teacher.

    `outputs` are k times `[B, S, D]`, `lm_head` is `[V, D]`.
    """
    num_depths, num_rows = positions.valid.shape
    is_half = spec.half_logits and lm_head.is_cuda and lm_head.dtype.itemsize == 2
    drafts = outputs[0].new_empty(
        num_depths, num_rows, outputs[0].shape[-1], dtype=torch.float16 if is_half else None
    )
    for draft, output, index in zip(drafts, outputs, positions.index, strict=True):
        gather_rows(output.flatten(0, 1), index=index, out=draft)
    result = cross_entropy(
        drafts.flatten(0, 1),
        labels=positions.label.repeat(num_depths),
        valid=positions.valid.flatten(),
        lm_head=lm_head,
        weight=1.0 if wants_grad else None,  # a small one would underflow in float16
        half_logits=is_half,
        chunk_rows=spec.chunk_rows,
    )
    nll = positions.to_anchors(result.nll.view(num_depths, num_rows))
    hits = positions.to_anchors(result.is_hit.view(num_depths, num_rows))
    nothing = torch.zeros_like(nll)
    grads = [] if result.grads is None else [list(result.grads.view_as(drafts))]
    return RowLosses(AnchorStats(nll, nothing, nothing, hits), grads)


def distilled_losses(
    positions: LabelPositions,
    outputs: Sequence[Tensor],
    *,
    teacher: Tensor | None,
    lm_head: Tensor,
    spec: LossSpec,
    wants_grad: bool,
) -> RowLosses:
    """All depths of a position beside the teacher's.

    As `cross_entropy_losses`, with the target's hidden states `teacher`, `[U, D]`; None when no
    term needs them.
    """
    drafts = [
        positions.gather(output, depth=depth) for depth, output in enumerate(outputs, start=1)
    ]
    result = distill(
        drafts,
        labels=positions.label,
        valid=positions.valid,
        lm_head=lm_head,
        teacher=teacher,
        mixtures=spec.mixtures() if wants_grad else (),
        eta=spec.lk_eta,
        chunk_rows=spec.chunk_rows,
    )
    stats = AnchorStats(
        *(positions.to_anchors(x) for x in (result.nll, result.kl, result.tv, result.is_hit))
    )
    return RowLosses(stats, result.grads)
