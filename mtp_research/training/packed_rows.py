"""Packed rows of a run, and the frozen target's hidden states for them.

Which rows a step sees is a pure function of (seed, position), so a resumed run needs no data state.
Hidden states are computed when a row is needed. When the run reads its rows more than once and they
fit, they stay in memory: always computed in the same blocks of rows, since the rounding of a
batched forward depends on its neighbours and a resumed run must repeat it bit for bit. They may
also come from a cache on disk, which `task=cache` makes (`cache_rows`). Its header holds hashes of
the target's files, so that a cache of another model cannot pass for this one's; a target with all
its layers (`data.check_hidden_cache`) computes one row of each shard again as well. Or a server
computes them while heads train (`data.states_endpoint`), and only the final norm is applied here.

Letters: B batch rows, S row length, D hidden.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mtp_research.config.schema import TrainConfig
from mtp_research.data.engine_states import StatesForm
from mtp_research.data.hidden_cache import (
    CacheHeader,
    HiddenCache,
    cached_bytes_per_token,
    files_sha256,
)
from mtp_research.data.packing import PackedRows, pack_first_fit
from mtp_research.data.served_states import ServedStates
from mtp_research.data.server import Options, Server, find_server
from mtp_research.kernels.losses.cross_entropy import cross_entropy
from mtp_research.models.attention.attention import DenseContext, document_ends, flat_ends
from mtp_research.models.attention.paged import require_exact_length
from mtp_research.models.family import NormPoint
from mtp_research.models.loading.source import check_source
from mtp_research.models.target import Target
from mtp_research.runtime.captures import CapturedPass
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.documents import HeadDocuments

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
BLOCK_ROWS = 8
TRAIN, HELD_OUT = "train", "held_out"  # folders of a cache
OPTIONS = Options(
    "data.states_endpoint",
    "model.path",
    name_fix="set data.states_model",
    key_fix="start it without a key",
    goes_on="goes on from the last checkpoint",
)
_TIMEOUT_S = 600.0  # that a server may take for one document


class Batch(NamedTuple):
    """One micro-batch."""

    input_ids: Tensor  # `[B, S]` int64
    position_ids: Tensor  # `[B, S]` int64, counted from 0 in each document
    document_index: Tensor  # `[B, S]` int64, -1 for padding
    loss_mask: Tensor  # `[B, S]` bool, True where the token is the target's own output
    cu_seqlens: Tensor  # `[documents + 1]` int32, where documents end in the flattened batch
    num_labels: int  # labels at depth 1, counted on the host


class BatchHidden(NamedTuple):
    """Target hidden states of a batch, each `[B, S, D]`."""

    source: Tensor  # at the point the heads read
    post_norm: Tensor  # after the final norm, from which the target's own logits follow


class TrainingRows:
    """Rows of packed documents with their target hidden states, at the point that the heads read.

    `keep_hidden` holds hidden states once computed, if all of them fit in `CACHE_BYTES`. With a
    `cache` on disk the target computes nothing, or samples: for `checks_cache`, a row of each shard
    is compared with the target's own. With `served` states it computes the final norm alone.
    With `captures` the target's pass is a CUDA graph: states that are not kept hold until the next.
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
        served: ServedStates | None = None,
        captures: bool = False,
    ) -> None:
        self._target = target
        self._hidden_source = hidden_source
        self._cache = cache
        self._checks_cache = checks_cache
        self._served = served
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
        bytes_per_token = cached_bytes_per_token(
            target.config.hidden_size, dtype=target.dtype, hidden_source=hidden_source
        )
        self.keeps_hidden = keep_hidden and self._rows[0].numel() * bytes_per_token <= CACHE_BYTES
        self._blocks: dict[int, BatchHidden] = {}
        self._run: Callable[..., BatchHidden] = self._target_pass
        if captures:
            self._run = CapturedPass(self._target_pass, key="trainer.cuda_graphs")

    def __len__(self) -> int:
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

    def follow(self, order: Iterable[int]) -> None:
        """Prepare for `hidden` of these rows, one after the other."""
        if self._served is not None:
            self._served.follow(order)

    def served_times(self) -> dict[str, float]:
        """`ServedTimes` so far, nothing where no server is asked."""
        return {} if self._served is None else dataclasses.asdict(self._served.times)

    def hidden(self, indices: Sequence[int]) -> BatchHidden:
        """Target hidden states of the rows of `indices`, without gradient."""
        if self._served is not None:
            return self._normed(self._served.rows(indices))
        if self._cache is not None:
            return self._read(self._cache, indices)
        if not self.keeps_hidden:
            return self._run(*_pass_inputs(self.batch(indices)))
        parts = [(self._block(index // BLOCK_ROWS), index % BLOCK_ROWS) for index in indices]
        source = torch.stack([part.source[row] for part, row in parts])
        if self._hidden_source == "post_norm":
            return BatchHidden(source, source)
        return BatchHidden(source, torch.stack([part.post_norm[row] for part, row in parts]))

    @torch.no_grad()
    def own_nll(self, index: int) -> float:
        """Mean of `own_token_nll` of a row, to see whether its states are those of its tokens."""
        batch, hidden = self.batch([index]), self.hidden([index])
        is_own = batch.loss_mask[0] & (batch.position_ids[0] > 0)
        found = own_token_nll(
            self._target, hidden.post_norm[0], token_ids=batch.input_ids[0], is_own=is_own
        )
        return float(np.mean(found)) if found else float("nan")

    def computed(self, indices: range) -> dict[str, Tensor]:
        """Hidden states `[rows, S, D]` of whole blocks by name, for a cache; none stays here."""
        blocks = range(indices.start // BLOCK_ROWS, -(-indices.stop // BLOCK_ROWS))
        parts = [self._compute_block(block) for block in blocks]
        names = ("post_norm",) if self._hidden_source == "post_norm" else ("source", "post_norm")
        rows = slice(len(indices))
        return {name: torch.cat([getattr(part, name) for part in parts])[rows] for name in names}

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

    @torch.no_grad()
    def _normed(self, pre_norm: Tensor) -> BatchHidden:
        """Of states `[B, S, D]` before the final norm."""
        post_norm = self._target.final_norm(pre_norm)
        return BatchHidden(post_norm if self._hidden_source == "post_norm" else pre_norm, post_norm)

    def _compare(self, cached: Tensor, *, index: int) -> None:
        """Refuse a row `[S, D]` of the cache that this target does not compute."""
        batch = self.batch([index])
        is_text = batch.document_index[0] >= 0  # an imported row is empty elsewhere
        own = self._target_pass(*_pass_inputs(batch)).post_norm[0][is_text].float()
        error = float((cached[is_text].float() - own).norm() / own.norm())
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
        """Of as many rows in the last block, so that the target is compiled and captured once."""
        last = len(self) - 1
        rows = range(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
        hidden = self._run(*_pass_inputs(self.batch([min(row, last) for row in rows])))
        source = hidden.source.clone()  # a graph's memory is written again by the next block
        is_post = self._hidden_source == "post_norm"
        return BatchHidden(source, source if is_post else hidden.post_norm.clone())

    @torch.no_grad()
    def _target_pass(
        self, input_ids: Tensor, position_ids: Tensor, document_index: Tensor, cu_seqlens: Tensor
    ) -> BatchHidden:
        context = DenseContext(document_index, cu_seqlens)
        hidden = self._target.forward(input_ids, position_ids=position_ids, context=context)
        is_post = self._hidden_source == "post_norm"
        return BatchHidden(hidden.post_norm if is_post else hidden.pre_norm, hidden.post_norm)


def _pass_inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.input_ids, batch.position_ids, batch.document_index, batch.cu_seqlens


def own_token_nll(
    target: Target, post_norm: Tensor, *, token_ids: Tensor, is_own: Tensor
) -> list[float]:
    """Negative log-likelihood (nats) of each of the target's own tokens of a row.

    It is low for text that the target wrote, and high where the states are another layer's.

    Args:
        target: its lm_head gives the logits.
        post_norm: states `[S, D]` after the final norm.
        token_ids: `[S]`.
        is_own: `[S]`, True at tokens that the target wrote behind others of their document.
    """
    is_label = is_own[1:].to(post_norm.device)
    labels = token_ids[1:].to(post_norm.device)[is_label]
    states, valid = post_norm[:-1][is_label], torch.ones_like(labels, dtype=torch.bool)
    result = cross_entropy(states, labels=labels, valid=valid, lm_head=target.lm_head_weight)
    return result.nll.tolist()


def num_row_labels(packed: PackedRows) -> np.ndarray:
    """`[rows]` labels of depth 1: own tokens that are at least the third of their document."""
    is_label = packed.loss_mask & (packed.document_index >= 0) & (packed.position >= 2)
    return is_label.sum(axis=1)


def row_indices(position: int, *, count: int, num_rows: int, seed: int) -> list[int]:
    """Rows [position, position + count) of an endless stream: one shuffled epoch after another.

    `position` counts rows consumed before, over all ranks.
    """
    wanted = range(position, position + count)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(num_rows)
        for epoch in {index // num_rows for index in wanted}
    }
    return [int(orders[index // num_rows][index % num_rows]) for index in wanted]


class RunRows(NamedTuple):
    """Packed rows of a run."""

    train: TrainingRows
    held_out: TrainingRows


def build_rows(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> RunRows:
    """Rows of a training run, with hidden states from `data.hidden_cache` if it is set."""
    packed = pack_rows(config, documents=documents, target=target, num_depths=num_depths)
    source, trainer = cast(NormPoint, config.head.hidden_source), config.trainer
    rows_read = trainer.max_steps * trainer.batch_size * trainer.gradient_accumulation_steps
    # Ranks that share the target's layers run it together or wait for one another for ever.
    may_keep = not trainer.shard_target
    root, found = config.data.hidden_cache, []
    server = _server(config)
    for name, rows in packed.items():
        keep_hidden = may_keep and (name == HELD_OUT or rows_read > len(rows.token_ids))
        cache = served = None
        if root is not None:
            header = cache_header(rows, target=target, hidden_source=source)
            cache = HiddenCache(Path(root) / name, header=header)
        if server is not None:
            size = rows.token_ids.size * target.config.hidden_size * target.dtype.itemsize
            served = ServedStates(
                rows,
                server=server,
                form=StatesForm(OPTIONS.endpoint, target.config.hidden_size, target.dtype),
                ahead=config.data.states_ahead,
                keeps=keep_hidden and size <= CACHE_BYTES,
                device=target.device,
            )
        part = TrainingRows(
            rows,
            target=target,
            hidden_source=source,
            keep_hidden=keep_hidden,
            cache=cache,
            checks_cache=may_keep and target.num_left_out == 0,
            served=served,
            captures=trainer.cuda_graphs and name == TRAIN,
        )
        found.append(part)
    return RunRows(*found)


def _server(config: TrainConfig) -> Server | None:
    """The server of `data.states_endpoint`, once it has said that it serves the target."""
    if config.data.states_endpoint is None:
        return None
    return find_server(
        config.data.states_endpoint,
        target=config.model.path,
        served_model=config.data.states_model,
        timeout_s=_TIMEOUT_S,
        options=OPTIONS,
    )


def cache_header(packed: PackedRows, *, target: Target, hidden_source: NormPoint) -> CacheHeader:
    """What the hidden states of packed rows depend on."""
    config_file = check_source(target.path)
    folder = config_file.parent if config_file is not None else Path(target.path)
    digest = hashlib.sha256()
    for array in (packed.token_ids, packed.document_index, packed.position):
        digest.update(array.tobytes())
    return CacheHeader(
        target_sha256=files_sha256(list(folder.glob("*.safetensors"))),
        tokenizer_sha256=files_sha256(list(folder.glob("tokenizer.json"))),
        chat_template_sha256=_chat_template_sha256(folder),
        dtype=str(target.dtype),
        hidden_source=hidden_source,
        seq_len=packed.token_ids.shape[1],
        num_rows=len(packed.token_ids),
        documents_sha256=digest.hexdigest(),
        versions={
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
    )


def _chat_template_sha256(folder: Path) -> str:
    """Of a template file, or of the one inside `tokenizer_config.json`."""
    if files := list(folder.glob("chat_template.*")):
        return files_sha256(files)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf8")) if config.is_file() else {}
    template = settings.get("chat_template")
    return "none" if template is None else hashlib.sha256(str(template).encode()).hexdigest()


def pack_rows(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> dict[str, PackedRows]:
    """Training rows of `data.seq_len`; held-out rows long enough for the longest document."""
    if not documents.train:
        raise ConfigError(
            f"data.path must hold documents of {num_depths + 2} or more tokens beside the held-out "
            "ones, got none; set data.path."
        )
    pad_id = target.config.pad_token_id or 0
    exact = target.max_exact_tokens
    require_exact_length(config.data.seq_len, limit=exact, key="data.seq_len")
    packed = pack_first_fit(documents.train, seq_len=config.data.seq_len, pad_id=pad_id)
    logger.info(
        "%d rows of %d tokens; %d documents cut (%d tokens), %d shorter than %d tokens left out",
        len(packed.token_ids),
        config.data.seq_len,
        packed.num_cut,
        packed.num_cut_tokens,
        documents.num_short,
        num_depths + 2,
    )
    longest = max(len(document.token_ids) for document in documents.held_out)
    limit = exact or target.config.max_position_embeddings
    held_out = pack_first_fit(documents.held_out, seq_len=min(longest, limit), pad_id=pad_id)
    return {TRAIN: packed, HELD_OUT: held_out}
