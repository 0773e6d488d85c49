"""Helpers for tests of the whole loop: drafts that are right by chance, runs in a tight pool."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import drafter as draft
from mtp_research.decode.draft.drafter import VerifiedStep
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.slot_state import SlotState
from mtp_research.decode.stats import RequestRecord

PROMPTS = [[5, 9, 77, 31, 2, 64], [8], [100, 3, 3, 50, 21, 90, 41, 12, 7], [11, 12]]


def run(
    decoder: SpecDecoder,
    prompts: list[list[int]] = PROMPTS,
    *,
    sampling: SamplingParams | list[SamplingParams] | None = None,
) -> dict[str, RequestRecord]:
    """Decode all prompts, checking the invariants after every step; request ids are indices."""
    sampling = sampling or SamplingParams(max_new_tokens=10)
    params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    for index, prompt in enumerate(prompts):
        decoder.add_request(prompt, sampling=params[index], request_id=str(index))
    while decoder.scheduler.has_work:
        decoder.step()
        decoder.scheduler.check_integrity()
    blocks = decoder.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks, "blocks leaked"
    return {record.request_id: record for record in decoder.stats.records}


def texts_of(records: dict[str, RequestRecord]) -> dict[str, tuple[int, ...]]:
    """Output of every request."""
    return {name: record.output_token_ids for name, record in records.items()}


def small_pool(num_blocks: int, **changes: int) -> EngineConfig:
    """Four-token pages and few of them, so that requests push each other out."""
    settings = {"block_size": 4, "max_num_requests": 4, "num_blocks": num_blocks} | changes
    return EngineConfig(**settings)


def draft_rightly(
    monkeypatch: pytest.MonkeyPatch, outputs: dict[str, tuple[int, ...]], *, chance: float
) -> None:
    """Replace each draft of the MTP modules by the right token with some chance.

    Random modules are hardly ever right, and a policy shows its faults only after mixed histories.
    The modules still run, and write the KV that their policy asks for.
    """
    texts = {name: (*PROMPTS[int(name)], *output) for name, output in outputs.items()}

    plain = draft.choose_drafts

    def choose(logits: Tensor, step: VerifiedStep, *, draft_step: int, **how: Any) -> Tensor:
        drafts = plain(logits, step, draft_step=draft_step, **how)
        names = step.request_ids or names_of(step, how["slot_state"], texts)
        for row, name in enumerate(names):
            if name is None:
                continue
            known = int(step.state.num_known_tokens[row])
            is_lucky = random.Random(f"{name} {known} {draft_step}").random() < chance
            if is_lucky and known + draft_step < len(texts[name]):
                drafts[row] = texts[name][known + draft_step]
        return drafts

    monkeypatch.setattr(draft, "choose_drafts", choose)


def names_of(
    step: VerifiedStep, slot_state: SlotState, texts: dict[str, tuple[int, ...]]
) -> list[str | None]:
    """Names of a captured step's requests, by what is written in their slots; None for padding."""
    found: list[str | None] = []
    for slot, known in zip(step.inputs.slots, step.state.num_known_tokens.tolist(), strict=True):
        text = tuple(slot_state.text[slot, :known].tolist())
        of_text = (name for name, whole in texts.items() if known > 1 and whole[:known] == text)
        found.append(next(of_text, None))
    return found


def poison(table: Tensor, token_id: int) -> None:
    """Make one row of an embedding table NaN, in place."""
    with torch.no_grad():
        table[token_id] = torch.nan
