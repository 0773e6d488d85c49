"""Slow references: every policy recomputed over the committed text, dense and without pages.

Nothing here imports the row plan, the pages or the loop; it follows the definitions of the policies
page, one pass after the other, over the whole text each time.

`axis_positions` `[axes, L + K]` are the rotary positions of every row where they differ by axis.

Letters: K drafts per step, N MTP modules, p frontier row, L tokens of the text, D hidden.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtp_research.heads.stack import ModuleOutput, MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target, TargetHidden


def greedy_text(target: Target, prompt: list[int], num_new: int) -> list[int]:
    """Plain greedy decoding, the whole text recomputed for every token."""
    text = list(prompt)
    for _ in range(num_new):
        text.append(int(target_logits(target, text)[-1].argmax()))
    return text[len(prompt) :]


def target_logits(target: Target, text: list[int]) -> Tensor:
    """Logits `[L, V]` of every row."""
    return target.logits(_hidden(target, text).post_norm[0])


def _hidden(target: Target, text: list[int], axis_positions: Tensor | None = None):
    ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
    if axis_positions is not None:
        positions = axis_positions[:, None, : len(text)]
    with torch.no_grad():
        return target.forward(ids, position_ids=positions, context=DenseContext())


def _source(heads: MTPHeads, text: list[int], axis_positions: Tensor | None) -> Tensor:
    """What the first pass reads, `[L, D]`, by the record of the heads and not by their methods."""
    return _at(_hidden(heads.target, text, axis_positions), heads.spec.hidden_source)


def _at(output: TargetHidden | ModuleOutput, norm: str) -> Tensor:
    return {"pre_norm": output.pre_norm, "post_norm": output.post_norm}[norm][0]


def _run(
    heads: MTPHeads,
    module: int,
    tokens: list[int],
    hidden: Tensor,
    axis_positions: Tensor | None = None,
):
    positions = torch.arange(len(tokens))[None]
    if axis_positions is not None:
        axis_positions = axis_positions[:, None, : len(tokens)]
    with torch.no_grad():
        return heads.run_module(
            heads.mtp_modules[module],
            token_ids=torch.tensor([tokens]),
            prev_hidden_states=hidden[None],
            position_ids=positions,
            context=DenseContext(),
            axis_positions=axis_positions,
        )


def training_drafts(
    heads: MTPHeads, text: list[int], num_drafts: int, axis_positions: Tensor | None = None
) -> tuple[list[int], list[Tensor]]:
    """Drafts and draft logits of the chain policy at the frontier p = L - 2.

    Pass m runs rows 0..p; row q consumes token q + 1 + m of the text followed by the drafts so far,
    and reads the output of pass m - 1 at the same row.
    """
    hidden = _source(heads, text[:-1], axis_positions)  # rows 0..p
    known, logits = list(text), []
    for m in range(num_drafts):
        tokens = known[1 + m : 1 + m + len(hidden)]
        module_idx = m % heads.spec.num_mtp_modules
        output = _run(heads, module_idx, tokens, hidden, axis_positions)
        logits.append(heads.logits(output.post_norm[0, -1], module_idx=module_idx))
        known.append(int(logits[-1].argmax()))
        hidden = _at(output, heads.spec.recycle_norm)
    return known[len(text) :], logits


def eagle_drafts(
    heads: MTPHeads, text: list[int], num_drafts: int, axis_positions: Tensor | None = None
) -> tuple[list[int], list[Tensor]]:
    """Drafts and draft logits of the EAGLE policy at the frontier p = L - 2.

    Pass m runs its module over rows 0..p with the target's hidden states, followed by the draft
    rows p+1..p+m, whose hidden vectors are the outputs of the earlier passes at their sampled rows.
    """
    hidden = _source(heads, text[:-1], axis_positions)
    known, logits = list(text), []
    for m in range(num_drafts):
        module_idx = m % heads.spec.num_mtp_modules
        output = _run(heads, module_idx, known[1:], hidden, axis_positions)
        logits.append(heads.logits(output.post_norm[0, -1], module_idx=module_idx))
        known.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, _at(output, heads.spec.recycle_norm)[-1:]])
    return known[len(text) :], logits


DRAFTS = {"training": training_drafts, "eagle": eagle_drafts}


class NaiveDifference(NamedTuple):
    """A difference of acceptance lengths, and the 2.5 and 97.5 % points of its draws."""

    value: float
    low: float
    high: float


def paired_length_difference(
    ours: list[list[list[int]]], theirs: list[list[list[int]]], *, seed: int, num_draws: int
) -> NaiveDifference:
    """Two-level bootstrap of accepted drafts `[seed][prompt][round]`, one draw after the other.

    Both sides see the same drawn prompts and seeds. The draws come from the generator of
    `bootstrap.make_draws`; all the rest is loops.
    """
    num_seeds, num_prompts = len(ours), len(ours[0])
    generator = np.random.default_rng(seed)
    prompts, seeds = (
        generator.multinomial(size, np.full(size, 1 / size), size=num_draws).tolist()
        for size in (num_prompts, num_seeds)
    )

    def length(cell: list[list[int]], times: list[int]) -> float:
        accepted = sum(sum(rounds) * n for rounds, n in zip(cell, times, strict=True))
        return 1 + accepted / sum(len(rounds) * n for rounds, n in zip(cell, times, strict=True))

    def mean(side: list[list[list[int]]], seed_times: list[int], times: list[int]) -> float:
        drawn = [cell for cell, n in zip(side, seed_times, strict=True) for _ in range(n)]
        return sum(length(cell, times) for cell in drawn) / len(drawn)

    draws = [
        mean(ours, seed_times, times) - mean(theirs, seed_times, times)
        for seed_times, times in zip(seeds, prompts, strict=True)
    ]
    once = [1] * num_seeds, [1] * num_prompts
    low, high = np.quantile(draws, (0.025, 0.975))
    return NaiveDifference(mean(ours, *once) - mean(theirs, *once), float(low), float(high))
