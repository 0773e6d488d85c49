"""Training documents of MTP heads: the target's own output as token ids, with a held-out part.

Input is any source that `data.rows` reads: `id` and `domain` where a row has them, and one of

    token_ids, num_prompt_tokens    the decoded trajectory itself; preferred, because encoding a
                                    text again may cut it into other tokens than were emitted
    a conversation                  written in the target's chat template; assistant turns are the
                                    target's own output (forms: `data.row_forms`)
    text                            a plain document

The split is a function of document ids alone, so that runs with other k, seeds or lengths are
measured on the same held-out documents. Those whose prompt or answer is that of a training document
are dropped: the walk must not be measured on what was learnt. How far the answers of the others
repeat training answers in parts is counted in runs of 13 tokens.

Source: training on the target's own output FastMTP (arXiv:2509.18362).
"""

import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtp_research.config.training_schema import DataConfig
from mtp_research.data.chat import encode_for_target
from mtp_research.data.packing import EncodedDocument
from mtp_research.data.rows import Row, read_rows, source_sha256
from mtp_research.data.sources import Document, document_of, hash_of
from mtp_research.models.target import (
    Target,
    hash_tokenizer,
    load_tokenizer,
    target_hashes,
)
from mtp_research.runtime.errors import ConfigError, IntegrityError

logger = logging.getLogger(__name__)
GRAM_TOKENS = 13  # of a run that counts as copied
# Settings of regeneration under which a text is a draw from the target's own distribution.
SAMPLED_LAW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True)
class HeadDocuments:
    """Documents of a run, in file order."""

    train: list[EncodedDocument]
    held_out: list[EncodedDocument]  # of the replay walk
    num_short: int  # training documents left out: they have fewer than k + 2 tokens
    data_sha256: str  # of the file
    num_seen: int = 0  # held-out documents dropped, whose prompt or answer is in training
    overlap_13: float = math.nan  # share of held-out answers' 13-grams in training answers
    # Why the expected length of sampled drafts cannot be measured on this text; None where it can
    not_sampled: str | None = None

    def facts(self) -> dict[str, object]:
        """What a result records of the data."""
        return {
            "num_held_out_dropped": self.num_seen,
            "held_out_13gram_overlap": self.overlap_13,
            "sampled_length_not_measured": self.not_sampled,
        }

    def line(self) -> str:
        """The same for people, on one line."""
        text = (
            f"data: {len(self.train)} training and {len(self.held_out)} held-out documents, "
            f"{self.num_seen} more dropped, whose prompt or answer is in training; "
            f"{self.overlap_13:.1%} of the 13-grams of held-out answers occur in training answers"
        )
        unmeasured = f"; sampled_acceptance_length is nan: {self.not_sampled}"
        return text + unmeasured * (self.not_sampled is not None)


RawDocument = Document | EncodedDocument  # encoded: regenerated text, which is token ids


def read_head_documents(data: DataConfig) -> list[RawDocument]:
    """All rows of `data.path`, checked, before a model is loaded.

    Raises:
        ConfigError: there is no such source.
        IntegrityError: it is empty or damaged, or a row has no known form; file and line are named.
    """
    if data.kind == "original":
        logger.warning("data.kind=original: heads learn text that the target itself did not write")
    return _read(data.path)


def mark_words(data: DataConfig, found: Sequence[RawDocument]) -> None:
    """Rows of words are no record of what the target wrote: `data.kind` is `original`, in place."""
    if data.kind != "original" and isinstance(found[0], Document):  # a source has one form
        data.kind = "original"
        logger.warning(
            "data.path holds words: unless the target wrote them, heads learn another model's text "
            "and draft worse; mtp regenerate --target MODEL --source %s --output FILE lets the "
            "target answer the same questions",
            data.path,
        )


def load_head_documents(
    data: DataConfig,
    found: Sequence[RawDocument],
    *,
    model_path: str,
    vocab_size: int,
    num_depths: int,
) -> HeadDocuments:
    """Encode and split what `read_head_documents` found.

    Texts and messages are encoded by the tokenizer of `model_path`; token ids must lie below
    `vocab_size`. A document needs k + 2 tokens to have one anchor with k labels (`num_depths`).
    """
    path = Path(data.path)
    settings = answer_settings(path)
    _check_tokenizer(settings, path=path, model_path=model_path)
    encoded = _encode(found, model_path=model_path)
    documents = _thin_out(encoded, limit=data.max_documents)
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
            f"got {len(documents)}; "
            + (
                f"set data.eval_documents={max(1, len(documents) // 5)}."
                if len(documents) > 1
                else "set data.path to a file with more texts."
            )
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
    asked = [documents[index] for index in sorted(chosen)]
    held_out = unseen(asked, train=train)
    if not held_out:
        raise ConfigError(
            f"data.path must hold documents that differ from each other, got {len(asked)} held-out "
            "ones whose prompt or answer is that of a training document; remove the copies, or set "
            "data.path to a file with more texts."
        )
    return HeadDocuments(
        train=train,
        held_out=held_out,
        num_short=len(rest) - len(train),
        data_sha256=source_sha256(data.path, key="data.path"),
        num_seen=len(asked) - len(held_out),
        overlap_13=overlap(held_out, train=train),
        not_sampled=_why_not_sampled(settings),
    )


def read_texts(paths: Iterable[str], *, model_path: str) -> list[EncodedDocument]:
    """All documents of files as `data.path` takes them, encoded by the tokenizer of the target."""
    return [document for path in paths for document in _encode(_read(path), model_path=model_path)]


def unseen(
    held_out: Sequence[EncodedDocument], *, train: Iterable[EncodedDocument]
) -> list[EncodedDocument]:
    """The held-out documents that share neither their whole prompt nor answer with training."""
    parts = list(map(_parts, train))
    prompts = {one.prompt for one in parts if len(one.prompt) > 1}  # plain text has its first token
    answers = {one.answer for one in parts if one.answer}
    pairs = [(document, _parts(document)) for document in held_out]
    return [d for d, own in pairs if own.prompt not in prompts and own.answer not in answers]


class _Parts(NamedTuple):
    """Token ids of a document: before the target's first own token, and the own ones."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def _parts(document: EncodedDocument) -> _Parts:
    token_ids, is_own = document.token_ids, document.loss_mask
    num_prompt = is_own.index(True) if True in is_own else len(token_ids)
    return _Parts(token_ids[:num_prompt], tuple(itertools.compress(token_ids, is_own)))


def overlap(held_out: Iterable[EncodedDocument], *, train: Iterable[EncodedDocument]) -> float:
    """Share of the 13-grams of held-out answers that occur in training answers; nan without any.

    Compared by 64-bit hashes, as text by text there are too many to keep.
    """
    found = [_gram_hashes(_parts(document).answer) for document in held_out]
    wanted = np.concatenate([*found, np.zeros(0, np.uint64)])
    if not len(wanted):
        return math.nan
    known = np.unique(wanted)
    is_seen = np.zeros(len(known), dtype=bool)
    for document in train:
        hashes = _gram_hashes(_parts(document).answer)
        at = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        is_seen[at[known[at] == hashes]] = True
    return float(is_seen[np.searchsorted(known, wanted)].mean())


def _gram_hashes(token_ids: Sequence[int]) -> np.ndarray:
    """A hash of each 13 tokens in a row, `[n - 12]`."""
    if len(token_ids) < GRAM_TOKENS:
        return np.zeros(0, np.uint64)
    factors = np.random.default_rng(0).integers(1 << 63, size=GRAM_TOKENS, dtype=np.uint64)
    grams = np.lib.stride_tricks.sliding_window_view(np.array(token_ids, np.uint64), GRAM_TOKENS)
    return (grams * (2 * factors + 1)).sum(axis=1, dtype=np.uint64)  # modulo 2^64


def _why_not_sampled(settings: Mapping[str, object]) -> str | None:
    """Replay of rejection sampling takes the text for a draw from the target's distribution."""
    law = {name: settings.get(name) for name in SAMPLED_LAW}
    if law == SAMPLED_LAW:
        return None
    got = "of unknown sampling"
    if any(value is not None for value in law.values()):
        got = "at " + ", ".join(f"{name} {value}" for name, value in law.items())
    wanted = ", ".join(f"{name} {value:g}" for name, value in SAMPLED_LAW.items())
    return f"it needs text sampled at {wanted}, got text {got}"


def answer_settings(path: Path) -> dict:
    """The settings that regeneration left beside its answers; empty without them."""
    beside = path.with_name(f"{path.name.removesuffix('.xz')}.settings.json")
    if not beside.is_file():
        return {}
    try:
        return dict(json.loads(beside.read_text(encoding="utf8")))
    except (OSError, ValueError, TypeError) as fault:
        raise IntegrityError(f"{beside} must be settings in JSON, got {fault}.") from None


def warn_of_writer(source: str, *, target: Target) -> None:
    """Warn of answers that another model wrote, whose token ids this one reads all the same."""
    theirs = answer_settings(Path(source)).get("weights_sha256")
    if theirs is not None and theirs != target_hashes(target)["weights_sha256"]:
        logger.warning(
            "data.path %s was written by another model than model.path %s, so heads learn from "
            "text that this one would not write; mtp regenerate --target %s writes its own",
            source,
            target.path,
            target.path,
        )


def _check_tokenizer(settings: Mapping[str, object], *, path: Path, model_path: str) -> None:
    """Refuse token ids of another tokenizer."""
    theirs = settings.get("tokenizer_sha256")
    ours = hash_tokenizer(model_path) if theirs is not None else None
    if theirs is not None and ours is not None and theirs != ours:
        raise ConfigError(
            f"data.path must hold token ids of this target, {str(path)!r} was made with another "
            "tokenizer; set data.path to conversations or texts of your own, or to what "
            f"mtp regenerate --target {model_path} --source QUESTIONS --output FILE writes."
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


def _read(source: str) -> list[RawDocument]:
    """All documents; the first row says whether they are token ids."""
    rows = read_rows(source, key="data.path")
    first = next(rows, None)
    if first is None:
        raise IntegrityError(f"{source}: expected at least one document, the file is empty")
    read = _trajectory if "token_ids" in first.record else document_of
    return [read(row) for row in itertools.chain([first], rows)]


def _encode(found: Sequence[RawDocument], *, model_path: str) -> list[EncodedDocument]:
    """Token ids of all, in order; the tokenizer is loaded when one needs it."""
    texts = [document for document in found if isinstance(document, Document)]
    encoded = iter(encode_for_target(texts, load_tokenizer(model_path)) if texts else ())
    return [next(encoded) if isinstance(one, Document) else one for one in found]


def _trajectory(row: Row) -> EncodedDocument:
    token_ids, num_prompt = row.record.get("token_ids"), row.record.get("num_prompt_tokens")
    if not (
        isinstance(token_ids, list)
        and all(isinstance(token, int) for token in token_ids)
        and isinstance(num_prompt, int)
        and 0 < num_prompt <= len(token_ids)
    ):
        raise IntegrityError(
            f"{row.where}: expected `token_ids` (a list of integers) and `num_prompt_tokens` in "
            "[1, number of tokens], as in the first line; fix the line"
        )
    return EncodedDocument(
        doc_id=row.name or row.where,
        domain=row.domain or row.stem,
        token_ids=tuple(token_ids),
        loss_mask=tuple(index >= num_prompt for index in range(len(token_ids))),
    )
