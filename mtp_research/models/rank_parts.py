"""What ranks that split a target say to each other in a step, and how they agree on a token.

A rank has its rows of `lm_head`, so its logits are columns of the whole rows. A greedy step needs
the best token of each row and no logits: every rank sends the value and the id of its own best one,
16 bytes, and all take the largest, of equals the lowest id. That is the argmax of the whole row,
NaN included, and the same on every rank. What reads more of a row gathers the logits (`whole_of`)
or some of them (`decode.sampling.top_candidates`).

The collective calls are operators, so that compiled code calls them as they are and a CUDA graph
holds them. A rank that is gone is an `EnvironmentFault` of the others where the backend tells
(gloo); with NCCL torchrun ends them.

Letters: R rows of any shape, V vocabulary, n ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from mtp_research.models.attention.paged import fusion_barrier
from mtp_research.runtime.errors import EnvironmentFault

# Named anew in torch 2.13, where the old name warns; 2.11 has the old one alone.
_NEW_NAME = "all_gather_single"
_all_gather = vars(distributed).get(_NEW_NAME) or distributed.all_gather_into_tensor
_PEER_IS_GONE = ("by peer", "Broken pipe", "Timed out", "remote process")  # gloo's words and NCCL's
BEST_BYTES = 16  # that a rank sends of a row: value and id of its best token


@dataclass(frozen=True)
class RankParts:
    """How ranks split a target, and which of them this is."""

    rank: int  # 0..n-1
    num_ranks: int  # n, at least 2
    # transformers' style by the name of a module or parameter in a decoder layer, `*` for a number
    plan: Mapping[str, str]

    def rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a whole `[V, D]` (or `[V]`), a tensor of its own."""
        return weight.chunk(self.num_ranks)[self.rank].clone()


class Best(NamedTuple):
    """The best token of each row."""

    index: Tensor  # `[R]` int64, in the whole vocabulary
    value: Tensor  # `[R]`, its logit; NaN where the row has one


def best_of(logits: Tensor, parts: RankParts | None) -> Best:
    """Argmax of logits `[R, V]`, or of rows of which this rank has `[R, V / n]`."""
    index = fusion_barrier(logits.argmax(dim=-1))
    value = logits.gather(-1, index[..., None])[..., 0]
    if parts is None:
        return Best(index, value)
    index = index + parts.rank * logits.shape[-1]
    own = torch.stack((value.double(), index.double()))  # exact: an id has fewer than 53 bits
    values, indices = gather_ranks(own, parts.num_ranks).unbind(dim=1)  # [n, R] each
    winner = values.argmax(dim=0, keepdim=True)  # of equals the first rank, whose ids are lowest
    return Best(indices.gather(0, winner)[0].long(), values.gather(0, winner)[0].to(logits.dtype))


def best_probability(logits: Tensor, parts: RankParts | None) -> Tensor:
    """Softmax of the best token `[R]` float64, of logits as in `best_of`; NaN if one is."""
    wide = logits.double()
    if parts is None:
        return torch.softmax(wide, dim=-1).amax(dim=-1)
    largest = wide.amax(dim=-1, keepdim=True)
    own = torch.stack((largest[..., 0], (wide - largest).exp().sum(dim=-1)))
    values, sums = gather_ranks(own, parts.num_ranks).unbind(dim=1)  # [n, R] each
    return 1 / (sums * (values - values.amax(dim=0)).exp()).sum(dim=0)


def whole_of(part: Tensor, parts: RankParts | None, *, dim: int = -1) -> Tensor:
    """The whole of a tensor of which each rank has an equal part along `dim`; all must call."""
    if parts is None:
        return part
    return torch.cat(gather_ranks(part, parts.num_ranks).unbind(), dim=dim)


@torch.library.custom_op("mtp_research::sum_over_ranks", mutates_args=("part",))
def sum_over_ranks(part: torch.Tensor) -> None:
    """Put the sum of all ranks' `part` in its place."""
    with peers_needed():
        distributed.all_reduce(part)


@sum_over_ranks.register_fake
def _(part: torch.Tensor) -> None:
    pass


@torch.library.custom_op("mtp_research::gather_ranks", mutates_args=())
def gather_ranks(part: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """All ranks' `part`, `[n, *part.shape]`."""
    gathered = part.new_empty(num_ranks, *part.shape)
    with peers_needed():
        _all_gather(gathered.view(-1), part.reshape(-1))
    return gathered


@gather_ranks.register_fake
def _(part: torch.Tensor, num_ranks: int) -> torch.Tensor:
    return part.new_empty(num_ranks, *part.shape)


@contextmanager
def peers_needed() -> Iterator[None]:
    """Turn a backend's complaint about a rank that is gone into a line (`EnvironmentFault`)."""
    try:
        yield
    except RuntimeError as fault:
        if not any(words in str(fault) for words in _PEER_IS_GONE):
            raise
        reason = " ".join(str(fault).split()).partition(". ")[0]
        raise EnvironmentFault(
            f"all processes of torchrun are needed, and another one has ended ({reason}); see what "
            "it said, and start the command again."
        ) from fault
