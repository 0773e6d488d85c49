"""`task=cache`: hidden states of all rows of a run, computed here or taken from an engine's files.

They are computed in the blocks that a training without a cache computes, so that training from the
cache gives the same bits. Only the final norm is applied to states that an inference engine wrote
(`data.import_hidden`).

Letters: S row length, D hidden.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mtp_research.config.schema import TrainConfig
from mtp_research.data.engine_states import EngineStates, StatesForm
from mtp_research.data.hidden_cache import SHARD_ROWS, HiddenCacheWriter
from mtp_research.data.packing import EncodedDocument, PackedRows, document_spans
from mtp_research.models.family import NormPoint
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.progress import WorkProgress
from mtp_research.training.documents import HeadDocuments
from mtp_research.training.packed_rows import (
    HELD_OUT,
    TRAIN,
    TrainingRows,
    cache_header,
    own_token_nll,
    pack_rows,
)


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
        self._spans = [list(document_spans(row)) for row in packed.document_index]
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
        post_norm = target.final_norm(pre_norm.to(target.device))
        first = indices[0]
        self.sampled_nll += own_token_nll(
            target,
            post_norm[0],
            token_ids=torch.from_numpy(packed.token_ids[first]),
            is_own=torch.from_numpy(packed.loss_mask[first] & (packed.position[first] > 0)),
        )
        names = {"post_norm": post_norm}
        return names if self._hidden_source == "post_norm" else names | {"source": pre_norm}


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
    packed = pack_rows(config, documents=documents, target=target, num_depths=num_depths)
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
    form = StatesForm("data.import_hidden", target.config.hidden_size, target.dtype)
    lengths = {part.token_ids.shape[1] for part in packed.values()}
    states = EngineStates(Path(folder), form=form, lengths=lengths)
    texts = {TRAIN: documents.train, HELD_OUT: documents.held_out}
    return {
        name: ImportedRows(
            part, documents=texts[name], states=states, target=target, hidden_source=source
        )
        for name, part in packed.items()
    }
