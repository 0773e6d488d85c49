"""Verification rules by name, and the lossy ones: what they emit is not the target's text.

`relaxed` and `typical` trade exactness for acceptance, `synthetic` measures speed at a chosen
acceptance. Every output of an evaluation that used one of them says so.

Letters: R requests, K drafts per step, V vocabulary, L tokens of the text.
Source: relaxed acceptance as in TensorRT-LLM's DeepSeek-R1 recipe; typical acceptance of Medusa
(Cai et al., arXiv:2401.10774, section 2.3.1); synthetic acceptance as in serving benchmarks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.config.schema import RULES
from mtp_research.decode.sampling.sampling import Stream, sample_from, target_probabilities
from mtp_research.decode.verify.verify import (
    VerifyInputs,
    VerifyOutput,
    count_leading,
    emit,
    verify_block,
    verify_greedy,
    verify_standard,
)
from mtp_research.decode.verify.verify_options import synthetic_rates
from mtp_research.models.attention.paged import fusion_barrier
from mtp_research.models.rank_parts import best_of


def verify_relaxed(inputs: VerifyInputs) -> VerifyOutput:
    """Accept a draft among the target's n best whose probability is within delta of the best one's.

    With thinking tokens set, only drafts between them are judged like this, others greedily. The
    token after the accepted drafts is the target's argmax.
    """
    options = inputs.options
    best = fusion_barrier(inputs.target_logits.argmax(dim=-1))
    probs = torch.softmax(inputs.target_logits[:, :-1].double(), dim=-1)  # [R, K, V]
    p_draft = probs.gather(-1, inputs.draft_indices[..., None])
    rank = (probs > p_draft).sum(dim=-1)
    p_draft = p_draft[..., 0]
    is_close = p_draft >= probs.amax(dim=-1) - options.relaxed_delta
    # A large delta lets everything in, but never a token that was masked out.
    relaxed = (rank < options.relaxed_top_n) & is_close & (p_draft > 0)
    if options.relaxed_thinking_token_ids is not None:
        assert inputs.is_thinking is not None, "thinking tokens are set: is_thinking must be given"
        begin, end = options.relaxed_thinking_token_ids
        relaxed &= thinking_rows(inputs.is_thinking, inputs.draft_token_ids, begin=begin, end=end)
    accepted = inputs.is_valid & (relaxed | (best[:, :-1] == inputs.draft_token_ids))
    largest = fusion_barrier(inputs.target_logits.amax(dim=-1))
    return emit(inputs, num_accepted=count_leading(accepted), decided=best, largest=largest)


def verify_typical(inputs: VerifyInputs) -> VerifyOutput:
    """Accept a draft whose target probability exceeds min(epsilon, delta * exp(-entropy)).

    The token after the accepted drafts is drawn from the target. At temperature 0 this is `greedy`.
    """
    options = inputs.options
    probs = target_probabilities(inputs.target_logits, inputs.params)
    p_draft = probs[:, :-1].gather(-1, inputs.draft_indices[..., None])[..., 0]
    entropy = torch.special.entr(probs[:, :-1]).sum(dim=-1)
    bar = (options.typical_delta * torch.exp(-entropy)).clamp(max=options.typical_epsilon)
    decided = sample_from(probs, inputs.noise(Stream.RESAMPLE))
    accepted = inputs.is_valid & (p_draft > bar)
    return emit(inputs, num_accepted=count_leading(accepted), decided=decided)


def verify_synthetic(inputs: VerifyInputs) -> VerifyOutput:
    """Accept drafts by chance at given rates, whatever they are; for speed at a known acceptance.

    The token after the accepted drafts is drawn from the target. A draft outside the vocabulary or
    under a mask (its logit is -inf) is rejected here too.
    """
    num_drafts = inputs.draft_token_ids.shape[1]
    rates = tuple(inputs.options.synthetic_rates)  # of K drafts, which may be more
    if not rates:
        rates = synthetic_rates(inputs.options, num_speculative_tokens=num_drafts)
    chances = _conditional(rates[:num_drafts])
    noise = inputs.noise(Stream.ACCEPT)
    by_chance = [noise[:, step] < chance for step, chance in enumerate(chances)]
    accepted = inputs.is_valid
    if inputs.parts is None:  # logits that are masked are gathered first
        accepted = accepted & _is_unmasked(inputs)
    if by_chance:
        accepted = accepted & torch.stack(by_chance, dim=1)
    largest = None
    if inputs.params.all_greedy:
        decided, largest = best_of(inputs.target_logits, inputs.parts)
    else:
        probs = target_probabilities(inputs.target_logits, inputs.params)
        decided = sample_from(probs, inputs.noise(Stream.RESAMPLE))
    num_accepted = count_leading(accepted)
    return emit(inputs, num_accepted=num_accepted, decided=decided, largest=largest)


def _is_unmasked(inputs: VerifyInputs) -> Tensor:
    """`[R, K]` bool, the target's logit of the draft is not -inf."""
    logits = inputs.target_logits[:, :-1].gather(-1, inputs.draft_indices[..., None])[..., 0]
    return logits > -torch.inf


def thinking_rows(is_thinking: Tensor, draft_token_ids: Tensor, *, begin: int, end: int) -> Tensor:
    """`[R, K]` bool: does draft j fall between the thinking tokens, given the drafts before it?

    Args:
        is_thinking: `[R]` bool, state after the committed text.
        draft_token_ids: `[R, K]` int64.
        begin: token after which thinking starts.
        end: token after which it is over; the end token itself still counts as thinking.
    """
    states = [is_thinking]
    for token_ids in draft_token_ids.unbind(dim=1):
        states.append((states[-1] | (token_ids == begin)) & (token_ids != end))
    return torch.stack(states, dim=1)[:, :-1]


def text_is_thinking(text: Tensor, *, num_tokens: Tensor, begin: int, end: int) -> Tensor:
    """`[R]` bool: the last thinking token in the first `num_tokens` of `text[R, L]` is `begin`."""
    position = torch.arange(text.shape[1], device=text.device)
    known = position < num_tokens[:, None]
    last_begin = torch.where(known & (text == begin), position, -1).amax(dim=-1)
    last_end = torch.where(known & (text == end), position, -1).amax(dim=-1)
    return last_begin > last_end


def _conditional(rates: tuple[float, ...]) -> list[float]:
    before = (1.0, *rates)
    return [rate / prior if prior > 0 else 0.0 for prior, rate in zip(before, rates, strict=False)]


class Rule(NamedTuple):
    """A verification rule."""

    function: Callable[[VerifyInputs], VerifyOutput]  # the rule
    lossless: bool  # the text is the target's: the argmax, or distributed exactly as its samples
    samples: bool  # a temperature above 0 means something to it; otherwise it is refused
    # at temperature 0 it reads the best token of each row of logits and no more
    reads_best: bool = False

    @property
    def is_greedy_at_zero(self) -> bool:
        """Whether it is `greedy` at temperature 0: lossless, and shown to read the best alone."""
        return self.lossless and self.reads_best


RULES |= {
    "greedy": Rule(verify_greedy, lossless=True, samples=False, reads_best=True),
    "standard": Rule(verify_standard, lossless=True, samples=True, reads_best=True),
    "block": Rule(verify_block, lossless=True, samples=True, reads_best=True),
    "relaxed": Rule(verify_relaxed, lossless=False, samples=False),
    "typical": Rule(verify_typical, lossless=False, samples=True),
    "synthetic": Rule(verify_synthetic, lossless=False, samples=True, reads_best=True),
}


def is_lossless(name: str | None) -> bool:
    """Whether this process knows a rule of that name that keeps the target's text."""
    return name in RULES and RULES[name].lossless
