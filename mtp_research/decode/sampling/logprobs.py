"""Log-probabilities of emitted tokens and of the best tokens beside them.

Row j of a step decides its j-th emitted token, accepted draft or not, so a token's log-probability
is read from the row that it was decided by. `raw` is of the target's own logits; `processed` of the
logits after processors, masks, temperature and truncation, which is what sampling drew from.

Letters: R requests, J rows a request, V vocabulary, n tokens reported.
Source: raw and processed as in vLLM's `logprobs_mode`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling import LogprobsPlan, SamplingTensors, scaled_logits


class TokenLogprobs(NamedTuple):
    """One emitted token.

    Attributes:
        logprob: natural logarithm of its probability, -inf if it had none (lossy rules).
        top: (token id, logprob) of the best tokens, best first; as many as the request asked for,
            or as have any probability.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobTensors(NamedTuple):
    """Log-probabilities of a step's tokens.

    Attributes:
        emitted: `[R, J]` float32, of the emitted tokens; of token 0 where none was.
        top_ids: `[R, J, n]` int64, best tokens first.
        top: `[R, J, n]` float32.
    """

    emitted: Tensor
    top_ids: Tensor
    top: Tensor

    def of_request(self, row: int, *, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        """Copy to the host: the first emitted tokens of one request."""
        emitted, top_ids, top = (tensor[row, :num_tokens].tolist() for tensor in self)
        return [
            TokenLogprobs(
                logprob,
                tuple(
                    (token_id, value)
                    for token_id, value in zip(ids[:num_top], values[:num_top], strict=True)
                    if value > -math.inf
                ),
            )
            for logprob, ids, values in zip(emitted, top_ids, top, strict=True)
        ]


def step_logprobs(
    raw_logits: Tensor,
    processed_logits: Tensor,
    *,
    sampled_token_ids: Tensor,
    params: SamplingTensors,
) -> LogprobTensors | None:
    """Log-probabilities of a step in float32; None where no request asks.

    Args:
        raw_logits: `[R, J, V]`.
        processed_logits: `[R, J, V]`, after the processors.
        sampled_token_ids: `[R, J]` int64, -1 where nothing was emitted.
        params: one entry per request.
    """
    if params.logprobs is None:
        return None
    logprobs = _of_kinds(raw_logits, processed_logits, params=params, plan=params.logprobs)
    top, top_ids = logprobs.topk(min(params.logprobs.num_top, logprobs.shape[-1]), dim=-1)
    emitted = logprobs.gather(-1, sampled_token_ids.clamp(min=0)[..., None])[..., 0]
    return LogprobTensors(emitted, top_ids, top)


def _of_kinds(
    raw_logits: Tensor, processed_logits: Tensor, *, params: SamplingTensors, plan: LogprobsPlan
) -> Tensor:
    """`[R, J, V]` float32 of the kind that each request asks for."""
    if plan.kinds == {"raw"}:
        return torch.log_softmax(raw_logits, dim=-1, dtype=torch.float32)
    scaled = scaled_logits(processed_logits, params)
    processed = torch.log_softmax(scaled, dim=-1).float()
    if plan.kinds == {"processed"}:
        return processed
    raw = torch.log_softmax(raw_logits, dim=-1, dtype=torch.float32)
    return torch.where(plan.is_raw[:, None, None], raw, processed)
