"""One column of the table: a decoding of the whole prompt set under one policy, or with K = 0.

Second stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per step.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch

from mtp_research.config import EvalConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import DraftSampling
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.evaluation.prompts import EncodedPrompts
from mtp_research.evaluation.settings import draft_length, verify_options
from mtp_research.evaluation.summary import ConditionResult
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target
from mtp_research.policy import ModuleSchedule

_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 4, 8
Heads = MTPHeads | Literal["null", "oracle"] | None


@dataclass(frozen=True)
class Condition:
    """One column of the table."""

    label: str
    policy: str | None
    num_speculative_tokens: int
    heads: Heads


def conditions_of(config: EvalConfig, target: Target) -> list[Condition]:
    """K = 0 first when asked for, then every policy, or `null` or `oracle` alone.

    Raises:
        ConfigError: the heads are missing or belong to another target.
        IntegrityError: their files are damaged.
    """
    spec, num_drafts = config.spec, config.spec.num_speculative_tokens
    wants_baseline = config.baseline or num_drafts == 0
    conditions = [Condition("baseline", None, 0, None)] if wants_baseline else []
    if num_drafts == 0:
        return conditions
    if spec.head is None:
        return [*conditions, Condition("null", None, num_drafts, "null")]
    if spec.head == "oracle":
        return [*conditions, Condition("oracle", None, num_drafts, "oracle")]
    heads = load_heads(spec.head, target)
    drafting = [Condition(policy, policy, num_drafts, heads) for policy in spec.policy]
    return [*conditions, *drafting]


class _Clock(NamedTuple):
    """Seconds of a decoding; seconds and tokens of its steps without prompt rows."""

    wall_s: float
    decode_wall_s: float
    num_decode_tokens: int


def run_condition(
    condition: Condition,
    *,
    target: Target,
    config: EvalConfig,
    encoded: EncodedPrompts,
    sampling: Sequence[SamplingParams],
) -> ConditionResult:
    """Decode every prompt under one condition, after a short warm-up that is not counted."""
    warm_up = [
        dataclasses.replace(params, max_new_tokens=_WARM_UP_TOKENS)
        for params in sampling[:_WARM_UP_PROMPTS]
    ]
    _decode(_decoder(condition, target, config), encoded, warm_up)
    decoder = _decoder(condition, target, config)
    decoder.cache.fill(0.0)  # touch the pool's pages before the clock starts
    if decoder.graphs is not None:
        with torch.inference_mode():
            decoder.graphs.prepare(sampling[0])
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target.device)
    clock = _decode(decoder, encoded, sampling)
    return ConditionResult(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=condition.num_speculative_tokens,
        records=tuple(sorted(decoder.stats.records, key=lambda record: record.request_id)),
        wall_s=clock.wall_s,
        num_steps=decoder.stats.num_steps,
        rows_per_step=decoder.stats.num_target_rows / max(decoder.stats.num_steps, 1),
        lossless="not checked",
        decode_wall_s=clock.decode_wall_s,
        num_decode_tokens=clock.num_decode_tokens,
        audit=decoder.stats.audit,
        peak_memory_bytes=torch.cuda.max_memory_allocated(target.device) if on_gpu else None,
    )


def _decode(
    decoder: SpecDecoder, encoded: EncodedPrompts, sampling: Sequence[SamplingParams]
) -> _Clock:
    """Run the loop over the prompts.

    Every step ends with the copy of its tokens to the host, so host clocks measure finished work on
    a GPU too.
    """
    started = time.perf_counter()
    # The warm-up hands over the sampling parameters of the first prompts only.
    asked = zip(encoded.prompts, encoded.token_ids, sampling, strict=False)
    for prompt, token_ids, params in asked:
        decoder.add_request(token_ids, sampling=params, request_id=prompt.question_id)
    decode_s, num_decode_tokens = 0.0, 0
    while decoder.scheduler.has_work:
        prompt_rows, tokens = decoder.stats.num_prompt_rows, decoder.stats.num_emitted_tokens
        before = time.perf_counter()
        decoder.step()
        if decoder.stats.num_prompt_rows == prompt_rows:
            decode_s += time.perf_counter() - before
            num_decode_tokens += decoder.stats.num_emitted_tokens - tokens
    return _Clock(time.perf_counter() - started, decode_s, num_decode_tokens)


def _decoder(condition: Condition, target: Target, config: EvalConfig) -> SpecDecoder:
    drafts = condition.num_speculative_tokens > 0
    return SpecDecoder(
        target,
        condition.heads,
        policy=condition.policy or "training",
        num_speculative_tokens=condition.num_speculative_tokens,
        engine=config.engine,
        verify=config.spec.verify,
        verify_options=verify_options(config.spec) if drafts else None,
        draft_sampling=cast(DraftSampling, config.spec.draft_sampling),  # checked
        module_schedule=cast(ModuleSchedule, config.spec.module_schedule),  # checked
        draft_length=draft_length(config.spec) if drafts else None,
    )
