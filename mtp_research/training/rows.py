"""Packed rows of a run, and the frozen target's hidden states for them.

Which rows a step sees is a pure function of (seed, position), so a resumed run needs no data state.
Hidden states are computed when a row is needed. When the run reads its rows more than once and they
fit, they are kept: always computed in the same blocks of rows, since the rounding of a batched
forward depends on its neighbours and a resumed run must repeat it bit for bit.

Letters: B batch rows, S row length, D hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtp_research.data.packing import PackedRows
from mtp_research.models.attention import DenseContext
from mtp_research.models.families import NormPoint
from mtp_research.models.target import Target

CACHE_BYTES = 1 << 30
BLOCK_ROWS = 8


class Batch(NamedTuple):
    """One micro-batch.

    Attributes:
        input_ids: `[B, S]` int64.
        position_ids: `[B, S]` int64, counted from 0 in each document.
        document_index: `[B, S]` int64, -1 for padding.
        loss_mask: `[B, S]` bool, True where the token is the target's own output.
    """

    input_ids: Tensor
    position_ids: Tensor
    document_index: Tensor
    loss_mask: Tensor


class BatchHidden(NamedTuple):
    """Target hidden states of a batch, each `[B, S, D]`.

    Attributes:
        source: at the point the heads read.
        post_norm: after the final norm, from which the target's own logits follow.
    """

    source: Tensor
    post_norm: Tensor


class TrainingRows:
    """Rows of packed documents with their target hidden states.

    Args:
        packed: the rows.
        target: the frozen model.
        hidden_source: the point that the heads read.
        keep_hidden: keep hidden states once computed, if all of them fit in `CACHE_BYTES`.
    """

    def __init__(
        self, packed: PackedRows, *, target: Target, hidden_source: NormPoint, keep_hidden: bool
    ) -> None:
        """Put the rows on the target's device."""
        self._target = target
        self._hidden_source = hidden_source
        self._rows = Batch(
            *(
                torch.from_numpy(np.ascontiguousarray(array)).to(target.device)
                for array in (
                    packed.token_ids,
                    packed.position,
                    packed.document_index,
                    packed.loss_mask,
                )
            )
        )
        num_tensors = 1 if hidden_source == "post_norm" else 2
        bytes_per_token = target.config.hidden_size * target.dtype.itemsize * num_tensors
        self.keeps_hidden = (
            keep_hidden and self._rows.input_ids.numel() * bytes_per_token <= CACHE_BYTES
        )
        self._blocks: dict[int, BatchHidden] = {}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows.input_ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows of `indices`, without hidden states."""
        return Batch(*(tensor[list(indices)] for tensor in self._rows))

    def hidden(self, indices: Sequence[int]) -> BatchHidden:
        """Target hidden states of the rows of `indices`, without gradient."""
        if not self.keeps_hidden:
            return self._forward(self.batch(indices))
        parts = [self._block(index // BLOCK_ROWS) for index in indices]
        rows = [index % BLOCK_ROWS for index in indices]
        source = torch.stack([part.source[row] for part, row in zip(parts, rows, strict=True)])
        if self._hidden_source == "post_norm":
            return BatchHidden(source, source)
        post_norm = torch.stack(
            [part.post_norm[row] for part, row in zip(parts, rows, strict=True)]
        )
        return BatchHidden(source, post_norm)

    def _block(self, block: int) -> BatchHidden:
        if block not in self._blocks:
            indices = range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, len(self)))
            self._blocks[block] = self._forward(self.batch(indices))
        return self._blocks[block]

    @torch.no_grad()
    def _forward(self, batch: Batch) -> BatchHidden:
        hidden = self._target.forward(
            batch.input_ids,
            position_ids=batch.position_ids,
            context=DenseContext(batch.document_index),
        )
        is_post = self._hidden_source == "post_norm"
        return BatchHidden(hidden.post_norm if is_post else hidden.pre_norm, hidden.post_norm)


def row_indices(position: int, *, count: int, num_rows: int, seed: int) -> list[int]:
    """Rows [position, position + count) of an endless stream: one shuffled epoch after another.

    Args:
        position: rows consumed before, over all ranks.
        count: rows wanted.
        num_rows: rows of an epoch.
        seed: of the shuffles.
    """
    wanted = range(position, position + count)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(num_rows)
        for epoch in {index // num_rows for index in wanted}
    }
    return [int(orders[index // num_rows][index % num_rows]) for index in wanted]
