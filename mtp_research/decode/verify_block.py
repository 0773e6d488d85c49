"""Block verification: lossless, and never accepts fewer drafts in expectation than `standard`.

Drafts are judged together: after i drafts the block keeps the weight
w_i = min(1, w_{i-1} p(d_i) / q(d_i)), and stops at the longest prefix that passes its own test. A
prefix passes with probability S_i / (S_i + 1 - w_i), where S_i = sum_x max(w_i p(x) - q(x), 0)
belongs to the token after it; the whole block passes with probability w_K. The next token is then
drawn from max(w_i p - q, 0), and after the whole block from p.

Since later drafts take part in the decision, the noise of drafts and tests must not be used again
for the same position in a later step; it is keyed by the step's first position as well.

Letters: R requests, K drafts per step, V vocabulary.
Source: Sun et al., Block Verification Accelerates Speculative Decoding (arXiv:2403.10444).
"""

import torch
from torch import Tensor

from mtp_research.decode.sampling import Stream, target_probabilities, uniform_noise
from mtp_research.decode.verify import VerifyInputs, VerifyOutput, emit, sample_residual


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
    index = torch.arange(inputs.positions.shape[1], device=first.device)
    seed = inputs.params.seed[:, None]
    return uniform_noise(seed, first, Stream.ACCEPT, index=index)
