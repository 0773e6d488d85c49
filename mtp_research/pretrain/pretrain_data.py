"""Corpus and installed Python source as token streams, for `task=target`.

Holds what the training loop, the dev evaluation and the provenance file need to know of the data.
Letters: B rows of a batch, S tokens of a row.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from mtp_research.config.training_schema import PretrainConfig
from mtp_research.data.packing import TokenStream, build_stream, sample_rows
from mtp_research.data.sources import (
    PYTHON_DOMAIN,
    Document,
    Split,
    corpus_files,
    load_corpus,
    python_sources,
)
from mtp_research.data.tokenizer import (
    encode_documents,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.files import sha256_of
from mtp_research.runtime.provenance import resolve_path

MAX_PYTHON_BYTES = 40_000_000


@dataclass(frozen=True)
class PretrainData:
    """Everything that was read."""

    tokenizer: Tokenizer  # trained, or found in the output folder
    # training tokens per domain of positive weight, in the order of `weights`
    streams: dict[str, TokenStream]
    weights: dict[str, float]  # sampling weight per domain, as configured, positive ones only
    dev_documents: dict[str, list[Document]]  # held-out ones per domain
    sha256: dict[str, str]  # per file name; the Python source counts as one file
    num_bytes: dict[str, int]  # UTF-8 bytes of training text per domain


def prepare_data(pretrain: PretrainConfig, *, tokenizer_dir: Path) -> PretrainData:
    """Read the domains of positive weight, train or reuse the tokenizer, encode."""
    weights = _positive_weights(pretrain.domain_weights)
    corpus_dir = resolve_path(pretrain.corpus_dir)
    documents = {domain: _read(corpus_dir, domain=domain, split="train") for domain in weights}
    dev_documents = {domain: _read(corpus_dir, domain=domain, split="dev") for domain in weights}
    if (tokenizer_dir / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(tokenizer_dir)
    else:
        flat = [document for members in documents.values() for document in members]
        tokenizer = train_tokenizer(flat, vocab_size=pretrain.vocab_size)
        save_tokenizer(tokenizer, tokenizer_dir)
    if tokenizer.get_vocab_size() > pretrain.vocab_size:
        raise ConfigError(
            f"expected a tokenizer of at most model.pretrain.vocab_size={pretrain.vocab_size} ids, "
            f"got {tokenizer.get_vocab_size()} in {tokenizer_dir}; use another output_dir"
        )
    streams = {
        domain: build_stream(
            encode_documents(members, tokenizer), vocab_size=tokenizer.get_vocab_size()
        )
        for domain, members in documents.items()
    }
    return PretrainData(
        tokenizer=tokenizer,
        streams=streams,
        weights=weights,
        dev_documents=dev_documents,
        sha256=_file_hashes(corpus_dir, documents),
        num_bytes={
            domain: sum(len(text.encode()) for document in members for text in document.texts)
            for domain, members in documents.items()
        },
    )


def token_array(streams: Mapping[str, TokenStream], *, seq_len: int) -> np.ndarray:
    """All streams, then their first S + 1 tokens again, so that no row runs past it; int32."""
    tokens = np.concatenate([stream.token_ids for stream in streams.values()]).astype(np.int32)
    return np.concatenate([tokens, np.resize(tokens, seq_len + 1)])


def device_batches(
    data: PretrainData,
    pretrain: PretrainConfig,
    *,
    seed: int,
    device: torch.device,
    first_step: int = 0,
) -> Iterator[torch.Tensor]:
    """Endless row starts [B] int64 on the device, copied there without waiting for it.

    `first_step` batches are left out, which an earlier part of the run has taken.
    """
    is_cuda = device.type == "cuda"
    rows = sample_rows(
        data.streams,
        weights=data.weights,
        batch_size=pretrain.batch_size,
        seq_len=pretrain.seq_len,
        seed=seed,
    )
    for starts in itertools.islice(rows, first_step, None):
        batch = torch.from_numpy(starts)
        yield batch.pin_memory().to(device, non_blocking=True) if is_cuda else batch


def describe_data(data: PretrainData) -> list[str]:
    """One line per domain: share of the rows, tokens, bytes per token."""
    total = sum(data.weights.values())
    lines = []
    for name, stream in data.streams.items():
        num_tokens = len(stream.token_ids)
        lines.append(
            f"domain {name:14s} weight {data.weights[name] / total:.3f}  {num_tokens:>11,} tokens  "
            f"{data.num_bytes[name] / num_tokens:.2f} bytes/token"
        )
    return lines


def data_record(data: PretrainData) -> dict[str, object]:
    """What was read, for PROVENANCE.json."""
    return {
        "data_sha256": data.sha256,
        "data_bytes": data.num_bytes,
        "data_tokens": {name: len(stream.token_ids) for name, stream in data.streams.items()},
    }


def _positive_weights(weights: Mapping[str, float]) -> dict[str, float]:
    negative = sorted(domain for domain, weight in weights.items() if weight < 0)
    positive = {domain: float(weight) for domain, weight in weights.items() if weight > 0}
    if negative or not positive:
        raise ConfigError(
            "model.pretrain.domain_weights must hold weights >= 0 and one > 0, got "
            f"{dict(weights)}; set for example model.pretrain.domain_weights.math=1"
        )
    return positive


def _read(corpus_dir: str, *, domain: str, split: Split) -> list[Document]:
    if domain == PYTHON_DOMAIN:
        documents = python_sources(max_bytes=MAX_PYTHON_BYTES, split=split)
    else:
        documents = load_corpus(corpus_dir, domains=[domain], split=split)
    # Files list their sources one after the other; mixed neighbours make every row varied.
    order = np.random.default_rng(0).permutation(len(documents))
    return [documents[index] for index in order]


def _file_hashes(corpus_dir: str, documents: Mapping[str, list[Document]]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for domain, members in documents.items():
        if domain == PYTHON_DOMAIN:
            digest = hashlib.sha256()
            for document in sorted(members, key=lambda document: document.doc_id):
                digest.update(f"{document.doc_id}\0{document.text}\0".encode())
            hashes[f"installed python source ({len(members)} files)"] = digest.hexdigest()
            continue
        for split in ("train", "dev"):
            for path in corpus_files(corpus_dir, domain=domain, split=split):
                hashes[path.name] = sha256_of(path)
    return hashes
