"""Verification: from target logits and drafts to accepted counts and emitted tokens.

Row j of a request's target logits is the distribution of the token after the newest token and
drafts d_1..d_j. A draft id outside the vocabulary (-1 is padding or an invalid proposal) is never
accepted and never used as an index, so shorter draft lists need no second code path.

Rules are pure functions: `standard`, `greedy` and `block` here, the lossy ones and the table of all
in `verify_rules`.

`block` is lossless and never accepts fewer drafts in expectation than `standard`. Drafts are judged
together: after i drafts the block keeps the weight w_i = min(1, w_{i-1} p(d_i) / q(d_i)), and stops
at the longest prefix that passes its own test. A prefix passes with probability
S_i / (S_i + 1 - w_i), where S_i = sum_x max(w_i p(x) - q(x), 0) belongs to the token after it; the
whole block passes with probability w_K. The next token is then drawn from max(w_i p - q, 0), and
after the whole block from p. Since later drafts take part in the decision, the noise of drafts and
tests must not be used again for the same position in a later step; it is keyed by the step's first
position as well.

Letters: R requests, K drafts per step, V vocabulary.
Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318) for `standard`; Sun et
al., Block Verification Accelerates Speculative Decoding (arXiv:2403.10444) for `block`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.config.schema import VerifyOptions
from mtp_research.decode.sampling.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    target_probabilities,
    uniform_noise,
)
from mtp_research.models.attention.paged import fusion_barrier
from mtp_research.models.rank_parts import RankParts, best_of

PADDING_TOKEN_ID = -1


class VerifyInputs(NamedTuple):
    """What a rule decides on."""

    target_logits: Tensor  # `[R, K+1, V]`; with `parts` this rank's, `[R, K+1, V / n]`
    draft_token_ids: Tensor  # `[R, K]` int64; ids outside the vocabulary are no valid drafts
    # `[R, K, V]` distributions the drafts were drawn from; None for one-hot drafts
    draft_probs: Tensor | None
    params: SamplingTensors  # sampling parameters of the requests
    # `[R, K+1]` int64, position of the token that each row decides; keys the noise
    positions: Tensor
    # `[R]` bool, the text so far ends between the thinking tokens; None: not asked
    is_thinking: Tensor | None = None
    options: VerifyOptions = VerifyOptions()  # settings of the lossy rules
    parts: RankParts | None = None  # of a rule that reads nothing but the best token of each row

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target_logits.shape[-1] * (1 if self.parts is None else self.parts.num_ranks)

    @property
    def is_valid(self) -> Tensor:
        """`[R, K]` bool, the draft is a token of the vocabulary."""
        return (self.draft_token_ids >= 0) & (self.draft_token_ids < self.vocab_size)

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
    """Result of a verification."""

    num_accepted: Tensor  # `[R]` int64, 0..K, bonus not counted
    # `[R, K+1]` int64: accepted drafts, then the recovered or bonus token, then -1
    sampled_token_ids: Tensor
    # `[R]` bool, False where a logit row that decided a token was not finite; such a request emits
    # nothing
    is_finite: Tensor


def verify_greedy(inputs: VerifyInputs) -> VerifyOutput:
    """Accept drafts while each is the target's argmax; then emit the argmax."""
    best, largest = best_of(inputs.target_logits, inputs.parts)
    matches = inputs.is_valid & (best[:, :-1] == inputs.draft_token_ids)
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
    """`num_accepted` `[R]` drafts, then the token `decided` `[R, K+1]` at the row after them.

    `largest` `[R, K+1]` of the logits is found here where it is not at hand.
    """
    if largest is None:
        largest = fusion_barrier(inputs.target_logits.amax(dim=-1))
        decided = fusion_barrier(decided)
    column = torch.arange(decided.shape[1], device=decided.device)
    drafts = torch.nn.functional.pad(inputs.draft_token_ids, (0, 1), value=PADDING_TOKEN_ID)
    sampled = torch.where(column < num_accepted[:, None], drafts, decided)
    used = column <= num_accepted[:, None]
    # NaN and +inf are the largest of their row, as values and as argmax; -inf alone is a mask.
    is_finite = (torch.isfinite(largest) | ~used).all(dim=-1)
    sampled = sampled.masked_fill(~used | ~is_finite[:, None], PADDING_TOKEN_ID)
    return VerifyOutput(num_accepted * is_finite, sampled, is_finite)


def verify_block(inputs: VerifyInputs) -> VerifyOutput:
    """Accept the longest prefix of drafts that passes; the text is distributed as the target's."""
    probs = target_probabilities(inputs.target_logits, inputs.params)  # [R, K+1, V]
    proposals = inputs.proposals()
    num_drafts = proposals.shape[1]
    num_valid = inputs.is_valid.long().cumprod(dim=-1).sum(dim=-1)  # [R]
    weights = _weights(probs, proposals, drafts=inputs.draft_indices)  # [R, K+1]

    excess = (weights[:, :-1, None] * probs[:, :-1] - proposals).clamp(min=0)  # [R, K, V]
    mass = excess.sum(dim=-1)
    open_weight = mass + 1 - weights[:, :-1]
    # 0 / 0: w = 1 and p = q; the next prefix passes for certain, this value decides nothing.
    passing = torch.where(open_weight == 0, 1.0, mass / open_weight)
    passing = torch.cat([passing, weights[:, -1:]], dim=-1)  # [R, K+1]
    length = torch.arange(num_drafts + 1, device=weights.device)
    is_whole = length == num_valid[:, None]
    passing = torch.where(is_whole, weights, passing)

    accepted = (_test_noise(inputs) < passing) & (length <= num_valid[:, None])
    num_accepted = torch.where(accepted, length, 0).amax(dim=-1)
    residual = torch.where(is_whole[..., None], probs, torch.cat([excess, probs[:, -1:]], dim=1))
    decided = sample_residual(residual, probs, uniform=inputs.noise(Stream.RESAMPLE))
    return emit(inputs, num_accepted=num_accepted, decided=decided)


def _weights(probs: Tensor, proposals: Tensor, *, drafts: Tensor) -> Tensor:
    """Weights w_0..w_K, `[R, K+1]`."""
    p_draft = probs[:, :-1].gather(-1, drafts[..., None])[..., 0]
    q_draft = proposals.gather(-1, drafts[..., None])[..., 0]
    weights = [torch.ones_like(probs[:, 0, 0])]
    for ratio in (p_draft / q_draft).unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    return torch.stack(weights, dim=1)


def _test_noise(inputs: VerifyInputs) -> Tensor:
    """Uniform numbers of the tests, `[R, K+1]`; no later step of the request sees them again."""
    first = inputs.positions[:, :1]
    # 0..K of positions that were read: of an arange the compiler works out products of its own,
    # which do not wrap at 64 bits.
    index = inputs.positions - first
    seed = inputs.params.seed[:, None]
    return uniform_noise(seed, first, Stream.ACCEPT, index=index)
