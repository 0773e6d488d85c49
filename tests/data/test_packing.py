import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.data.packing import (
    EncodedDocument,
    TokenStream,
    build_stream,
    pack_first_fit,
    pack_stream,
    sample_rows,
)
from mtp_research.runtime.errors import ConfigError

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def make_documents(lengths: list[int]) -> list[EncodedDocument]:
    """Every token of every document has its own id, so that tokens can be followed."""
    documents, first = [], 10
    for index, length in enumerate(lengths):
        ids = tuple(range(first, first + length))
        mask = tuple(token % 3 > 0 for token in ids)
        documents.append(EncodedDocument(str(index), "d", ids, mask))
        first += length
    return documents


@given(lengths=lengths_lists, seq_len=st.integers(1, 24), min_tokens=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_pack_first_fit_keeps_every_token_once(
    lengths: list[int], seq_len: int, min_tokens: int
) -> None:
    documents = make_documents(lengths)
    kept = [index for index, length in enumerate(lengths) if length >= min_tokens]
    if not kept:
        with pytest.raises(ConfigError, match="at least"):
            pack_first_fit(documents, seq_len=seq_len, min_tokens=min_tokens)
        return
    packed = pack_first_fit(documents, seq_len=seq_len, min_tokens=min_tokens)
    real = packed.document_index >= 0
    expected = [token for index in kept for token in documents[index].token_ids[:seq_len]]
    assert sorted(packed.token_ids[real].tolist()) == expected
    assert packed.num_skipped == len(lengths) - len(kept)
    assert packed.num_cut == sum(lengths[index] > seq_len for index in kept)
    assert packed.num_cut_tokens + len(expected) == sum(lengths[index] for index in kept)
    assert packed.token_ids.shape[1] == seq_len


@given(lengths=lengths_lists, seq_len=st.integers(2, 24))
@settings(max_examples=200, deadline=None)
def test_pack_first_fit_keeps_documents_whole_and_in_one_row(
    lengths: list[int], seq_len: int
) -> None:
    documents = make_documents(lengths)
    packed = pack_first_fit(documents, seq_len=seq_len, min_tokens=1)
    for index, document in enumerate(documents):
        rows, columns = np.nonzero(packed.document_index == index)
        size = min(len(document.token_ids), seq_len)
        assert len(set(rows.tolist())) == 1
        assert columns.tolist() == list(range(columns[0], columns[0] + size))
        where = (rows[0], columns)
        assert packed.token_ids[where].tolist() == list(document.token_ids[:size])
        assert packed.loss_mask[where].tolist() == list(document.loss_mask[:size])
        assert packed.position[where].tolist() == list(range(size))
    empty = packed.document_index < 0
    assert set(packed.token_ids[empty].tolist()) <= {2}
    assert not packed.loss_mask[empty].any()


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_pack_first_fit_equals_the_plain_scan(lengths: list[int]) -> None:
    seq_len = 16
    room: list[int] = []
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, free in enumerate(room) if free >= lengths[index]), len(room))
        if row == len(room):
            room.append(seq_len)
            rows.append([])
        room[row] -= lengths[index]
        rows[row].append(index)
    packed = pack_first_fit(make_documents(lengths), seq_len=seq_len, min_tokens=1)
    found = [
        [index for index, _ in itertools.groupby(row.tolist()) if index >= 0]
        for row in packed.document_index
    ]
    assert found == rows


def test_pack_first_fit_docstring_example() -> None:
    packed = pack_first_fit(make_documents([5, 3, 2, 4]), seq_len=7)
    assert packed.document_index.tolist() == [[0, 0, 0, 0, 0, 2, 2], [3, 3, 3, 3, 1, 1, 1]]


def make_stream(lengths: list[int]) -> TokenStream:
    return build_stream(make_documents(lengths), vocab_size=4096)


@given(lengths=lengths_lists, seq_len=st.integers(1, 24), epoch=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_pack_stream_reads_every_token_and_every_document_start(
    lengths: list[int], seq_len: int, epoch: int
) -> None:
    stream = make_stream(lengths)
    starts = pack_stream(stream, seq_len=seq_len, seed=5, epoch=epoch)
    assert set(stream.document_starts.tolist()) <= set(starts.tolist())
    read = {start + offset for start in starts.tolist() for offset in range(seq_len)}
    assert set(range(sum(lengths))) <= read
    assert len(starts) == sum(-(-length // seq_len) for length in lengths)
    np.testing.assert_array_equal(starts, pack_stream(stream, seq_len=seq_len, seed=5, epoch=epoch))


def test_pack_stream_order_depends_on_seed_and_epoch() -> None:
    stream = make_stream([3] * 50)
    orders = {
        tuple(pack_stream(stream, seq_len=4, seed=seed, epoch=epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_build_stream_takes_two_bytes_a_token_for_small_vocabularies() -> None:
    documents = make_documents([2, 3])
    assert build_stream(documents, vocab_size=65536).token_ids.dtype == np.uint16
    assert build_stream(documents, vocab_size=65537).token_ids.dtype == np.int32
    with pytest.raises(ConfigError, match="at least one document"):
        build_stream([], vocab_size=300)


def test_sample_rows_follow_the_weights_and_cover_an_epoch_without_replacement() -> None:
    streams = {"a": make_stream([4] * 20), "b": make_stream([4] * 20)}
    batches = sample_rows(streams, weights={"a": 3.0, "b": 1.0}, batch_size=64, seq_len=4, seed=1)
    rows = np.concatenate([next(batches) for _ in range(40)])
    share = (rows < 80).mean()
    assert share == pytest.approx(0.75, abs=0.04)
    first_epoch = [row for row in rows.tolist() if row < 80][:20]
    assert sorted(first_epoch) == list(range(0, 80, 4))
    again = sample_rows(streams, weights={"a": 3.0, "b": 1.0}, batch_size=64, seq_len=4, seed=1)
    np.testing.assert_array_equal(next(again), rows[:64])


def test_encoded_document_with_a_short_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="loss mask"):
        EncodedDocument("x", "d", (1, 2), (True,))
