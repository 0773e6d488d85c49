"""Verification: from target logits and drafts to accepted counts and emitted tokens.

Row j of a request's target logits is the distribution of the token after the newest token and
drafts d_1..d_j. A draft id outside the vocabulary (-1 is padding or an invalid proposal) is never
accepted and never used as an index, so shorter draft lists need no second code path.

Here are the types that all rules share and the two plain rules; `verify_block`, `verify_lossy` hold
the others, `verify_rules.RULES` lists them by name. Rules are pure functions.

Letters: R requests, K drafts per step, V vocabulary.
Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318) for `standard`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.verify_options import VerifyOptions
from mtp_research.models.compiled import settled

PADDING_TOKEN_ID = -1


class VerifyInputs(NamedTuple):
    """What a rule decides on.

    Attributes:
        target_logits: `[R, K+1, V]`.
        draft_token_ids: `[R, K]` int64; ids outside the vocabulary are no valid drafts.
        draft_probs: `[R, K, V]` distributions the drafts were drawn from; None for one-hot drafts.
        params: sampling parameters of the requests.
        positions: `[R, K+1]` int64, position of the token that each row decides; keys the noise.
        is_thinking: `[R]` bool, the text so far ends between the thinking tokens; None: not asked.
        options: settings of the lossy rules.
    """

    target_logits: Tensor
    draft_token_ids: Tensor
    draft_probs: Tensor | None
    params: SamplingTensors
    positions: Tensor
    is_thinking: Tensor | None = None
    options: VerifyOptions = VerifyOptions()

    @property
    def is_valid(self) -> Tensor:
        """`[R, K]` bool, the draft is a token of the vocabulary."""
        vocab_size = self.target_logits.shape[-1]
        return (self.draft_token_ids >= 0) & (self.draft_token_ids < vocab_size)

    @property
    def draft_indices(self) -> Tensor:
        """`[R, K]` int64, drafts that may be used as an index: 0 in place of invalid ones."""
        return self.draft_token_ids.masked_fill(~self.is_valid, 0)

    def noise(self, stream: Stream) -> Tensor:
        """One uniform number for each row's position, `[R, K+1]`."""
        return uniform_noise(self.params.seed[:, None], self.positions, stream)

    def proposals(self) -> Tensor:
        """`[R, K, V]` float64 distributions the drafts were drawn from, one-hot if need be."""
        if self.draft_probs is not None:
            return self.draft_probs.double()
        shape = (*self.draft_token_ids.shape, self.target_logits.shape[-1])
        zeros = torch.zeros(shape, dtype=torch.float64, device=self.target_logits.device)
        return zeros.scatter_(-1, self.draft_indices[..., None], 1.0)


class VerifyOutput(NamedTuple):
    """Result of a verification.

    Attributes:
        num_accepted: `[R]` int64, 0..K, bonus not counted.
        sampled_token_ids: `[R, K+1]` int64: accepted drafts, then the recovered or bonus token,
            then -1.
        is_finite: `[R]` bool, False where a logit row that decided a token was not finite; such a
            request emits nothing.
    """

    num_accepted: Tensor
    sampled_token_ids: Tensor
    is_finite: Tensor


def verify_greedy(inputs: VerifyInputs) -> VerifyOutput:
    """Accept drafts while each is the target's argmax; then emit the argmax."""
    best = settled(inputs.target_logits.argmax(dim=-1))
    matches = inputs.is_valid & (best[:, :-1] == inputs.draft_token_ids)
    largest = inputs.target_logits.gather(-1, best[..., None])[..., 0]
    return emit(inputs, num_accepted=count_leading(matches), decided=best, largest=largest)


def verify_standard(inputs: VerifyInputs) -> VerifyOutput:
    """Standard rejection sampling: the emitted text is distributed exactly as the target's.

    Draft d is accepted with probability min(1, p(d) / q(d)); at the first rejection the token is
    drawn from the normalised residual max(p - q, 0). Greedy drafts are one-hot: q(d) = 1.
    """
    probs = target_probabilities(inputs.target_logits, inputs.params)  # [R, K+1, V]
    drafts = inputs.draft_indices[..., None]
    p_draft = probs[:, :-1].gather(-1, drafts)[..., 0]
    if inputs.draft_probs is None:  # one-hot: the residual is the target without the draft
        q_draft = torch.ones_like(p_draft)
        rejected = probs[:, :-1].scatter(-1, drafts, 0.0)
    else:
        q_draft = inputs.draft_probs.double().gather(-1, drafts)[..., 0]
        rejected = (probs[:, :-1] - inputs.draft_probs).clamp(min=0)
    accepted = inputs.is_valid & (inputs.noise(Stream.ACCEPT)[:, :-1] * q_draft < p_draft)
    rejected = torch.where(inputs.is_valid[..., None], rejected, probs[:, :-1])
    residual = torch.cat([rejected, probs[:, -1:]], dim=1)
    recovered = sample_residual(residual, probs, uniform=inputs.noise(Stream.RESAMPLE))
    return emit(inputs, num_accepted=count_leading(accepted), decided=recovered)


def sample_residual(residual: Tensor, probs: Tensor, *, uniform: Tensor) -> Tensor:
    """Draw from residuals `[R, K+1, V]`; an empty one means p = q up to rounding: p is right."""
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    return sample_from(torch.where(empty, probs, residual), uniform)


def count_leading(accepted: Tensor) -> Tensor:
    """Drafts before the first one that is not accepted, `[R]` of `[R, K]` bool."""
    return accepted.long().cumprod(dim=-1).sum(dim=-1)


def emit(
    inputs: VerifyInputs, *, num_accepted: Tensor, decided: Tensor, largest: Tensor | None = None
) -> VerifyOutput:
    """Accepted drafts, then the token decided at the row after them.

    Args:
        inputs: what was decided on.
        num_accepted: `[R]` int64.
        decided: `[R, K+1]` int64, token that each row emits if it is the first without an
            accepted draft.
        largest: `[R, K+1]` of the logits, where they are at hand.
    """
    if largest is None:
        largest, decided = settled(inputs.target_logits.amax(dim=-1)), settled(decided)
    column = torch.arange(decided.shape[1], device=decided.device)
    drafts = torch.nn.functional.pad(inputs.draft_token_ids, (0, 1), value=PADDING_TOKEN_ID)
    sampled = torch.where(column < num_accepted[:, None], drafts, decided)
    used = column <= num_accepted[:, None]
    # NaN and +inf are the largest of their row, as values and as argmax; -inf alone is a mask.
    is_finite = (torch.isfinite(largest) | ~used).all(dim=-1)
    sampled = sampled.masked_fill(~used | ~is_finite[:, None], PADDING_TOKEN_ID)
    return VerifyOutput(num_accepted * is_finite, sampled, is_finite)
