"""Rules that trade exactness for acceptance, and one that measures speed at a chosen acceptance.

Their text is not the target's. Every output of an evaluation that used one of them says so.

Letters: R requests, K drafts per step, V vocabulary, L tokens of the text.
Source: relaxed acceptance as in TensorRT-LLM's DeepSeek-R1 recipe; typical acceptance of Medusa
(Cai et al., arXiv:2401.10774, section 2.3.1); synthetic acceptance as in serving benchmarks.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from mtp_research.decode.sampling import Stream, sample_from, target_probabilities
from mtp_research.decode.verify import VerifyInputs, VerifyOutput, count_leading, emit
from mtp_research.errors import ConfigError

LengthSchedule = Literal["minimum_variance", "geometric"]


def verify_relaxed(inputs: VerifyInputs) -> VerifyOutput:
    """Accept a draft among the target's n best whose probability is within delta of the best one's.

    With thinking tokens set, only drafts between them are judged like this, others greedily. The
    token after the accepted drafts is the target's argmax.
    """
    options = inputs.options
    best = inputs.target_logits.argmax(dim=-1)
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
    return emit(inputs, num_accepted=count_leading(accepted), decided=best)


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

    The token after the accepted drafts is drawn from the target. A draft outside the vocabulary is
    rejected here too.
    """
    rates = inputs.options.synthetic_rates
    num_drafts = inputs.draft_token_ids.shape[1]
    assert len(rates) == num_drafts, f"{len(rates)} synthetic rates for {num_drafts} drafts"
    chances = inputs.target_logits.new_tensor(_conditional(rates), dtype=torch.float64)
    probs = target_probabilities(inputs.target_logits, inputs.params)
    accepted = inputs.is_valid & (inputs.noise(Stream.ACCEPT)[:, :-1] < chances)
    decided = sample_from(probs, inputs.noise(Stream.RESAMPLE))
    return emit(inputs, num_accepted=count_leading(accepted), decided=decided)


def rates_of_length(
    acceptance_length: float, *, num_speculative_tokens: int, schedule: LengthSchedule
) -> tuple[float, ...]:
    """Synthetic rates with a given mean acceptance length.

    Args:
        acceptance_length: mean tokens per step, bonus counted, in [1, K+1].
        num_speculative_tokens: K.
        schedule: `minimum_variance` accepts the two counts around the mean and no others;
            `geometric` gives every draft the same chance once the ones before it are accepted.

    Returns:
        Chance that drafts 1..j are all accepted, for j = 1..K; they sum to the length minus one.

    Raises:
        ConfigError: the length is out of range.

    Example:
        length 2.5, K = 3: `minimum_variance` gives (1, 0.5, 0), lengths 2 and 3 half the time each.
    """
    if not 1 <= acceptance_length <= num_speculative_tokens + 1:
        raise ConfigError(
            f"the acceptance length must be in [1, K + 1 = {num_speculative_tokens + 1}], "
            f"got {acceptance_length}; lower it or raise spec.k."
        )
    mean = acceptance_length - 1
    steps = range(num_speculative_tokens)
    if schedule == "minimum_variance":
        return tuple(min(max(mean - step, 0.0), 1.0) for step in steps)
    chance = _geometric_chance(mean, num_speculative_tokens)
    return tuple(chance ** (step + 1) for step in steps)


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
    """Chance of draft j given that all before it were accepted."""
    before = (1.0, *rates)
    return [rate / prior if prior > 0 else 0.0 for prior, rate in zip(before, rates, strict=False)]


def _geometric_chance(mean: float, num_drafts: int) -> float:
    """The c in [0, 1] with c + c^2 + ... + c^K = mean, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if math.fsum(middle ** (step + 1) for step in range(num_drafts)) < mean:
            low = middle
        else:
            high = middle
    return high
