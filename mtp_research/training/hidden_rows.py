"""The packed rows of a run, and where their hidden states come from: the target or a cache.

`task=cache` writes the hidden states that `task=heads` would compute, in the same blocks of rows:
training from a cache gives the same bits as training that keeps what it computes.
"""

import hashlib
import importlib.metadata
import json
import logging
import time
from pathlib import Path
from typing import NamedTuple, cast

import torch

from mtp_research.config import TrainConfig
from mtp_research.data.hidden_cache import (
    SHARD_ROWS,
    CacheHeader,
    HiddenCache,
    HiddenCacheWriter,
    files_sha256,
)
from mtp_research.data.packing import PackedRows, pack_first_fit
from mtp_research.errors import ConfigError
from mtp_research.models.family import NormPoint
from mtp_research.models.source import check_source
from mtp_research.models.target import Target
from mtp_research.training.documents import HeadDocuments
from mtp_research.training.rows import TrainingRows

logger = logging.getLogger(__name__)

TRAIN, HELD_OUT = "train", "held_out"  # folders of a cache


class RunRows(NamedTuple):
    """Packed training and held-out rows."""

    train: TrainingRows
    held_out: TrainingRows


def build_rows(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> RunRows:
    """Rows of a training run, with hidden states from `data.hidden_cache` if it is set.

    Raises:
        ConfigError: no training document, or no cache where one was named.
        IntegrityError: the cache was made with another target, tokenizer, convention or data.
    """
    packed = _pack(config, documents=documents, target=target, num_depths=num_depths)
    source, trainer = cast(NormPoint, config.head.hidden_source), config.trainer
    rows_read = trainer.max_steps * trainer.batch_size * trainer.gradient_accumulation_steps
    # Ranks that share the target's layers run it together or wait for one another for ever.
    may_keep = not trainer.shard_target
    caches: dict[str, HiddenCache] = {}
    if config.data.hidden_cache is not None:
        root = Path(config.data.hidden_cache)
        caches = {
            name: HiddenCache(
                root / name, header=cache_header(rows, target=target, hidden_source=source)
            )
            for name, rows in packed.items()
        }
    return RunRows(
        *(
            TrainingRows(
                packed[name],
                target=target,
                hidden_source=source,
                keep_hidden=may_keep and (name == HELD_OUT or rows_read > len(rows.token_ids)),
                cache=caches.get(name),
                checks_cache=may_keep,
            )
            for name, rows in packed.items()
        )
    )


def write_hidden_cache(
    config: TrainConfig, *, documents: HeadDocuments, target: Target, num_depths: int
) -> dict[str, object]:
    """Write what is missing of `data.hidden_cache`; a stopped call goes on when it is repeated.

    Returns:
        JSON-serialisable result: rows, tokens, bytes, shards written now, seconds.

    Raises:
        ConfigError: no training document.
        IntegrityError: the folder holds a cache of something else; names the field.
    """
    started_s = time.perf_counter()
    assert config.data.hidden_cache is not None, "validation asks for data.hidden_cache"
    root, source = Path(config.data.hidden_cache), cast(NormPoint, config.head.hidden_source)
    packed = _pack(config, documents=documents, target=target, num_depths=num_depths)
    num_written = 0
    for name, part in packed.items():
        rows = TrainingRows(part, target=target, hidden_source=source, keep_hidden=False)
        header = cache_header(part, target=target, hidden_source=source)
        writer = HiddenCacheWriter(root / name, header=header)
        for number in writer.missing():
            indices = range(number * SHARD_ROWS, min((number + 1) * SHARD_ROWS, len(rows)))
            writer.write(number, rows.computed(indices))
            num_written += 1
            logger.info("%s: shard %d of %d", root / name, number + 1, header.num_shards)
    return {
        "hidden_cache": str(root),
        "num_rows": sum(len(part.token_ids) for part in packed.values()),
        "num_tokens": sum(int((part.document_index >= 0).sum()) for part in packed.values()),
        "num_short_documents": documents.num_short,
        "num_shards_written": num_written,
        "bytes": sum(path.stat().st_size for path in root.rglob("*.safetensors")),
        "seconds": round(time.perf_counter() - started_s, 1),
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
