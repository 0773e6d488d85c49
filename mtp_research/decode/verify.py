"""Verification rules: pure functions from target logits and drafts to accepted counts and emitted tokens.

Row j of a request's target logits is the distribution of the token after the bonus token and drafts d_1..d_j. A draft id of
-1 (padding, an invalid proposal) is never accepted, so shorter draft lists need no second code path.

Letters: R requests, K drafts per step, V vocabulary.
Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318) for standard rejection sampling.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling import SamplingTensors, Stream, sample_from, target_probabilities, uniform_noise

PADDING_TOKEN_ID = -1
VERIFY_RULES = ("greedy", "standard")


class VerifyOutput(NamedTuple):
    """Result of a verification.

    Attributes:
        num_accepted: `[R]` int64, 0..K, bonus not counted.
        sampled_token_ids: `[R, K+1]` int64: accepted drafts, then the recovered or bonus token, then -1.
        is_finite: `[R]` bool, False where a logit row that decided a token was not finite; such a request emits nothing.
    """

    num_accepted: Tensor
    sampled_token_ids: Tensor
    is_finite: Tensor


def verify_greedy(target_logits: Tensor, *, draft_token_ids: Tensor) -> VerifyOutput:
    """Accept drafts while each is the target's argmax; then emit the argmax.

    Args:
        target_logits: `[R, K+1, V]`.
        draft_token_ids: `[R, K]` int64, -1 where there is no valid draft.
    """
    best = target_logits.argmax(dim=-1)
    return _emit(best, (best[:, :-1] == draft_token_ids), draft_token_ids, target_logits)


def verify_standard(
    target_logits: Tensor,
    *,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    params: SamplingTensors,
    positions: Tensor,
) -> VerifyOutput:
    """Standard rejection sampling: the emitted text is distributed exactly as the target's.

    Draft d is accepted with probability min(1, p(d) / q(d)); at the first rejection the token is drawn from the normalised
    residual max(p - q, 0). Greedy drafts are one-hot: q(d) = 1.

    Args:
        target_logits: `[R, K+1, V]`.
        draft_token_ids: `[R, K]` int64, -1 where there is no valid draft.
        draft_probs: `[R, K, V]` distributions the drafts were drawn from; None for one-hot drafts.
        params: sampling parameters of the requests.
        positions: `[R, K+1]` int64, absolute position of the token each row decides; keys the noise.
    """
    probs = target_probabilities(target_logits, params)
    valid = draft_token_ids >= 0
    drafts = draft_token_ids.clamp(min=0)
    p_draft = probs[:, :-1].gather(-1, drafts[..., None])[..., 0]
    q_draft = torch.ones_like(p_draft)
    if draft_probs is not None:
        q_draft = draft_probs.double().gather(-1, drafts[..., None])[..., 0]
    noise = uniform_noise(params.seed[:, None], positions, Stream.ACCEPT)[:, :-1]
    accepted = valid & (noise * q_draft < p_draft)

    residual = probs.clone()
    if draft_probs is None:
        proposal = torch.zeros_like(probs[:, :-1]).scatter_(-1, drafts[..., None], 1.0)
    else:
        proposal = draft_probs.double()
    residual[:, :-1] = torch.where(valid[..., None], (probs[:, :-1] - proposal).clamp(min=0), probs[:, :-1])
    # p == q up to rounding leaves an empty residual; a rejection is then a rounding event and p itself is right.
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    residual = torch.where(empty, probs, residual)
    recovered = sample_from(residual, uniform_noise(params.seed[:, None], positions, Stream.RESAMPLE))
    return _emit(recovered, accepted, draft_token_ids, target_logits)


def _emit(decided: Tensor, matches: Tensor, draft_token_ids: Tensor, target_logits: Tensor) -> VerifyOutput:
    """Combine per-row decisions: accepted drafts up to the first mismatch, then `decided` at that row."""
    num_accepted = matches.long().cumprod(dim=-1).sum(dim=-1)  # [R]
    column = torch.arange(decided.shape[1], device=decided.device)
    padded_drafts = torch.nn.functional.pad(draft_token_ids, (0, 1), value=PADDING_TOKEN_ID)
    sampled = torch.where(column < num_accepted[:, None], padded_drafts, decided)
    used = column <= num_accepted[:, None]
    finite_rows = torch.isfinite(target_logits.amax(dim=-1)) & ~torch.isnan(target_logits).any(dim=-1)
    is_finite = (finite_rows | ~used).all(dim=-1)
    sampled = sampled.masked_fill(~used | ~is_finite[:, None], PADDING_TOKEN_ID)
    return VerifyOutput(num_accepted=num_accepted * is_finite, sampled_token_ids=sampled, is_finite=is_finite)
