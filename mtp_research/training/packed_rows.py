"""Packed rows of a run, and the frozen target's hidden states for them.

Which rows a step sees is a pure function of (seed, position), so a resumed run needs no data state.
Hidden states are computed when a row is needed. When the run reads its rows more than once and they
fit, they stay in memory: always computed in the same blocks of rows, since the rounding of a
batched forward depends on its neighbours and a resumed run must repeat it bit for bit. They may
also come from a cache on disk, which `task=cache` makes of the same blocks, so that training from
it gives the same bits. Its header holds hashes of the target's files, so that a cache of
another model cannot pass for this one's; a target with all its layers (`data.check_hidden_cache`)
computes one row of each shard again as well. A cache can also be made of hidden states that an
inference engine wrote (`data.import_hidden`), to which only the final norm is applied here.

Letters: B batch rows, S row length, D hidden.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mtp_research.config.schema import TrainConfig
from mtp_research.data.engine_states import EngineStates
from mtp_research.data.hidden_cache import (
    SHARD_ROWS,
    CacheHeader,
    HiddenCache,
    HiddenCacheWriter,
    cached_bytes_per_token,
    files_sha256,
)
from mtp_research.data.packing import EncodedDocument, PackedRows, pack_first_fit
from mtp_research.models.attention.attention import DenseContext, document_ends, flat_ends
from mtp_research.models.family import NormPoint
from mtp_research.models.loading.source import check_source
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.progress import WorkProgress
from mtp_research.training.documents import HeadDocuments

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30
BLOCK_ROWS = 8
TRAIN, HELD_OUT = "train", "held_out"  # folders of a cache


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
    is compared with the target's own.
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
        bytes_per_token = cached_bytes_per_token(
            target.config.hidden_size, dtype=target.dtype, hidden_source=hidden_source
        )
        self.keeps_hidden = keep_hidden and self._rows[0].numel() * bytes_per_token <= CACHE_BYTES
        self._blocks: dict[int, BatchHidden] = {}

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

    def hidden(self, indices: Sequence[int]) -> BatchHidden:
        """Target hidden states of the rows of `indices`, without gradient."""
        if self._cache is not None:
            return self._read(self._cache, indices)
        if not self.keeps_hidden:
            return self._forward(self.batch(indices))
        parts = [(self._block(index // BLOCK_ROWS), index % BLOCK_ROWS) for index in indices]
        source = torch.stack([part.source[row] for part, row in parts])
        if self._hidden_source == "post_norm":
            return BatchHidden(source, source)
        return BatchHidden(source, torch.stack([part.post_norm[row] for part, row in parts]))

    def computed(self, indices: range) -> dict[str, Tensor]:
        """Hidden states `[rows, S, D]` of whole blocks by name, for a cache; none stays here."""
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
        batch = self.batch([index])
        is_text = batch.document_index[0] >= 0  # an imported row is empty elsewhere
        own = self._forward(batch).post_norm[0][is_text].float()
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


class ImportedRows:
    """Packed rows whose hidden states come from the files of an engine."""

    def __init__(
        self,
        packed: PackedRows,
        *,
        documents: Sequence[EncodedDocument],
        states: EngineStates,
        target: Target,
        hidden_source: NormPoint,
    ) -> None:
        """Find the file of every document that is in a row.

        Raises:
            ConfigError: some have none.
        """
        self._packed, self._states, self._target = packed, states, target
        self._hidden_source = hidden_source
        self.sampled_nll: list[float] = []  # a row of each call, see `nll_per_token`
        self._spans = [list(_spans(row)) for row in packed.document_index]
        lacking = [
            documents[packed.document_index[row, span.start]].doc_id
            for row, spans in enumerate(self._spans)
            for span in spans
            if not states.has(packed.token_ids[row, span])
        ]
        if lacking:
            raise ConfigError(
                f"data.import_hidden must hold the hidden states of every document of data.path, "
                f"{states.folder} lacks {len(lacking)} of {sum(map(len, self._spans))}, such as "
                f"{min(lacking)!r}; let the engine read its token ids as a prompt."
            )

    def __len__(self) -> int:
        return len(self._spans)

    @torch.no_grad()
    def computed(self, indices: range) -> dict[str, Tensor]:
        """Hidden states `[rows, S, D]` by name, zero where a row is empty."""
        target, packed = self._target, self._packed
        shape = (len(indices), packed.token_ids.shape[1], target.config.hidden_size)
        pre_norm = torch.zeros(shape, dtype=target.dtype)
        for place, row in enumerate(indices):
            for span in self._spans[row]:
                pre_norm[place, span] = self._states.states(packed.token_ids[row, span])
        final_norm = target.model.base_model.get_submodule(target.family.final_norm)
        post_norm = final_norm(pre_norm.to(target.device))
        self.sampled_nll += self._nll(post_norm[0], row=indices[0])
        names = {"post_norm": post_norm}
        return names if self._hidden_source == "post_norm" else names | {"source": pre_norm}

    def _nll(self, post_norm: Tensor, *, row: int) -> list[float]:
        """Of each of the target's own tokens of a row, given its states `[S, D]`; nats."""
        packed = self._packed
        is_own = torch.from_numpy(packed.loss_mask[row, 1:] & (packed.position[row, 1:] > 0))
        labels = torch.from_numpy(packed.token_ids[row, 1:])[is_own].to(post_norm.device)
        logits = self._target.logits(post_norm[:-1][is_own.to(post_norm.device)])
        return functional.cross_entropy(logits.float(), labels, reduction="none").tolist()


def _spans(document_index: np.ndarray) -> Iterator[slice]:
    """Where the documents of a row `[S]` stand."""
    bounds = np.flatnonzero(np.diff(document_index, prepend=-2, append=-2))
    for start, end in itertools.pairwise(bounds.tolist()):
        if document_index[start] >= 0:
            yield slice(start, end)


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
    packed = _pack(config, documents=documents, target=target, num_depths=num_depths)
    source, trainer = cast(NormPoint, config.head.hidden_source), config.trainer
    rows_read = trainer.max_steps * trainer.batch_size * trainer.gradient_accumulation_steps
    # Ranks that share the target's layers run it together or wait for one another for ever.
    may_keep = not trainer.shard_target
    root, found = config.data.hidden_cache, []
    for name, rows in packed.items():
        cache = None
        if root is not None:
            header = cache_header(rows, target=target, hidden_source=source)
            cache = HiddenCache(Path(root) / name, header=header)
        part = TrainingRows(
            rows,
            target=target,
            hidden_source=source,
            keep_hidden=may_keep and (name == HELD_OUT or rows_read > len(rows.token_ids)),
            cache=cache,
            checks_cache=may_keep and target.num_left_out == 0,
        )
        found.append(part)
    return RunRows(*found)


def write_hidden_cache(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> dict[str, object]:
    """Write what is missing of `data.hidden_cache`; a repeated call continues a stopped one.

    The JSON-serialisable result has rows, tokens, bytes, shards written now and seconds; of
    imported states also `nll_per_token`, the mean negative log-likelihood (nats) of the target's
    own tokens in a row of each shard. It is low for text that the target wrote, and high where the
    states are another layer's.
    """
    started_s = time.perf_counter()
    assert config.data.hidden_cache is not None, "validation asks for data.hidden_cache"
    root, source = Path(config.data.hidden_cache), cast(NormPoint, config.head.hidden_source)
    packed = _pack(config, documents=documents, target=target, num_depths=num_depths)
    missing: list[tuple[HiddenCacheWriter, TrainingRows | ImportedRows, int]] = []
    all_rows = _rows_to_cache(config, packed, documents=documents, target=target)
    for name, part in packed.items():
        rows = all_rows[name]
        header = cache_header(part, target=target, hidden_source=source)
        if config.data.import_hidden is not None:
            origin = {"imported_from": config.data.import_hidden}
            header = dataclasses.replace(header, versions=origin)
        writer = HiddenCacheWriter(root / name, header=header)
        missing += [(writer, rows, number) for number in writer.missing()]
    with WorkProgress("hidden states", total=len(missing), unit="shards") as progress:
        for writer, rows, number in missing:
            indices = range(number * SHARD_ROWS, min((number + 1) * SHARD_ROWS, len(rows)))
            writer.write(number, rows.computed(indices))
            progress.advance()
    imported = [rows for rows in all_rows.values() if isinstance(rows, ImportedRows)]
    sampled = [nll for rows in imported for nll in rows.sampled_nll]
    facts: dict[str, object] = {}
    if sampled:
        facts["nll_per_token"] = round(float(np.mean(sampled)), 4)
    return facts | {
        "hidden_cache": str(root),
        "num_rows": sum(len(part.token_ids) for part in packed.values()),
        "num_tokens": sum(int((part.document_index >= 0).sum()) for part in packed.values()),
        "num_short_documents": documents.num_short,
        "num_shards_written": len(missing),
        "bytes": sum(path.stat().st_size for path in root.rglob("*.safetensors")),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def _rows_to_cache(
    config: TrainConfig,
    packed: Mapping[str, PackedRows],
    *,
    documents: HeadDocuments,
    target: Target,
) -> dict[str, TrainingRows] | dict[str, ImportedRows]:
    """Rows that compute their hidden states, or take them from `data.import_hidden`."""
    source, folder = cast(NormPoint, config.head.hidden_source), config.data.import_hidden
    if folder is None:
        return {
            name: TrainingRows(part, target=target, hidden_source=source, keep_hidden=False)
            for name, part in packed.items()
        }
    states = EngineStates(
        Path(folder),
        hidden_size=target.config.hidden_size,
        dtype=target.dtype,
        lengths={part.token_ids.shape[1] for part in packed.values()},
    )
    texts = {TRAIN: documents.train, HELD_OUT: documents.held_out}
    return {
        name: ImportedRows(
            part, documents=texts[name], states=states, target=target, hidden_source=source
        )
        for name, part in packed.items()
    }


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


def _pack(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> dict[str, PackedRows]:
    """Training rows of `data.seq_len`; held-out rows long enough for the longest document."""
    if not documents.train:
        raise ConfigError(
            f"data.path must hold documents of {num_depths + 2} or more tokens beside the held-out "
            "ones, got none; set data.path."
        )
    pad_id = target.config.pad_token_id or 0
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
    limit = target.config.max_position_embeddings
    held_out = pack_first_fit(documents.held_out, seq_len=min(longest, limit), pad_id=pad_id)
    return {TRAIN: packed, HELD_OUT: held_out}
