"""Slow references: every policy recomputed over the committed text, dense and without pages.

Nothing here imports the row plan, the pages or the loop; it follows the definitions of the policies
page, one pass after the other, over the whole text each time.

`axis_positions` `[axes, L + K]` are the rotary positions of every row where they differ by axis.

Letters: K drafts per step, N MTP modules, p frontier row, L tokens of the text, D hidden.
"""

import torch
from torch import Tensor

from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target


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
            module,
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
    target = heads.target
    hidden = heads.source(_hidden(target, text[:-1], axis_positions))[0]  # rows 0..p
    known, logits = list(text), []
    for m in range(num_drafts):
        tokens = known[1 + m : 1 + m + len(hidden)]
        module_idx = m % heads.spec.num_mtp_modules
        output = _run(heads, module_idx, tokens, hidden, axis_positions)
        logits.append(heads.logits(output.post_norm[0, -1], module_idx=module_idx))
        known.append(int(logits[-1].argmax()))
        hidden = heads.recycled(output)[0]
    return known[len(text) :], logits


def eagle_drafts(
    heads: MTPHeads, text: list[int], num_drafts: int, axis_positions: Tensor | None = None
) -> tuple[list[int], list[Tensor]]:
    """Drafts and draft logits of the EAGLE policy at the frontier p = L - 2.

    Pass m runs its module over rows 0..p with the target's hidden states, followed by the draft
    rows p+1..p+m, whose hidden vectors are the outputs of the earlier passes at their sampled rows.
    """
    target = heads.target
    hidden = heads.source(_hidden(target, text[:-1], axis_positions))[0]
    known, logits = list(text), []
    for m in range(num_drafts):
        module_idx = m % heads.spec.num_mtp_modules
        output = _run(heads, module_idx, known[1:], hidden, axis_positions)
        logits.append(heads.logits(output.post_norm[0, -1], module_idx=module_idx))
        known.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, heads.recycled(output)[0, -1:]])
    return known[len(text) :], logits


DRAFTS = {"training": training_drafts, "eagle": eagle_drafts}
