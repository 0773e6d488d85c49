"""Held-out measurement: hits of every anchor, and the replay walk over them, per domain too.

Sits between the training loop, which asks for a report, and `acceptance`, which defines the walk.

Letters: T tokens of a document, k depths, B batch rows, S row length.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtp_research.data.packing import EncodedDocument
from mtp_research.heads.stack import MTPHeads
from mtp_research.training.acceptance import (
    AnchorRange,
    bootstrap_error,
    others_proxies,
    pooled_length,
    replay_walk,
    response_ranges,
)
from mtp_research.training.losses import argmax_tokens
from mtp_research.training.objective import UnrollSpec, run_heads
from mtp_research.training.rows import TrainingRows
from mtp_research.training.unroll import same_document, shift_left


@dataclass(frozen=True)
class WalkReport:
    """Acceptance on held-out documents.

    Attributes:
        acceptance_length: micro, 1 + accepted / rounds of the replay walk.
        standard_error: bootstrap over documents.
        num_documents: documents with at least one round.
        num_rounds: rounds of the walk.
        accuracy_per_depth: `[k]` hits / anchors, the marginal figure.
        acceptance_rate_per_position: `[k]` share of rounds that accept at least i drafts.
        product_of_marginals: what others log; assumes uniform round starts.
        uniform_joint_prefix: what others log; assumes uniform round starts.
        length_by_domain: acceptance length of each domain.
    """

    acceptance_length: float
    standard_error: float
    num_documents: int
    num_rounds: int
    accuracy_per_depth: tuple[float, ...]
    acceptance_rate_per_position: tuple[float, ...]
    product_of_marginals: float
    uniform_joint_prefix: float
    length_by_domain: dict[str, float]


@torch.no_grad()
def held_out_hits(
    heads: MTPHeads, rows: TrainingRows, *, spec: UnrollSpec, row_batches: Sequence[Sequence[int]]
) -> dict[int, np.ndarray]:
    """Hits of documents, document index -> `[T, k]` bool.

    Args:
        heads: what is measured.
        rows: packed held-out documents.
        spec: how the heads are run.
        row_batches: rows to run, batch by batch.
    """
    lm_head = heads.target.lm_head_weight
    hits: dict[int, np.ndarray] = {}
    for indices in row_batches:
        batch = rows.batch(indices)
        outputs = run_heads(heads, batch, hidden=rows.hidden(indices), spec=spec)
        is_hit = torch.zeros(*batch.input_ids.shape, spec.num_depths, dtype=torch.bool)
        for depth, output in enumerate(outputs, start=1):
            expected = shift_left(batch.input_ids, offset=depth + 1, fill=-1)
            known = same_document(batch.document_index, offset=depth + 1)
            # Prompt rows are never anchors; their logits would be most of the cost.
            known &= shift_left(batch.loss_mask.long(), offset=depth + 1, fill=0) > 0
            drafts = argmax_tokens(output.post_norm[known], lm_head=lm_head)
            is_hit[..., depth - 1][known.cpu()] = (drafts == expected[known]).cpu()
        for index, row, columns in _documents(batch.document_index.cpu().numpy()):
            hits[index] = is_hit[row, columns].numpy()
    return hits


def walk_report(
    hits: dict[int, np.ndarray], *, documents: Sequence[EncodedDocument], num_depths: int
) -> WalkReport:
    """Walk over every response of every document.

    Args:
        hits: of `held_out_hits`.
        documents: what the indices of `hits` refer to.
        num_depths: k.
    """
    accepted, rounds = np.zeros(len(documents)), np.zeros(len(documents))
    per_position = np.zeros(num_depths)
    anchors: list[np.ndarray] = []
    for index, flags in sorted(hits.items()):
        mask = documents[index].loss_mask[: len(flags)]
        for start, stop in response_ranges(mask, num_depths=num_depths):
            walk = replay_walk(flags, start=start, stop=stop)
            accepted[index] += walk.num_accepted
            rounds[index] += walk.num_rounds
            per_position += _at_least(walk.accepted_per_round, num_depths)
            anchors.append(flags[start:stop])
    pooled = np.concatenate(anchors or [np.zeros((0, num_depths), dtype=bool)])
    proxies = others_proxies(pooled, ranges=[AnchorRange(0, len(pooled))])
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index, document in enumerate(documents):
        by_domain[document.domain].append(index)
    return WalkReport(
        acceptance_length=pooled_length(accepted.tolist(), rounds.tolist()),
        standard_error=bootstrap_error(accepted.tolist(), rounds.tolist()),
        num_documents=int((rounds > 0).sum()),
        num_rounds=int(rounds.sum()),
        accuracy_per_depth=tuple((pooled.sum(axis=0) / max(len(pooled), 1)).tolist()),
        acceptance_rate_per_position=tuple((per_position / max(rounds.sum(), 1)).tolist()),
        product_of_marginals=proxies.product_of_marginals,
        uniform_joint_prefix=proxies.uniform_joint_prefix,
        length_by_domain={
            domain: pooled_length(accepted[members].tolist(), rounds[members].tolist())
            for domain, members in sorted(by_domain.items())
        },
    )


def _at_least(accepted_per_round: Sequence[int], num_depths: int) -> np.ndarray:
    """`[k]` number of rounds that accept at least i = 1..k drafts."""
    accepted = np.asarray(accepted_per_round, dtype=np.int64)
    return (accepted[:, None] >= np.arange(1, num_depths + 1)).sum(axis=0)


def _documents(document_index: np.ndarray) -> list[tuple[int, int, slice]]:
    """(document, row, columns) of every document of a batch `[B, S]`."""
    found = []
    for row, documents in enumerate(document_index):
        for index in np.unique(documents[documents >= 0]).tolist():
            columns = np.flatnonzero(documents == index)
            found.append((index, row, slice(int(columns[0]), int(columns[-1]) + 1)))
    return found
