"""Training documents of MTP heads: the target's own output as token ids, with a held-out part.

Input is a `.jsonl` or `.jsonl.xz` file, one document a line: `id`, optional `domain`, and one of

    token_ids, num_prompt_tokens    the decoded trajectory itself; preferred, because encoding a
                                    text again may cut it into other tokens than were emitted
    messages                        a conversation, written in the target's chat template;
                                    assistant turns are the target's own output
    text                            a plain document

The split is a function of document ids alone, so that runs with other k, seeds or lengths are
measured on the same held-out documents.

Source: training on the target's own output FastMTP (arXiv:2509.18362).
"""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_research.config.training_schema import DataConfig
from mtp_research.data.chat import encode_for_target
from mtp_research.data.json_lines import JsonLine, read_json_lines
from mtp_research.data.packing import EncodedDocument
from mtp_research.data.sources import hash_of, read_documents
from mtp_research.models.target import hash_tokenizer, load_tokenizer
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import sha256_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadDocuments:
    """Documents of a run, in file order."""

    train: list[EncodedDocument]
    held_out: list[EncodedDocument]  # of the replay walk
    num_short: int  # training documents left out: they have fewer than k + 2 tokens
    data_sha256: str  # of the file


def load_head_documents(
    data: DataConfig, *, model_path: str, vocab_size: int, num_depths: int
) -> HeadDocuments:
    """Read, encode and split the documents of `data.path`.

    Texts and messages are encoded by the tokenizer of `model_path`; token ids must lie below
    `vocab_size`. A document needs k + 2 tokens to have one anchor with k labels (`num_depths`).
    """
    path = Path(data.path)
    if not path.is_file():
        raise ConfigError(f"data.path must be a .jsonl or .jsonl.xz file, got {data.path!r}.")
    if data.kind == "original":
        logger.warning("data.kind=original: heads learn text that the target itself did not write")
    _check_tokenizer(path, model_path=model_path)
    documents = _thin_out(_encode(path, model_path=model_path), limit=data.max_documents)
    for document in documents:
        token_ids = document.token_ids or (0,)
        if max(token_ids) >= vocab_size or min(token_ids) < 0:
            raise IntegrityError(
                f"{path}: document {document.doc_id!r} has tokens outside the target's vocabulary "
                f"of {vocab_size}; the file was made with another tokenizer"
            )
    if len(documents) <= data.eval_documents:
        raise ConfigError(
            f"data.path must hold more than data.eval_documents={data.eval_documents} documents, "
            f"got {len(documents)}; set data.eval_documents={max(1, len(documents) // 5)}."
        )
    chosen = held_out_indices(documents, num_documents=data.eval_documents)
    held_out_ids = {documents[index].doc_id for index in chosen}
    rest = [document for document in documents if document.doc_id not in held_out_ids]
    if num_twins := len(documents) - len(chosen) - len(rest):
        logger.warning(
            "%s: %d documents have the id of a held-out one and are left out of training",
            path,
            num_twins,
        )
    train = [document for document in rest if len(document.token_ids) >= num_depths + 2]
    return HeadDocuments(
        train=train,
        held_out=[documents[index] for index in sorted(chosen)],
        num_short=len(rest) - len(train),
        data_sha256=sha256_of(path),
    )


def _check_tokenizer(path: Path, *, model_path: str) -> None:
    """Refuse token ids of another tokenizer, by the settings that regeneration left beside them."""
    beside = path.with_name(f"{path.name.removesuffix('.xz')}.settings.json")
    if not beside.is_file():
        return
    try:
        theirs = json.loads(beside.read_text(encoding="utf8")).get("tokenizer_sha256")
    except (OSError, ValueError, AttributeError) as fault:
        raise IntegrityError(f"{beside} must be settings in JSON, got {fault}.") from None
    ours = hash_tokenizer(model_path)
    if theirs is not None and ours is not None and theirs != ours:
        raise ConfigError(
            f"data.path must hold token ids of this target, {str(path)!r} was made with another "
            f"tokenizer; run python -m mtp_research.studies.regenerate --target {model_path} "
            "--output FILE, and set data.path=FILE."
        )


def held_out_indices(documents: Sequence[EncodedDocument], *, num_documents: int) -> set[int]:
    """Indices of the held-out documents: by hash of the id, one domain after the other in turn."""
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index in sorted(range(len(documents)), key=lambda index: hash_of(documents[index].doc_id)):
        by_domain[documents[index].domain].append(index)
    chosen: set[int] = set()
    queues = [by_domain[domain] for domain in sorted(by_domain)]
    while len(chosen) < num_documents:
        for queue in queues:
            if queue and len(chosen) < num_documents:
                chosen.add(queue.pop(0))
    return chosen


def _thin_out(documents: list[EncodedDocument], *, limit: int | None) -> list[EncodedDocument]:
    """At most `limit` documents, chosen by hash, in file order."""
    if limit is None or len(documents) <= limit:
        return documents
    order = sorted(range(len(documents)), key=lambda index: hash_of(documents[index].doc_id))
    return [documents[index] for index in sorted(order[:limit])]


def _encode(path: Path, *, model_path: str) -> list[EncodedDocument]:
    """All documents of the file, in order; the tokenizer is loaded when a line needs it."""
    first = next(read_json_lines(path, key="data.path"), None)
    if first is None:
        raise IntegrityError(f"{path}: expected at least one document, the file is empty")
    if "token_ids" in first.record:
        return [_trajectory(line, path=path) for line in read_json_lines(path, key="data.path")]
    return encode_for_target(list(read_documents(path)), load_tokenizer(model_path))


def _trajectory(line: JsonLine, *, path: Path) -> EncodedDocument:
    where, record = line.where, line.record
    token_ids, num_prompt = record.get("token_ids"), record.get("num_prompt_tokens")
    if not (
        isinstance(token_ids, list)
        and all(isinstance(token, int) for token in token_ids)
        and isinstance(num_prompt, int)
        and 0 < num_prompt <= len(token_ids)
    ):
        raise IntegrityError(
            f"{where}: expected `token_ids` (a list of integers) and `num_prompt_tokens` in "
            f"[1, number of tokens], as in the first line; fix the line"
        )
    return EncodedDocument(
        doc_id=str(record.get("id", where)),
        domain=str(record.get("domain") or path.name.split(".")[0]),
        token_ids=tuple(token_ids),
        loss_mask=tuple(index >= num_prompt for index in range(len(token_ids))),
    )
