"""Row order and the cache of target hidden states."""

import itertools

import numpy as np
import pytest
import torch

from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.training.losses.losses import depth_labels
from mtp_research.training.losses.row_losses import label_positions
from mtp_research.training.packed_rows import BLOCK_ROWS, TrainingRows, row_indices
from tests.tiny import tiny_target


def make_rows(
    *, keep_hidden: bool, hidden_source: str = "post_norm", captures: bool = False
) -> TrainingRows:
    generator = np.random.default_rng(0)
    documents = []
    for index in range(30):
        tokens = tuple(generator.integers(6, 128, size=int(generator.integers(5, 16))).tolist())
        documents.append(EncodedDocument(f"d{index}", "code", tokens, (True,) * len(tokens)))
    return TrainingRows(
        pack_first_fit(documents, seq_len=16),
        target=tiny_target("qwen3"),
        hidden_source=hidden_source,
        keep_hidden=keep_hidden,
        captures=captures,
    )


def test_row_indices_every_row_once_an_epoch():
    first = row_indices(0, count=10, num_rows=10, seed=0)
    second = row_indices(10, count=10, num_rows=10, seed=0)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert row_indices(0, count=10, num_rows=10, seed=1) != first


def test_row_indices_slices_agree_across_the_epoch_boundary():
    whole = row_indices(0, count=40, num_rows=7, seed=3)
    assert row_indices(5, count=9, num_rows=7, seed=3) == whole[5:14]


@pytest.mark.parametrize("hidden_source", ["post_norm", "pre_norm"])
def test_training_rows_kept_hidden_equals_computed(hidden_source):
    kept = make_rows(keep_hidden=True, hidden_source=hidden_source)
    computed = make_rows(keep_hidden=False, hidden_source=hidden_source)
    assert kept.keeps_hidden
    assert not computed.keeps_hidden
    indices = [9, 0, 3, 9]
    for got, expected in zip(kept.hidden(indices), computed.hidden(indices), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        assert not got.requires_grad


def test_training_rows_kept_hidden_does_not_depend_on_who_asked_first():
    left, right = make_rows(keep_hidden=True), make_rows(keep_hidden=True)
    left.hidden([1, 2])
    right.hidden([9, 4])
    assert torch.equal(left.hidden([2, 9]).source, right.hidden([2, 9]).source)


def test_blocks_of_kept_states_have_one_size(monkeypatch):
    rows = make_rows(keep_hidden=True)
    assert len(rows) % BLOCK_ROWS, "the last block is not full"
    sizes, plain = [], rows._run

    def run(*inputs):
        sizes.append(len(inputs[0]))
        return plain(*inputs)

    monkeypatch.setattr(rows, "_run", run)
    states = rows.computed(range(len(rows)))
    assert len(states["post_norm"]) == len(rows)
    assert set(sizes) == {BLOCK_ROWS}
    assert torch.equal(states["post_norm"][-1], rows.hidden([len(rows) - 1]).post_norm[0])


def test_training_rows_post_norm_and_pre_norm_differ_by_the_norm():
    rows = make_rows(keep_hidden=False, hidden_source="pre_norm")
    hidden = rows.hidden([0])
    norm = rows._target.model.base_model.norm
    torch.testing.assert_close(norm(hidden.source), hidden.post_norm)


def test_training_rows_batch_knows_how_many_labels_it_has():
    generator = np.random.default_rng(1)
    documents = []
    for index in range(20):
        size = int(generator.integers(1, 14))
        mask = tuple((generator.random(size) < 0.6).tolist())
        documents.append(EncodedDocument(f"d{index}", "code", tuple([7] * size), mask))
    packed = pack_first_fit(documents, seq_len=16)
    target = tiny_target("qwen3")
    rows = TrainingRows(packed, target=target, hidden_source="post_norm", keep_hidden=False)
    batch = rows.batch([3, 0, 3])
    labels = depth_labels(
        batch.input_ids,
        document_index=batch.document_index,
        loss_mask=batch.loss_mask,
        num_depths=3,
    )
    assert batch.num_labels == int((labels[0] >= 0).sum())
    known, found = label_positions(labels, num_positions=batch.num_labels), label_positions(labels)
    assert all(torch.equal(a, b) for a, b in zip(known, found, strict=True))


def test_training_rows_batch_knows_where_its_documents_end():
    rows = make_rows(keep_hidden=False)
    sizes = {len(rows.batch([index]).cu_seqlens) for index in range(len(rows))}
    assert len(sizes) == 1  # one shape for all batches of a size, so one compilation
    for indices in ([4], [0, 7, 3]):
        batch = rows.batch(indices)
        ends = batch.cu_seqlens.tolist()
        assert (ends[0], ends[-1]) == (0, batch.input_ids.numel())
        flat = batch.document_index.flatten()
        pieces = [flat[start:end] for start, end in itertools.pairwise(ends)]
        assert all(len(piece.unique()) <= 1 for piece in pieces)
        runs = [torch.unique_consecutive(row).numel() for row in batch.document_index]
        assert sum(len(piece) > 0 for piece in pieces) == sum(runs)
