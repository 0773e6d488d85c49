"""Many short decodes of a target and a drafter that are Markov chains: truth is a matrix product.

A lossless rule must leave the text distributed as the target's own. Here that is tested on the text
of several steps, not on one: noise used twice in different steps shows as well.

Letters: R requests, K drafts per step, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling.processors import process_logits, processor_tensors
from mtp_research.decode.sampling.sampling import (
    SamplingTensors,
    Stream,
    sample_from,
    sampling_tensors,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify.verify import VerifyInputs, VerifyOutput
from tests.decode.chi_square import chi_square_p_value, smallest_of
from tests.oracle_processors import probabilities, processed_row

CPU = torch.device("cpu")
VOCAB = 5
NUM_REQUESTS = 20_000

Rule = Callable[[VerifyInputs], VerifyOutput]
# (params, positions of the drafted token [R], first position of the step [R], draft step) -> [R]
DraftNoise = Callable[[SamplingTensors, Tensor, Tensor, int], Tensor]


class Decoded(NamedTuple):
    """Texts after some steps.

    Attributes:
        text: `[R, num_tokens]`, the start token and `num_tokens - 1` emitted ones.
        first: output of the first step.
        transition: `[V, V]` float64, what the target draws after each token.
    """

    text: Tensor
    first: VerifyOutput
    transition: Tensor


def chains(seed: int) -> tuple[Tensor, Tensor]:
    """Logits `[V, V]` of a target and of a drafter that resembles it."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.2
    return target, target + torch.randn(VOCAB, VOCAB, generator=generator) * 0.9


def draft_noise(params: SamplingTensors, _: Tensor, first: Tensor, draft_step: int) -> Tensor:
    """As the engine's drafter draws it."""
    return uniform_noise(params.seed, first, Stream.DRAFT, index=draft_step)


def decode(
    rule: Rule,
    *,
    seed: int,
    sampling: SamplingParams,
    num_drafts: int = 3,
    sample_drafts: bool = False,
    process_drafts: bool = False,
    num_tokens: int = 5,
    num_requests: int = NUM_REQUESTS,
    noise: DraftNoise = draft_noise,
) -> Decoded:
    """Decode `num_requests` texts that start with token 0, each with its own seed.

    Token 0 is the prompt. Drafts are the argmax of the drafter's logits, of its processed logits
    (`process_drafts`), or drawn from its distribution (`sample_drafts`).
    """
    target, draft = chains(seed)
    params = sampling_tensors([sampling], device=CPU)
    seeds = torch.arange(num_requests) + seed * num_requests
    params = SamplingTensors(*(p.expand(num_requests) for p in params[:4]), seeds, *params[5:])
    processors = processor_tensors(
        [sampling] * num_requests,
        num_prompt_tokens=[1] * num_requests,
        vocab_size=VOCAB,
        device=CPU,
    )

    def process(logits: Tensor, num_tokens: Tensor) -> Tensor:
        if processors is None:
            return logits
        return process_logits(logits, processors, text=text, num_tokens=num_tokens)

    draft_table = target_probabilities(draft[None], sampling_tensors([sampling], device=CPU))[0]
    text = torch.zeros(num_requests, num_tokens * (num_drafts + 1) + 1, dtype=torch.int64)
    length = torch.ones(num_requests, dtype=torch.int64)
    rows, column = torch.arange(num_requests), torch.arange(num_drafts + 1)
    first = None
    while int(length.min()) < num_tokens:
        tokens = [text[rows, length - 1]]
        probs = []
        for step in range(num_drafts):
            probs.append(draft_table[tokens[-1]])
            uniform = noise(params, length + step, length, step)
            drawn = sample_from(probs[-1], uniform)
            if process_drafts:
                own = process(draft[tokens[-1]][:, None], (length + step)[:, None])
                drawn = own[:, 0].argmax(dim=-1)
            elif not sample_drafts:
                drawn = probs[-1].argmax(dim=-1)
            text[rows, length + step] = drawn
            tokens.append(drawn)
        output = rule(
            VerifyInputs(
                target_logits=process(target[torch.stack(tokens, dim=1)], length[:, None] + column),
                draft_token_ids=torch.stack(tokens[1:], dim=1),
                draft_probs=torch.stack(probs, dim=1) if sample_drafts else None,
                params=params,
                positions=length[:, None] + column,
            )
        )
        first = first or output
        keep = output.sampled_token_ids >= 0
        where = (length[:, None] + column)[keep]
        text[rows[:, None].expand_as(keep)[keep], where] = output.sampled_token_ids[keep]
        length = length + output.num_accepted + 1
    transition = target_probabilities(target[None], sampling_tensors([sampling], device=CPU))[0]
    return Decoded(text[:, :num_tokens], first, transition)


def text_p_value(decoded: Decoded) -> float:
    """Chance of texts this far from the target's: every position, and every pair of neighbours."""
    text, _, transition = decoded
    marginal = torch.zeros(VOCAB, dtype=torch.float64)
    marginal[0] = 1
    p_values = []
    for position in range(1, text.shape[1]):
        pair = text[:, position - 1] * VOCAB + text[:, position]
        joint = marginal[:, None] * transition
        p_values.append(_p_value(pair, joint.flatten()))
        marginal = joint.sum(dim=0)
        p_values.append(_p_value(text[:, position], marginal))
    return smallest_of(p_values)


def processed_text_p_value(decoded: Decoded, *, seed: int, sampling: SamplingParams) -> float:
    """As `text_p_value` where the next token depends on the whole text: every text is a cell."""
    target = chains(seed)[0].tolist()
    texts, probs = [[0]], [1.0]
    for _ in range(1, decoded.text.shape[1]):
        longer, chances = [], []
        for text, chance in zip(texts, probs, strict=True):
            if chance == 0:
                following = [0.0] * VOCAB
            else:
                row = processed_row(target[text[-1]], text, 1, sampling)
                following = probabilities(row, sampling)
            longer += [[*text, token] for token in range(VOCAB)]
            chances += [chance * one for one in following]
        texts, probs = longer, chances
    weights = VOCAB ** torch.arange(decoded.text.shape[1]).flip(0)
    return _p_value((decoded.text * weights).sum(dim=1), torch.tensor(probs, dtype=torch.float64))


def column_p_value(decoded: Decoded) -> float:
    """The first step alone: column j given that it was reached, after each previous token.

    Holds for rules whose decision at a draft does not look at later ones.
    """
    text, first, transition = decoded
    p_values = []
    for column in range(first.sampled_token_ids.shape[1]):
        reached = first.num_accepted >= column
        before, token = text[reached, column], first.sampled_token_ids[reached, column]
        for previous in before.unique().tolist():
            p_values.append(_p_value(token[before == previous], transition[previous]))
    return smallest_of(p_values)


def _p_value(cell: Tensor, probs: Tensor) -> float:
    counts = torch.bincount(cell, minlength=len(probs))
    return chi_square_p_value(counts, probs * len(cell))
