"""Acceptance of a speculative decode loop, computed exactly from teacher-forced drafts.

`hits[t, d-1]` says whether the depth-d draft of anchor t is the text's token x_{t+d+1}, when the
text is the target's own output and the unroll matches the decode policy. Verified rows hold the
same KV whatever the rounds before, so the loop can be replayed on these flags alone:

    L[t] = sum_d prod_{j<=d} hits[t, j-1],   t <- t + L[t] + 1,   acceptance length = 1 + mean L[t]

First anchor. After the prefill of P prompt tokens the target emits x_P, and row P - 1 is the newest
one whose hidden state is known. So the first drafts are made at anchor P - 1 (they predict x_{P+1}
and later), and a round that accepts L drafts moves the frontier to P - 1 + L + 1.

End rule. A round counts when all its k tokens are known: t + k + 1 <= T - 1 for a text of T
tokens, that is t in [P - 1, T - k - 1). Later rounds could accept more than the text shows. To
compare with a loop, take its first `num_rounds` rounds: they are equal one by one.

Letters: T tokens of a document, P prompt tokens, k depths (K drafts of the loop).
Source: the derivation is ours; rejection sampling Leviathan et al. (arXiv:2211.17192).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

BoolArray = np.ndarray | Tensor
BOOTSTRAP_DRAWS = 2000


class AnchorRange(NamedTuple):
    """Anchors [start, stop) of one response; every round that starts there is fully known."""

    start: int
    stop: int


class WalkResult(NamedTuple):
    """Rounds of a greedy loop."""

    num_rounds: int  # verify rounds with k known tokens
    num_accepted: int  # accepted drafts over those rounds, bonus not counted
    accepted_per_round: tuple[int, ...]  # 0..k for each round, in order
    acceptance_length: float  # 1 + num_accepted / num_rounds; nan without rounds


class ExpectedWalk(NamedTuple):
    """Expected rounds and accepted drafts of a sampled loop, over its accept/reject noise."""

    num_rounds: float
    num_accepted: float
    acceptance_length: float


class Proxies(NamedTuple):
    """What others log; both assume rounds that start uniformly over positions, and they do not."""

    product_of_marginals: float  # 1 + sum_d prod_{j<=d} mean_t hits[t, j-1]
    uniform_joint_prefix: float  # 1 + mean_t L[t]


def replay_walk(hits: BoolArray, *, start: int, stop: int) -> WalkResult:
    """Replay the greedy loop on one response.

    Example, k = 2, hits of anchors 3..6 = `11 00 10 11`, [start, stop) = [3, 7): the round at 3
    accepts 2, the next one at 6 accepts 2, the frontier is 9: two rounds, acceptance length 3.

    Args:
        hits: `[T, k]` bool, draft of anchor t and depth d equals x_{t+d+1}.
        start: first anchor, the last prompt row P - 1.
        stop: end of the anchors whose k tokens are known, T - k - 1.
    """
    lengths = accepted_prefix(hits)
    accepted = []
    anchor = start
    while anchor < stop:
        accepted.append(int(lengths[anchor]))
        anchor += accepted[-1] + 1
    total = sum(accepted)
    return WalkResult(len(accepted), total, tuple(accepted), _length(total, len(accepted)))


def replay_dp(accept: BoolArray, *, start: int, stop: int) -> ExpectedWalk:
    """Expected walk of rejection sampling, exact, by dynamic programming over the round starts.

    f(t), the chance that a round starts at t, follows f(t + l + 1) += f(t) (S_l - S_{l+1}) with
    S_l the probability that at least l drafts are accepted.

    `accept`, `[T, k]` float in [0, 1], is min(1, q(x) / p(x)) of the emitted token x = x_{t+d+1};
    anchors [start, stop) as in `replay_walk`.
    """
    accept = np.asarray(accept, dtype=np.float64)
    num_depths = accept.shape[1]
    survival = np.ones((len(accept), num_depths + 2))
    survival[:, 1:-1] = np.cumprod(accept, axis=1)
    survival[:, -1] = 0.0
    starts = np.zeros(max(stop, start) + num_depths + 2)
    starts[start] = 1.0
    for anchor in range(start, stop):
        exactly = survival[anchor, :-1] - survival[anchor, 1:]  # [k + 1], l drafts accepted
        starts[anchor + 1 : anchor + num_depths + 2] += starts[anchor] * exactly
    counted = starts[start:stop]
    num_rounds = float(counted.sum())
    num_accepted = float(counted @ survival[start:stop, 1:-1].sum(axis=1))
    return ExpectedWalk(num_rounds, num_accepted, _length(num_accepted, num_rounds))


def others_proxies(hits: BoolArray, *, ranges: Sequence[AnchorRange]) -> Proxies:
    """The two biased figures over the same anchors as the walk; nan without anchors."""
    hits = np.asarray(hits, dtype=bool)
    chosen = np.concatenate([hits[start:stop] for start, stop in ranges] or [hits[:0]])
    if len(chosen) == 0:
        return Proxies(float("nan"), float("nan"))
    product = float(np.cumprod(chosen.mean(axis=0)).sum())
    return Proxies(1.0 + product, 1.0 + float(accepted_prefix(chosen).mean()))


def response_ranges(loss_mask: Sequence[bool], *, num_depths: int) -> list[AnchorRange]:
    """Anchors of each response of a document: one range per run of the target's own tokens.

    A response of tokens [P, E) has the anchors [P - 1, E - k - 1). Responses shorter than k + 2
    tokens have none and are left out.
    """
    mask = np.concatenate(([False], np.asarray(loss_mask, dtype=bool), [False]))
    edges = np.flatnonzero(mask[1:] != mask[:-1])
    ranges = []
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start, stop = max(first - 1, 0), end - num_depths - 1
        if start < stop:
            ranges.append(AnchorRange(start, stop))
    return ranges


def accepted_prefix(hits: BoolArray) -> np.ndarray:
    """L[t], `[T]` int64: drafts accepted when a round starts at t."""
    return np.cumprod(np.asarray(hits, dtype=bool), axis=1).sum(axis=1)


def pooled_length(
    num_accepted: Sequence[float] | np.ndarray, num_rounds: Sequence[float] | np.ndarray
) -> float:
    """Acceptance length (micro) over documents: 1 + sum accepted / sum rounds."""
    return _length(float(np.sum(num_accepted)), float(np.sum(num_rounds)))


def bootstrap_error(
    num_accepted: Sequence[float] | np.ndarray,
    num_rounds: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
) -> float:
    """Standard error of `pooled_length` when documents are drawn again with replacement.

    nan with fewer than two documents that have rounds.
    """
    accepted, rounds = np.asarray(num_accepted, dtype=float), np.asarray(num_rounds, dtype=float)
    accepted, rounds = accepted[rounds > 0], rounds[rounds > 0]
    if len(rounds) < 2:
        return float("nan")
    draws = np.random.default_rng(seed).integers(len(rounds), size=(BOOTSTRAP_DRAWS, len(rounds)))
    lengths = accepted[draws].sum(axis=1) / rounds[draws].sum(axis=1)
    return float(lengths.std(ddof=1))


def _length(num_accepted: float, num_rounds: float) -> float:
    return 1.0 + num_accepted / num_rounds if num_rounds > 0 else float("nan")
