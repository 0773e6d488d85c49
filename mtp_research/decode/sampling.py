"""From logits to probabilities and tokens, vectorised; noise depends on nothing but the request.

A uniform number is a hash of (request seed, position, stream, index). So noise does not depend on
the batch, its order, chunking or a preemption, and needs no state. Streams keep the draft's noise
apart from the verifier's: a residual drawn with the draft's own noise would be biased.

Letters: R requests, J rows a request, V vocabulary.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.request import SamplingParams

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUM_STREAMS = 4  # room for one more


class Stream(IntEnum):
    """Independent noise streams of a request."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


class SamplingTensors(NamedTuple):
    """Sampling parameters of a batch.

    Attributes:
        temperature: `[R]` float64, 0 is greedy.
        top_k: `[R]` int64, 0 keeps all.
        top_p: `[R]` float64, in (0, 1].
        seed: `[R]` int64.
        all_greedy: no request samples; known on the host.
        keeps_all: no request truncates; known on the host.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    all_greedy: bool
    keeps_all: bool


def sampling_tensors(params: list[SamplingParams], *, device: torch.device) -> SamplingTensors:
    """Stack the parameters of a batch."""
    return SamplingTensors(
        temperature=torch.tensor(
            [p.temperature for p in params], dtype=torch.float64, device=device
        ),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        seed=torch.tensor([_signed(p.seed) for p in params], dtype=torch.int64, device=device),
        all_greedy=all(p.temperature == 0 for p in params),
        keeps_all=all(p.top_k == 0 and p.top_p == 1 for p in params),
    )


def target_probabilities(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Probabilities that a request is sampled from.

    Args:
        logits: `[R, J, V]`, any float dtype.
        params: one entry per request.

    Returns:
        `[R, J, V]` float64; one-hot at the argmax where the temperature is 0. Temperature first,
        then top-k, then top-p, then renormalisation (the order of transformers and vLLM).
    """
    values = logits.double()
    greedy = torch.zeros_like(values).scatter_(-1, values.argmax(dim=-1, keepdim=True), 1.0)
    if params.all_greedy:
        return greedy
    temperature = params.temperature[:, None, None]
    # Relative to the best token, so that no temperature, however low, overflows.
    relative = values - values.amax(dim=-1, keepdim=True)
    scaled = relative / torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    if not params.keeps_all:
        scaled = scaled.masked_fill(~_keep_top(scaled, params), -torch.inf)
    return torch.where(temperature > 0, torch.softmax(scaled, dim=-1), greedy)


def _keep_top(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Mask `[R, J, V]` of what top-k and top-p keep; the most probable token always stays."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    top_k = torch.where(params.top_k == 0, scaled.shape[-1], params.top_k)[:, None, None]
    keep = rank < top_k
    probs = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = params.top_p[:, None, None]
    # At 1 the sum, which rounds, has no say: what a request keeps must not depend on the batch.
    keep = keep & ((mass_before < top_p) | (top_p == 1) | (rank == 0))
    return torch.zeros_like(keep).scatter_(-1, order, keep)


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
    return torch.minimum(index, last)


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
        float64 of the broadcast shape, 53 random bits each. The mixing function is SplitMix64's
        finaliser (Steele et al., OOPSLA 2014) applied to seed, position and (stream, index).
    """
    state = _mix(seed + _signed(_GOLDEN))
    state = _mix(state ^ (position * _signed(0xD1342543DE82EF95)))
    number = index * _NUM_STREAMS + int(stream)
    state = _mix(state + _times_golden(number))
    return _shift_right(state, 11).double() * 2.0**-53


def _times_golden(number: Tensor | int) -> Tensor | int:
    return _signed(number * _GOLDEN) if isinstance(number, int) else number * _signed(_GOLDEN)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    """The 64-bit two's complement value of an integer of any size."""
    constant &= _MASK_64
    return constant - (1 << 64) if constant >> 63 else constant
