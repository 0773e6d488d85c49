"""From logits to probabilities and tokens, vectorised; noise depends on nothing but the request.

A uniform number is a hash of (request seed, position, stream, index). So noise does not depend on
the batch, its order, chunking or a preemption, and needs no state. Streams keep the draft's noise
apart from the verifier's: a residual drawn with the draft's own noise would be biased.

Row j of a step decides its j-th emitted token, accepted draft or not, so a token's log-probability
is read from the row that it was decided by. `raw` is of the target's own logits, `processed` of
what sampling drew from, as in vLLM's `logprobs_mode`.

Letters: R requests, J rows a request, K drafts per step, V vocabulary, W words of a grammar's mask.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling.grammar import StepMasks, bitmask_shape
from mtp_research.decode.sampling.processors import (
    ProcessorTensors,
    power_of_two,
    processor_tensors,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams, TokenLogprobs
from mtp_research.decode.schedule.request import Request
from mtp_research.decode.slot_state import map_tensors, to_device
from mtp_research.models.rank_parts import RankParts, whole_of
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.hash_bits import GOLDEN, mix, shift_right, signed


class LogprobsPlan(NamedTuple):
    """Which log-probabilities a batch reports."""

    # tokens beside the emitted one, at least what every request wants: 0 or a power of two, or V
    num_top: int
    some_raw: bool  # a request asks for `raw`, as known on the host
    some_processed: bool  # a request asks for `processed`
    is_raw: Tensor  # `[R]` bool, the request asks for `raw`


class SamplingTensors(NamedTuple):
    """Sampling parameters of a batch.

    Flags, and which parts are None, are known on the host: they choose code, and so take part in
    the key of a captured graph. `top_k_bound` is a power of two, so that there are few such keys.
    """

    temperature: Tensor  # `[R]` float64, 0 is greedy
    top_k: Tensor  # `[R]` int64, 0 keeps all
    top_p: Tensor  # `[R]` float64, in (0, 1]
    min_p: Tensor  # `[R]` float64, in [0, 1]
    seed: Tensor  # `[R]` int64
    all_greedy: bool  # no request samples
    keeps_all: bool  # no request truncates
    top_k_bound: int | None  # no top-k exceeds it; None where a request has a top-p and no top-k
    processors: ProcessorTensors | None = None  # logit processors; None where no request uses any
    # `[R, K+1, W]` int32 of allowed tokens, all of them until `BatchSampling.bitmask` has made the
    # step's; None where no request has a grammar
    bitmask: Tensor | None = None
    logprobs: LogprobsPlan | None = None  # what to report; None where no request asks
    every_top_k: bool = False  # every request that samples has a top-k


class BatchSampling:
    """Makes the tensors of a batch, and hands them out again while the batch stays the same.

    Plain greedy requests are alike unless the rule `draws_at_zero`: then it reads their seeds.
    """

    def __init__(
        self,
        plan: DraftPlan,
        *,
        vocab_size: int,
        device: torch.device,
        draws_at_zero: bool = True,
    ) -> None:
        self._plan, self._vocab_size, self._device = plan, vocab_size, device
        self._draws_at_zero = draws_at_zero
        self._greedy: dict[int, SamplingTensors] = {}  # of plain greedy requests, by their number
        self._masks = StepMasks(
            num_speculative_tokens=plan.num_speculative_tokens,
            vocab_size=vocab_size,
            pin_memory=device.type == "cuda",
        )
        self._requests: list[Request] = []
        self._tensors: SamplingTensors | None = None

    def tensors(self, requests: list[Request]) -> SamplingTensors:
        """Everything that sampling needs of the requests of a step, but for the masks."""
        if self._tensors is None or not self._is_same(requests):
            self._requests, self._tensors = requests, self._build(requests)
        return self._tensors

    def bitmask(self, requests: list[Request]) -> Tensor:
        """Masks of a step `[R, K+1, W]` on the host, pinned where there is a GPU; see `StepMasks`.

        The host has to know the tokens and drafts of all requests.
        """
        return self._masks.make(
            [request.matcher for request in requests],
            [request.draft_token_ids for request in requests],
        )

    def _is_same(self, requests: list[Request]) -> bool:
        return len(requests) == len(self._requests) and all(map(is_, requests, self._requests))

    def _build(self, requests: list[Request]) -> SamplingTensors:
        params = [request.sampling for request in requests]
        if not self._draws_at_zero and all(map(_is_plain_greedy, params)):
            return self._greedy_ones(len(params))
        return batch_tensors(
            params,
            num_prompt_tokens=[request.num_prompt_tokens for request in requests],
            num_speculative_tokens=self._plan.num_speculative_tokens,
            vocab_size=self._vocab_size,
            device=self._device,
        )

    def _greedy_ones(self, count: int) -> SamplingTensors:
        """Tensors of plain greedy requests: the first rows of the same memory for every count.

        So nothing is copied when such requests come and go: neither from the host, nor to where
        captured steps read.
        """
        most = max(self._greedy, default=0)
        if most < count:
            most = power_of_two(count)
            greedy = [SamplingParams()] * most
            self._greedy = {most: sampling_tensors(greedy, device=self._device)}
        if count not in self._greedy:
            self._greedy[count] = map_tensors(lambda rows: rows[:count], self._greedy[most])
        return self._greedy[count]


_is_plain_greedy = attrgetter("is_plain_greedy")


def batch_tensors(
    params: list[SamplingParams],
    *,
    num_prompt_tokens: list[int],
    num_speculative_tokens: int,
    vocab_size: int,
    device: torch.device,
) -> SamplingTensors:
    """Tensors of a batch, with masks that allow everything; made without waiting for the device."""
    bitmask = None
    if any(p.grammar is not None for p in params):
        shape = bitmask_shape(
            len(params), num_speculative_tokens=num_speculative_tokens, vocab_size=vocab_size
        )
        bitmask = torch.full(shape, -1, dtype=torch.int32, device=device)
    processors = processor_tensors(
        params, num_prompt_tokens=num_prompt_tokens, vocab_size=vocab_size, device=device
    )
    return sampling_tensors(params, device=device)._replace(
        processors=processors,
        bitmask=bitmask,
        logprobs=_logprobs_plan(params, vocab_size, device),
    )


def sampling_tensors(params: Sequence[SamplingParams], *, device: torch.device) -> SamplingTensors:
    """Temperature, truncation and seeds of a batch."""
    facts = to_device(
        [(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float64, device=device
    )
    whole = to_device(
        [(p.top_k, signed(p.seed or 0)) for p in params], dtype=torch.int64, device=device
    )
    temperature, top_p, min_p = facts.unbind(dim=1)
    top_k, seed = whole.unbind(dim=1)
    drawn = [p for p in params if p.temperature > 0]  # greedy sampling has nothing to truncate
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        all_greedy=not drawn,
        keeps_all=all(p.top_k == 0 and p.top_p == 1 and p.min_p == 0 for p in drawn),
        top_k_bound=_top_k_bound(drawn),
        every_top_k=all(p.top_k > 0 for p in drawn),
    )


def _logprobs_plan(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> LogprobsPlan | None:
    asked = [p for p in params if p.logprobs is not None]
    if not asked:
        return None
    most = max(p.logprobs or 0 for p in asked)
    return LogprobsPlan(
        num_top=min(power_of_two(most), vocab_size) if most else 0,
        some_raw=any(p.logprobs_kind == "raw" for p in asked),
        some_processed=any(p.logprobs_kind == "processed" for p in asked),
        is_raw=to_device(
            [p.logprobs_kind == "raw" for p in params], dtype=torch.bool, device=device
        ),
    )


def _top_k_bound(drawn: Sequence[SamplingParams]) -> int | None:
    """The smallest power of two that no top-k exceeds; None where top-p looks at all tokens."""
    ordered = [p.top_k for p in drawn if p.top_k > 0 or p.top_p < 1]
    return None if 0 in ordered else power_of_two(max(ordered, default=1))


_NUM_STREAMS = 4  # room for one more


class Stream(IntEnum):
    """Independent noise streams of a request."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def target_probabilities(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Probabilities that a request is sampled from.

    Args:
        logits: `[R, J, V]`, any float dtype.
        params: one entry per request.

    Returns:
        `[R, J, V]` float64; one-hot at the argmax where the temperature is 0.
    """
    token_id = torch.arange(logits.shape[-1], device=logits.device)
    greedy = (token_id == logits.argmax(dim=-1, keepdim=True)).double()
    if params.all_greedy:
        return greedy
    probs = torch.softmax(scaled_logits(logits, params), dim=-1)
    return torch.where(params.temperature[:, None, None] > 0, probs, greedy)


def scaled_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Temperature, then top-k, top-p and min-p, the order of transformers.

    Args:
        logits: `[R, J, V]`, any float dtype.
        params: one entry per request; temperature 0 scales by 1 and truncates nothing.

    Returns:
        `[R, J, V]` float64, relative to the best token; -inf where a token is not kept. The most
        probable token always stays, of equals the first.
    """
    temperature = params.temperature[:, None, None]
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    # Relative to the best token, so that no temperature, however low, overflows.
    best = logits.amax(dim=-1, keepdim=True).double()
    scaled = (logits.double() - best) / divisor
    if params.keeps_all:
        return scaled
    laws = params.temperature, params.top_k, params.top_p
    keep = keep_top(logits, *laws, params.top_k_bound)
    keep = keep & (scaled.exp() >= params.min_p[:, None, None])
    return scaled.masked_fill(~keep & (temperature > 0), -torch.inf)


# Operators of their own, here and at `sample_from`: Inductor of torch 2.11 fails at running sums in
# compiled steps (TypeError in get_block_shape over sorted values, no code for a scan over 49 152
# values of a batch of any size), and gains nothing beside the sort and the scan.
@torch.library.custom_op("mtp_research::keep_top", mutates_args=())
def keep_top(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, top_k_bound: int | None
) -> Tensor:
    """Mask `[R, J, V]` of what top-k and top-p keep; arguments as in `SamplingTensors`.

    Both keep the first n tokens in falling order; n is found on sorted values alone. Values are
    sorted in their own dtype, which has half the bits of the probabilities, and only as many as a
    top-k can keep: at V = 150 000 sorting is most of the cost of sampling.
    """
    vocab_size = logits.shape[-1]
    if top_k_bound is not None:
        ordered = logits.topk(min(top_k_bound, vocab_size), dim=-1).values
    else:
        ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    unbounded = top_k[:, None, None] == 0
    num_best = torch.where(unbounded, vocab_size, top_k[:, None, None])
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    scaled = (ordered.double() - ordered[..., :1].double()) / divisor[:, None, None]
    probs = torch.softmax(scaled.masked_fill(rank >= num_best, -torch.inf), dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = top_p[:, None, None]
    # At 1 the sum, which rounds, has no say: what a request keeps must not depend on the batch.
    keep = (rank < num_best) & ((mass_before < top_p) | (top_p == 1) | (rank == 0))
    kept = keep.sum(dim=-1, keepdim=True)
    first = _first_of_order(logits, ordered, kept)
    # A request without top-k that keeps all is not bound by a neighbour's top-k.
    return (first | (unbounded & (top_p == 1))).contiguous()


@keep_top.register_fake
def _(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, top_k_bound: int | None
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.bool)


def _first_of_order(logits: Tensor, ordered: Tensor, kept: Tensor) -> Tensor:
    """Mask `[R, J, V]` of the first `kept` `[R, J, 1]` tokens in falling order, ties by index."""
    smallest = ordered.gather(-1, kept - 1)
    above = logits > smallest
    ties = logits == smallest
    num_ties = kept - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= num_ties))


def top_candidates(logits: Tensor, num_best: int, parts: RankParts) -> Tensor:
    """Whole rows `[R, J, V]` of ranks' `[R, J, V / n]`, -inf but for each rank's best tokens.

    With `num_best` of a rank, the first so many of the whole row are among them, ties by index, so
    that a top-k of no more keeps what it keeps of all logits. 16 bytes a candidate are exchanged.
    """
    size = logits.shape[-1]
    index = best_indices(logits, min(num_best, size))
    own = torch.stack((logits.gather(-1, index).double(), (index + parts.rank * size).double()))
    values, indices = whole_of(own, parts)  # [R, J, n count] each
    rows = logits.new_full((*logits.shape[:-1], size * parts.num_ranks), -torch.inf)
    return rows.scatter(-1, indices.long(), values.to(logits.dtype))


@torch.library.custom_op("mtp_research::best_indices", mutates_args=())
def best_indices(logits: Tensor, count: int) -> Tensor:
    """`[R, J, count]` int64, the first tokens in falling order, ties by index, in any order.

    NaN comes before all numbers. Where NaN takes places, an index may be there twice.
    """
    size = logits.shape[-1]
    ordered = logits.topk(count, dim=-1).values
    is_best = _first_of_order(logits, ordered, torch.full_like(ordered[..., :1], count).long())
    index = torch.arange(size, device=logits.device)
    place = torch.where(is_best, index, size)  # those that are not wanted behind all others
    place = torch.where(logits.isnan(), index - size, place)
    return place.topk(count, dim=-1, largest=False).values.remainder(size)


@best_indices.register_fake
def _(logits: Tensor, count: int) -> Tensor:
    return logits.new_empty((*logits.shape[:-1], count), dtype=torch.int64)


@torch.library.custom_op("mtp_research::sample_from", mutates_args=())
def sample_from(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling.

    Args:
        probs: `[..., V]` non-negative, need not sum to one (a residual).
        uniform: `[...]` in [0, 1).

    Returns:
        `[...]` int64. A token of probability zero is never returned while any has weight.
    """
    cumulative = probs.double().cumsum(dim=-1)
    threshold = (uniform * cumulative[..., -1])[..., None]
    index = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    # Rounding at the top of the range must not pick a token behind the last that has weight.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    # Compiled steps count on this layout, whatever that of the arguments.
    return torch.minimum(index, last).contiguous()


@sample_from.register_fake
def _(probs: Tensor, uniform: Tensor) -> Tensor:
    return uniform.new_empty(uniform.shape, dtype=torch.int64)


def uniform_noise(
    seed: Tensor, position: Tensor, stream: Stream, *, index: Tensor | int = 0
) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of the arguments.

    Args:
        seed: `[R]` or broadcastable to `position`, int64.
        position: int64, position in the text that the number is for.
        stream: noise stream.
        index: which number of this position and stream; an int or broadcastable int64.

    Returns:
        float64 of the broadcast shape, 53 random bits each: `hash_bits.mix` applied to seed,
        position and (stream, index).
    """
    state = mix(seed + signed(GOLDEN))
    state = mix(state ^ (position * signed(0xD1342543DE82EF95)))
    number = index * _NUM_STREAMS + int(stream)
    state = mix(state + _times_golden(number))
    return shift_right(state, 11).double() * 2.0**-53


def _times_golden(number: Tensor | int) -> Tensor | int:
    return signed(number * GOLDEN) if isinstance(number, int) else number * signed(GOLDEN)


class LogprobTensors(NamedTuple):
    """Log-probabilities of a step's tokens."""

    emitted: Tensor  # `[R, J]` float32, of the emitted tokens; of token 0 where none was
    top_ids: Tensor  # `[R, J, n]` int64, best tokens first
    top: Tensor  # `[R, J, n]` float32

    def read(self) -> "HostLogprobs":
        """All of them as numbers of the host."""
        emitted, top_ids, top = (tensor.flatten().tolist() for tensor in self)
        _, num_rows, num_best = self.top.shape
        return HostLogprobs(emitted, top_ids, top, num_rows, num_best)


class HostLogprobs(NamedTuple):
    """`LogprobTensors` as flat lists: one read for a batch, and few objects to be collected."""

    emitted: list[float]  # R J
    top_ids: list[int]  # R J n
    top: list[float]  # R J n
    num_rows: int  # J
    num_best: int  # n

    def of_request(self, row: int, *, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        """Of the first emitted tokens of one request, with their `num_top` <= n best."""
        first = row * self.num_rows
        return [self._of_token(first + index, num_top) for index in range(num_tokens)]

    def _of_token(self, index: int, num_top: int) -> TokenLogprobs:
        first = index * self.num_best
        values = self.top[first : first + num_top]
        best = zip(self.top_ids[first : first + num_top], values, strict=True)
        if values and values[-1] == -math.inf:  # they fall: the last ones have no probability
            best = (pair for pair in best if pair[1] > -math.inf)
        return TokenLogprobs(self.emitted[index], tuple(best))


def step_logprobs(
    raw_logits: Tensor,
    processed_logits: Tensor,
    *,
    sampled_token_ids: Tensor,
    params: SamplingTensors,
) -> LogprobTensors | None:
    """Log-probabilities of a step's tokens `[R, J]`, -1 where nothing was emitted, in float32.

    Logits `[R, J, V]` are those before and after the processors. None where no request asks.
    """
    if params.logprobs is None:
        return None
    logprobs = _of_kinds(raw_logits, processed_logits, params=params, plan=params.logprobs)
    top, top_ids = logprobs.topk(params.logprobs.num_top, dim=-1)
    emitted = logprobs.gather(-1, sampled_token_ids.clamp(min=0)[..., None])[..., 0]
    return LogprobTensors(emitted, top_ids, top)


def _of_kinds(
    raw_logits: Tensor, processed_logits: Tensor, *, params: SamplingTensors, plan: LogprobsPlan
) -> Tensor:
    """`[R, J, V]` float32 of the kind that each request asks for."""
    if not plan.some_processed:
        return torch.log_softmax(raw_logits, dim=-1, dtype=torch.float32)
    scaled = scaled_logits(processed_logits, params)
    processed = torch.log_softmax(scaled, dim=-1).float()
    if not plan.some_raw:
        return processed
    raw = torch.log_softmax(raw_logits, dim=-1, dtype=torch.float32)
    return torch.where(plan.is_raw[:, None, None], raw, processed)
