"""Sampling parameters of a batch as tensors, and what the host knows about them.

Letters: R requests, K drafts per step, V vocabulary, W words of a grammar's mask.
"""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.grammar import step_bitmask
from mtp_research.decode.processors import ProcessorTensors, processor_tensors
from mtp_research.decode.request import Request
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.transfer import to_device


class LogprobsPlan(NamedTuple):
    """Which log-probabilities a batch reports.

    Attributes:
        num_top: most tokens a request wants beside the emitted one.
        kinds: kinds that requests ask for, known on the host.
        is_raw: `[R]` bool, the request asks for `raw`.
    """

    num_top: int
    kinds: frozenset[str]
    is_raw: Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters of a batch.

    The three flags are known on the host: they choose code, and so take part in the key of a
    captured graph. `top_k_bound` is a power of two, so that there are few such keys.

    Attributes:
        temperature: `[R]` float64, 0 is greedy.
        top_k: `[R]` int64, 0 keeps all.
        top_p: `[R]` float64, in (0, 1].
        min_p: `[R]` float64, in [0, 1].
        seed: `[R]` int64.
        all_greedy: no request samples.
        keeps_all: no request truncates.
        top_k_bound: no top-k exceeds it; None where a request has a top-p and no top-k.
        processors: logit processors; None where no request uses any.
        bitmask: `[R, K+1, W]` int32 of allowed tokens; None where no request has a grammar.
        logprobs: what to report; None where no request asks.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    all_greedy: bool
    keeps_all: bool
    top_k_bound: int | None
    processors: ProcessorTensors | None = None
    bitmask: Tensor | None = None
    logprobs: LogprobsPlan | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature and truncation is asked for."""
        return self.processors is None and self.bitmask is None and self.logprobs is None


class BatchSampling:
    """Makes the tensors of a batch, and hands them out again while the batch stays the same.

    Args:
        num_speculative_tokens: K.
        vocab_size: V.
        device: where the tensors live.
    """

    def __init__(
        self, *, num_speculative_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._vocab_size = vocab_size
        self._device = device
        self._requests: list[Request] = []
        self._tensors: SamplingTensors | None = None
        self._have_grammars = False

    def tensors(self, requests: list[Request]) -> SamplingTensors:
        """Everything that sampling needs of the requests of a step."""
        if self._tensors is None or not self._is_same(requests):
            self._requests, self._tensors = requests, self._build(requests)
            self._have_grammars = any(request.matcher is not None for request in requests)
        if not self._have_grammars:
            return self._tensors
        bitmask = step_bitmask(
            [request.matcher for request in requests],
            [request.draft_token_ids for request in requests],
            num_speculative_tokens=self._num_speculative_tokens,
            vocab_size=self._vocab_size,
        )
        return self._tensors._replace(bitmask=bitmask.to(self._device))

    def _is_same(self, requests: list[Request]) -> bool:
        return len(requests) == len(self._requests) and all(map(is_, requests, self._requests))

    def _build(self, requests: list[Request]) -> SamplingTensors:
        params = [request.sampling for request in requests]
        processors = processor_tensors(
            params,
            num_prompt_tokens=[request.num_prompt_tokens for request in requests],
            vocab_size=self._vocab_size,
            device=self._device,
        )
        return sampling_tensors(params, device=self._device)._replace(
            processors=processors, logprobs=_logprobs_plan(params, self._device)
        )


def sampling_tensors(params: Sequence[SamplingParams], *, device: torch.device) -> SamplingTensors:
    """Temperature, truncation and seeds of a batch; like all of these made without waiting."""
    facts = to_device(
        [(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float64, device=device
    )
    whole = to_device(
        [(p.top_k, _signed(p.seed)) for p in params], dtype=torch.int64, device=device
    )
    temperature, top_p, min_p = facts.unbind(dim=1)
    top_k, seed = whole.unbind(dim=1)
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        all_greedy=all(p.temperature == 0 for p in params),
        keeps_all=all(_keeps_all(p) for p in params),
        top_k_bound=_top_k_bound(params),
    )


def _logprobs_plan(params: Sequence[SamplingParams], device: torch.device) -> LogprobsPlan | None:
    asked = [p for p in params if p.logprobs is not None]
    if not asked:
        return None
    return LogprobsPlan(
        num_top=max(p.logprobs or 0 for p in asked),
        kinds=frozenset(p.logprobs_kind for p in asked),
        is_raw=to_device(
            [p.logprobs_kind == "raw" for p in params], dtype=torch.bool, device=device
        ),
    )


def _keeps_all(params: SamplingParams) -> bool:
    """Whether nothing is truncated; greedy sampling has nothing to truncate."""
    untouched = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
    return untouched or params.temperature == 0


def _top_k_bound(params: Sequence[SamplingParams]) -> int | None:
    """The smallest power of two that no top-k exceeds; None where top-p looks at all tokens."""
    ordered = [p.top_k for p in params if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)]
    return None if 0 in ordered else 1 << (max(ordered, default=1) - 1).bit_length()


def _signed(seed: int) -> int:
    """The 64-bit two's complement value of an integer of any size."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
