"""Held-out measurement: what every anchor drafts, and the replays over it, per domain too.

Sits between the training loop, which asks for a report and keeps the best, and `acceptance`, which
defines the walk of a greedy loop and the expectation of a sampled one. The text should be the
target's own: greedy for the first; sampled at temperature 1 for the second, which is nan elsewhere.

Letters: T tokens of a document, k depths, B batch rows, S row length.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from mtp_research.data.packing import EncodedDocument
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels.losses.cross_entropy import cross_entropy
from mtp_research.training.losses.losses import UnrollSpec, batch_labels, run_heads
from mtp_research.training.losses.row_losses import LabelPositions, label_positions
from mtp_research.training.packed_rows import BatchHidden, TrainingRows
from mtp_research.training.setup import RunParts
from mtp_research.training.unroll import MEASURED_UNROLL, DepthOutput
from mtp_research.training.walk.acceptance import (
    AnchorRange,
    bootstrap_error,
    others_proxies,
    pooled_length,
    replay_dp,
    replay_walk,
    response_ranges,
)


@dataclass(frozen=True)
class WalkReport:
    """Acceptance on held-out documents."""

    acceptance_length: float  # micro, 1 + accepted / rounds of the replay walk
    standard_error: float  # bootstrap over documents
    num_documents: int  # documents with at least one round
    num_rounds: int  # rounds of the walk
    accuracy_per_depth: tuple[float, ...]  # `[k]` hits / anchors, the marginal figure
    # `[k]` hits / anchors whose earlier depths all hit
    conditional_accuracy_per_depth: tuple[float, ...]
    # `[k]` share of rounds that accept at least i drafts
    acceptance_rate_per_position: tuple[float, ...]
    product_of_marginals: float  # what others log; assumes uniform round starts
    uniform_joint_prefix: float  # what others log; assumes uniform round starts
    # micro, of rejection sampling at temperature 1, in expectation; nan for text of another law
    sampled_acceptance_length: float
    sampled_standard_error: float  # bootstrap over documents
    length_by_domain: dict[str, float]  # acceptance length of each domain
    sampled_length_by_domain: dict[str, float]  # the same of rejection sampling


class AnchorDrafts(NamedTuple):
    """What the drafts of a document's anchors are worth, each `[T, k]`."""

    is_hit: np.ndarray  # bool, the greedy draft is the text's token x_{t+d+1}
    # float32, min(1, q / p) of that token: the chance that a sampled draft was accepted, given that
    # the text went on with it
    acceptance: np.ndarray


@dataclass
class BestWalk:
    """The longest held-out walk so far, whose heads are the run's result.

    The loss does not choose: it keeps falling while the accepted length has begun to shrink.
    """

    _report: WalkReport | None = None
    step: int = 0  # optimizer steps done when it was measured
    num_evals_since: int = 0  # evaluations after it
    newest_length: float = math.nan  # acceptance length of the last evaluation

    @property
    def report(self) -> WalkReport:
        """The measurement itself."""
        assert self._report is not None, "a run is measured before its first step"
        return self._report

    def add(self, report: WalkReport, *, step: int) -> bool:
        """Count an evaluation; whether it is the new best."""
        self.newest_length = report.acceptance_length
        is_best = self._report is None or report.acceptance_length > self._report.acceptance_length
        self.num_evals_since = 0 if is_best else self.num_evals_since + 1
        if is_best:
            self._report, self.step = report, step
        return is_best

    def is_stale(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better; None never is."""
        return patience is not None and self.num_evals_since >= patience

    def state(self) -> dict[str, object]:
        """JSON-serialisable, for `from_state`."""
        fields = dataclasses.asdict(self)
        return {"report": fields.pop("_report"), **fields}

    @classmethod
    def from_state(cls, state: dict) -> "BestWalk":
        """What `state` wrote."""
        fields = dict(state)
        return cls(WalkReport(**fields.pop("report")), **fields)


def measure_held_out(parts: RunParts, *, ranks: Accelerator, batch_size: int) -> WalkReport:
    """Replay walk on all held-out documents; all ranks call it and get the same report.

    At most `batch_size` packed rows take part in a forward pass, and always as many: ranks that
    share modules meet in each. Nothing is compiled for it: code for rows of this length and without
    gradients took several times as long to make as all walks of a run of 400 steps took.
    """
    num_rows = len(parts.held_out_rows)
    most = math.ceil(num_rows / ranks.num_processes)
    num_batches = math.ceil(most / batch_size)
    size = math.ceil(most / num_batches)
    mine = list(range(num_rows))[ranks.process_index :: ranks.num_processes]
    mine += [0] * (num_batches * size - len(mine))  # that row again, with the same result
    batches = [mine[index * size : (index + 1) * size] for index in range(num_batches)]
    parts.heads.eval()
    with torch.compiler.set_stance("force_eager"):
        drafts = held_out_drafts(
            parts.heads,
            parts.held_out_rows,
            spec=parts.unroll_spec,
            row_batches=batches,
        )
    parts.heads.train()
    return walk_report(
        dict(gather_object(list(drafts.items()))),
        documents=parts.documents.held_out,
        num_depths=parts.unroll_spec.num_depths,
        is_sampled=parts.documents.not_sampled is None,
    )


@torch.no_grad()
def held_out_drafts(
    heads: MTPHeads, rows: TrainingRows, *, spec: UnrollSpec, row_batches: Sequence[Sequence[int]]
) -> dict[int, AnchorDrafts]:
    """Drafts of documents by document index, run as the matching decode policy runs them.

    `row_batches` are indices of rows, batch by batch.
    """
    spec = dataclasses.replace(spec, kind=MEASURED_UNROLL.get(spec.kind, spec.kind))
    found: dict[int, AnchorDrafts] = {}
    for indices in row_batches:
        batch, hidden = rows.batch(indices), rows.hidden(indices)
        outputs = run_heads(heads, batch, hidden=hidden, spec=spec)
        # Prompt rows are never anchors; their logits would be most of the cost.
        labels = batch_labels(batch, num_depths=spec.num_depths)
        chosen = label_positions(labels, num_positions=batch.num_labels)
        by_anchor = _judge(outputs, chosen, hidden=hidden, lm_head=heads.target.lm_head_weight)
        shape = batch.input_ids.shape
        is_hit, chance = (x.T.unflatten(0, shape).cpu().numpy() for x in by_anchor)  # [B, S, k]
        for index, row, columns in _documents(batch.document_index.cpu().numpy()):
            found[index] = AnchorDrafts(is_hit[row, columns], chance[row, columns])
    return found


def _judge(
    outputs: Sequence[DepthOutput],
    chosen: LabelPositions,
    *,
    hidden: BatchHidden,
    lm_head: Tensor,
) -> tuple[Tensor, Tensor]:
    """`[k, N]` each: the draft is the label; the chance p / q, at most 1, that it is accepted."""
    states = [hidden.post_norm.flatten(0, 1)[chosen.position]]  # the target's, beside every depth's
    states += [chosen.gather(out.post_norm, depth=d) for d, out in enumerate(outputs, start=1)]
    result = cross_entropy(
        torch.cat(states),
        labels=chosen.label.repeat(len(states)),
        valid=torch.cat([torch.ones_like(chosen.valid[:1]), chosen.valid]).flatten(),
        lm_head=lm_head,
    )
    own, *nll = result.nll.view(len(states), -1)
    chance = torch.exp(own - torch.stack(nll)).clamp(max=1).float()
    is_hit = result.is_hit.view(len(states), -1)[1:]
    return chosen.to_anchors(is_hit), chosen.to_anchors(chance)


def walk_report(
    drafts: dict[int, AnchorDrafts],
    *,
    documents: Sequence[EncodedDocument],
    num_depths: int,
    is_sampled: bool = True,
) -> WalkReport:
    """Walk over every response of every document; `drafts` by document index.

    Unless the text `is_sampled` from the target at temperature 1, untruncated, the figures of
    rejection sampling are nan: on other text the expectation is of no loop.
    """
    greedy, sampled = np.zeros((2, len(documents))), np.zeros((2, len(documents)))
    per_position = np.zeros(num_depths)
    anchors: list[np.ndarray] = []
    for index, (is_hit, acceptance) in sorted(drafts.items()):
        mask = documents[index].loss_mask[: len(is_hit)]
        for start, stop in response_ranges(mask, num_depths=num_depths):
            walk = replay_walk(is_hit, start=start, stop=stop)
            expected = replay_dp(acceptance, start=start, stop=stop)
            greedy[:, index] += walk.num_accepted, walk.num_rounds
            sampled[:, index] += expected.num_accepted, expected.num_rounds
            per_position += _at_least(walk.accepted_per_round, num_depths)
            anchors.append(is_hit[start:stop])
    pooled = np.concatenate(anchors or [np.zeros((0, num_depths), dtype=bool)])
    proxies = others_proxies(pooled, ranges=[AnchorRange(0, len(pooled))])
    num_rounds = int(greedy[1].sum())
    if not is_sampled:
        sampled[:] = np.nan
    return WalkReport(
        acceptance_length=pooled_length(*greedy),
        standard_error=bootstrap_error(*greedy),
        num_documents=int((greedy[1] > 0).sum()),
        num_rounds=num_rounds,
        accuracy_per_depth=tuple((pooled.sum(axis=0) / max(len(pooled), 1)).tolist()),
        conditional_accuracy_per_depth=_conditional(pooled),
        acceptance_rate_per_position=tuple((per_position / max(num_rounds, 1)).tolist()),
        product_of_marginals=proxies.product_of_marginals,
        uniform_joint_prefix=proxies.uniform_joint_prefix,
        sampled_acceptance_length=pooled_length(*sampled),
        sampled_standard_error=bootstrap_error(*sampled),
        length_by_domain=_by_domain(greedy, documents=documents),
        sampled_length_by_domain=_by_domain(sampled, documents=documents),
    )


def _by_domain(counts: np.ndarray, *, documents: Sequence[EncodedDocument]) -> dict[str, float]:
    """Acceptance length of each domain; `counts` `[2, documents]`: accepted drafts, rounds."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, document in enumerate(documents):
        members[document.domain].append(index)
    return {name: pooled_length(*counts[:, chosen]) for name, chosen in sorted(members.items())}


def _conditional(is_hit: np.ndarray) -> tuple[float, ...]:
    """`[k]` hits of depth d / anchors `[n, k]` whose depths below d all hit; nan without any."""
    joint = np.cumprod(is_hit, axis=1).sum(axis=0)
    reached = np.concatenate(([len(is_hit)], joint[:-1]))
    return tuple((joint / np.where(reached > 0, reached, np.nan)).tolist())


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
