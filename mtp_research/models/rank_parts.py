"""What ranks that split a target say to each other in a step, and how they agree on a token.

A rank has its rows of `lm_head`, so its logits are columns of the whole rows. A greedy step needs
the best token of each row and no logits: every rank sends the value and the id of its own best one,
16 bytes, and all take the largest, of equals the lowest id. That is the argmax of the whole row,
NaN included, and the same on every rank. What reads more of a row gathers the logits (`whole_of`)
or some of them (`decode.sampling.top_candidates`).

The collective calls are operators, so that compiled code calls them as they are and a CUDA graph
holds them. A rank that is gone is an `EnvironmentFault` of the others where the backend tells
(gloo); with NCCL torchrun ends them.

Ranks that share experts alone (`model.tp_plan=data`) decode requests of their own, each with its
own pages, and decide tokens without the others. Their rows meet in expert layers, by a
`RowExchange`:

    own rows and their experts [T, ...]  ->  those of all ranks [n S, ...]  ->  a rank's experts,
    added up over ranks and handed back [S, D]  ->  own rows [T, D]

S is the same on all ranks, so that the calls match. Hosts agree on it once a step that runs as it
comes: rows that a rank lacks are padding without experts, and a rank that has no rows runs its
experts all the same. In captured steps, which are padded to one shape on all ranks, S is T and
nothing is asked of the host.

Letters: R rows of any shape, V vocabulary, n ranks, T rows of a rank, S rows of each, D hidden, E
experts of a rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from mtp_research.kernels.losses.logit_rows import best_tokens
from mtp_research.models.attention.paged import fusion_barrier
from mtp_research.runtime.errors import EnvironmentFault

# Named anew in torch 2.13, where the old name warns; 2.11 has the old one alone.
_NEW_NAME = "all_gather_single"
_all_gather = vars(distributed).get(_NEW_NAME) or distributed.all_gather_into_tensor
_reduce_scatter = (
    vars(distributed).get("reduce_scatter_single") or distributed.reduce_scatter_tensor
)
_PEER_IS_GONE = ("by peer", "Broken pipe", "Timed out", "remote process")  # gloo's words and NCCL's
_LEAST_IN_PARTS = 1 << 15  # logits; below, a second launch costs what it saves
BEST_BYTES = 16  # that a rank sends of a row: value and id of its best token


@dataclass(frozen=True)
class RankParts:
    """How ranks split a target, and which of them this is."""

    rank: int  # 0..n-1
    num_ranks: int  # n, at least 2
    # transformers' style by the name of a module or parameter in a decoder layer, `*` for a number
    plan: Mapping[str, str]
    exchange: "RowExchange | None" = None  # of ranks that share experts alone

    def rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a whole `[V, D]` (or `[V]`), a tensor of its own."""
        return weight.chunk(self.num_ranks)[self.rank].clone()


class Best(NamedTuple):
    """The best token of each row."""

    index: Tensor  # `[R]` int64, in the whole vocabulary
    value: Tensor  # `[R]`, its logit; NaN where the row has one


def best_of(logits: Tensor, parts: RankParts | None) -> Best:
    """Argmax of logits `[R, V]`, or of rows of which this rank has `[R, V / n]`."""
    index = fusion_barrier(_argmax(logits))
    value = logits.gather(-1, index[..., None])[..., 0]
    if parts is None:
        return Best(index, value)
    index = index + parts.rank * logits.shape[-1]
    own = torch.stack((value.double(), index.double()))  # exact: an id has fewer than 53 bits
    values, indices = gather_ranks(own, parts.num_ranks).unbind(dim=1)  # [n, R] each
    winner = values.argmax(dim=0, keepdim=True)  # of equals the first rank, whose ids are lowest
    return Best(indices.gather(0, winner)[0].long(), values.gather(0, winner)[0].to(logits.dtype))


def _argmax(logits: Tensor) -> Tensor:
    """Argmax of rows `[..., V]`; compiled code finds that of long rows by a kernel of ours."""
    is_long = logits.shape[-1] >= _LEAST_IN_PARTS and logits.dtype != torch.float64
    return best_tokens(logits) if torch.compiler.is_compiling() and is_long else logits.argmax(-1)


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


@torch.library.custom_op("mtp_research::scatter_sums", mutates_args=())
def scatter_sums(rows: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """This rank's `[S, ...]` of the sum of all ranks' `[n S, ...]`."""
    own = rows.new_empty(rows.shape[0] // num_ranks, *rows.shape[1:])
    with peers_needed():
        _reduce_scatter(own, rows.contiguous())
    return own


@scatter_sums.register_fake
def _(rows: torch.Tensor, num_ranks: int) -> torch.Tensor:
    return rows.new_empty(rows.shape[0] // num_ranks, *rows.shape[1:])


class RowExchange:
    """What ranks do around the experts that they share.

    All ranks make one. `num_rows` and what is known of the layer that runs are its state.

    Args:
        num_ranks: n.
        hidden_size: D.
        top_k: experts of a row.
    """

    def __init__(self, *, num_ranks: int, hidden_size: int, top_k: int) -> None:
        self._num_ranks, self._hidden_size, self._top_k = num_ranks, hidden_size, top_k
        # S, of the step that runs; None: in each layer all ranks have as many rows as this one
        self.num_rows: int | None = None
        self._num_own = 0  # T, of the layer that runs
        # Hosts agree without the GPU, whose work may be a step behind. No ranks: sizes alone.
        have_ranks = distributed.is_initialized()
        self._hosts = distributed.new_group(backend="gloo") if have_ranks else None
        self._stacks: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest that any rank has in each place, the same on all; hosts alone take part."""
        found = torch.tensor(values)
        with peers_needed():
            distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._hosts)
        return found.tolist()

    def surround(self, stack: nn.Module) -> None:
        """Let an expert layer run on the rows of all ranks, in place; it numbers experts later."""
        stack.register_forward_pre_hook(self._gather)
        stack.register_forward_hook(self._scatter)

    def join(self, model: nn.Module) -> None:
        """Run the expert layers of a model, in their order, on rows that others have."""
        if self.num_rows is None:
            return  # where this rank has no rows, no rank has
        if model not in self._stacks:
            hooks = ((one, one._forward_pre_hooks.values()) for one in model.modules())
            self._stacks[model] = [one for one, known in hooks if self._gather in known]
        for stack in self._stacks[model]:
            like = next(p for p in stack.parameters() if p.dim() > 2)
            choices = like.new_empty(0, self._top_k)
            stack(like.new_empty(0, self._hidden_size), choices.long(), choices)

    def _gather(self, _: nn.Module, args: tuple) -> tuple:
        """Arguments of an expert layer, of all ranks: rows, experts `[n S, top_k]` and weights.

        They travel as bytes, in one call. Experts are counted from 1 on the way: padding has none.
        """
        hidden, index, weights, *rest = args
        weights = weights.to(torch.promote_types(hidden.dtype, torch.float32))
        own = (hidden, index.int() + 1, weights)
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in own], dim=1)
        if self.num_rows is not None:
            self._num_own = len(hidden)
            num_lacking = self.num_rows - self._num_own
            assert num_lacking >= 0, f"{self._num_own} rows, agreed on {self.num_rows}"
            packed = nn.functional.pad(packed, (0, 0, 0, num_lacking))
        sizes = [part.shape[1] * part.itemsize for part in own]
        parts = gather_ranks(packed, self._num_ranks).flatten(0, 1).split(sizes, dim=1)
        rows, experts, shares = (
            part.contiguous().view(like.dtype) for part, like in zip(parts, own, strict=True)
        )
        return rows, experts.long() - 1, shares, *rest

    def _scatter(self, _: nn.Module, args: object, output: Tensor) -> Tensor:
        own = scatter_sums(output, self._num_ranks)
        return own if self.num_rows is None else own[: self._num_own]


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
