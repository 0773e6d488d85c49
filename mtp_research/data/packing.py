"""Rows of token ids: continuous ones for pretraining, document-safe ones for head training.

Third stage of the data flow: sources -> tokenizer -> packing. Letters: B rows of a batch, S tokens
of a row. Both packers are pure functions of their arguments, so that data order is a function of
(seed, epoch) and a resumed run sees the same rows.

Source: first-fit decreasing bin packing (Johnson 1973).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids of one document."""

    doc_id: str  # as in the `Document` it was made from
    domain: str  # as in the `Document`
    token_ids: tuple[int, ...]  # from `<|bos|>` to `<|eos|>` or the last `<|end|>`
    loss_mask: tuple[bool, ...]  # same length; True where the token is the target's own output

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"document {self.doc_id!r} has {len(self.token_ids)} tokens and "
                f"{len(self.loss_mask)} loss mask entries; expected the same number"
            )


@dataclass(frozen=True)
class PackedRows:
    """Document-safe rows, B of S tokens each."""

    token_ids: np.ndarray  # [B, S] int64, `pad_id` where empty
    document_index: np.ndarray  # [B, S] int64 index into the packed `documents`, -1 where empty
    position: np.ndarray  # [B, S] int64 position inside the document, 0 where empty
    loss_mask: np.ndarray  # [B, S] bool, False where empty
    num_cut: int  # documents that were longer than S and lost their tail
    num_cut_tokens: int  # tokens lost that way
    num_skipped: int  # documents shorter than `min_tokens`, which are in no row


def pack_first_fit(
    documents: Sequence[EncodedDocument], *, seq_len: int, min_tokens: int = 2, pad_id: int = 2
) -> PackedRows:
    """Pack whole documents into rows of `seq_len` tokens by first-fit decreasing.

    The longest document goes first, each into the first row with room; ties keep their order. A
    document never spans two rows; one longer than a row is cut to it. `document_index` has indices
    into `documents`; those of fewer than `min_tokens` are skipped and counted: 2 is one prediction.

    Example:
        Documents of 5, 3, 2 and 4 tokens at `seq_len` 7 give the rows (5, 2) and (4, 3).
    """
    lengths = [min(len(document.token_ids), seq_len) for document in documents]
    chosen = [
        index for index, document in enumerate(documents) if len(document.token_ids) >= min_tokens
    ]
    if not chosen:
        raise ConfigError(
            f"expected documents of at least {min_tokens} tokens, got none among {len(documents)}; "
            "change data.path"
        )
    rows = _first_fit(sorted(chosen, key=lambda index: -lengths[index]), lengths, seq_len)
    shape = (len(rows), seq_len)
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    document_index = np.full(shape, -1, dtype=np.int64)
    position = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=bool)
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            end = start + lengths[index]
            token_ids[row, start:end] = documents[index].token_ids[:seq_len]
            loss_mask[row, start:end] = documents[index].loss_mask[:seq_len]
            document_index[row, start:end] = index
            position[row, start:end] = np.arange(end - start)
            start = end
    cut = [len(documents[index].token_ids) - seq_len for index in chosen]
    return PackedRows(
        token_ids=token_ids,
        document_index=document_index,
        position=position,
        loss_mask=loss_mask,
        num_cut=sum(tokens > 0 for tokens in cut),
        num_cut_tokens=sum(tokens for tokens in cut if tokens > 0),
        num_skipped=len(documents) - len(chosen),
    )


def _first_fit(order: Sequence[int], lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Rows as lists of document indices.

    A tree over rows keeps the largest room in each subtree, which finds the first row with enough
    room in O(log rows); the plain scan is quadratic and takes minutes at 10^5 documents.
    """
    num_leaves = 1 << max(len(order) - 1, 0).bit_length()
    room = np.full(2 * num_leaves, seq_len, dtype=np.int64).tolist()
    rows: list[list[int]] = []
    for index in order:
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        row = node - num_leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


@dataclass(frozen=True)
class TokenStream:
    """All documents of one domain, end to end."""

    token_ids: np.ndarray  # [num_tokens] uint16 or int32
    document_starts: np.ndarray  # [num_documents] int64 offsets of each `<|bos|>`


def build_stream(documents: Iterable[EncodedDocument], *, vocab_size: int) -> TokenStream:
    """Concatenate documents in the order given; two bytes a token where the vocabulary allows."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    pieces = [np.asarray(document.token_ids, dtype=dtype) for document in documents]
    if not pieces:
        raise ConfigError("expected at least one document per domain, got none; change the domain")
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return TokenStream(
        token_ids=np.concatenate(pieces), document_starts=np.cumsum(lengths) - lengths
    )


def pack_stream(stream: TokenStream, *, seq_len: int, seed: int, epoch: int) -> np.ndarray:
    """Row starts of one epoch, shuffled: row r reads tokens [start, start + seq_len + 1), wrapping.

    A row starts at every document and at every `seq_len` tokens inside a long one, so that each
    token is read at least once an epoch and every document is also read from position 0, as at
    decoding time. A row runs on into the documents that follow; attention is not cut between them.
    The [num_rows] int64 offsets into the stream are a pure function of the arguments.
    """
    bounds = np.append(stream.document_starts, len(stream.token_ids))
    num_rows = np.maximum(-(-np.diff(bounds) // seq_len), 1)  # per document, rounded up
    first_row = np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    stride = np.arange(num_rows.sum()) - first_row
    starts = np.repeat(stream.document_starts, num_rows) + stride * seq_len
    return np.random.default_rng((seed, epoch)).permutation(starts)


def sample_rows(
    streams: Mapping[str, TokenStream],
    *,
    weights: Mapping[str, float],
    batch_size: int,
    seq_len: int,
    seed: int,
) -> Iterator[np.ndarray]:
    """Endless batches of row starts, [B] int64, each row from a domain drawn with its weight.

    The offsets index the concatenation of all streams in the order of `streams`. Inside a domain
    rows come without replacement, epoch after epoch.
    """
    names = list(streams)
    probabilities = np.array([weights[name] for name in names], dtype=np.float64)
    probabilities /= probabilities.sum()
    offsets = np.cumsum([0, *(len(streams[name].token_ids) for name in names)])
    walks = [_epochs(streams[name], seq_len=seq_len, seed=seed) for name in names]
    draw = np.random.default_rng(seed)
    while True:
        domains = draw.choice(len(names), size=batch_size, p=probabilities)
        yield np.array([offsets[d] + next(walks[d]) for d in domains], dtype=np.int64)


def _epochs(stream: TokenStream, *, seq_len: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        yield from pack_stream(stream, seq_len=seq_len, seed=seed, epoch=epoch).tolist()
        epoch += 1


def document_spans(document_index: np.ndarray) -> Iterator[slice]:
    """Where the documents of a row `[S]` stand."""
    bounds = np.flatnonzero(np.diff(document_index, prepend=-2, append=-2))
    for start, end in itertools.pairwise(bounds.tolist()):
        if document_index[start] >= 0:
            yield slice(start, end)
