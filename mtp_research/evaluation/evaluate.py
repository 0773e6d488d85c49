"""One evaluation: decode a prompt set with K = 0 and with each policy, in one process, and report.

Flow: prompts -> decode loop (a fresh decoder per condition, same prompts, same order) -> statistics -> report.

Letters: K drafts per step, N MTP modules.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mtp_research.config import EvalConfig
from mtp_research.decode.audit import Verdict
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.request import SamplingParams
from mtp_research.errors import IntegrityError
from mtp_research.evaluation.prompts import Prompt, encode_prompt, load_prompts
from mtp_research.evaluation.report import build_report, last_line, print_report
from mtp_research.evaluation.results import write_results
from mtp_research.evaluation.summary import ConditionResult
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.provenance import run_record

logger = logging.getLogger(__name__)

_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 4, 8
Heads = MTPHeads | Literal["null", "oracle"] | None


@dataclass(frozen=True)
class Condition:
    """One column of the table."""

    label: str
    policy: str | None
    num_speculative_tokens: int
    heads: Heads


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts that fit the context, and the ids of those that do not."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    skipped: tuple[str, ...]


def evaluate(config: EvalConfig, output_dir: Path) -> dict[str, object]:
    """Run an evaluation, print its tables and write `results.json` and `table.txt`.

    Args:
        config: checked configuration.
        output_dir: folder of the results.

    Returns:
        The main figures, as printed on the last line.

    Raises:
        ConfigError: model, head or prompts are missing or do not fit each other.
        IntegrityError: a prompt file is damaged, or no prompt fits the context.
    """
    target = load_target(config.model.path, dtype=config.model.dtype, device=config.model.device)
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config.prompts.path, max_prompts=config.prompts.max_prompts, seed=config.seed)
    encoded = _encode(prompts, tokenizer, config.engine.max_model_len or target.config.max_position_embeddings)
    sampling = _sampling(config, num_prompts=len(encoded.prompts), stop_token_ids=_stop_token_ids(target))
    conditions = []
    for condition in _conditions(config, target):
        result = run_condition(condition, target=target, config=config, encoded=encoded, sampling=sampling)
        conditions.append(_with_verdict(result, conditions, sampling))
    report = build_report(
        conditions,
        prompts=encoded.prompts,
        dtype=str(target.dtype).removeprefix("torch."),
        seed=config.seed,
        config=dataclasses.asdict(config),
        run=run_record() | {"skipped_prompts": list(encoded.skipped)},
    )
    path = write_results(output_dir, report)
    print_report(report)
    print(f"results: {path}")
    return json.loads(last_line(report, folder=output_dir))


def run_condition(
    condition: Condition,
    *,
    target: Target,
    config: EvalConfig,
    encoded: EncodedPrompts,
    sampling: Sequence[SamplingParams],
) -> ConditionResult:
    """Decode every prompt under one condition, after a short warm-up that is not counted."""
    warm_up = [dataclasses.replace(params, max_new_tokens=_WARM_UP_TOKENS) for params in sampling[:_WARM_UP_PROMPTS]]
    _decode(_decoder(condition, target, config), encoded, warm_up)
    decoder = _decoder(condition, target, config)
    decoder.cache.keys.zero_()  # touch the pool's pages before the clock starts
    decoder.cache.values.zero_()
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    wall_s, decode_wall_s, num_decode_tokens = _decode(decoder, encoded, sampling)
    on_gpu = target.device.type == "cuda"
    audit = None
    if decoder.auditor is not None:
        audit = {verdict.value: sum(total[verdict] for total in decoder.auditor.totals) for verdict in Verdict}
    return ConditionResult(
        label=condition.label,
        policy=condition.policy,
        num_speculative_tokens=condition.num_speculative_tokens,
        records=tuple(sorted(decoder.stats.records, key=lambda record: record.request_id)),
        wall_s=wall_s,
        num_steps=decoder.stats.num_steps,
        rows_per_step=decoder.stats.num_target_rows / max(decoder.stats.num_steps, 1),
        lossless="not checked",
        decode_wall_s=decode_wall_s,
        num_decode_tokens=num_decode_tokens,
        audit=audit,
        peak_memory_bytes=torch.cuda.max_memory_allocated(target.device) if on_gpu else None,
    )


def _decode(
    decoder: SpecDecoder, encoded: EncodedPrompts, sampling: Sequence[SamplingParams]
) -> tuple[float, float, int]:
    """Run the loop over the prompts; wall seconds, seconds and tokens of steps without prompt rows.

    Every step ends with the copy of its tokens to the host, so host clocks measure finished work on a GPU too.
    """
    started = time.perf_counter()
    for prompt, token_ids, params in zip(encoded.prompts, encoded.token_ids, sampling, strict=False):
        decoder.add_request(token_ids, sampling=params, request_id=prompt.question_id)
    decode_s, num_decode_tokens = 0.0, 0
    while decoder.scheduler.has_work:
        prompt_rows, tokens = decoder.stats.num_prompt_rows, decoder.stats.num_emitted_tokens
        before = time.perf_counter()
        decoder.step()
        if decoder.stats.num_prompt_rows == prompt_rows:
            decode_s += time.perf_counter() - before
            num_decode_tokens += decoder.stats.num_emitted_tokens - tokens
    return time.perf_counter() - started, decode_s, num_decode_tokens


def _decoder(condition: Condition, target: Target, config: EvalConfig) -> SpecDecoder:
    return SpecDecoder(
        target,
        condition.heads,
        policy=condition.policy or "training",
        num_speculative_tokens=condition.num_speculative_tokens,
        engine=config.engine,
        verify=config.spec.verify,
        draft_sampling=config.spec.draft_sampling,
        module_schedule=config.spec.module_schedule,
    )


def _conditions(config: EvalConfig, target: Target) -> list[Condition]:
    """K = 0 first when asked for, then one condition per policy (one in all for `null` and `oracle`)."""
    spec = config.spec
    conditions = [Condition("baseline", None, 0, None)] if config.baseline or spec.num_speculative_tokens == 0 else []
    if spec.num_speculative_tokens == 0:
        return conditions
    if spec.head is None or spec.head == "oracle":
        heads = spec.head or "null"
        return [*conditions, Condition(heads, None, spec.num_speculative_tokens, heads)]
    heads = load_heads(spec.head, target)
    return [*conditions, *(Condition(policy, policy, spec.num_speculative_tokens, heads) for policy in spec.policy)]


def _encode(prompts: Sequence[Prompt], tokenizer: object, max_model_len: int) -> EncodedPrompts:
    """Token ids of the prompts; those that leave no room for a token are skipped and counted.

    Raises:
        IntegrityError: none fits.
    """
    pairs = [(prompt, encode_prompt(prompt, tokenizer)) for prompt in prompts]
    fitting = [(prompt, token_ids) for prompt, token_ids in pairs if len(token_ids) < max_model_len]
    skipped = tuple(prompt.question_id for prompt, token_ids in pairs if len(token_ids) >= max_model_len)
    if not fitting:
        raise IntegrityError(
            f"all {len(pairs)} prompts have {max_model_len} tokens or more, the context length; "
            "use shorter prompts or raise engine.max_model_len."
        )
    if skipped:
        logger.warning("%d of %d prompts are longer than the context of %d tokens: skipped", len(skipped), len(pairs), max_model_len)
    return EncodedPrompts(tuple(p for p, _ in fitting), tuple(t for _, t in fitting), skipped)


def _sampling(config: EvalConfig, *, num_prompts: int, stop_token_ids: tuple[int, ...]) -> list[SamplingParams]:
    """Parameters of each prompt; seeds differ per prompt and agree across conditions."""
    sampling = config.sampling
    return [
        SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=config.seed * 1_000_003 + index,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=() if sampling.ignore_eos else stop_token_ids,
        )
        for index in range(num_prompts)
    ]


def _stop_token_ids(target: Target) -> tuple[int, ...]:
    """Tokens that end a generation, from the model's generation config."""
    eos = target.model.generation_config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _with_verdict(
    result: ConditionResult, earlier: Sequence[ConditionResult], sampling: Sequence[SamplingParams]
) -> ConditionResult:
    """Add the lossless verdict: under greedy sampling every output must equal the baseline's, token for token."""
    if result.num_speculative_tokens == 0:
        return dataclasses.replace(result, lossless="is the baseline")
    baseline = next((other for other in earlier if other.num_speculative_tokens == 0), None)
    if baseline is None or any(params.temperature > 0 for params in sampling):
        return result
    expected = {record.request_id: record.output_token_ids for record in baseline.records}
    equal = sum(expected[record.request_id] == record.output_token_ids for record in result.records)
    word = "identical" if equal == len(result.records) else "DIFFERS"
    return dataclasses.replace(result, lossless=f"{word} {equal}/{len(result.records)}")
