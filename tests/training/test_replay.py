"""Held-out report from hits: ranges, pooling, domains."""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from mtp_research.data.packing import EncodedDocument
from mtp_research.training.walk import replay
from mtp_research.training.walk.replay import AnchorDrafts, walk_report


def document(name: str, domain: str, mask: list[int]) -> EncodedDocument:
    return EncodedDocument(name, domain, tuple(range(len(mask))), tuple(bool(m) for m in mask))


def drafts_of(flags: np.ndarray) -> AnchorDrafts:
    """Drafts that are kept for certain where they hit, and never elsewhere."""
    return AnchorDrafts(flags.astype(bool), flags.astype(np.float32))


def play_drafts(monkeypatch, held_out_drafts) -> None:
    """Let `measure_held_out` call this, and do nothing with what it gives."""
    monkeypatch.setattr(replay, "held_out_drafts", held_out_drafts)
    monkeypatch.setattr(replay, "gather_object", lambda items: items)
    monkeypatch.setattr(replay, "walk_report", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_ranks"), [(67, 32, 1), (5, 4, 2), (3, 8, 4), (8, 4, 1)]
)
def test_batches_of_the_walk_have_one_size_on_all_ranks(
    monkeypatch, num_rows, batch_size, num_ranks
):
    found: list[list[list[int]]] = []
    play_drafts(monkeypatch, lambda *_, row_batches, **__: found.append(row_batches) or {})
    for rank in range(num_ranks):
        ranks = SimpleNamespace(process_index=rank, num_processes=num_ranks)
        parts = MagicMock(held_out_rows=range(num_rows))
        replay.measure_held_out(parts, ranks=ranks, batch_size=batch_size)
    assert len({len(batches) for batches in found}) == 1
    assert len({len(batch) for batches in found for batch in batches}) == 1
    assert len(found[0][0]) <= batch_size
    rows = [row for batches in found for batch in batches for row in batch]
    assert set(rows) == set(range(num_rows))
    assert len(rows) - num_rows < num_ranks * len(found[0])


def test_the_walk_compiles_nothing(monkeypatch):
    @torch.compile(backend=lambda *_: pytest.fail("the walk compiled"))
    def compiled(value):
        return value + 1

    ran = []

    def held_out_drafts(*_, **__):
        ran.append(compiled(torch.ones(3)))
        return {}

    play_drafts(monkeypatch, held_out_drafts)
    ranks = SimpleNamespace(process_index=0, num_processes=1)
    replay.measure_held_out(MagicMock(held_out_rows=range(2)), ranks=ranks, batch_size=2)
    assert ran[0].tolist() == [2, 2, 2]


def test_walk_report_two_documents_by_hand():
    documents = [document("a", "code", [0, 0] + [1] * 8), document("b", "math", [0] + [1] * 6)]
    hits = {index: np.zeros((len(d.token_ids), 2), dtype=bool) for index, d in enumerate(documents)}
    hits[0][1] = [True, True]  # round at 1 accepts 2; next rounds at 4, 5, 6
    hits[0][5] = [True, False]  # round at 5 accepts 1: the next would be 7, past the end
    drafts = {index: drafts_of(flags) for index, flags in hits.items()}
    report = walk_report(drafts, documents=documents, num_depths=2)
    # a: anchors [1, 7), rounds at 1, 4, 5; b: anchors [0, 4), rounds at 0, 1, 2, 3
    assert report.num_rounds == 3 + 4
    assert report.num_documents == 2
    assert report.acceptance_length == pytest.approx(1 + 3 / 7)
    assert report.length_by_domain == {"code": pytest.approx(2.0), "math": pytest.approx(1.0)}
    assert report.acceptance_rate_per_position == pytest.approx((2 / 7, 1 / 7))
    assert report.accuracy_per_depth == pytest.approx((2 / 10, 1 / 10))
    assert report.uniform_joint_prefix == pytest.approx(1 + 3 / 10)
    assert report.product_of_marginals == pytest.approx(1 + 0.2 + 0.02)
    assert report.conditional_accuracy_per_depth == pytest.approx((2 / 10, 1 / 2))
    # certain acceptance makes the expectation the walk itself
    assert report.sampled_acceptance_length == pytest.approx(report.acceptance_length)
    assert report.sampled_length_by_domain == pytest.approx(report.length_by_domain)
    assert report.sampled_standard_error == pytest.approx(report.standard_error)


def test_walk_report_sampled_length_follows_the_acceptance_alone():
    documents = [document("a", "code", [0] + [1] * 9)]
    half = AnchorDrafts(np.ones((10, 1), dtype=bool), np.full((10, 1), 0.5))
    report = walk_report({0: half}, documents=documents, num_depths=1)
    assert report.acceptance_length == 2
    assert report.sampled_acceptance_length == pytest.approx(1.5)


def test_walk_report_of_text_that_was_not_sampled_has_no_sampled_length():
    documents = [document("a", "code", [0] + [1] * 9)]
    half = AnchorDrafts(np.ones((10, 1), dtype=bool), np.full((10, 1), 0.5))
    report = walk_report({0: half}, documents=documents, num_depths=1, is_sampled=False)
    assert report.acceptance_length == 2
    assert math.isnan(report.sampled_acceptance_length)
    assert math.isnan(report.sampled_standard_error)
    assert math.isnan(report.sampled_length_by_domain["code"])


def test_walk_report_documents_without_rounds_have_no_length():
    documents = [document("a", "code", [0, 1, 1])]
    report = walk_report({0: drafts_of(np.zeros((3, 2)))}, documents=documents, num_depths=2)
    assert report.num_rounds == 0
    assert math.isnan(report.acceptance_length)
    assert math.isnan(report.length_by_domain["code"])


def test_walk_report_cut_document_uses_the_rows_that_ran():
    documents = [document("a", "code", [0] + [1] * 20)]
    report = walk_report({0: drafts_of(np.ones((8, 2)))}, documents=documents, num_depths=2)
    assert report.num_rounds == 2  # anchors [0, 5): rounds at 0 and 3
