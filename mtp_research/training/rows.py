"""Packed rows of a run, and the frozen target's hidden states for them.

Which rows a step sees is a pure function of (seed, position), so a resumed run needs no data state.
Hidden states are computed when a row is needed. When the run reads its rows more than once and they
fit, they are kept: always computed in the same blocks of rows, since the rounding of a batched
forward depends on its neighbours and a resumed run must repeat it bit for bit. They may also come
from a cache on disk, made of the same blocks; one row of each of its shards is computed again, so
that a cache of another model cannot pass for this one's.

Letters: B batch rows, S row length, D hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtp_research.data.hidden_cache import HiddenCache
from mtp_research.data.packing import PackedRows
from mtp_research.errors import IntegrityError
from mtp_research.models.attention import DenseContext
from mtp_research.models.family import NormPoint
from mtp_research.models.target import Target
from mtp_research.models.varlen import document_ends, flat_ends

CACHE_BYTES = 1 << 30
BLOCK_ROWS = 8


class Batch(NamedTuple):
    """One micro-batch.

    Attributes:
        input_ids: `[B, S]` int64.
        position_ids: `[B, S]` int64, counted from 0 in each document.
        document_index: `[B, S]` int64, -1 for padding.
        loss_mask: `[B, S]` bool, True where the token is the target's own output.
        cu_seqlens: `[documents + 1]` int32, where documents end in the flattened batch.
        num_labels: labels at depth 1, counted on the host.
    """

    input_ids: Tensor
    position_ids: Tensor
    document_index: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    num_labels: int


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
        cache: hidden states of these rows on disk; the target then computes only samples.
        checks_cache: compare a row of each shard with the target's own.
    """

    def __init__(
        self,
        packed: PackedRows,
        *,
        target: Target,
        hidden_source: NormPoint,
        keep_hidden: bool,
        cache: HiddenCache | None = None,
        checks_cache: bool = True,
    ) -> None:
        """Put the rows on the target's device."""
        self._target = target
        self._hidden_source = hidden_source
        self._cache = cache
        self._checks_cache = checks_cache
        arrays = (
            packed.token_ids,
            packed.position,
            packed.document_index,
            packed.loss_mask,
            document_ends(packed.document_index),
        )
        self._rows = [
            torch.from_numpy(np.ascontiguousarray(array)).to(target.device) for array in arrays
        ]
        self._num_labels = num_row_labels(packed)
        num_tensors = 1 if hidden_source == "post_norm" else 2
        bytes_per_token = target.config.hidden_size * target.dtype.itemsize * num_tensors
        self.keeps_hidden = keep_hidden and self._rows[0].numel() * bytes_per_token <= CACHE_BYTES
        self._blocks: dict[int, BatchHidden] = {}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._num_labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows of `indices`, without hidden states."""
        chosen = torch.tensor(list(indices))
        if self._target.device.type == "cuda":  # from pageable memory the copy would be waited for
            chosen = chosen.pin_memory().to(self._target.device, non_blocking=True)
        *tensors, ends = (tensor.index_select(0, chosen) for tensor in self._rows)
        return Batch(
            *tensors,
            cu_seqlens=flat_ends(ends, length=self._rows[0].shape[1]),
            num_labels=int(self._num_labels[list(indices)].sum()),
        )

    def hidden(self, indices: Sequence[int]) -> BatchHidden:
        """Target hidden states of the rows of `indices`, without gradient."""
        if self._cache is not None:
            return self._read(self._cache, indices)
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

    def computed(self, indices: range) -> dict[str, Tensor]:
        """Hidden states `[rows, S, D]` of whole blocks by name, for a cache; nothing is kept."""
        blocks = range(indices.start // BLOCK_ROWS, -(-indices.stop // BLOCK_ROWS))
        parts = [self._compute_block(block) for block in blocks]
        names = ("post_norm",) if self._hidden_source == "post_norm" else ("source", "post_norm")
        return {name: torch.cat([getattr(part, name) for part in parts]) for name in names}

    def _read(self, cache: HiddenCache, indices: Sequence[int]) -> BatchHidden:
        samples = [index for index in indices if cache.open_shard(index)]
        device = self._target.device
        post_norm = cache.rows("post_norm", indices).to(device)
        source = post_norm
        if self._hidden_source == "pre_norm":
            source = cache.rows("source", indices).to(device)
        if self._checks_cache:
            for index in samples:
                self._compare(post_norm[list(indices).index(index)], index=index)
        return BatchHidden(source, post_norm)

    def _compare(self, cached: Tensor, *, index: int) -> None:
        """Refuse a row `[S, D]` of the cache that this target does not compute."""
        own = self._forward(self.batch([index])).post_norm[0].float()
        error = float((cached.float() - own).norm() / own.norm())
        limit = 1e-3 if self._target.dtype.itemsize >= torch.float32.itemsize else 0.05
        if not error <= limit:
            raise IntegrityError(
                f"data.hidden_cache: row {index} differs from this target's hidden states by "
                f"{error:.2g} of their norm, {limit:g} allowed; write the cache again, task=cache."
            )

    def _block(self, block: int) -> BatchHidden:
        if block not in self._blocks:
            self._blocks[block] = self._compute_block(block)
        return self._blocks[block]

    def _compute_block(self, block: int) -> BatchHidden:
        indices = range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, len(self)))
        return self._forward(self.batch(indices))

    @torch.no_grad()
    def _forward(self, batch: Batch) -> BatchHidden:
        hidden = self._target.forward(
            batch.input_ids,
            position_ids=batch.position_ids,
            context=DenseContext(batch.document_index, batch.cu_seqlens),
        )
        is_post = self._hidden_source == "post_norm"
        return BatchHidden(hidden.post_norm if is_post else hidden.pre_norm, hidden.post_norm)


def num_row_labels(packed: PackedRows) -> np.ndarray:
    """`[rows]` labels of depth 1: own tokens that are at least the third of their document."""
    is_label = packed.loss_mask & (packed.document_index >= 0) & (packed.position >= 2)
    return is_label.sum(axis=1)


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
