"""Which rows of a micro-batch have labels, seen from the anchors and from the positions.

Anchor t and depth d meet at position u = t + d: the draft there is compared with the target's
distribution at u, and its label is x_{u+1}, whatever d is. The products with lm_head run over the
positions that some depth needs; depth weights and acceptance lengths are functions of an anchor.

    anchors    [k, N], N = B * S, column t
    positions  [k, U], only those u with a label at some depth; row d belongs to t = u - d

Letters: B batch rows, S row length, N = B S, U positions, k depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LossRows(NamedTuple):
    """Index tensors between the two layouts.

    Attributes:
        labelled: `[k, N]` bool, depth d of anchor t has a label.
        position: `[U]` int64, rising, into the flattened batch.
        label: `[U]` int64.
        valid: `[k, U]` bool, the depth has a label at that position.
        anchor: `[k, U]` int64, t = u - d; N where not valid.
    """

    labelled: Tensor
    position: Tensor
    label: Tensor
    valid: Tensor
    anchor: Tensor

    @property
    def index(self) -> Tensor:
        """`[k, U]` int64, the anchor of each position, -1 where not valid."""
        return torch.where(self.valid, self.anchor, -1)

    @property
    def inverse(self) -> Tensor:
        """`[k, N]` int64, the position row of each anchor, -1 where it has no label."""
        num_depths, num_anchors = self.labelled.shape
        found = self.anchor.new_full((num_depths, num_anchors + 1), -1)
        rows = torch.arange(len(self.position), device=found.device)
        found.scatter_(1, self.anchor, rows.expand_as(self.anchor))
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


def loss_rows(labels: Sequence[Tensor], *, num_positions: int | None = None) -> LossRows:
    """Rows of `depth_labels`.

    Args:
        labels: k times `[B, S]` int64, label of each anchor, -1 where there is none.
        num_positions: U, if the host knows it: the device is not waited for then. It is the number
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
    return LossRows(
        labelled=by_anchor.flatten(1) >= 0,
        position=position,
        label=label[position],
        valid=valid,
        anchor=torch.where(valid, position - depths, num_rows * length),
    )
